"""Clients' requests to a log, whatever their protocol: permissions, checks and limits. No wire types.

``LogService`` adapts it to gRPC, ``dledger.remoting.log`` to remoting. Everything runs on the event loop; only
``LogNode.read`` may wait for a disk, so only it runs elsewhere, on a few threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from dledger.access.guard import AccessGuard, Caller, ResourceKind
from dledger.access.quota import Limits, Quota, Quotas
from dledger.access.rules import Permission
from dledger.config import ServerConfig
from dledger.core.noop_payload import own_name
from dledger.errors import (
    AppendsNotServedError,
    DLedgerError,
    EmptyBatchError,
    EntryTooLargeError,
    IdentityError,
    IndexOutOfRangeError,
    LeaderHint,
    PendingFullError,
    TooManyProducersError,
)
from dledger.monitoring import Conditions
from dledger.records import ENTRY_HEADER_BYTES
from dledger.rpc.clients.bulk_service import BulkService
from dledger.rpc.clients.codec import Read, ReadAnswer, ReadMode
from dledger.rpc.clients.connections import AnswerRoom, Leases
from dledger.rpc.clients.group_codec import Commands, Query
from dledger.rpc.loops import EventHub, LoopBridge, LoopCallback
from dledger.rpc.ports import LogNode, NodeStatus
from dledger.types import (
    AppendedBatch,
    Configuration,
    Entry,
    LogIndex,
    MemberChange,
    NodeId,
    ProducerBatch,
    QueryAnswer,
    SnapshotState,
    Term,
)
from dledger.values import MIB

_READ_THREADS_MAX: Final = 4
READ_BYTES_DEFAULT: Final = MIB
READ_BYTES_MAX: Final = 8 * MIB
DRAIN_TIMEOUT_S: Final = 1.0

AppendOutcome = AppendedBatch | DLedgerError
EncodeRead = Callable[[ReadAnswer], bytes]
_Value = TypeVar("_Value")


class LogOperation(StrEnum):
    """The operations of clients; the names are those of the audit log."""

    APPEND = "Append"
    PRODUCER = "Producer"
    READ = "Read"
    FOLLOW = "Follow"
    METADATA = "Metadata"
    WATCH_ROLE = "WatchRole"
    TRANSFER = "TransferLeadership"
    CHANGE_MEMBERS = "ChangeMembers"
    COMMAND = "Command"
    QUERY = "Query"
    SNAPSHOT = "Snapshot"
    FETCH = "FetchLog"
    LOCATE = "Locate"
    DIGESTS = "BlockDigests"


NEEDED: Final = {
    LogOperation.APPEND: Permission.PUB,
    LogOperation.PRODUCER: Permission.PUB,
    LogOperation.COMMAND: Permission.PUB,
    LogOperation.QUERY: Permission.SUB,
    LogOperation.READ: Permission.SUB,
    LogOperation.FOLLOW: Permission.SUB,
    LogOperation.FETCH: Permission.SUB,
    LogOperation.LOCATE: Permission.SUB,
    LogOperation.DIGESTS: Permission.SUB,
}
"""Permissions on the topic named like the group; other operations need an account, but no permission. Changes of the
group are for administrators only, and so are reads of an application's log, which mixes all its users' entries.
"""
_OF_THE_GROUP: Final = (LogOperation.TRANSFER, LogOperation.CHANGE_MEMBERS, LogOperation.SNAPSHOT)


class ClientRoom(NamedTuple):
    """Limits for clients, of all logs of a process together."""

    quotas: Quotas
    room: AnswerRoom

    @classmethod
    def of(cls, config: ServerConfig) -> ClientRoom:
        """As configured."""
        limits = Limits(
            entries_max=config.replication.pending_entries_max,
            bytes_max=config.replication.pending_bytes_max,
            streams_max=config.client_streams_max,
            answer_bytes_max=config.limits.answer_bytes_max,
        )
        return cls(Quotas(limits, owner_percent=config.access.account_share_percent), AnswerRoom())


class LogRequests:
    """Create it on the event loop's thread; ``close`` it after the servers that use it have stopped.

    ``guard``: access control; None: everything is allowed.
    """

    def __init__(
        self,
        config: ServerConfig,
        node: LogNode,
        bridge: LoopBridge,
        guard: AccessGuard | None,
        conditions: Conditions,
        room: ClientRoom | None = None,
        groups: Collection[str] = (),
    ) -> None:
        """``room``: shared with the logs of the process's other ``groups``, which include this one's."""
        self.config: Final = config
        self.guard: Final = guard
        self.bridge: Final = bridge
        self.conditions: Final = conditions
        self._groups = sorted({config.group, *groups})
        self.quotas, self.room = room or ClientRoom.of(config)
        self.hub: Final = EventHub(node, bridge)
        self.bulk: Final = BulkService(config, node.bulk, self.check_group)
        self._node = node
        self._readers = ThreadPoolExecutor(_READ_THREADS_MAX, thread_name_prefix=f"dledger-read-{config.node_id}")
        self._body_bytes_max = config.store.entry_bytes_limit - ENTRY_HEADER_BYTES
        self._waiting: set[asyncio.Task[Any]] = set()  # handlers that a stopping server cancels

    def close(self) -> None:
        """Stop listening to the node and join the threads."""
        self.hub.close()
        self._readers.shutdown(wait=True)
        self.bulk.close()

    async def drain(self) -> None:
        """Wait for the handlers that the stopped server is cancelling: a loop that ends before them logs errors."""
        if self._waiting:
            await asyncio.wait(tuple(self._waiting), timeout=DRAIN_TIMEOUT_S)

    def note_waiting(self) -> None:
        """The current task waits for something that may never come: ``drain`` must know it."""
        task = asyncio.current_task()
        if task is not None:
            self._waiting.add(task)
            task.add_done_callback(self._waiting.discard)

    @contextmanager
    def long_lived(self, kind: str, quota: Quota) -> Iterator[None]:
        """Count something that goes on until the client ends it. Raises ``TooManyWaitsError``."""
        with quota.stream(kind, "client_streams_max"):
            self.note_waiting()
            yield

    # --- access -----------------------------------------------------------------------------------------------------

    def require(self, guard: AccessGuard, caller: Caller, operation: LogOperation, action: str) -> None:
        """Raise ``AccessDeniedError`` unless the caller may; ``action`` names it in the audit log."""
        group = self.config.group
        if self._needs_admin(operation):
            guard.require_admin(caller, action, f"log:{group}", changes=operation in _OF_THE_GROUP)
        elif operation in NEEDED:
            guard.require(caller, action, ResourceKind.TOPIC, group, NEEDED[operation])

    def may(self, caller: Caller, operation: LogOperation) -> bool:
        """Whether the caller may, by its present account."""
        if self._needs_admin(operation):
            return caller.account.admin
        return operation not in NEEDED or caller.may(ResourceKind.TOPIC, self.config.group, NEEDED[operation])

    def _needs_admin(self, operation: LogOperation) -> bool:
        application = not self.config.client_appends
        return operation in _OF_THE_GROUP or (application and NEEDED.get(operation) is Permission.SUB)

    def check_group(self, group: str) -> None:
        """Raise ``IdentityError`` for another group's request; one that names none is for the only one."""
        if group == self.config.group or (not group and len(self._groups) == 1):
            return
        names = ", ".join(map(repr, self._groups))
        if not group:
            raise IdentityError(f"this node serves the groups {names}: name one of them")
        if group in self._groups:  # on a stream of this one's
            raise IdentityError(f"this stream is for group {self.config.group!r}, not {group!r}: open another one")
        raise IdentityError(
            f"this node serves {'group' if len(self._groups) == 1 else 'the groups'} {names}, not {group!r}"
        )

    # --- appends ----------------------------------------------------------------------------------------------------

    def submit_append(
        self,
        caller: Caller | None,
        group: str,
        bodies: Sequence[bytes],
        producer: ProducerBatch | None,
        done: Callable[[AppendOutcome], None],
    ) -> None:
        """Append a batch, all or nothing; ``done`` may be called on any thread, at once if it is refused."""
        try:
            self.check_group(group)
            self._check_appends_served()
            self._check_bodies(bodies)
            if producer is not None and caller is not None:
                producer = replace(producer, producer=own_name(caller.name, producer.producer))
        except DLedgerError as error:
            done(error)
        else:
            self._node.submit_append(bodies, done, producer)

    def note_refusal(self, error: DLedgerError) -> None:
        """A limit that refuses appends is a condition of this node."""
        if isinstance(error, PendingFullError | TooManyProducersError):
            self.conditions.limit(str(error))

    def _check_appends_served(self) -> None:
        if not self.config.client_appends:
            raise AppendsNotServedError(
                f"the log of group {self.config.group!r} belongs to an application (client_appends=false) and "
                "takes reads only: send to the application, for example as a producer to its broker"
            )

    def _check_bodies(self, bodies: Sequence[bytes]) -> None:
        if not bodies:
            raise EmptyBatchError("an append needs at least one entry")
        largest = max(map(len, bodies))
        if largest > self._body_bytes_max:
            store = self.config.store
            setting = "max_entry_bytes" if store.entry_bytes_limit == store.max_entry_bytes else "segment_bytes"
            raise EntryTooLargeError(
                f"an entry of {largest} bytes is too large: the limit is {self._body_bytes_max} bytes, because of "
                f"{setting}={getattr(store, setting)}"
            )

    async def producer_sequence(self, caller: Caller | None, group: str, producer: str) -> int:
        """The number of a producer's next entry. Raises ``DLedgerError``, as all below do."""
        self.check_group(group)
        if caller is not None:
            producer = own_name(caller.name, producer)
        outcome: LoopCallback[int | DLedgerError] = LoopCallback(self.bridge)
        self._node.submit_producer(producer, outcome.done)
        return _raised(await outcome.future)

    # --- reads ------------------------------------------------------------------------------------------------------

    async def read(self, request: Read, leases: Leases, encode: EncodeRead) -> bytes:
        """The encoded answer, for which ``leases`` then have room; without entries at the next index to be written."""
        self.check_group(request.group)
        last_index = await self.readable_index(request.mode)
        first_index = request.first_index
        if first_index == last_index + 1:  # no entry yet, but no error either
            return encode(self._answer([]))
        if not 0 <= first_index <= last_index:
            raise IndexOutOfRangeError(
                f"index {first_index} is not readable yet: the last readable index is {last_index}"
            )
        if request.count:
            last_index = LogIndex(min(last_index, first_index + request.count - 1))
        max_bytes = min(request.max_bytes or READ_BYTES_DEFAULT, READ_BYTES_MAX)
        await leases.take(max_bytes)
        answer, _ = await self.read_entries(first_index, last_index, max_bytes, encode)
        leases.resize(len(answer))
        return answer

    async def wait_for(self, index: LogIndex, wait_s: float, quota: Quota) -> None:
        """Return once an entry is committed, or the time is up. Raises ``TooManyWaitsError``."""
        follower = self.hub.follow()
        try:
            with self.long_lived("follow", quota), suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while self.hub.committed_index < index:
                        await follower.wait()
                        follower.clear()
        finally:
            self.hub.unfollow(follower)

    async def readable_index(self, mode: ReadMode) -> LogIndex:
        """The last index that a read in this mode may return."""
        if mode is ReadMode.LOCAL:
            return self._node.status().end_index
        if mode is ReadMode.LINEARIZABLE:
            outcome: LoopCallback[LogIndex | DLedgerError] = LoopCallback(self.bridge)
            self._node.submit_read_index(outcome.done)
            return LogIndex(max(_raised(await outcome.future), self._node.status().committed_index))
        return self._node.status().committed_index

    async def read_entries(
        self, first_index: LogIndex, last_index: LogIndex, max_bytes: int, encode: EncodeRead
    ) -> tuple[bytes, LogIndex]:
        """The answer, and the index of the entry after it."""
        work = partial(self._read_and_encode, first_index, last_index, max_bytes, encode)
        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _read_and_encode(
        self, first_index: LogIndex, last_index: LogIndex, max_bytes: int, encode: EncodeRead
    ) -> tuple[bytes, LogIndex]:
        """On a thread: encoding many small entries takes too long for the event loop."""
        entries = self._node.read(first_index, last_index, max_bytes)
        return encode(self._answer(entries)), LogIndex(entries[-1].index + 1)

    def _answer(self, entries: list[Entry]) -> ReadAnswer:
        status = self._node.status()
        return ReadAnswer(entries, status.committed_index, status.begin_index, status.end_index)

    # --- the state machine ------------------------------------------------------------------------------------------

    async def command(self, caller: Caller | None, quota: Quota, request: Commands, size: int) -> tuple[bytes, ...]:
        """The results of commands; a request of ``size`` bytes counts for its client's quota while it waits."""
        self.check_group(request.group)
        self._check_appends_served()
        self._check_bodies(request.commands)
        producer, entries = request.producer, len(request.commands)
        if producer is not None and caller is not None:
            producer = replace(producer, producer=own_name(caller.name, producer.producer))
        if quota.is_full:
            raise quota.full_error()
        self.note_waiting()
        quota.take(entries, size)
        outcome: LoopCallback[tuple[bytes, ...] | DLedgerError] = LoopCallback(
            self.bridge, partial(quota.give, entries, size)
        )
        self._node.submit_commands(request.commands, outcome.done, producer)
        return _raised(await outcome.future)

    async def query(self, request: Query, quota: Quota) -> QueryAnswer:
        """The state machine's answer. Raises ``TooManyWaitsError`` for too many that wait."""
        self.check_group(request.group)
        outcome: LoopCallback[QueryAnswer | DLedgerError] = LoopCallback(self.bridge)
        linearizable = request.mode is ReadMode.LINEARIZABLE
        with self.long_lived("query", quota) if request.wait_ms else nullcontext():
            self._node.submit_query(
                request.request, outcome.done, linearizable=linearizable, after=request.after, wait_ms=request.wait_ms
            )
            return _raised(await outcome.future)

    async def snapshot(self, group: str) -> SnapshotState:
        """Write a snapshot here."""
        self.check_group(group)
        self.note_waiting()
        outcome: LoopCallback[SnapshotState | DLedgerError] = LoopCallback(self.bridge)
        self._node.submit_snapshot(outcome.done)
        return _raised(await outcome.future)

    # --- the group --------------------------------------------------------------------------------------------------

    def status(self, group: str = "") -> NodeStatus:
        """The node's status, for the group asked about; empty: the only one."""
        if group:
            self.check_group(group)
        return self._node.status()

    async def transfer(self, group: str, target: NodeId | None) -> tuple[LeaderHint, Term]:
        """Transfer leadership; the new leader."""
        self.check_group(group)
        outcome: LoopCallback[LeaderHint | DLedgerError] = LoopCallback(self.bridge)
        self._node.submit_transfer(target, outcome.done)
        return _raised(await outcome.future), self._node.status().term

    async def change_members(self, group: str, change: MemberChange) -> Configuration:
        """Change the members; the new configuration, which is committed."""
        self.check_group(group)
        outcome: LoopCallback[Configuration | DLedgerError] = LoopCallback(self.bridge)
        self._node.submit_member_change(change, outcome.done)
        return _raised(await outcome.future)


def _raised(outcome: _Value | DLedgerError) -> _Value:
    """The outcome, raised if it is an error."""
    if isinstance(outcome, DLedgerError):
        raise outcome
    return outcome
