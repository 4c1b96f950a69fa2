"""Large reads of a group's log: raw chunks, block digests, and the places of entries. Any member can answer.

When a read breaks off, it continues from there, at the same or another member: committed entries are the same
everywhere. So an iterator yields every entry once and in order, whatever happens to single nodes, or raises.

Entries that one member has damaged or no longer keeps are requested from all others before the caller gets an error,
because "no longer kept" makes readers skip them. Only a member chosen by its address answers for itself alone.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from dledger.backoff import Backoff
from dledger.client.aio.large_reads import ReadFrom
from dledger.client.channels import Channels, Seeker
from dledger.client.discovery import DISCOVERY_TIMEOUT_S, Directory, report_of_node
from dledger.client.rpc_failures import rpc_failure
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    Deadline,
    is_retried_read,
)
from dledger.errors import (
    CorruptLogError,
    DiskError,
    DLedgerError,
    FencedError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    UnavailableError,
)
from dledger.rpc import options
from dledger.rpc.clients import bulk_codec as codec
from dledger.rpc.ports import NodeStatus
from dledger.types import BlockDigest, LogChunk, LogIndex, Position, Role

if TYPE_CHECKING:  # generic in the stubs only
    _Stream = grpc.UnaryStreamMultiCallable[bytes, bytes]

STREAM_TIMEOUT_S: Final = 600.0
"""The age at which an open stream is replaced by a new one."""

_ONE_MEMBERS: Final = (CorruptLogError, DiskError, FencedError, IndexBeforeBeginError)
"""Problems of one member's log: another member may hold the requested entries intact."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BulkTarget:
    """The member to ask: one of a kind, or the one at ``address``. ``timeout_s`` limits the time without progress."""

    read_from: ReadFrom
    address: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ClientContext:
    """The parts of a client that its large reads use."""

    group: str
    directory: Directory
    channels: Channels
    seeker: Seeker[NodeStatus]
    ask_all: Callable[[Collection[str], Deadline], Iterator[tuple[str, NodeStatus | DLedgerError]]]
    diagnose: Callable[[DLedgerError, str], DLedgerError]


class BulkReads:
    """One client's large reads. Thread-safe; an iterator is for one thread at a time."""

    def __init__(self, client: ClientContext) -> None:
        self._client = client
        self._random = random.Random()  # spreads load

    def fetch(self, request: codec.FetchLog, target: BulkTarget) -> Iterator[LogChunk]:
        """See ``DLedgerClient.fetch_log``."""
        next_index, end, got = request.first_index, request.end_index, 0
        patience = _Patience(self._client.channels.closing, target.timeout_s)
        while True:
            left = request.max_bytes and request.max_bytes - got
            wanted = codec.FetchLog(request.group, next_index, end, left, request.chunk_bytes)
            node = self._choose(target, patience)
            try:
                with closing(self._stream("FetchLog", node, codec.encode_fetch(wanted))) as answers:
                    for chunk in map(codec.decode_chunk, answers):
                        end = end or LogIndex(chunk.committed_index + 1)
                        if chunk.count:
                            yield chunk
                            patience = _Patience(self._client.channels.closing, target.timeout_s)
                        next_index = chunk.end_index
                        got += len(chunk.data)
                        if next_index >= end or 0 < request.max_bytes <= got:
                            return
                raise UnavailableError(f"{node} does not know yet that entries {next_index} to {end - 1} are committed")
            except DLedgerError as error:
                self._note_failure(node, error, patience)
                patience.wait_after(error, retried=_is_retried(error) or patience.refused_by(node, error, target))

    def digests(self, request: codec.BlockDigests, target: BulkTarget) -> Iterator[BlockDigest]:
        """See ``DLedgerClient.block_digests``."""
        position, end = request.from_position, request.end_position
        block_bytes = request.block_bytes or codec.BLOCK_BYTES_DEFAULT
        patience = _Patience(self._client.channels.closing, target.timeout_s)
        while True:
            wanted = codec.BlockDigests(request.group, position, end, block_bytes)
            node = self._choose(target, patience)
            try:
                with closing(self._stream("BlockDigests", node, codec.encode_digests_request(wanted))) as answers:
                    for some in map(codec.decode_digests, answers):
                        end = end or some.committed_position
                        for block in some.blocks:
                            past = Position(block.position + block.size)
                            if past < end and past % block_bytes:  # the member is behind, so the block is incomplete
                                break
                            yield block
                            position = past
                            patience = _Patience(self._client.channels.closing, target.timeout_s)
                        if position >= end or end <= some.begin_position:
                            return
                raise UnavailableError(f"{node} does not know yet that positions {position} to {end} are committed")
            except DLedgerError as error:
                self._note_failure(node, error, patience)
                patience.wait_after(error, retried=_is_retried(error))

    def locate(self, request: codec.Locate, target: BulkTarget) -> codec.LocatedEntries:
        """See ``DLedgerClient.locate``."""
        patience = _Patience(self._client.channels.closing, target.timeout_s)
        while True:
            node = self._choose(target, patience)
            try:
                data = self._client.channels.call("Locate", node, codec.encode_locate(request), patience.deadline)
                return codec.decode_located(data)
            except DLedgerError as error:
                self._note_failure(node, error, patience)
                patience.wait_after(error, retried=_is_retried(error) or patience.refused_by(node, error, target))

    def _choose(self, target: BulkTarget, patience: _Patience) -> str:
        """The address of a member to ask now. Raises ``UnavailableError`` and errors that make asking pointless."""
        while True:
            try:
                return self._find_other(target, patience) if patience.refused else self._find(target, patience.deadline)
            except DLedgerError as error:  # a node's earlier error says more than the time-out of the search
                patience.wait_after(patience.failure or error, retried=is_retried_read(error))

    def _find(self, target: BulkTarget, deadline: Deadline) -> str:
        if target.address is not None:
            return target.address
        if target.read_from is ReadFrom.LEADER:
            return self._client.seeker.leader(deadline)
        return self._pick(target, self._present(deadline))

    def _find_other(self, target: BulkTarget, patience: _Patience) -> str:
        """A member that has not refused, and has everything that the refusing members knew to be committed.

        When all have refused, raises a refusal: damage in preference to "no longer kept".
        """
        found = self._present(patience.deadline)
        patience.raise_floor(
            one.committed_index
            for address, one in found
            if address in patience.refused and (target.read_from is not ReadFrom.LEADER or one.role is Role.LEADER)
        )
        others = [(address, one) for address, one in found if address not in patience.refused]
        if not others:
            patience.failure = patience.refusal
            raise patience.refusal
        if patience.floor is None:  # the refusing members are gone or have forgotten: nothing shows who is behind
            caught_up = [(address, one) for address, one in others if one.role is Role.LEADER]
        else:
            caught_up = [(address, one) for address, one in others if one.committed_index >= patience.floor]
        if not caught_up:
            raise UnavailableError("no other member is known to hold all committed entries yet")
        return self._pick(target, caught_up)

    def _pick(self, target: BulkTarget, members: Sequence[tuple[str, NodeStatus]]) -> str:
        wanted = {ReadFrom.LEADER: {Role.LEADER}, ReadFrom.FOLLOWER: set(Role) - {Role.LEADER}, ReadFrom.ANY: set(Role)}
        fitting = [address for address, one in members if one.role in wanted[target.read_from]]
        return self._random.choice(fitting or [address for address, _ in members])

    def _present(self, deadline: Deadline) -> list[tuple[str, NodeStatus]]:
        """The members that answer; at least one."""
        answers = self._survey(Deadline(min(DISCOVERY_TIMEOUT_S, deadline.remaining_s)))
        found = [(address, one) for address, one in answers if isinstance(one, NodeStatus)]
        if not found:
            raise next(one for _, one in answers if isinstance(one, DLedgerError))
        return found

    def _survey(self, deadline: Deadline) -> list[tuple[str, NodeStatus | DLedgerError]]:
        """The status of every member, including those learnt from others' answers."""
        directory, answers, asked = self._client.directory, list[tuple[str, NodeStatus | DLedgerError]](), set[str]()
        while addresses := [one for one in directory.addresses if one not in asked]:
            asked.update(addresses)
            for address, answer in self._client.ask_all(addresses, deadline):
                answers.append((address, answer))
                if isinstance(answer, DLedgerError):
                    directory.note_tried(address)
                else:
                    directory.learn(address, report_of_node(answer))
        return answers

    def _note_failure(self, node: str, error: DLedgerError, patience: _Patience) -> None:
        patience.failure = error
        self._client.directory.note_failure(node, error)

    def _stream(self, name: str, address: str, request: bytes) -> Generator[bytes, None, None]:
        stream: _Stream = self._client.channels.channel(address).unary_stream(
            options.method(options.LOG_SERVICE, name), request_serializer=None, response_deserializer=None
        )
        call = stream(request, timeout=STREAM_TIMEOUT_S)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._client.diagnose(rpc_failure(error, address, sent=False), address) from error
        finally:
            call.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leaves it untyped


def _is_retried(error: DLedgerError) -> bool:
    """Whether trying again, perhaps elsewhere, may help: a member may be behind the one that gave an index."""
    return is_retried_read(error) or isinstance(error, IndexOutOfRangeError)


class _Patience:
    """How long to continue without progress."""

    def __init__(self, closing: threading.Event, timeout_s: float) -> None:
        self.deadline = Deadline(timeout_s)
        self.failure: DLedgerError | None = None
        """Of the node asked last."""
        self.refused: dict[str, DLedgerError] = {}
        """Members whose own logs cannot provide the next entries, and why."""
        self.floor: LogIndex | None = None
        """The highest commit index known of them: a member behind it may answer with too little."""
        self._closing = closing
        self._backoff = Backoff(RETRY_WAIT_S_MIN, RETRY_WAIT_S_MAX)

    @property
    def refusal(self) -> DLedgerError:
        """The error to raise when all members have refused: damage first, because that member may still hold the
        entries.
        """
        return min(self.refused.values(), key=lambda error: isinstance(error, IndexBeforeBeginError))

    def raise_floor(self, committed: Iterable[LogIndex]) -> None:
        """Raise the floor to the commit indexes of refusing members; a restarted one may report less than before."""
        self.floor = max((*committed, *(() if self.floor is None else (self.floor,))), default=None)

    def refused_by(self, node: str, error: DLedgerError, target: BulkTarget) -> bool:
        """Record a failure due to the member's own log; returns whether to ask other members."""
        if target.address is not None or not isinstance(error, _ONE_MEMBERS):
            return False
        self.refused[node] = error
        return True

    def wait_after(self, error: DLedgerError, *, retried: bool) -> None:
        """Pause before the next attempt, or raise ``error`` if there is none."""
        if self._closing.is_set() or self.deadline.expired or not retried:
            raise error
        self._closing.wait(min(self._backoff.pause(), self.deadline.remaining_s))
