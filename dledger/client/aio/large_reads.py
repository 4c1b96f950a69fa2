"""Large reads of a group's log: raw chunks, block digests, and the places of entries. Any member can answer.

When a read breaks off, it continues from there, at the same or another member: committed entries are the same
everywhere. So an iterator yields every entry once and in order, whatever happens to single nodes, or raises. It holds
two chunks at most: the next one is asked for while its user has the one before.

Entries that one member has damaged or no longer keeps are requested from all others before the caller gets an error,
because "no longer kept" makes readers skip them. Only a member chosen by its address answers for itself alone.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

from dledger.client.aio.connections import Calls, NodeConnections
from dledger.client.discovery import DISCOVERY_TIMEOUT_S
from dledger.client.shared import RETRY_WAIT_S_MAX, RETRY_WAIT_S_MIN, ReadFrom, TimeLimit, is_retried_read
from dledger.clock import Backoff
from dledger.errors import (
    CorruptLogError,
    DiskError,
    DLedgerError,
    FencedError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    UnavailableError,
)
from dledger.remoting.log_codec import LogCode
from dledger.rpc.clients import bulk_codec as codec
from dledger.rpc.ports import NodeStatus
from dledger.types import BlockDigest, LogChunk, LogIndex, Position, Role

_ONE_MEMBERS: Final = (CorruptLogError, DiskError, FencedError, IndexBeforeBeginError)
"""Problems of one member's log: another member may hold the requested entries intact."""


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """The member to ask: one of a kind, or the one at ``address``. ``timeout_s`` limits the time without progress."""

    read_from: ReadFrom
    address: str | None
    timeout_s: float


class LargeReads:
    """One client's. On the loop."""

    def __init__(self, connections: NodeConnections, calls: Calls) -> None:
        self._connections = connections
        self._calls = calls
        self._random = random.Random()  # spreads load

    async def fetch(self, request: codec.FetchLog, target: ReadTarget) -> AsyncGenerator[LogChunk, None]:
        """See ``DLedgerClient.fetch_log``."""
        next_index, end, got = request.first_index, request.end_index, 0
        patience = self._patience(target)
        while True:
            left = request.max_bytes and request.max_bytes - got
            wanted = replace(request, first_index=next_index, end_index=end, max_bytes=left)
            node = await self._choose(target, patience)
            try:
                async with aclosing(self._chunks(node, wanted, target.timeout_s)) as chunks:
                    async for chunk in chunks:
                        end = end or LogIndex(chunk.committed_index + 1)
                        if chunk.count:
                            yield chunk
                            patience = self._patience(target)
                        next_index = chunk.end_index
                        got += len(chunk.data)
                        if next_index >= end or 0 < request.max_bytes <= got:
                            return
                raise UnavailableError(f"{node} does not know yet that entries {next_index} to {end - 1} are committed")
            except DLedgerError as error:
                self._note_failure(node, error, patience)
                await patience.wait_after(error, retried=_is_retried(error) or patience.refused_by(node, error, target))

    async def digests(self, request: codec.BlockDigests, target: ReadTarget) -> AsyncGenerator[BlockDigest, None]:
        """See ``DLedgerClient.block_digests``."""
        position, end = request.from_position, request.end_position
        block_bytes = request.block_bytes or codec.BLOCK_BYTES_DEFAULT
        patience = self._patience(target)
        node: str | None = None
        while True:
            wanted = codec.BlockDigests(request.group, position, end, block_bytes)
            if node is None:
                node = await self._choose(target, patience)
            try:
                body = codec.encode_digests_request(wanted)
                some = codec.decode_digests(
                    await self._connections.call(node, LogCode.DIGESTS, body, TimeLimit(target.timeout_s))
                )
                end, before = end or some.committed_position, position
                for block in some.blocks:
                    past = Position(block.position + block.size)
                    if past < end and past % block_bytes:  # the member is behind, so the block is incomplete
                        break
                    yield block
                    position = past
                    patience = self._patience(target)
                if position >= end or end <= some.begin_position:
                    return
                if position == before:
                    raise UnavailableError(f"{node} does not know yet that positions {position} to {end} are committed")
            except DLedgerError as error:
                self._note_failure(node, error, patience)
                node = None
                await patience.wait_after(error, retried=_is_retried(error))

    async def locate(self, request: codec.Locate, target: ReadTarget) -> codec.LocatedEntries:
        """See ``DLedgerClient.locate``."""
        patience = self._patience(target)
        while True:
            node = await self._choose(target, patience)
            try:
                body = codec.encode_locate(request)
                return codec.decode_located(await self._connections.call(node, LogCode.LOCATE, body, patience.deadline))
            except DLedgerError as error:
                self._note_failure(node, error, patience)
                await patience.wait_after(error, retried=_is_retried(error) or patience.refused_by(node, error, target))

    # --- whom to ask --------------------------------------------------------------------------------------------------

    async def _choose(self, target: ReadTarget, patience: _Patience) -> str:
        """The address of a member to ask now. Raises ``UnavailableError`` and errors that make asking pointless."""
        while True:
            try:
                if patience.refused:
                    return await self._find_other(target, patience)
                return await self._find(target, patience.deadline)
            except DLedgerError as error:  # a node's earlier error says more than the time-out of the search
                await patience.wait_after(patience.failure or error, retried=is_retried_read(error))

    async def _find(self, target: ReadTarget, deadline: TimeLimit) -> str:
        if target.address is not None:
            return target.address
        if target.read_from is ReadFrom.LEADER:
            return await self._calls.seeker.leader(deadline)
        return self._pick(target, await self._present(deadline))

    async def _find_other(self, target: ReadTarget, patience: _Patience) -> str:
        """A member that has not refused, and has everything that the refusing members knew to be committed.

        When all have refused, raises a refusal: damage in preference to "no longer kept".
        """
        found = await self._present(patience.deadline)
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

    def _pick(self, target: ReadTarget, members: Sequence[tuple[str, NodeStatus]]) -> str:
        wanted = {ReadFrom.LEADER: {Role.LEADER}, ReadFrom.FOLLOWER: set(Role) - {Role.LEADER}, ReadFrom.ANY: set(Role)}
        fitting = [address for address, one in members if one.role in wanted[target.read_from]]
        return self._random.choice(fitting or [address for address, _ in members])

    async def _present(self, deadline: TimeLimit) -> list[tuple[str, NodeStatus]]:
        """The members that answer; at least one."""
        answers = await self._calls.survey(TimeLimit(min(DISCOVERY_TIMEOUT_S, deadline.remaining_s)))
        found = [(address, one) for address, one in answers if isinstance(one, NodeStatus)]
        if not found:
            raise next(one for _, one in answers if isinstance(one, DLedgerError))
        return found

    def _note_failure(self, node: str, error: DLedgerError, patience: _Patience) -> None:
        patience.failure = error
        self._calls.directory.note_failure(node, error)

    # --- chunks -------------------------------------------------------------------------------------------------------

    async def _chunks(self, node: str, request: codec.FetchLog, timeout_s: float) -> AsyncGenerator[LogChunk, None]:
        """The chunks of a range at one node, until it has no more of it or the limit of bytes is reached."""
        coming = self._asked(node, request, timeout_s)
        try:
            while True:
                chunk = await coming
                end = request.end_index or LogIndex(chunk.committed_index + 1)
                left = request.max_bytes and max(0, request.max_bytes - len(chunk.data))
                is_last = not chunk.count or chunk.end_index >= end or (request.max_bytes and not left)
                if not is_last:
                    request = replace(request, first_index=chunk.end_index, end_index=end, max_bytes=left)
                    coming = self._asked(node, request, timeout_s)
                yield chunk
                if is_last:
                    return
        finally:
            _drop(coming)

    def _asked(self, node: str, request: codec.FetchLog, timeout_s: float) -> asyncio.Task[LogChunk]:
        async def ask() -> LogChunk:
            body = codec.encode_fetch(request)
            return codec.decode_chunk(await self._connections.call(node, LogCode.FETCH, body, TimeLimit(timeout_s)))

        return asyncio.get_running_loop().create_task(ask())

    def _patience(self, target: ReadTarget) -> _Patience:
        return _Patience(lambda: self._connections.is_closed, target.timeout_s)


def _drop(coming: asyncio.Task[LogChunk]) -> None:
    """Nobody wants this chunk any more, nor its error."""
    if not coming.cancel() and not coming.cancelled():
        coming.exception()


def _is_retried(error: DLedgerError) -> bool:
    """Whether trying again, perhaps elsewhere, may help: a member may be behind the one that gave an index."""
    return is_retried_read(error) or isinstance(error, IndexOutOfRangeError)


class _Patience:
    """How long to continue without progress."""

    def __init__(self, is_closed: Callable[[], bool], timeout_s: float) -> None:
        self.deadline = TimeLimit(timeout_s)
        self.failure: DLedgerError | None = None
        """Of the node asked last."""
        self.refused: dict[str, DLedgerError] = {}
        """Members whose own logs cannot provide the next entries, and why."""
        self.floor: LogIndex | None = None
        """The highest commit index known of them: a member behind it may answer with too little."""
        self._is_closed = is_closed
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

    def refused_by(self, node: str, error: DLedgerError, target: ReadTarget) -> bool:
        """Record a failure due to the member's own log; returns whether to ask other members."""
        if target.address is not None or not isinstance(error, _ONE_MEMBERS):
            return False
        self.refused[node] = error
        return True

    async def wait_after(self, error: DLedgerError, *, retried: bool) -> None:
        """Pause before the next attempt, or raise ``error`` if there is none."""
        if self._is_closed() or self.deadline.expired or not retried:
            raise error
        await asyncio.sleep(min(self._backoff.pause(), self.deadline.remaining_s))
