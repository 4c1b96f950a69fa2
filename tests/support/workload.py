"""A background load: single appends, pipelined ones and linearizable reads, all recorded in a ``History``."""

from __future__ import annotations

import faulthandler
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Final, Self

from dledger.client import AppendFuture, ClientSecurity, DLedgerClient, ReadMode
from dledger.errors import DLedgerError, IndexBeforeBeginError, IndexOutOfRangeError
from dledger.types import Entry, LogIndex, Magic
from tests.support.history import AppendOp, History, Outcome, ReadOp

READ_PAGE: Final = 500
READ_BYTES_MAX: Final = 1 << 20
READ_BACK: Final = 20
IN_FLIGHT_MAX: Final = 64
JOIN_TIMEOUT_S: Final = 120.0


class Workload:
    """Runs from entry to exit. Every value is unique, across workloads too, if each has its own ``name``."""

    def __init__(
        self,
        addresses: Sequence[str],
        history: History,
        *,
        name: str = "w",
        group: str = "default",
        singles: int = 2,
        pipelines: int = 1,
        readers: int = 1,
        value_bytes: int = 64,
        pace_s: float = 0.004,
        timeout_s: float = 3.0,
        security: ClientSecurity | None = None,
    ) -> None:
        self.history = history
        self._addresses = list(addresses)
        self._group = group
        self._pace_s = pace_s
        self._timeout_s = timeout_s
        self._security = security
        self._padding = b"." * value_bytes
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        roles: list[tuple[str, Callable[[str], None]]] = [
            *((f"{name}-single-{n}", self._append_singly) for n in range(singles)),
            *((f"{name}-pipeline-{n}", self._append_pipelined) for n in range(pipelines)),
            *((f"{name}-reader-{n}", self._read) for n in range(readers)),
        ]
        self._threads = [threading.Thread(target=self._guard, args=(who, role), name=who) for who, role in roles]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(JOIN_TIMEOUT_S)
        if kind is None:
            alive = [thread.name for thread in self._threads if thread.is_alive()]
            if alive:
                faulthandler.dump_traceback(2)  # what they wait for cannot be found out afterwards
                raise AssertionError(f"these clients hang: {alive}")
            for failure in self._failures:
                raise failure

    def _guard(self, who: str, role: Callable[[str], None]) -> None:
        try:
            role(who)
        except BaseException as error:  # noqa: BLE001 - raised again by __exit__
            self._failures.append(error)

    def _client(self) -> DLedgerClient:
        return DLedgerClient(self._addresses, group=self._group, timeout_s=self._timeout_s, security=self._security)

    def _values(self, who: str) -> Iterator[bytes]:
        for number in itertools.count():
            yield b"%s/%d %s" % (who.encode(), number, self._padding)

    def _append_singly(self, who: str) -> None:
        with closing(self._client()) as client:
            for value in self._values(who):
                if self._stopping.wait(self._pace_s):
                    return
                began = time.monotonic()
                try:
                    index: int | None = client.append(value).index
                    error: DLedgerError | None = None
                except DLedgerError as raised:
                    index, error = None, raised
                self._record(value, began, index, error)

    def _append_pipelined(self, who: str) -> None:
        in_flight: deque[tuple[bytes, float, AppendFuture]] = deque()
        with closing(self._client()) as client:
            for value in self._values(who):
                if self._stopping.wait(self._pace_s / 8):
                    break
                began = time.monotonic()
                try:
                    in_flight.append((value, began, client.submit(value)))
                except DLedgerError as error:
                    self._record(value, began, None, error)
                while in_flight and (in_flight[0][2].done() or len(in_flight) >= IN_FLIGHT_MAX):
                    self._settle(*in_flight.popleft())
            while in_flight:
                self._settle(*in_flight.popleft())

    def _settle(self, value: bytes, began: float, future: AppendFuture) -> None:
        # Looked at some time after it was done, so the recorded end is late. That weakens the real-time rule for
        # this append, never wrongly: an interval that is too long only allows more.
        try:
            self._record(value, began, future.result(self._timeout_s + 5).index, None)
        except DLedgerError as error:
            self._record(value, began, None, error)

    def _record(self, value: bytes, began: float, index: int | None, error: DLedgerError | None) -> None:
        outcome = Outcome.ACKED if error is None else Outcome(error.outcome)
        text = "" if error is None else f"{type(error).__name__}: {error}"
        self.history.record(AppendOp(value, began, time.monotonic(), outcome, index, text))

    def _read(self, who: str) -> None:
        with closing(self._client()) as client:
            first = 0
            while not self._stopping.wait(self._pace_s):
                operation = linearizable_read(client, first)
                if operation is not None:
                    self.history.record(operation)
                    first = max(0, operation.tail - READ_BACK)


def linearizable_read(client: DLedgerClient, first: int, address: str | None = None) -> ReadOp | None:
    """One page; None if it failed (a read that fails proves nothing)."""
    began = time.monotonic()
    try:
        entries = client.read(
            LogIndex(first), count=READ_PAGE, max_bytes=READ_BYTES_MAX, mode=ReadMode.LINEARIZABLE, address=address
        )
    except IndexOutOfRangeError:
        entries = []
    except DLedgerError:
        return None
    values = tuple(value_of(entry) for entry in entries)
    # The server may have stopped before an entry that did not fit; none of the tests' is half a page long.
    limited = len(entries) == READ_PAGE or sum(len(entry.body) for entry in entries) > READ_BYTES_MAX // 2
    return ReadOp(first, values, began, time.monotonic(), complete=not limited)


def value_of(entry: Entry) -> bytes | None:
    """The body of what a client appended."""
    return entry.body if entry.magic is Magic.NORMAL else None


def read_log(client: DLedgerClient, begin: int, end: int, address: str | None = None) -> dict[int, bytes | None]:
    """Everything that one node knows to be committed, from ``begin`` to ``end`` (inclusive)."""
    log: dict[int, bytes | None] = {}
    first = begin
    while first <= end:
        try:
            count = min(READ_PAGE, end - first + 1)
            entries = client.read(LogIndex(first), count=count, mode=ReadMode.COMMITTED, address=address)
        except IndexBeforeBeginError:
            raise AssertionError(f"index {first} expired while the log was read") from None
        if not entries:
            raise AssertionError(f"no entry at {first}, although {end} is committed")
        for entry in entries:
            log[entry.index] = value_of(entry)
        first = entries[-1].index + 1
    return log
