"""Large reads by a client, from fake nodes that share one log."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from dledger.client import DLedgerClient, ReadFrom, shared
from dledger.client.aio.large_reads import LargeReads, ReadTarget
from dledger.client.shared import TimeLimit
from dledger.errors import (
    CorruptLogError,
    DLedgerError,
    FencedError,
    IndexBeforeBeginError,
    IndexOutOfRangeError,
    LeaderHint,
    PendingFullError,
    ShutdownError,
    UnavailableError,
    UntimedLogError,
)
from dledger.remoting.log_codec import LogCode
from dledger.rpc.clients import bulk_codec
from dledger.rpc.clients.bulk_service import TooManyBulkReadsError
from dledger.rpc.ports import CommitEvent, NodeStatus
from dledger.store.format import decode_entry
from dledger.types import BlockDigest, Entry, LogChunk, LogIndex, Position
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.on_loop import on_loop
from tests.support.waiting import wait_until

DAMAGE = CorruptLogError(Path("/data/n0/data/0"), 100, "bodyCrc of entry 1 does not match its body", "keep the file")
RECORD_BYTES = 100
ALL = 50
PATIENCE_S: Final = 10.0
TARGET: Final = ReadTarget(ReadFrom.LEADER, "n0:1", PATIENCE_S)


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    """Three nodes with 50 entries of 100 bytes each, all committed."""
    with fake_group() as made:
        made.nodes[0].submit_append([b"%2d" % number * 26 for number in range(ALL)], lambda _result: None)
        for node in made.nodes[1:]:
            node.entries, node.committed = list(made.nodes[0].entries), made.nodes[0].committed
        yield made


@pytest.fixture
def client(group: FakeGroup) -> Iterator[DLedgerClient]:
    with DLedgerClient(group.addresses, timeout_s=60) as made:
        yield made


def entries(chunks: Iterator[LogChunk]) -> list[Entry]:
    """What chunks hold."""
    return [decode_entry(one.data, at) for one in chunks for at in range(0, len(one.data), RECORD_BYTES)]


def indexes(chunks: Iterator[LogChunk]) -> list[int]:
    return [one.index for one in entries(chunks)]


def reads(group: FakeGroup) -> list[int]:
    """How often each node was read."""
    return [node.bulk.reads for node in group.nodes]


def test_a_range_is_fetched_from_the_leader(group: FakeGroup, client: DLedgerClient) -> None:
    """Each entry once and in order; without an end, all that is committed."""
    assert indexes(client.fetch_log(3, 40, chunk_bytes=350)) == list(range(3, 40))
    assert indexes(client.fetch_log(0)) == list(range(ALL))
    assert [len(one.data) for one in client.fetch_log(0, max_bytes=750, chunk_bytes=300)] == [300, 300, 100, 100]
    assert list(client.fetch_log(ALL)) == list(client.fetch_log(7, 7)) == list(client.fetch_log(7, 3)) == []
    assert reads(group)[1:] == [0, 0]


def test_a_member_can_be_chosen(group: FakeGroup, client: DLedgerClient) -> None:
    """A follower spares the leader; any spreads the load; an address is that node and no other."""
    assert len(indexes(client.fetch_log(0, read_from=ReadFrom.FOLLOWER))) == ALL
    assert reads(group)[0] == 0
    for _ in range(40):
        assert indexes(client.fetch_log(0, 2, read_from=ReadFrom.ANY)) == [0, 1]
    assert min(reads(group)) > 0
    before = reads(group)
    assert indexes(client.fetch_log(0, 2, address=group.addresses[2])) == [0, 1]
    assert reads(group) == [before[0], before[1], before[2] + 1]


def test_the_leader_answers_where_there_is_no_follower() -> None:
    """A group of one, or all others down."""
    with fake_group(1) as group, DLedgerClient(group.addresses) as client:
        group.nodes[0].submit_append([b"x" * 52], lambda _result: None)
        assert indexes(client.fetch_log(0, read_from=ReadFrom.FOLLOWER)) == [0]


@pytest.mark.parametrize("read_from", list(ReadFrom))
def test_a_lost_node_loses_nothing(group: FakeGroup, client: DLedgerClient, read_from: ReadFrom) -> None:
    """The stream goes on at another one where it broke off, nothing missing, nothing twice."""
    found: list[int] = []
    for number, chunk in enumerate(client.fetch_log(0, chunk_bytes=200, read_from=read_from)):
        found += [one.index for one in entries(iter([chunk]))]
        if number == 3:
            asked = next(place for place, node in enumerate(group.nodes) if node.bulk.reads)
            group.kill(asked)
            if asked == 0:
                group.elect(1)

    assert found == list(range(ALL))


def test_a_stream_that_a_node_breaks_off_is_taken_up_again(group: FakeGroup, client: DLedgerClient) -> None:
    """At the same node if it is the only one."""
    group.nodes[1].bulk.fail_reads = [None, ShutdownError("stopping"), None, None, ShutdownError("again")]

    assert indexes(client.fetch_log(0, chunk_bytes=300, address=group.addresses[1])) == list(range(ALL))


@pytest.mark.parametrize("max_bytes", [250, 300, 750])
def test_the_limit_of_a_read_is_not_that_of_each_stream(
    group: FakeGroup, client: DLedgerClient, max_bytes: int
) -> None:
    """However often it is taken up again, no more comes than without a break."""
    whole = indexes(client.fetch_log(0, max_bytes=max_bytes, chunk_bytes=100))
    group.nodes[0].bulk.fail_reads = [None, ShutdownError("stopping"), None, ShutdownError("again")]

    assert indexes(client.fetch_log(0, max_bytes=max_bytes, chunk_bytes=100)) == whole
    group.nodes[0].bulk.fail_reads = [None, ShutdownError("stopping")]
    assert sum(len(one.data) for one in client.fetch_log(0, max_bytes=750, chunk_bytes=300)) == 800


@pytest.mark.parametrize(("first", "end"), [(0, 30), (25, 30), (25, None)])
def test_a_follower_that_is_behind_is_waited_for(
    group: FakeGroup, client: DLedgerClient, first: int, end: int | None
) -> None:
    """An index that the leader said is committed will be so there, too."""
    behind = group.nodes[2]
    behind.committed = 19
    found: list[int] = []
    chunks = client.fetch_log(first, end, address=group.addresses[2])
    reader = threading.Thread(target=lambda: found.extend(indexes(chunks)))
    reader.start()
    wait_until(lambda: behind.bulk.asked >= 2, "it has been asked again")
    behind.committed = 29
    behind.tell(CommitEvent(LogIndex(29)))
    reader.join(60)

    assert found == list(range(first, 30))


def test_a_range_beyond_what_is_committed_is_an_error_in_the_end(group: FakeGroup) -> None:
    """Nothing is made up, and nobody waits for ever."""
    with DLedgerClient(group.addresses) as client:
        with pytest.raises(UnavailableError, match="50 to 59"):
            indexes(client.fetch_log(40, 60, timeout_s=1.5))
        with pytest.raises(IndexOutOfRangeError):
            indexes(client.fetch_log(ALL + 1))
        with pytest.raises(IndexOutOfRangeError):
            indexes(client.fetch_log(ALL + 1, ALL + 5))


def test_what_is_lost_is_said_at_once(group: FakeGroup, client: DLedgerClient) -> None:
    """By all who could have it, each asked once: trying again brings nothing back."""
    for node in group.nodes:
        node.begin_index = 5
    with pytest.raises(IndexBeforeBeginError, match="starts at 5"):
        next(client.fetch_log(4))
    assert reads(group) == [1, 1, 1]


def test_a_node_with_too_many_readers_is_tried_again(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until there is room, or the time is over; then the error says what to do."""
    refusals = [TooManyBulkReadsError("too many: bulk_streams_max")] * 2

    @contextmanager
    def refuse(_service: object, _quota: object) -> Iterator[None]:
        if refusals:
            raise refusals.pop()
        yield

    monkeypatch.setattr("dledger.rpc.clients.bulk_service.BulkService.one_of_few", refuse)
    with DLedgerClient(group.addresses, timeout_s=60) as client:
        assert indexes(client.fetch_log(0)) == list(range(ALL))
        refusals += [TooManyBulkReadsError("too many: bulk_streams_max")] * 10_000
        with pytest.raises(PendingFullError, match="bulk_streams"):  # over the same connection: it is refused in time
            indexes(client.fetch_log(0, timeout_s=2))


def test_an_iterator_that_is_given_up_frees_its_place(group: FakeGroup) -> None:
    """The server hears of it: a reader that stops early is no reader."""
    for node in group.nodes:
        node.entries, node.committed = [], -1
    group.nodes[0].submit_append([bytes(1 << 20)] * 30, lambda _result: None)
    with DLedgerClient(group.addresses) as client:
        for _ in range(20):  # more than bulk_streams_max
            chunks = client.fetch_log(0)
            assert next(chunks).first_index == 0
            chunks.close()


def test_no_more_than_one_chunk_is_asked_for_ahead(group: FakeGroup, client: DLedgerClient) -> None:
    """However slow its user is, a reader holds two chunks."""
    chunks = client.fetch_log(0, chunk_bytes=100)
    for taken in (1, 2, 3):
        assert next(chunks).count == 1
        wait_until(lambda: reads(group)[0] == taken + 1, "the next one is asked for")  # noqa: B023
        client.metadata(group.addresses[0])  # would come after a further one
        assert reads(group)[0] == taken + 1


# --- digests and places ---------------------------------------------------------------------------------------------


def test_digests_of_a_chosen_node(group: FakeGroup, client: DLedgerClient) -> None:
    """As the node computes them; without an end, up to what is committed."""
    found = list(client.block_digests(block_bytes=4096, address=group.addresses[1]))

    expected = [group.nodes[1].bulk.digest(at, 5000, 4096) for at in (0, 4096)]
    assert found == expected
    assert [one.size for one in client.block_digests(4096, 4500, block_bytes=4096)] == [404]
    assert list(client.block_digests(5000, block_bytes=4096)) == []
    assert list(client.block_digests(5, 5)) == []


def test_digests_of_many_steps(group: FakeGroup, client: DLedgerClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node answers with some at a time; the client asks for the others, and for none twice."""
    monkeypatch.setattr("dledger.rpc.clients.bulk_service._DIGEST_STEP_BLOCKS", 1)

    found = list(client.block_digests(block_bytes=4096))

    assert found == [group.nodes[0].bulk.digest(at, 5000, 4096) for at in (0, 4096)]


def test_digests_go_on_after_a_failure_and_no_block_is_given_in_part(group: FakeGroup, client: DLedgerClient) -> None:
    """A member that is behind gives the whole block once it has it: half a block would differ from everybody's."""
    node = group.nodes[2]
    node.submit_append([bytes(4000)] * 5, lambda _result: None) if node.leader is None else None
    for one in group.nodes:
        one.entries, one.committed = list(group.nodes[0].entries), 49
    node.committed = 44
    found: list[tuple[Position, int]] = []

    def read() -> None:
        blocks = client.block_digests(0, 5000, block_bytes=4096, address=group.addresses[2])
        found.extend((one.position, one.size) for one in blocks)

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: node.bulk.reads >= 2, "it has been asked")
    node.committed = 49
    reader.join(60)

    assert found == [(0, 4096), (4096, 904)]


def test_places(group: FakeGroup, client: DLedgerClient) -> None:
    """One per question; from any member."""
    group.nodes[0].bulk.fail_reads = []
    located = client.locate(indexes=(0, 7), positions=(650,), read_from=ReadFrom.ANY)

    assert [(one.index, one.position) for one in located.places] == [(0, 0), (7, 700), (7, 700)]
    assert (located.range.end.index, located.range.end.position) == (ALL, ALL * RECORD_BYTES)
    with pytest.raises(UntimedLogError):
        client.index_by_time(5)


def test_metadata_says_what_a_reader_needs(client: DLedgerClient) -> None:
    """How far the log is committed in bytes, whose log it is, and of which cluster."""
    status = client.metadata()

    assert (status.committed_position, status.is_broker, status.cluster_id) == (ALL * RECORD_BYTES, False, "c")


@pytest.mark.parametrize("read_from", list(ReadFrom))
@pytest.mark.parametrize("error", [DAMAGE, FencedError("fenced"), IndexBeforeBeginError("gone")], ids=type)
def test_what_one_member_cannot_give_another_one_is_asked_for(
    group: FakeGroup, client: DLedgerClient, read_from: ReadFrom, error: DLedgerError
) -> None:
    """Damage, another history and a shorter log are one member's own: nobody takes entries for lost because of them.

    At the beginning, and in the middle.
    """
    failing = group.nodes[0 if read_from is ReadFrom.LEADER else 1].bulk
    for fine in (0, 1, 3, 4):
        failing.fail_reads = [*[None] * fine, *[error] * ALL]

        assert indexes(client.fetch_log(0, chunk_bytes=200, read_from=read_from)) == list(range(ALL))


@pytest.mark.parametrize("read_from", list(ReadFrom))
def test_a_place_that_one_member_cannot_tell_another_one_does(
    group: FakeGroup, client: DLedgerClient, read_from: ReadFrom
) -> None:
    """Each of them in turn is the damaged one."""
    for node in group.nodes:
        node.bulk.fail_places = DAMAGE
        for _ in range(5):
            assert client.locate(indexes=(7,), read_from=read_from).places[0].position == 7 * RECORD_BYTES
        node.bulk.fail_places = None


def test_entries_are_gone_only_where_no_member_has_them(group: FakeGroup, client: DLedgerClient) -> None:
    """A damaged member may have what the others no longer keep: that is damage, not retention."""
    for node in group.nodes:
        node.begin_index = 5
    with pytest.raises(IndexBeforeBeginError):
        list(client.fetch_log(0))
    group.nodes[0].bulk.fail_reads = [DAMAGE] * 2
    with pytest.raises(CorruptLogError):
        list(client.fetch_log(0))
    group.nodes[2].begin_index = 0

    assert indexes(client.fetch_log(0)) == list(range(ALL))
    assert indexes(client.fetch_log(0, read_from=ReadFrom.FOLLOWER)) == list(range(ALL))
    with pytest.raises(IndexBeforeBeginError):
        list(client.fetch_log(0, address=group.addresses[1]))


def test_a_member_that_is_behind_does_not_stand_in_for_a_damaged_one(group: FakeGroup, client: DLedgerClient) -> None:
    """It would say that there is nothing more, or that its end is where an entry begins."""
    leader, behind, other = group.nodes
    behind.committed = 19
    leader.bulk.fail_places = DAMAGE
    for _ in range(10):
        assert client.locate(positions=(30 * RECORD_BYTES,)).places[0].index == 30
    other.committed = 19

    with pytest.raises(CorruptLogError):
        client.locate(positions=(30 * RECORD_BYTES,), timeout_s=0.3)
    leader.bulk.fail_reads = [None, DAMAGE]
    with pytest.raises(CorruptLogError):
        list(client.fetch_log(0, chunk_bytes=1000, timeout_s=0.3))


def test_nobody_stands_in_for_one_who_says_no_more_how_far_it_was(
    group: FakeGroup, client: DLedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its word a member that is behind cannot be told from one that is not; a new leader can."""
    leader, behind, other = group.nodes
    behind.committed = other.committed = 19
    assert client.locate(positions=(30 * RECORD_BYTES,)).places[0].index == 30
    leader.bulk.fail_places = DAMAGE

    def gone() -> NodeStatus:
        raise ShutdownError("gone")

    monkeypatch.setattr(leader, "status", gone)
    with pytest.raises(CorruptLogError):
        client.locate(positions=(30 * RECORD_BYTES,), timeout_s=0.5)
    other.committed = leader.committed
    other.become(None)

    assert client.locate(positions=(30 * RECORD_BYTES,)).places[0].index == 30


def test_one_who_has_restarted_does_not_tell_how_far_it_was(
    group: FakeGroup, client: DLedgerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit index is that of its checkpoint then, which members that are behind may well have passed."""
    leader, behind, other = group.nodes
    behind.committed = other.committed = 19
    ended = leader.committed

    def restarts(node: str, error: DLedgerError, *_: object) -> None:
        if isinstance(error, CorruptLogError):
            leader.committed = 9
            leader.become(LeaderHint(other.node_id, group.addresses[2]))

    monkeypatch.setattr(client._client._large_reads, "_note_failure", restarts)
    leader.bulk.fail_reads = [DAMAGE] * ALL
    with pytest.raises(DLedgerError):  # of any kind, but no end
        list(client.fetch_log(0, timeout_s=0.5))
    other.committed = ended
    other.become(None)

    assert indexes(client.fetch_log(0)) == list(range(ALL))


class Halting:
    """One node's connections: each answer of it is followed by a failure, long after it."""

    is_closed = False

    def __init__(self, clock: list[float], *answers: bytes) -> None:
        self._clock = clock
        self._answers = deque(answers)
        self._failed = True

    async def call(self, _address: str, _code: LogCode, _body: bytes, _deadline: TimeLimit) -> bytes:
        self._failed = not self._failed
        if self._failed:
            self._clock[0] += 0.8 * PATIENCE_S
            raise UnavailableError("it hung up")
        return self._answers.popleft()


def halting(monkeypatch: pytest.MonkeyPatch, *answers: bytes) -> LargeReads:
    clock = [0.0]
    monkeypatch.setattr(shared, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    connections: Any = Halting(clock, *answers)
    calls: Any = SimpleNamespace(directory=SimpleNamespace(note_failure=lambda _address, _error: None))
    return LargeReads(connections, calls)


@on_loop
async def test_a_node_that_fails_again_and_again_is_read_as_long_as_there_is_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``timeout_s`` limits the time without any: large reads take hours."""
    blocks = [BlockDigest(Position(at), 10, 0, LogIndex(0), LogIndex(0), 0) for at in range(0, 50, 10)]
    answers = [
        bulk_codec.encode_digests(bulk_codec.Digested((one,), Position(0), Position(50), LogIndex(4))) for one in blocks
    ]
    reads = halting(monkeypatch, *answers)
    digests = reads.digests(bulk_codec.BlockDigests("g", Position(0), Position(50), 10), TARGET)
    assert [one async for one in digests] == blocks

    chunks = [LogChunk(LogIndex(at), 1, Position(0), Position(0), b"x", LogIndex(4), LogIndex(0)) for at in range(5)]
    reads = halting(monkeypatch, *map(bulk_codec.encode_chunk, chunks))
    fetched = reads.fetch(bulk_codec.FetchLog("g", LogIndex(0), LogIndex(5)), TARGET)
    assert [one async for one in fetched] == chunks
