"""The client of a group for asyncio, over remoting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from dledger.client.aio.connections import ROLE_CHANGES_MAX, Calls, NodeConnections
from dledger.client.discovery import DISCOVERY_TIMEOUT_S, Directory, nobody_answers, parse_addresses, report_of_node
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    AppendResult,
    ReadFrom,
    TimeLimit,
    is_retried_read,
    members_by_id,
)
from dledger.clock import Backoff
from dledger.errors import DLedgerError, LeaderHint, NotLeaderError, UnavailableError
from dledger.remoting import log_codec
from dledger.remoting.log_codec import LogCode
from dledger.rpc.clients import codec as messages
from dledger.rpc.clients.codec import Read, ReadMode
from dledger.rpc.ports import NodeStatus, RoleEvent
from dledger.types import (
    NO_INDEX,
    BlockDigest,
    Configuration,
    Entry,
    LogChunk,
    LogIndex,
    MemberChange,
    NodeId,
    Position,
    QueryAnswer,
    Role,
    SnapshotState,
)

if TYPE_CHECKING:
    from dledger.client.aio.appending import AppendBatch, Appending, CommandSender
    from dledger.client.aio.large_reads import LargeReads, ReadTarget
    from dledger.client.shared import ClientSecurity
    from dledger.rpc.clients.bulk_codec import LocatedEntries
    from dledger.sending.futures import AsyncSentItem, AsyncSentMany

_FOLLOW_WAIT_S: Final = 5.0
"""How long a node may hold back the answer to a follower, who would not notice its death before."""
WATCH_CHECK_S: Final = 10.0
"""How long a watcher hears nothing before it checks that its node still answers."""
_NOTHING: Final = b""
"""In the place of a role change, which is never empty."""


class DLedgerClient:
    """Talks to a group. Every call has a deadline (``timeout_s``) and retries until then if that is safe. Bound to the
    event loop of its first use, and not thread-safe.

    ``addresses``: client addresses of one or more nodes; the others are learnt. Errors are ``DLedgerError`` subclasses;
    their ``outcome`` says whether a failed append may still be in the log (``"unknown"``) or not (``"not_applied"``).
    With ``enable_idempotence`` each entry is stored once, however often it had to be sent.
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
        given = parse_addresses(addresses)
        self._connections = NodeConnections(given, group, security)
        self._directory = Directory(given)
        self._calls = Calls(self._connections, self._directory, group)
        self._idempotent = enable_idempotence
        self._appending: Appending | None = None
        self._commanding: CommandSender | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Store what was submitted, then close every connection; other calls in progress fail. Idempotent."""
        if self._appending is not None:
            await self._appending.finish_submitted()
        await self.abandon()

    async def abandon(self) -> None:
        """Close at once: what is in progress fails, as unknown if it may be stored. Idempotent."""
        self._connections.is_closed = True
        self._calls.seeker.close()
        if self._appending is not None:
            await self._appending.abandon()
        if self._commanding is not None:
            await self._commanding.close()
        await self._connections.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._connections.is_closed

    # --- append -------------------------------------------------------------------------------------------------------

    async def append(self, body: bytes, *, timeout_s: float | None = None) -> AppendResult:
        """Append one entry; returns when a quorum has stored it."""
        return await self._appends.append(body, self._timeout_s(timeout_s))

    async def append_many(self, bodies: Sequence[bytes], *, timeout_s: float | None = None) -> list[AppendResult]:
        """Append entries in order, in consecutive requests of up to 1 MiB; each request is all or nothing.

        When a request fails, the ones before it are in the log (the error then has ``outcome="unknown"`` and a note),
        and the ones after it were not sent.
        """
        return await self._appends.append_many(bodies, self._deadline(timeout_s))

    async def append_as(
        self, producer: str, sequence: int, bodies: Sequence[bytes], *, timeout_s: float | None = None
    ) -> list[AppendResult]:
        """Append entries under your own producer name, numbered from ``sequence``.

        Entries that the log already holds are not appended again, no matter who repeats them, or how often: a second
        attempt, another process, the next day (until the producer has been idle for ``producer_expiry_ms``). Only one
        caller at a time per producer. Split like ``append_many``; after an error, too, ``producer_sequence`` returns
        how far it got. Raises ``OutOfOrderSequenceError`` and ``UnknownProducerError``, besides what ``append`` raises.
        """
        return await self._appends.append_as(producer, sequence, bodies, self._deadline(timeout_s))

    async def submit(self, body: bytes) -> AsyncSentItem[AppendResult]:
        """Queue one entry, to be stored in the order of the calls: thousands of entries become few requests.

        Await the result, or read it once it is done. An entry is sent again until ``timeout_s`` after it was added.
        Waits only while 8 MiB are pending (``PendingFullError`` if that takes too long).
        """
        return await self._appends.submit(body)

    async def submit_many(self, bodies: Sequence[bytes]) -> AsyncSentMany[AppendResult]:
        """Queue many entries in order, much more cheaply than with ``submit``."""
        return await self._appends.submit_many(bodies)

    async def flush(self) -> None:
        """Return when everything submitted so far has succeeded or failed."""
        if self._appending is not None:
            await self._appending.flush()

    def begin_append(self, body: bytes, timeout_s: float | None = None) -> tuple[AppendBatch, int] | None:
        """``append`` without the wait, for who has no task: the batch, and the place in it; None: too much is pending,
        use ``append``.
        """
        return self._appends.begin(body, self._timeout_s(timeout_s))

    def begin_submit_many(self, bodies: Sequence[bytes], start: int) -> Iterator[tuple[AppendBatch, int, int]]:
        """``submit_many`` from ``start`` on without the wait, as far as there is room: batches, the place of the first
        entry in each, and how many there are.
        """
        return self._appends.begin_submit_many(bodies, start)

    def when_room(self, callback: Callable[[], object]) -> None:
        """Call it once ``begin_submit_many`` may go on."""
        self._appends.when_room(callback)

    async def producer_sequence(self, producer: str, *, timeout_s: float | None = None) -> int:
        """The number of a producer's next entry; 0 if the group does not know it. All entries before it are committed.

        An append in flight may still be stored after the answer: call this when none is.
        """
        request = messages.encode_producer_request(self.group, producer)

        async def ask(address: str, deadline: TimeLimit) -> int:
            return messages.decode_producer_answer(
                await self._connections.call(address, LogCode.PRODUCER, request, deadline)
            )

        return await self._calls.at_leader(ask, self._deadline(timeout_s))

    # --- the state machine --------------------------------------------------------------------------------------------

    async def command(self, command: bytes, *, timeout_s: float | None = None) -> bytes:
        """Have the state machine on the log apply a command, once; returns its result.

        Commands of one client are applied in the order of the calls. Raises ``NoStateMachineError``, and
        ``PendingFullError`` while more than 1,024 wait.
        """
        if self._commanding is None:
            from dledger.client.aio.appending import CommandSender

            self._commanding = CommandSender(self._connections, self._calls, self.group)
        return await self._commanding.send(command, self._timeout_s(timeout_s))

    async def query(
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
        from dledger.rpc.clients import group_codec

        query = group_codec.Query(self.group, request, mode, LogIndex(after), round(wait_s * 1000))
        encoded, deadline = group_codec.encode_query(query), TimeLimit(self._timeout_s(timeout_s) + wait_s)

        async def ask(at: str, until: TimeLimit) -> QueryAnswer:
            return group_codec.decode_answer(await self._connections.call(at, LogCode.QUERY, encoded, until))

        if address is not None:
            return await self._calls.at_one(ask, address, deadline)
        if mode is ReadMode.LINEARIZABLE:
            return await self._calls.at_leader(ask, deadline)
        return (await self._calls.at_any(ask, deadline))[0]

    async def create_snapshot(self, address: str, *, timeout_s: float = 60.0) -> SnapshotState:
        """Have the node at ``address`` write a snapshot of its state machine; returns when it is durable."""
        from dledger.rpc.clients import group_codec

        request = group_codec.encode_snapshot_request(self.group)

        async def ask(at: str, until: TimeLimit) -> SnapshotState:
            return group_codec.decode_snapshot_state(await self._connections.call(at, LogCode.SNAPSHOT, request, until))

        return await self._calls.at_one(ask, address, TimeLimit(timeout_s))

    # --- read ---------------------------------------------------------------------------------------------------------

    async def read(
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
        request = log_codec.encode_read(Read(self.group, LogIndex(first_index), count, max_bytes, mode))
        deadline = self._deadline(timeout_s)

        async def ask(at: str, until: TimeLimit) -> list[Entry]:
            return log_codec.decode_read_answer(await self._connections.call(at, LogCode.READ, request, until)).entries

        if address is not None:
            return await self._calls.at_one(ask, address, deadline)
        if mode is ReadMode.LINEARIZABLE:
            return await self._calls.at_leader(ask, deadline)
        return (await self._calls.at_any(ask, deadline))[0]

    async def follow(self, first_index: int, *, address: str | None = None) -> AsyncGenerator[Entry, None]:
        """Yield every committed entry from ``first_index`` on, endlessly; switches to another node when one fails.

        Raises ``UnavailableError`` when no node answers for ``timeout_s``. Close the iterator (or the client) to stop.
        """
        async with aclosing(self.follow_reads(first_index, address=address)) as reads:
            async for entries in reads:
                for entry in entries:
                    yield entry

    async def follow_reads(self, first_index: int, *, address: str | None = None) -> AsyncGenerator[list[Entry], None]:
        """``follow``, with as many entries at a time as one read returns: at least one."""
        next_index = LogIndex(first_index)
        wait_s = min(self.timeout_s, _FOLLOW_WAIT_S)
        node, broken, backoff = address, self._deadline(None), Backoff(RETRY_WAIT_S_MIN, RETRY_WAIT_S_MAX)
        while True:
            request = log_codec.encode_read(Read(self.group, next_index), round(wait_s * 1000))
            try:
                if node is None:
                    _, node = await self._calls.at_any(self._calls.status, TimeLimit(broken.remaining_s))
                patience = TimeLimit(wait_s + self.timeout_s)
                answer = log_codec.decode_read_answer(
                    await self._connections.call(node, LogCode.READ, request, patience)
                )
            except DLedgerError as error:
                if node is not None:
                    self._directory.note_failure(node, error)
                if self._connections.is_closed or broken.expired or not is_retried_read(error):
                    raise
                node = address
                await asyncio.sleep(min(backoff.pause(), broken.remaining_s))
                continue
            broken = self._deadline(None)
            backoff.succeeded()
            if answer.entries:
                next_index = LogIndex(answer.entries[-1].index + 1)
                yield answer.entries

    # --- large reads --------------------------------------------------------------------------------------------------

    async def fetch_log(
        self,
        first_index: int,
        end_index: int | None = None,
        *,
        max_bytes: int = 0,
        chunk_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[LogChunk, None]:
        """Yield committed entries as they are stored, from ``first_index`` to before ``end_index``.

        None: all that the member asked knows to be committed. That may be less than was acknowledged, even at a newly
        elected leader; to get everything, append an entry or read one linearizably, and use its index as the end. The
        entries come in order, each once, in chunks of about ``chunk_bytes`` (0: 1 MiB; one entry may be larger); with
        ``max_bytes`` the last chunk is the one that exceeds it. Continues at another member when one fails, is behind,
        is damaged or keeps less, and raises when nothing new arrives for ``timeout_s``. ``address`` picks one node and
        no other.

        Raises ``IndexBeforeBeginError`` (no member keeps all of it any more), ``IndexOutOfRangeError`` (it begins
        beyond the committed end, even after waiting), ``CorruptLogError`` and ``DiskError`` (naming file and offset),
        ``PendingFullError`` (too many readers).
        """
        if end_index is not None and end_index <= first_index:
            return
        end = LogIndex(0 if end_index is None else end_index)
        from dledger.rpc.clients.bulk_codec import FetchLog

        request = FetchLog(self.group, LogIndex(first_index), end, max_bytes, chunk_bytes)
        async with aclosing(self._large_reads.fetch(request, self._target(read_from, address, timeout_s))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def block_digests(
        self,
        from_position: int = 0,
        end_position: int | None = None,
        *,
        block_bytes: int = 0,
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[BlockDigest, None]:
        """Yield checksums of the blocks of a member's committed log up to ``end_position`` (None: all that it has).

        ``block_bytes`` 0: 4 MiB. The member computes them, at most ``digest_rate_bytes_max`` per second. Starts at the
        log's begin if ``from_position`` is below it. Raises like ``fetch_log``.
        """
        if end_position is not None and end_position <= from_position:
            return
        end = Position(0 if end_position is None else end_position)
        from dledger.rpc.clients.bulk_codec import BlockDigests

        request = BlockDigests(self.group, Position(from_position), end, block_bytes)
        async with aclosing(self._large_reads.digests(request, self._target(read_from, address, timeout_s))) as blocks:
            async for block in blocks:
                yield block

    async def locate(
        self,
        *,
        indexes: Sequence[int] = (),
        positions: Sequence[int] = (),
        store_times_ms: Sequence[int] = (),
        read_from: ReadFrom = ReadFrom.LEADER,
        address: str | None = None,
        timeout_s: float | None = None,
    ) -> LocatedEntries:
        """Where these entries begin, which entries begin at or after these positions, and which were stored then.

        Returns one place per question, first for ``indexes``, then ``positions``, then ``store_times_ms`` (brokers'
        logs only, ``UntimedLogError`` otherwise), and the range that the member holds. The end of the committed log
        answers whatever lies beyond it.
        """
        from dledger.rpc.clients.bulk_codec import Locate

        request = Locate(self.group, indexes, positions, store_times_ms)
        return await self._large_reads.locate(request, self._target(read_from, address, timeout_s))

    async def index_by_time(
        self, store_time_ms: int, *, read_from: ReadFrom = ReadFrom.LEADER, address: str | None = None
    ) -> LogIndex:
        """The first committed message stored at ``store_time_ms`` (since 1970) or later; the log's end if none was."""
        located = await self.locate(store_times_ms=(store_time_ms,), read_from=read_from, address=address)
        return located.places[0].index

    # --- the group ----------------------------------------------------------------------------------------------------

    async def metadata(self, address: str | None = None, *, timeout_s: float | None = None) -> NodeStatus:
        """The metadata of the node at ``address``; without it, of the leader if it is known and answers, or of any."""
        deadline = self._deadline(timeout_s)
        if address is not None:
            status, answering = await self._calls.at_one(self._calls.status, address, deadline), address
        else:
            status, answering = await self._calls.at_any(self._calls.status, deadline, attempt_s=self.timeout_s)
        self._directory.learn(answering, report_of_node(status))
        return status

    async def members_status(
        self, *, timeout_s: float = DISCOVERY_TIMEOUT_S
    ) -> Mapping[NodeId, NodeStatus | DLedgerError]:
        """The status of every member, or the error that prevented it. Raises ``UnavailableError`` if none answers."""
        answers = await self._calls.survey(self._deadline(timeout_s))
        statuses = [one for _, one in answers if not isinstance(one, DLedgerError)]
        failures = {address: one for address, one in answers if isinstance(one, DLedgerError)}
        if not statuses:
            raise nobody_answers(failures.values())
        return members_by_id(statuses, failures)

    async def watch_role(self, address: str | None = None) -> AsyncGenerator[RoleEvent, None]:
        """Yield a node's current role, then every change, endlessly; switches nodes unless ``address`` is given."""
        request = messages.encode_watch_role(self.group)
        broken, backoff = self._deadline(None), Backoff(RETRY_WAIT_S_MIN, RETRY_WAIT_S_MAX)
        while True:
            node, failure = address, DLedgerError("nothing failed yet")
            changes: asyncio.Queue[bytes | None] = asyncio.Queue(ROLE_CHANGES_MAX)
            try:
                if node is None:
                    _, node = await self._calls.at_any(self._calls.status, TimeLimit(broken.remaining_s))
                link = await self._connections.link(node, broken)
                link.watchers.add(changes)  # before the question, so that no change is missed
                try:
                    event: bytes | None = await self._connections.call(node, LogCode.WATCH_ROLE, request, broken)
                    while event is not None:
                        yield messages.decode_role_event(event)
                        broken = self._deadline(None)
                        backoff.succeeded()
                        while (event := await _heard(changes)) == _NOTHING:
                            broken = self._deadline(None)  # it has answered so far
                            await self._calls.status(node, TimeLimit(self.timeout_s / 2))
                finally:
                    link.watchers.discard(changes)
                failure = UnavailableError(f"the connection to {node} ended")
            except DLedgerError as error:
                failure = error
            if node is not None:
                self._directory.note_failure(node, failure)
            if self._connections.is_closed or broken.expired or not is_retried_read(failure):
                raise failure
            await asyncio.sleep(min(backoff.pause(), broken.remaining_s))

    async def transfer_leadership(self, target: NodeId | None = None, *, timeout_s: float | None = None) -> LeaderHint:
        """Transfer leadership to ``target``, or to the most up-to-date member; returns the new leader."""
        request = messages.encode_transfer(self.group, target)

        async def ask(address: str, deadline: TimeLimit) -> LeaderHint:
            return messages.decode_transferred(
                await self._connections.call(address, LogCode.TRANSFER, request, deadline, changes=True)
            )

        leader = await self._calls.at_leader(ask, self._deadline(timeout_s), changes=True)
        if (address := self._directory.resolve(leader)) is not None:
            self._directory.set_leader(address)
        return leader

    async def leader_status(self, *, timeout_s: float | None = None) -> NodeStatus:
        """The leader's metadata: the members, and in ``peers`` how far each of the others is."""
        return await self._calls.at_leader(self._leading, self._deadline(timeout_s))

    async def change_members(self, change: MemberChange, *, timeout_s: float | None = None) -> Configuration:
        """Change one member, as ``member_change`` describes it; returns the members, committed.

        An added member is a learner until it has caught up, which ``leader_status`` shows. After an error with
        ``outcome="unknown"`` you may repeat the call with the same ``change``: it is not made twice. Raises
        ``ChangeInProgressError``, ``NotReadyToPromoteError``, ``WouldLoseQuorumError``, ``MemberExistsError``,
        ``MemberUnknownError``, ``StaleConfigurationError`` and ``TooManyMembersError``.
        """
        from dledger.rpc.clients import group_codec

        request = group_codec.encode_change(self.group, change)

        async def ask(address: str, deadline: TimeLimit) -> Configuration:
            return group_codec.decode_changed(
                await self._connections.call(address, LogCode.CHANGE_MEMBERS, request, deadline, changes=True)
            )

        return await self._calls.at_leader(ask, self._deadline(timeout_s), changes=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _leading(self, address: str, deadline: TimeLimit) -> NodeStatus:
        status = await self._calls.status(address, deadline)
        self._directory.learn(address, report_of_node(status))
        if status.role is not Role.LEADER:
            raise NotLeaderError(f"{status.node_id} does not lead any more", leader=status.leader)
        return status

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout_s

    def _deadline(self, timeout_s: float | None) -> TimeLimit:
        return TimeLimit(self._timeout_s(timeout_s))

    # Modules that only some programs need are loaded at first use, which halves the cost of a status command.

    @property
    def _appends(self) -> Appending:
        if self._appending is None:
            from dledger.client.aio.appending import Appending

            self._appending = Appending(
                self._connections, self._calls, self.group, timeout_s=self.timeout_s, idempotent=self._idempotent
            )
        return self._appending

    @property
    def _large_reads(self) -> LargeReads:
        from dledger.client.aio.large_reads import LargeReads

        return LargeReads(self._connections, self._calls)

    def _target(self, read_from: ReadFrom, address: str | None, timeout_s: float | None) -> ReadTarget:
        from dledger.client.aio.large_reads import ReadTarget

        return ReadTarget(ReadFrom(read_from), address, self._timeout_s(timeout_s))


async def _heard(changes: asyncio.Queue[bytes | None]) -> bytes | None:
    """The next role change, or ``_NOTHING`` if it is time to check the node: a frozen one closes no connection."""
    with suppress(TimeoutError):
        async with asyncio.timeout(WATCH_CHECK_S):
            return await changes.get()
    return _NOTHING
