"""The node's side of large reads: raw chunks, places of entries, block digests.

They must not disturb appends. So they read on a few threads of their own, one chunk ahead of the one being sent; the
number of streams is limited, also per client, and with it the bytes waiting for readers; a stream whose client reads
nothing is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, contextmanager
from typing import Final, NamedTuple, TypeVar

from dledger.access.quota import Quota, TooManyWaitsError
from dledger.config import ServerConfig
from dledger.errors import DLedgerError, IndexOutOfRangeError, InvalidRequestError, InvariantError
from dledger.rpc.clients import bulk_codec as codec
from dledger.rpc.ports import BulkLog
from dledger.types import BlockDigest, LogChunk, LogIndex, Position
from dledger.values import MIB

_BULK_THREADS_MAX: Final = 2
_CHUNK_BYTES_DEFAULT: Final = MIB
CHUNK_BYTES_MAX: Final = 8 * MIB
_BLOCK_BYTES_MIN: Final = 4 * 1024
BLOCK_BYTES_MAX: Final = 64 * MIB
_DIGEST_STEP_BYTES: Final = 16 * MIB
"""How much log is digested at a time and reported in one message; at least one block, at most ..."""
_DIGEST_STEP_BLOCKS: Final = 256

_NO_LIMIT: Final = 1 << 62

_Result = TypeVar("_Result")


class TooManyBulkReadsError(Exception):
    """Raised when a client, or all together, exceed ``bulk_streams_max`` large reads."""


class _Ready(NamedTuple):
    """A chunk ready to send."""

    end_index: LogIndex
    size: int
    encoded: bytes


class RateLimit:
    """Limits the bytes per second of all callers together; 0: no limit. Lives on the loop."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    @property
    def step_bytes_max(self) -> int:
        """The bytes of one second: taking more at a time makes all wait for longer than clients do."""
        return self._bytes_per_s or _NO_LIMIT

    async def take(self, size: int) -> None:
        """Wait for the turn of ``size`` bytes."""
        if not self._bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        begin = max(now, self._free_at)
        self._free_at = begin + size / self._bytes_per_s
        if begin > now:
            await asyncio.sleep(begin - now)


class BulkService:
    """The handlers. Lives on the event loop; ``close`` after the server has stopped."""

    def __init__(self, config: ServerConfig, log: BulkLog, check_group: Callable[[str], None]) -> None:
        """``check_group`` raises ``IdentityError`` for a request that is not for this log."""
        self._check_group = check_group
        self._log = log
        self._streams_max = config.bulk.bulk_streams_max
        self._fetch_rate = RateLimit(config.bulk.fetch_rate_bytes_max)
        self._digest_rate = RateLimit(config.bulk.digest_rate_bytes_max)
        self._threads = ThreadPoolExecutor(_BULK_THREADS_MAX, thread_name_prefix=f"dledger-bulk-{config.node_id}")

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    # Each handler decodes first (raising InvalidRequestError: gRPC status), then answers (Status in the answer).

    async def fetch(self, data: bytes) -> AsyncGenerator[bytes, None]:
        request = codec.decode_fetch(data)
        try:
            self._check_group(request.group)
            async with aclosing(self._chunks(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except DLedgerError as error:
            yield codec.encode_chunk(error)

    async def _chunks(self, request: codec.FetchLog) -> AsyncGenerator[bytes, None]:
        """A request's chunks, each read while the one before is sent; a single empty one if there are no entries."""
        known = await self._run(self._log.committed_range)
        next_index, left = request.first_index, request.max_bytes or _NO_LIMIT
        chunk_bytes = self._step_bytes(request)
        end = min(request.end_index or known.end.index, known.end.index)
        if next_index >= end:
            yield codec.encode_chunk(await self._run(lambda: self._nothing(next_index)))
            return
        reading = self._start_read(next_index, end, min(left, chunk_bytes))
        try:
            while True:
                ready = await reading
                next_index, left = ready.end_index, left - ready.size
                done = next_index >= end or left <= 0
                if not done:
                    reading = self._start_read(next_index, end, min(left, chunk_bytes))
                await self._fetch_rate.take(ready.size)
                yield ready.encoded
                if done:
                    return
        finally:
            _drop(reading)

    def _start_read(self, first: LogIndex, end: LogIndex, max_bytes: int) -> asyncio.Future[_Ready]:
        return asyncio.get_running_loop().run_in_executor(self._threads, self._read, first, end, max_bytes)

    def _read(self, first: LogIndex, end: LogIndex, max_bytes: int) -> _Ready:
        """Read and encode a chunk on a thread: copying a megabyte would block the loop."""
        chunk = self._log.read_chunk(first, end, max_bytes)
        return _Ready(chunk.end_index, len(chunk.data), codec.encode_chunk(chunk))

    def _nothing(self, first: LogIndex) -> LogChunk:
        """An empty chunk that carries the node's range. Raises unless ``first`` is the next index to be written."""
        known = self._log.committed_range()
        if first > known.end.index:
            raise IndexOutOfRangeError(
                f"entry {first} is not committed here: the last committed entry is {known.end.index - 1}"
            )
        place = self._log.place_of_index(first)
        return LogChunk(first, 0, place.position, place.position, b"", LogIndex(known.end.index - 1), known.begin.index)

    async def locate(self, request: codec.Locate) -> codec.LocatedEntries:
        """``Locate``. Raises ``DLedgerError``, as the two below do."""
        self._check_group(request.group)
        return await self._run(lambda: self._located(request))

    def chunk_bytes(self, request: codec.FetchLog) -> int:
        """How many bytes of log the first chunk of a fetch has at most, unless a single entry is larger."""
        return min(request.max_bytes or _NO_LIMIT, self._step_bytes(request))

    def _step_bytes(self, request: codec.FetchLog) -> int:
        return min(request.chunk_bytes or _CHUNK_BYTES_DEFAULT, CHUNK_BYTES_MAX, self._fetch_rate.step_bytes_max)

    async def one_chunk(self, request: codec.FetchLog, encode: Callable[[LogChunk], bytes]) -> bytes:
        """The encoded first chunk of a fetch, for clients that ask for each; empty if there are no entries."""
        self._check_group(request.group)
        known = await self._run(self._log.committed_range)
        end = min(request.end_index or known.end.index, known.end.index)
        if request.first_index >= end:
            return encode(await self._run(lambda: self._nothing(request.first_index)))
        size = self.chunk_bytes(request)
        await self._fetch_rate.take(size)
        return await self._run(lambda: encode(self._log.read_chunk(request.first_index, LogIndex(end), size)))

    async def some_digests(self, request: codec.BlockDigests) -> codec.Digested:
        """The first digests of a request, for clients that ask for each step."""
        block_bytes = _block_bytes(request)
        self._check_group(request.group)
        async with aclosing(self._digests(request, block_bytes)) as digests:
            async for some in digests:
                return some
        raise InvariantError("a digest has at least one step")

    def _located(self, request: codec.Locate) -> codec.LocatedEntries:
        log = self._log
        return codec.LocatedEntries(
            (
                *(log.place_of_index(LogIndex(one)) for one in request.indexes),
                *(log.place_at_position(one) for one in request.positions),
                *(log.place_at_time(one) for one in request.store_times_ms),
            ),
            log.committed_range(),
        )

    async def digests(self, data: bytes) -> AsyncGenerator[bytes, None]:
        request = codec.decode_digests_request(data)
        block_bytes = _block_bytes(request)
        try:
            self._check_group(request.group)
            async with aclosing(self._digests(request, block_bytes)) as digests:
                async for some in digests:
                    yield codec.encode_digests(some)
        except DLedgerError as error:
            yield codec.encode_digests(error)

    async def _digests(self, request: codec.BlockDigests, block_bytes: int) -> AsyncGenerator[codec.Digested, None]:
        known = await self._run(self._log.committed_range)
        end = min(request.end_position or known.end.position, known.end.position)
        position = max(request.from_position, known.begin.position)
        steps = max(1, min(_DIGEST_STEP_BYTES // block_bytes, _DIGEST_STEP_BLOCKS))
        while True:
            await self._digest_rate.take(max(0, min(end - position, steps * block_bytes)))
            blocks = await self._run(lambda at=position: self._some_digests(at, end, block_bytes, steps))  # type: ignore[misc]
            yield codec.Digested(blocks, known.begin.position, known.end.position, LogIndex(known.end.index - 1))
            if len(blocks) < steps:
                return
            position = Position(blocks[-1].position + blocks[-1].size)

    def _some_digests(self, position: int, end: int, block_bytes: int, count: int) -> tuple[BlockDigest, ...]:
        blocks: list[BlockDigest] = []
        while len(blocks) < count and position < end:
            block = self._log.digest(position, end, block_bytes)
            if block is None:
                break
            blocks.append(block)
            position = block.position + block.size
        return tuple(blocks)

    async def _run(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextmanager
    def one_of_few(self, quota: Quota) -> Iterator[None]:
        """Count a large read while it runs. Raises ``TooManyBulkReadsError``."""
        with ExitStack() as held:
            try:
                held.enter_context(quota.stream("bulk", "bulk_streams_max", number_max=self._streams_max))
            except TooManyWaitsError as error:
                raise TooManyBulkReadsError(
                    f"too many large reads (FetchLog, BlockDigests): {error}; try again later, read from another "
                    "member (readFrom=any), or use fewer readers at once"
                ) from None
            yield


def _block_bytes(request: codec.BlockDigests) -> int:
    block_bytes = request.block_bytes or codec.BLOCK_BYTES_DEFAULT
    if not _BLOCK_BYTES_MIN <= block_bytes <= BLOCK_BYTES_MAX:
        raise InvalidRequestError(f"block_bytes={block_bytes} must be between {_BLOCK_BYTES_MIN} and {BLOCK_BYTES_MAX}")
    return block_bytes


def _drop(reading: asyncio.Future[_Ready]) -> None:
    """Discard an unwanted read; its error, if any, was meant for a client that is gone."""
    if reading.done() and not reading.cancelled():
        reading.exception()
    reading.cancel()
