"""The client of a group for threads: ``aio.DLedgerClient`` on an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from dledger.client.aio.client import DLedgerClient as AsyncClient
from dledger.client.discovery import DISCOVERY_TIMEOUT_S
from dledger.client.shared import AppendResult, ReadFrom
from dledger.errors import DLedgerError, InvalidRequestError, LeaderHint, PendingFullError, UnavailableError
from dledger.rpc.clients.codec import ReadMode
from dledger.rpc.loops import REASON, LoopRunner
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.sending.batch import ITEM_OVERHEAD_BYTES, call
from dledger.sending.futures import SentItem, wait_for
from dledger.types import (
    NO_INDEX,
    BlockDigest,
    Configuration,
    Entry,
    LogChunk,
    LogIndex,
    MemberChange,
    NodeId,
    QueryAnswer,
    SnapshotState,
)
from dledger.values import MIB

if TYPE_CHECKING:
    from dledger.client.aio.appending import AppendBatch
    from dledger.client.shared import ClientSecurity
    from dledger.rpc.clients.bulk_codec import LocatedEntries

_T = TypeVar("_T")

SUBMITTED_BYTES_MAX: Final = 8 * MIB
"""How much ``submit`` queues in front of what is being sent; then it blocks."""


class _Chunk:
    """Entries submitted together, on their way to the loop, which places each in a batch of the window."""

    __slots__ = ("bodies", "callbacks", "error", "futures", "is_placed", "runner")

    def __init__(self, runner: LoopRunner) -> None:
        self.runner = runner
        self.bodies: list[bytes] = []
        self.futures: list[AppendFuture] = []
        self.is_placed = False
        self.error: DLedgerError | None = None
        """Why the entries that have no batch get none."""
        self.callbacks: list[Callable[[], object]] = []

    def when_placed(self, callback: Callable[[], object]) -> None:
        """Call it once all have a batch or an error; on the loop, or immediately."""
        # list.append is atomic, and the loop reads the list only after it has set ``is_placed``.
        self.callbacks.append(callback)
        if self.is_placed:
            try:
                self.callbacks.remove(callback)
            except ValueError:
                return
            call(callback)

    def settle(self, error: DLedgerError | None = None) -> None:
        """All have a batch, or will have none."""
        self.error = error
        self.is_placed = True
        while self.callbacks:
            call(self.callbacks.pop(0))


class AppendFuture:
    """The result of one submitted entry. Thread-safe. In a forked child, one without an outcome has failed."""

    __slots__ = ("_batch", "_chunk", "_place")

    def __init__(self, chunk: _Chunk) -> None:
        self._chunk = chunk
        self._batch: AppendBatch | None = None
        self._place = 0

    def done(self) -> bool:
        """Whether ``result`` returns at once."""
        return self._has_outcome() or self._chunk.runner.is_left_behind

    def result(self, timeout: float | None = None) -> AppendResult:
        """Where the entry is stored; raises its error, or ``TimeoutError`` if there is none within ``timeout`` seconds.

        It ends even without ``timeout``: every entry has a deadline.
        """
        return self._item(timeout).result(0)

    def exception(self, timeout: float | None = None) -> DLedgerError | None:
        """The entry's error, or None; waits like ``result``."""
        try:
            return self._item(timeout).exception(0)
        except UnavailableError as error:
            return error

    def add_done_callback(self, callback: Callable[[AppendFuture], object]) -> None:
        """Call ``callback(self)`` when the entry is done, on the client's thread (or immediately if it is done).

        It must not block; it may submit more entries. Exceptions are logged.
        """
        if self._chunk.runner.is_left_behind:
            call(lambda: callback(self))
            return

        def placed() -> None:
            if self._batch is None:
                callback(self)
            else:
                self._batch.when_done(lambda: callback(self))

        self._chunk.when_placed(placed)

    def _has_outcome(self) -> bool:
        batch = self._batch
        return batch.done if batch is not None else self._chunk.error is not None

    def _item(self, timeout: float | None) -> SentItem[AppendResult]:
        """Once it is done. Raises why it never got a batch."""
        if self._chunk.runner.is_left_behind and not self._has_outcome():
            lost = UnavailableError(REASON)
            lost.outcome = "unknown"  # the parent goes on with it
            raise lost
        until = None if timeout is None else time.monotonic() + timeout
        if self._batch is None and not self._chunk.is_placed:
            _wait(self._chunk.when_placed, lambda: self._chunk.is_placed, timeout)
        if self._batch is None:
            raise self._chunk.error or UnavailableError("the client is closed")
        wait_for(self._batch, None if until is None else until - time.monotonic())
        return SentItem(self._batch, self._place)


def _wait(
    when: Callable[[Callable[[], object]], None], is_done: Callable[[], bool], timeout: float | None = None
) -> None:
    """Wait for something that calls back."""
    waiting = threading.Lock()
    waiting.acquire()
    when(waiting.release)
    if not waiting.acquire(timeout=-1 if timeout is None else max(timeout, 0.0)) and not is_done():
        raise TimeoutError(f"no outcome after {timeout} s")


class DLedgerClient:
    """Talks to a group. Thread-safe; every call has a deadline (``timeout_s``) and retries until then if that is safe.

    ``addresses``: client addresses of one or more nodes; the others are learnt. Errors are ``DLedgerError`` subclasses;
    their ``outcome`` says whether a failed append may still be in the log (``"unknown"``) or not (``"not_applied"``).
    In a forked child every call raises ``UnavailableError``: make a new client there.
    """

    def __init__(
        self,
        addresses: Sequence[str] | str,
        *,
        group: str = "default",
        timeout_s: float = 5.0,
        security: ClientSecurity | None = None,
        enable_idempotence: bool = True,
    ) -> None:
        self.group = group
        self.timeout_s = timeout_s
        self._client = AsyncClient(
            addresses, group=group, timeout_s=timeout_s, security=security, enable_idempotence=enable_idempotence
        )
        self._runner = LoopRunner("dledger-client")
        self._queue = _SubmitQueue(self._client, self._runner)
        self._end = weakref.finalize(self, _close, self._runner, self._client, self._queue, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Store what was submitted, then close every connection; other calls in progress fail. Idempotent.

        A program that ends without it does the same, at most for ``timeout_s``.
        """
        self._end()
        self._runner.join()

    # --- append -------------------------------------------------------------------------------------------------------

    def append(self, body: bytes, *, timeout_s: float | None = None) -> AppendResult:
        """Append one entry; returns when a quorum has stored it. Appends of many threads share requests."""
        self._check_thread()
        chunk = _Chunk(self._runner)
        future = AppendFuture(chunk)

        def begin() -> None:
            error: DLedgerError | None = None
            try:
                added = self._client.begin_append(body, timeout_s)
            except DLedgerError as refused:
                error = refused
            except TypeError as wrong:
                error = InvalidRequestError(f"an entry is bytes: {wrong}")
            else:
                if added is not None:
                    future._batch, future._place = added
            chunk.settle(error)

        self._runner.post(begin)
        _wait(chunk.when_placed, lambda: chunk.is_placed)
        if future._batch is None and chunk.error is None:  # too much is pending
            return self._runner.run(lambda: self._client.append(body, timeout_s=timeout_s))
        return future.result()

    def append_many(self, bodies: Sequence[bytes], *, timeout_s: float | None = None) -> list[AppendResult]:
        """Append entries in order, in consecutive requests of up to 1 MiB; each request is all or nothing.

        When a request fails, the ones before it are in the log (the error then has ``outcome="unknown"`` and a note),
        and the ones after it were not sent.
        """
        return self._runner.run(lambda: self._client.append_many(bodies, timeout_s=timeout_s))

    def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[AppendResult]:
        """Append entries under your own producer name, numbered from ``sequence``: see ``aio.DLedgerClient``."""
        return self._runner.run(lambda: self._client.append_as(producer, sequence, bodies, timeout_s=timeout_s))

    def submit(self, body: bytes) -> AppendFuture:
        """Queue one entry, to be stored in the order of the calls: thousands of entries become few requests.

        Blocks only while too much is queued; raises ``PendingFullError`` if that takes longer than ``timeout_s``.
        """
        return self._queue.add(body)

    def submit_many(self, bodies: Sequence[bytes]) -> list[AppendFuture]:
        """Queue many entries in order; see ``submit``. The first ones may be queued when it raises."""
        return [self._queue.add(body) for body in bodies]

    def flush(self) -> None:
        """Return when everything submitted so far has succeeded or failed."""
        self._runner.run(self._queue.flush)

    def producer_sequence(self, producer: str, *, timeout_s: float | None = None) -> int:
        """The number of a producer's next entry; 0 if the group does not know it. All entries before it are committed.

        An append in flight may still be stored after the answer: call this when none is.
        """
        return self._runner.run(lambda: self._client.producer_sequence(producer, timeout_s=timeout_s))

    # --- the state machine --------------------------------------------------------------------------------------------

    def command(self, command: bytes, *, timeout_s: float | None = None) -> bytes:
        """Have the state machine on the log apply a command, once; returns its result.

        Commands of one client are applied in the order of the calls. Raises ``NoStateMachineError``, and
        ``PendingFullError`` while more than 1,024 wait.
        """
        return self._runner.run(lambda: self._client.command(command, timeout_s=timeout_s))

    def query(
        self,
        request: bytes,
        *,
        mode: ReadMode = ReadMode.LINEARIZABLE,
        after: int = NO_INDEX,
        wait_s: float = 0.0,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> QueryAnswer:
        """Ask the state machine on the log. Linearizable: it sees every command that was answered before.

        In mode COMMITTED any node answers with its present state, which may be old; with ``wait_s`` (up to 15 s) once
        it has applied an entry after ``after``, or when that time is up.
        """
        return self._runner.run(
            lambda: self._client.query(
                request, mode=mode, after=after, wait_s=wait_s, address=address, timeout_s=timeout_s
            )
        )

    def create_snapshot(self, address: str, *, timeout_s: float = 60.0) -> SnapshotState:
        """Have the node at ``address`` write a snapshot of its state machine; returns when it is durable."""
        return self._runner.run(lambda: self._client.create_snapshot(address, timeout_s=timeout_s))

    # --- read ---------------------------------------------------------------------------------------------------------

    def read(
        self,
        first_index: int,
        *,
        count: int = 0,
        max_bytes: int = 0,
        mode: ReadMode = ReadMode.COMMITTED,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> list[Entry]:
        """Read entries from ``first_index`` on: at least one, then as many as ``count`` and ``max_bytes`` (1 MiB)
        permit.

        Empty when ``first_index`` is the next index to be written. Any node may answer in mode COMMITTED and LOCAL,
        only the leader in mode LINEARIZABLE; ``address`` picks one.
        """
        return self._runner.run(
            lambda: self._client.read(
                first_index, count=count, max_bytes=max_bytes, mode=mode, address=address, timeout_s=timeout_s
            )
        )

    def follow(self, first_index: int, *, address: str | None = None) -> Generator[Entry, None, None]:
        """Yield every committed entry from ``first_index`` on, endlessly; switches to another node when one fails.

        Raises ``UnavailableError`` when no node answers for ``timeout_s``. Close the iterator (or the client) to stop.
        """
        for entries in self._iterated(lambda: self._client.follow_reads(first_index, address=address)):
            yield from entries

    # --- large reads --------------------------------------------------------------------------------------------------

    def fetch_log(
        self,
        first_index: int,
        end_index: int | None = None,
        *,
        max_bytes: int = 0,
        chunk_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[LogChunk, None, None]:
        """Yield committed entries as they are stored, from ``first_index`` to before ``end_index`` (None: all that the
        member asked knows to be committed), in chunks of about ``chunk_bytes``: see ``aio.DLedgerClient``, which says
        what it raises, too.
        """
        return self._iterated(
            lambda: self._client.fetch_log(
                first_index,
                end_index,
                max_bytes=max_bytes,
                chunk_bytes=chunk_bytes,
                read_from=read_from,
                address=address,
                timeout_s=timeout_s,
            )
        )

    def block_digests(
        self,
        from_position: int = 0,
        end_position: int | None = None,
        *,
        block_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> Generator[BlockDigest, None, None]:
        """Yield checksums of the blocks of a member's committed log up to ``end_position`` (None: all that it has): see
        ``aio.DLedgerClient``.
        """
        return self._iterated(
            lambda: self._client.block_digests(
                from_position,
                end_position,
                block_bytes=block_bytes,
                read_from=read_from,
                address=address,
                timeout_s=timeout_s,
            )
        )

    def locate(
        self,
        *,
        indexes: Sequence[int] = (),
        positions: Sequence[int] = (),
        store_times_ms: Sequence[int] = (),
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> LocatedEntries:
        """Where these entries begin, which entries begin at or after these positions, and which were stored then: see
        ``aio.DLedgerClient``.
        """
        return self._runner.run(
            lambda: self._client.locate(
                indexes=indexes,
                positions=positions,
                store_times_ms=store_times_ms,
                read_from=read_from,
                address=address,
                timeout_s=timeout_s,
            )
        )

    def index_by_time(
        self, store_time_ms: int, *, read_from: ReadFrom = ReadFrom.LEADER, address: str | None = None
    ) -> LogIndex:
        """The first committed message stored at ``store_time_ms`` (since 1970) or later; the log's end if none was."""
        return self._runner.run(lambda: self._client.index_by_time(store_time_ms, read_from=read_from, address=address))

    # --- the group ----------------------------------------------------------------------------------------------------

    def metadata(self, address: str | None = None, *, timeout_s: float | None = None) -> NodeStatus:
        """The metadata of the node at ``address``; without it, of the leader if it is known and answers, or of any."""
        return self._runner.run(lambda: self._client.metadata(address, timeout_s=timeout_s))

    def members_status(self, *, timeout_s: float = DISCOVERY_TIMEOUT_S) -> Mapping[NodeId, NodeStatus | DLedgerError]:
        """The status of every member, or the error that prevented it. Raises ``UnavailableError`` if none answers."""
        return self._runner.run(lambda: self._client.members_status(timeout_s=timeout_s))

    def watch_role(self, address: str | None = None) -> Generator[RoleEvent, None, None]:
        """Yield a node's current role, then every change, endlessly; switches nodes unless ``address`` is given."""
        return self._iterated(lambda: self._client.watch_role(address))

    def transfer_leadership(self, target: NodeId | None = None, *, timeout_s: float | None = None) -> LeaderHint:
        """Transfer leadership to ``target``, or to the most up-to-date member; returns the new leader."""
        return self._runner.run(lambda: self._client.transfer_leadership(target, timeout_s=timeout_s))

    def leader_status(self, *, timeout_s: float | None = None) -> NodeStatus:
        """The leader's metadata: the members, and in ``peers`` how far each of the others is."""
        return self._runner.run(lambda: self._client.leader_status(timeout_s=timeout_s))

    def change_members(self, change: MemberChange, *, timeout_s: float | None = None) -> Configuration:
        """Change one member, as ``member_change`` describes it; returns the members, committed: see
        ``aio.DLedgerClient``.
        """
        return self._runner.run(lambda: self._client.change_members(change, timeout_s=timeout_s))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _check_thread(self) -> None:
        if self._runner.is_current:
            raise UnavailableError("a callback of the client must not wait for the client: use submit")

    def _iterated(self, begin: Callable[[], AsyncGenerator[_T, None]]) -> Generator[_T, None, None]:
        found = begin()

        async def following() -> list[_T]:
            async for one in found:
                return [one]
            return []

        try:
            while one := self._runner.run(following):
                yield one[0]
        finally:
            if not self._client.is_closed:
                self._runner.run(lambda: _ended(found))


async def _ended(found: AsyncGenerator[object, None]) -> None:
    await found.aclose()


class _SubmitQueue:
    """Entries on their way to the loop, in order. ``add`` is for any thread, the rest for the loop's."""

    def __init__(self, client: AsyncClient, runner: LoopRunner) -> None:
        self._client = client
        self._runner = runner
        self._room = threading.Condition()  # guards the two below
        self._bytes = 0
        self._open: _Chunk | None = None
        self._waiting: deque[_Chunk] = deque()  # on the loop
        self._placed = 0  # entries of the first of them
        self._feeding = False

    def add(self, body: bytes) -> AppendFuture:
        self._runner.check()  # first: after a fork, our own lock may be held for ever
        cost = len(body) + ITEM_OVERHEAD_BYTES
        if self._bytes >= SUBMITTED_BYTES_MAX and not self._runner.is_current:
            self._wait_for_room()
        with self._room:
            chunk = self._open
            if chunk is None:
                self._runner.post(self._take)
                chunk = self._open = _Chunk(self._runner)
            future = AppendFuture(chunk)
            chunk.bodies.append(body)
            chunk.futures.append(future)
            self._bytes += cost
        return future

    async def flush(self) -> None:
        self._take()
        while self._waiting:
            await self._client.flush()
            await asyncio.sleep(0)  # it may have had nothing to wait for
        await self._client.flush()

    def fail(self, error: DLedgerError) -> None:
        """Nothing that waits is sent any more."""
        while self._waiting:
            self._waiting.popleft().settle(error)

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._client.timeout_s
        with self._room:
            while self._bytes >= SUBMITTED_BYTES_MAX:
                if not self._room.wait(max(deadline - time.monotonic(), 0.0)):
                    raise PendingFullError(
                        f"{self._bytes} bytes are waiting to be sent, and nothing completed within "
                        f"{self._client.timeout_s:g} s"
                    )

    def _take(self) -> None:
        with self._room:
            chunk, self._open = self._open, None
        if chunk is not None:
            self._waiting.append(chunk)
            if not self._feeding:
                self._feed()

    def _feed(self) -> None:
        """Pass on what there is room for."""
        self._feeding = False
        while self._waiting:
            chunk = self._waiting[0]
            at, error = self._placed, None
            try:
                for batch, place, count in self._client.begin_submit_many(chunk.bodies, at):
                    for future in chunk.futures[at : at + count]:
                        future._batch, future._place = batch, place
                        place += 1
                    at += count
            except DLedgerError as refused:
                error = refused
            except TypeError as wrong:
                error = InvalidRequestError(f"an entry is bytes: {wrong}")
            end = len(chunk.bodies) if error is not None else at
            with self._room:
                self._bytes -= sum(map(len, chunk.bodies[self._placed : end])) + ITEM_OVERHEAD_BYTES * (
                    end - self._placed
                )
                self._room.notify_all()
            self._placed = end
            if end < len(chunk.bodies):
                self._feeding = True
                self._client.when_room(self._feed)
                return
            self._waiting.popleft()
            self._placed = 0
            chunk.settle(error)


def _close(runner: LoopRunner, client: AsyncClient, queue: _SubmitQueue, process: int) -> None:
    """Also at the program's end, and when nobody has the client any more."""
    if os.getpid() != process:
        return

    async def close() -> None:
        await queue.flush()
        queue.fail(UnavailableError("the client is closed"))
        await client.close()

    if runner.is_running and runner.is_current:  # a callback closes it, or the collector
        runner.close_after(close)
        return
    try:
        if runner.is_running:
            runner.run(close)
    finally:
        runner.close()
