"""Generates load: clients with one thread each that keep a number of records in flight, or send at a fixed rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from dledger.errors import AccessDeniedError, DLedgerError, InvalidRequestError
from dledger_cli.bench.meter import Meter
from rocketstore.client.aio.errors import ForbiddenError, MessageRefusedError, NotFoundError


class SentRecord(Protocol):
    """A record on its way."""

    def exception(self) -> BaseException | None:
        """Why it was not stored, once it is done."""
        ...

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:  # Any: the record itself
        """Call back with the record once it is done."""
        ...


Submit: TypeAlias = Callable[[], SentRecord]
OpenClient: TypeAlias = Callable[[], AbstractContextManager[Submit]]
"""Opens a client that is closed at the end of the block; the yielded callable sends one record."""
_HOPELESS: Final = (
    AccessDeniedError,
    ForbiddenError,
    InvalidRequestError,
    MessageRefusedError,
    NotFoundError,
)
"""Errors that every further record would get, too."""
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Stops after ``records`` or ``seconds``, whichever is set; ``rate``: records per second of all clients."""

    records: int | None
    seconds: float | None
    rate: float | None
    in_flight: int
    clients: int

    def share(self, client: int) -> int | None:
        """How many records this client sends; None if unlimited."""
        if self.records is None:
            return None
        return self.records // self.clients + (client < self.records % self.clients)


@dataclass(slots=True)
class BenchLoad:
    """A running load. ``stop`` may be called from a signal handler."""

    plan: LoadPlan
    open_client: OpenClient
    clock: Callable[[], float] = time.perf_counter
    meter: Meter = field(default_factory=Meter)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _broken: list[BaseException] = field(default_factory=list)
    _started_s: float = 0.0
    _ended_s: float = 0.0

    def start(self) -> None:
        self._started_s = self._ended_s = self.clock()
        for number in range(self.plan.clients):
            thread = threading.Thread(target=self._guarded, args=(number,), name=f"bench-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Stop sending; records in flight are still awaited."""
        self._stopping.set()

    def wait(self, timeout_s: float) -> bool:
        """Whether all records were answered within the time. Raises a client's fatal error."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        if self._broken:
            raise self._broken[0]
        return True

    @property
    def took_s(self) -> float:
        """Seconds from the start to the last response."""
        return self._ended_s - self._started_s

    def _guarded(self, number: int) -> None:
        try:
            with self.open_client() as submit:
                self._send(number, submit)
        except BaseException as error:  # noqa: BLE001 - told by ``wait``
            self._broken.append(error)
            self._stopping.set()

    def _send(self, number: int, submit: Submit) -> None:
        plan, clock = self.plan, self.clock
        room = threading.Semaphore(plan.in_flight)
        left = plan.share(number)
        until_s = None if plan.seconds is None else self._started_s + plan.seconds
        due_s = None if plan.rate is None else self._started_s + number / plan.rate
        sent = 0
        while not self._stopping.is_set() and sent != left:
            now_s = clock()
            if until_s is not None and now_s >= until_s:
                break
            if due_s is not None and due_s > now_s:
                self._stopping.wait(min(due_s - now_s, _LOOK_S))
                continue
            if not room.acquire(timeout=_LOOK_S):
                continue
            begun_s = clock() if due_s is None else due_s
            if due_s is not None and plan.rate is not None:
                due_s += plan.clients / plan.rate
            sent += 1
            try:
                submit().add_done_callback(partial(self._answered, begun_s, room))
            except DLedgerError as error:
                self._fail(error, room)

    def _answered(self, begun_s: float, room: threading.Semaphore, record: SentRecord) -> None:
        error = record.exception()
        if isinstance(error, DLedgerError):
            self._fail(error, room)
            return
        if error is not None:
            self._broken.append(error)
            self._stopping.set()
            return
        self._ended_s = now_s = self.clock()
        self.meter.acknowledge(now_s - begun_s)
        room.release()

    def _fail(self, error: DLedgerError, room: threading.Semaphore) -> None:
        self._ended_s = self.clock()
        self.meter.fail(error)
        if isinstance(error, _HOPELESS):
            self._stopping.set()
        room.release()
