"""Reading a lot of a group's log: raw chunks, digests of blocks, where entries are. Any member can answer.

What is lost on the way is asked for again, where it broke off, at the same or another member: committed entries are the
same everywhere. So an iterator gives every entry once and in order, whatever happens to single nodes, or raises.

Entries that one member has damaged or no longer keeps are asked for at all others before anybody is told so: "no longer
kept" makes readers go on behind them. Only a member named by its address speaks for itself.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeVar

import grpc

from dledger.backoff import Backoff
from dledger.client.channels import Channels, Seeker
from dledger.client.discovery import DISCOVERY_TIMEOUT_S, Directory, report_of_node
from dledger.client.shared import (
    RETRY_WAIT_S_MAX,
    RETRY_WAIT_S_MIN,
    Deadline,
    is_retried_read,
    rpc_failure,
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

if TYPE_CHECKING:  # a name that is not generic at run time
    _Stream = grpc.UnaryStreamMultiCallable[bytes, bytes]

STREAM_TIMEOUT_S: Final = 600.0
"""After which a stream that is still open is opened anew."""

_ONE_MEMBERS: Final = (CorruptLogError, DiskError, FencedError, IndexBeforeBeginError)
"""What is the matter with one member's log: another one may hold what was asked for, whole."""

_T = TypeVar("_T")


class ReadFrom(StrEnum):
    """Which member answers a large read."""

    LEADER = "leader"
    FOLLOWER = "follower"
    """One of the followers, to spare the leader; the leader if there is no other."""
    ANY = "any"


@dataclass(frozen=True, slots=True)
class BulkTarget:
    """Whom to ask: a kind of member, or the one at ``address``. ``timeout_s`` is for every step that brings nothing."""

    read_from: ReadFrom
    address: str | None
    timeout_s: float


@dataclass(frozen=True, slots=True)
class ClientContext:
    """What a client lends to its large reads."""

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
                            if past < end and past % block_bytes:  # the member is behind: not the whole block
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
        """The address of a member to ask now. Raises ``UnavailableError`` and whatever makes asking hopeless."""
        while True:
            try:
                return self._find_other(target, patience) if patience.refused else self._find(target, patience.deadline)
            except DLedgerError as error:  # what a node said before tells more than that no time was left to find one
                patience.wait_after(patience.failure or error, retried=is_retried_read(error))

    def _find(self, target: BulkTarget, deadline: Deadline) -> str:
        if target.address is not None:
            return target.address
        if target.read_from is ReadFrom.LEADER:
            return self._client.seeker.leader(deadline)
        return self._pick(target, self._present(deadline))

    def _find_other(self, target: BulkTarget, patience: _Patience) -> str:
        """A member that has not refused yet, and has all that those who have knew to be committed.

        Raises what was refused, damage rather than "no longer kept", once nobody is left who could be asked.
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
        if patience.floor is None:  # they are gone meanwhile, or have forgotten: who is behind cannot be told
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
        """The members that answer, at least one."""
        answers = self._survey(Deadline(min(DISCOVERY_TIMEOUT_S, deadline.remaining_s)))
        found = [(address, one) for address, one in answers if isinstance(one, NodeStatus)]
        if not found:
            raise next(one for _, one in answers if isinstance(one, DLedgerError))
        return found

    def _survey(self, deadline: Deadline) -> list[tuple[str, NodeStatus | DLedgerError]]:
        """What every member says of itself, those included that others tell of."""
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
    """Whether trying again, perhaps elsewhere, may help: a member may be behind the one that told an index."""
    return is_retried_read(error) or isinstance(error, IndexOutOfRangeError)


class _Patience:
    """How long to go on without anything new."""

    def __init__(self, closing: threading.Event, timeout_s: float) -> None:
        self.deadline = Deadline(timeout_s)
        self.failure: DLedgerError | None = None
        """Of the node that was asked last."""
        self.refused: dict[str, DLedgerError] = {}
        """Members whose own logs do not give what comes next, and why."""
        self.floor: LogIndex | None = None
        """What they are known to have known to be committed: who is behind that may answer too little."""
        self._closing = closing
        self._backoff = Backoff(RETRY_WAIT_S_MIN, RETRY_WAIT_S_MAX)

    @property
    def refusal(self) -> DLedgerError:
        """What to raise when all have refused: what is damaged somewhere may be kept there."""
        return min(self.refused.values(), key=lambda error: isinstance(error, IndexBeforeBeginError))

    def raise_floor(self, committed: Iterable[LogIndex]) -> None:
        """What members that refused say now; one that has restarted may say less than it knew."""
        self.floor = max((*committed, *(() if self.floor is None else (self.floor,))), default=None)

    def refused_by(self, node: str, error: DLedgerError, target: BulkTarget) -> bool:
        """Note that a member's own log is why it failed; whether others are to be asked."""
        if target.address is not None or not isinstance(error, _ONE_MEMBERS):
            return False
        self.refused[node] = error
        return True

    def wait_after(self, error: DLedgerError, *, retried: bool) -> None:
        """Pause before the next attempt; raises ``error`` if there is to be none."""
        if self._closing.is_set() or self.deadline.expired or not retried:
            raise error
        self._closing.wait(min(self._backoff.pause(), self.deadline.remaining_s))
