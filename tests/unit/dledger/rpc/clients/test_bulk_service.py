"""Large reads on a real loopback port, from a node without a group."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from dledger.access.guard import AccessControl
from dledger.clock import Clock
from dledger.config import AccessConfig, BulkReadConfig, ConnectionLimits, ServerConfig
from dledger.errors import (
    ConfigError,
    CorruptLogError,
    IdentityError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    InvariantError,
    UntimedLogError,
)
from dledger.host import ClientServer
from dledger.rpc import loops, options
from dledger.rpc.clients import bulk_codec as codec
from dledger.rpc.clients.bulk_service import BLOCK_BYTES_MAX, CHUNK_BYTES_MAX, BulkService, RateLimit
from dledger.store.format import decode_entry
from dledger.types import BlockDigest, LogChunk, LogIndex, LogPlace, Position
from dledger.values import MIB
from tests.support.fake_node import FakeNode, client_server
from tests.support.grpc_client import CHANNEL_OPTIONS
from tests.support.signed_calls import SignedCalls
from tests.support.waiting import wait_until

RULES = """\
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - default=SUB
- accessKey: bob
  secretKey: bob-secret
  topicPerms:
  - other=PUB|SUB
"""


@dataclass
class Service:
    """A served fake node and raw access to it."""

    node: FakeNode
    server: ClientServer
    channel: grpc.Channel

    def stream(self, name: str, request: bytes) -> Iterator[bytes]:
        method = self.channel.unary_stream(_path(name), request_serializer=None, response_deserializer=None)
        return iter(method(request, timeout=120))

    def fetching(self, first: int = 0, end: int = 0, max_bytes: int = 0, chunk_bytes: int = 0) -> Iterator[bytes]:
        request = codec.FetchLog("default", LogIndex(first), LogIndex(end), max_bytes, chunk_bytes)
        return self.stream("FetchLog", codec.encode_fetch(request))

    def fetch(self, first: int = 0, end: int = 0, max_bytes: int = 0, chunk_bytes: int = 0) -> list[LogChunk]:
        return [codec.decode_chunk(one) for one in self.fetching(first, end, max_bytes, chunk_bytes)]

    def digests(self, from_position: int = 0, end_position: int = 0, block_bytes: int = 0) -> list[codec.Digested]:
        request = codec.BlockDigests("default", Position(from_position), Position(end_position), block_bytes)
        answers = self.stream("BlockDigests", codec.encode_digests_request(request))
        return [codec.decode_digests(one) for one in answers]

    def locate(self, **questions: list[int]) -> codec.LocatedEntries:
        request = codec.encode_locate(codec.Locate("default", **questions))
        method = self.channel.unary_unary(_path("Locate"), request_serializer=None, response_deserializer=None)
        return codec.decode_located(method(request, timeout=60))


def _path(name: str) -> str:
    return options.method(options.LOG_SERVICE, name)


@contextmanager
def serving(config: ServerConfig | None = None, **bulk: int) -> Iterator[Service]:
    """Ten entries of 48 + 52 bytes, all committed."""
    node = FakeNode()
    node.submit_append([b"%d" % number * 52 for number in range(10)], lambda _result: None)
    server = client_server(config or ServerConfig(client_port=0, bulk=BulkReadConfig(**bulk)), node)
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", CHANNEL_OPTIONS) as channel:
            yield Service(node, server, channel)
    finally:
        server.close()


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as made:
        yield made


def refused(answers: Iterator[bytes]) -> tuple[grpc.StatusCode, str]:
    """How a stream ended that should have failed."""
    with pytest.raises(grpc.RpcError) as caught:
        for _ in answers:
            pass
    return caught.value.code(), str(caught.value.details())


def cancel(call: Iterator[bytes]) -> None:
    call.cancel()  # type: ignore[attr-defined]  # it is gRPC's


# --- fetch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [1, 100, 250, 0, 1 << 40])
def test_a_range_comes_as_whole_records_with_their_places(service: Service, chunk_bytes: int) -> None:
    """In order, as they are stored; no chunk is larger than asked for, unless a single entry is."""
    chunks = service.fetch(2, 9, chunk_bytes=chunk_bytes)

    entries = [decode_entry(chunk.data, at) for chunk in chunks for at in range(0, len(chunk.data), 100)]
    assert [(one.index, one.position, one.body) for one in entries] == [
        (number, number * 100, b"%d" % number * 52) for number in range(2, 9)
    ]
    assert [one.position for one in chunks] == [one.first_index * 100 for one in chunks]
    assert all(len(one.data) == one.count * 100 <= max(100, chunk_bytes or MIB) for one in chunks)
    assert {(one.committed_index, one.begin_index, one.segment_base) for one in chunks} == {(9, 0, 0)}


def test_only_committed_entries_are_given(service: Service) -> None:
    """Up to what is committed when the stream begins, whatever end is asked for."""
    service.node.committed = 6

    assert service.fetch(5)[-1].end_index == 7
    assert service.fetch(5, 100)[-1].end_index == 7


def test_where_the_next_entry_will_be_there_is_an_empty_chunk(service: Service) -> None:
    """It says what is committed; beyond it, an index is a mistake."""
    (nothing,) = service.fetch(10)

    assert (nothing.first_index, nothing.count, nothing.data) == (10, 0, b"")
    assert (nothing.position, nothing.committed_index) == (1000, 9)
    with pytest.raises(IndexOutOfRangeError, match="the last committed entry is 9"):
        service.fetch(11)


def test_a_stream_ends_with_the_chunk_that_brings_enough_bytes(service: Service) -> None:
    """``max_bytes`` is not exceeded, but by a single entry."""
    assert [one.count for one in service.fetch(0, max_bytes=350, chunk_bytes=200)] == [2, 1, 1]
    assert [one.count for one in service.fetch(0, max_bytes=1)] == [1]


def test_errors_arrive_as_what_they_are(service: Service) -> None:
    """Lost ranges, damage with its place, a group that is not served."""
    service.node.begin_index = 4
    with pytest.raises(IndexBeforeBeginError, match="starts at 4"):
        service.fetch(3)
    damage = CorruptLogError(Path("/data/0"), 17, "bad", "repair it")
    service.node.bulk.fail_reads = [None, damage]
    answers = service.fetching(4, chunk_bytes=100)
    assert codec.decode_chunk(next(answers)).first_index == 4
    with pytest.raises(CorruptLogError) as caught:
        codec.decode_chunk(next(answers))
    assert (caught.value.path, caught.value.offset, str(caught.value)) == (damage.path, 17, str(damage))
    with pytest.raises(IdentityError):
        codec.decode_chunk(next(service.stream("FetchLog", codec.encode_fetch(codec.FetchLog("x", LogIndex(0))))))


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("FetchLog", b"\xff"),
        ("FetchLog", codec.encode_fetch(codec.FetchLog("default", LogIndex(-1)))),
        ("FetchLog", codec.encode_fetch(codec.FetchLog("default", LogIndex(5), LogIndex(5)))),
        ("FetchLog", codec.encode_fetch(codec.FetchLog("default", LogIndex(5), max_bytes=-1))),
        ("BlockDigests", codec.encode_digests_request(codec.BlockDigests("default", Position(0), block_bytes=100))),
        (
            "BlockDigests",
            codec.encode_digests_request(codec.BlockDigests("default", Position(0), block_bytes=BLOCK_BYTES_MAX + 1)),
        ),
        ("BlockDigests", codec.encode_digests_request(codec.BlockDigests("default", Position(-1)))),
    ],
)
def test_garbage_is_refused(service: Service, name: str, request_: bytes) -> None:
    """Before anything is read."""
    assert refused(service.stream(name, request_))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert service.node.bulk.reads == 0


# --- what it may cost -----------------------------------------------------------------------------------------------


def test_large_reads_at_once_are_limited_with_advice() -> None:
    """``bulk_streams_max``, of which a connection has half, fetches and digests together; who goes away makes room."""
    with serving(bulk_streams_max=4) as service:
        service.node.bulk.gate = threading.Event()
        open_streams = [service.fetching(), service.fetching(5)]
        wait_until(lambda: service.node.bulk.waiting == 2, "both are under way")

        for name, data in (
            ("FetchLog", codec.encode_fetch(codec.FetchLog("default", LogIndex(0)))),
            ("BlockDigests", codec.encode_digests_request(codec.BlockDigests("default", Position(0)))),
        ):
            code, words = refused(service.stream(name, data))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "bulk_streams_max" in words
            assert "another member" in words
        cancel(open_streams[0])
        service.node.bulk.gate.set()
        assert len(list(open_streams[1])) == 1
        wait_until(lambda: _is_taken(service), "places become free")


def _is_taken(service: Service) -> bool:
    try:
        return len(service.fetch(0, 10)) == 1
    except grpc.RpcError:
        return False


def _in_socket_buffers() -> int:
    """How many chunks of 1 MiB the kernel may take for a client that reads nothing: it decides by itself."""
    limits = (Path("/proc/sys/net/ipv4") / name for name in ("tcp_rmem", "tcp_wmem"))
    return sum(int(limit.read_text().split()[-1]) for limit in limits) // MIB


def test_a_client_that_takes_nothing_is_read_ahead_for_a_little_only() -> None:
    """Flow control: what nobody takes is neither read from the disk nor kept in memory; then the client is hung up on.

    To end the stream alone would leave its last chunk in memory until the client goes.
    """
    config = ServerConfig(
        client_port=0, limits=ConnectionLimits(call_ms_max=1000), bulk=BulkReadConfig(bulk_streams_max=1)
    )
    with serving(config) as service:
        node = service.node
        entries = _in_socket_buffers() + 40
        for _ in range(0, entries, 20):
            node.submit_append([bytes(MIB)] * 20, lambda _result: None)
        answers = service.fetching(10)
        next(answers)
        wait_until(lambda: node.bulk.reads >= 2, "the next one is read ahead")
        read = 0

        def is_ended() -> bool:
            nonlocal read
            read = node.bulk.reads
            return _is_taken(service)

        wait_until(is_ended, "the server ends the stream, and with it the connection")

        assert read < _in_socket_buffers() + 20
        code, _ = refused(answers)
        assert code is grpc.StatusCode.UNAVAILABLE


def test_a_disk_that_does_not_answer_ends_the_stream() -> None:
    """Within ``call_ms_max``: the client goes elsewhere; the thread comes back when the disk does."""
    config = ServerConfig(client_port=0, limits=ConnectionLimits(call_ms_max=300))
    with serving(config) as service:
        service.node.bulk.gate = threading.Event()

        code, words = refused(service.fetching())

        assert (code, "call_ms_max" in words) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
        service.node.bulk.gate.set()
        assert service.fetch()[-1].end_index == 10


def test_no_stream_lasts_for_ever() -> None:
    """``bulk_stream_ms_max``, however well it goes."""
    with serving(bulk_stream_ms_max=1000) as service:
        service.node.submit_append([b"x"] * 200_000, lambda _result: None)
        code, words = refused(service.fetching(0, chunk_bytes=1))

        assert (code, "exceeded 1000 ms" in words) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)


def test_a_rate_is_kept_by_all_together() -> None:
    """The first goes at once, each of the others when its turn comes; 0 is no limit."""

    async def three(limit: RateLimit) -> float:
        began = time.monotonic()
        await asyncio.gather(*(limit.take(100) for _ in range(3)))
        return time.monotonic() - began

    assert loops.run(three(RateLimit(1000))) > 0.19
    assert loops.run(three(RateLimit(0))) < 0.1


def test_raw_bytes_and_digests_have_rates_of_their_own() -> None:
    """``fetch_rate_bytes_max`` and ``digest_rate_bytes_max``: the first piece at once, the others in their turn."""
    with serving(fetch_rate_bytes_max=MIB, digest_rate_bytes_max=16 * MIB) as service:
        service.node.submit_append([bytes(MIB // 8)] * 4, lambda _result: None)
        began = time.monotonic()
        assert service.fetch(10, chunk_bytes=MIB // 8)[-1].end_index == 14
        assert time.monotonic() - began > 0.37
        service.node.submit_append([bytes(MIB)] * 4, lambda _result: None)
        began = time.monotonic()
        assert len(service.digests(0, 0, 4096)) == 5
        assert time.monotonic() - began > 0.24


def test_a_chunk_is_no_larger_than_what_a_second_of_the_rate_allows() -> None:
    """Whatever a client asks for: its turn after a chunk of 8 MiB would come later than it waits, each time anew."""
    half = bytes(MIB // 2 - 48)
    with serving(fetch_rate_bytes_max=MIB) as service:
        service.node.submit_append([half] * 3, lambda _result: None)
        assert [len(one.data) for one in service.fetch(10, chunk_bytes=CHUNK_BYTES_MAX)] == [MIB, MIB // 2]

        asked = codec.FetchLog("default", LogIndex(10), LogIndex(0), 0, CHUNK_BYTES_MAX)
        bulk = BulkService(
            ServerConfig(client_port=0, bulk=BulkReadConfig(fetch_rate_bytes_max=MIB)),
            service.node.bulk,
            lambda _group: None,
        )
        try:
            assert loops.run(bulk.one_chunk(asked, lambda chunk: b"%d" % chunk.end_index)) == b"12"
        finally:
            bulk.close()


# --- places and digests ---------------------------------------------------------------------------------------------


def test_places_are_answered_in_order(service: Service) -> None:
    """Indexes, then positions; and what the node has."""
    service.node.begin_index = 1

    found = service.locate(indexes=[3, 10], positions=[250, 0, 5000])

    assert found.places == tuple(LogPlace(LogIndex(index), Position(index * 100)) for index in (3, 10, 3, 1, 10))
    assert (found.range.begin.index, found.range.end.index, found.range.end.position) == (1, 10, 1000)
    with pytest.raises(UntimedLogError):
        service.locate(store_times_ms=[1])
    with pytest.raises(IndexOutOfRangeError):
        service.locate(indexes=[11])


def test_places_are_limited(service: Service) -> None:
    """One request must not keep a thread busy for long."""
    assert len(service.locate(positions=[0] * codec.PLACES_MAX).places) == codec.PLACES_MAX
    with pytest.raises(grpc.RpcError, match="4097 places"):
        service.locate(positions=[0] * (codec.PLACES_MAX + 1))


def test_digests_cover_what_is_asked_for(service: Service) -> None:
    """Block by block, in order, and only below the committed position."""
    service.node.submit_append([bytes(5000)] * 3, lambda _result: None)
    service.node.committed = 11
    end = 1000 + 2 * 5048

    def blocks(*request: int) -> list[BlockDigest]:
        return [block for one in service.digests(*request) for block in one.blocks]

    assert [(one.position, one.size) for one in blocks(0, 0, 4096)] == [(0, 4096), (4096, 4096), (8192, end - 8192)]
    assert [(one.position, one.size) for one in blocks(5000, 9000, 4096)] == [(4096, 4096), (8192, 808)]
    assert [(one.first_index, one.last_index) for one in blocks(0, 0, 4096)] == [(0, 10), (11, 11), (12, 11)]
    (told,) = service.digests(0, 0, 4096)
    assert (told.begin_position, told.committed_position, told.committed_index) == (0, end, 11)
    assert blocks(end, 0, 4096) == []


def test_digests_come_in_bounded_messages(service: Service) -> None:
    """Each computed in one go, so that a thread is given back in between."""
    service.node.submit_append([bytes(MIB)] * 3, lambda _result: None)

    told = service.digests(0, 0, 4096)

    assert len(told) > 1
    assert max(len(one.blocks) for one in told) <= 256
    blocks = [block for one in told for block in one.blocks]
    assert [one.position for one in blocks] == list(range(0, 1000 + 3 * (MIB + 48), 4096))


# --- who may --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "appends", "allowed"),
    [("alice", True, True), ("bob", True, False), ("alice", False, False), ("root", False, True)],
)
@pytest.mark.parametrize("name", ["FetchLog", "BlockDigests", "Locate"])
def test_reading_needs_the_permission_to_read(
    tmp_path: Path, name: str, key: str, appends: bool, allowed: bool
) -> None:
    """On the topic called like the group; the log of an application holds everybody's: administrators only."""
    file = tmp_path / "plain_acl.yml"
    file.touch(0o600)
    file.write_text(RULES)
    config = ServerConfig(client_port=0, client_appends=appends, access=AccessConfig(acl_enable=True, acl_file=file))
    access = AccessControl.of(config.access, name="n0", clock=Clock())
    assert access is not None
    server = client_server(config, FakeNode(), access.guard)
    server.start()
    request = {
        "FetchLog": codec.encode_fetch(codec.FetchLog("default", LogIndex(0))),
        "BlockDigests": codec.encode_digests_request(codec.BlockDigests("default", Position(0))),
        "Locate": codec.encode_locate(codec.Locate("default")),
    }[name]
    try:
        with SignedCalls(f"127.0.0.1:{server.grpc_port}", key, f"{key}-secret") as calls:
            calls.meet(_path(name), request)
            answer = calls.call(_path(name), request, calls.metadata(_path(name), request))
        assert answer.code is (grpc.StatusCode.OK if allowed else grpc.StatusCode.PERMISSION_DENIED), answer
    finally:
        server.close()


def test_a_chunk_encoded_by_hand_is_what_protobuf_reads() -> None:
    """Also where its length takes one to four bytes."""
    for size in (0, 1, 127, 128, 16_383, 16_384, 1 << 21, (1 << 21) + 1):
        chunk = LogChunk(LogIndex(7), 3, Position(1 << 40), Position(1 << 39), bytes(size), LogIndex(9), LogIndex(1))
        assert codec.decode_chunk(codec.encode_chunk(chunk)) == chunk
    with pytest.raises(InvariantError, match="broken"):
        codec.decode_chunk(codec.encode_chunk(InvariantError("broken")))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bulk_streams_max", 0),
        ("bulk_stream_ms_max", 999),
        ("fetch_rate_bytes_max", MIB - 1),
        ("digest_rate_bytes_max", 16 * MIB - 1),
    ],
)
def test_limits_have_limits(name: str, value: int) -> None:
    """A rate below one piece of work per second would look like a disk that does not answer."""
    config = ServerConfig(bulk=BulkReadConfig(**{name: value}))
    with pytest.raises(ConfigError, match=f"{name}={value} must be"):
        config.check()
    ServerConfig(bulk=BulkReadConfig(fetch_rate_bytes_max=0, digest_rate_bytes_max=0)).check()
