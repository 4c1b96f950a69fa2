"""A running group's log over several members, of which some are damaged or keep less than others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from dledger.errors import IndexBeforeBeginError
from dledger.records import ENTRY
from dledger.store.format import encode_record
from dledger.types import LogIndex
from dledger_spark.directory import TimeBounds
from dledger_spark.errors import JobError, OptionError
from dledger_spark.options import ReadOptions
from dledger_spark.source import client_log
from dledger_spark.source.client_log import ClientLog, IndexRange, TrimmedError
from dledger_spark.source.live import within_times
from rocketstore.client import Admin, ForbiddenError, TopicInfo
from rocketstore.state.changes import TopicConfig
from tests.support.fake_bulk import FakeBulkLog
from tests.support.fake_group import FakeGroup, fake_group
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

ALL = 50
WRONG = IndexBeforeBeginError("entry 7 is no longer kept here")
READ_FROM = ("leader", "follower", "any")


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    """Three nodes with 50 entries of 100 bytes each, all committed."""
    with fake_group() as made:
        made.nodes[0].submit_append([b"%2d" % number * 26 for number in range(ALL)], lambda _result: None)
        for node in made.nodes[1:]:
            node.entries, node.committed = list(made.nodes[0].entries), made.nodes[0].committed
        yield made


def log_of(group: FakeGroup, read_from: str) -> ClientLog:
    """The log as a reader with this option sees it."""
    servers = {"bootstrap.servers": ",".join(group.addresses), "fetchTimeoutMs": "3000"}
    return ClientLog(ReadOptions.parse({**servers, "readFrom": read_from}))


def indexes(log: ClientLog, first: int, end: int) -> list[int]:
    """The entries that chunks between these bring."""
    return [index for chunk in log.chunks(first, end) for index in range(chunk.first_index, chunk.end_index)]


@pytest.mark.parametrize("read_from", READ_FROM)
def test_a_member_that_keeps_less_than_the_others_makes_nothing_look_trimmed(group: FakeGroup, read_from: str) -> None:
    """Its disk is fuller, or it was away: each of the followers in turn, for plans and for rows."""
    log = log_of(group, read_from)
    for short in group.nodes[1:]:
        short.begin_index = 20
        for _ in range(5):
            assert log.committed().begin_index == 0
            assert log.positions_of((7,)) == [700]
            assert indexes(log, 0, ALL) == list(range(ALL))
        short.begin_index = 0


@pytest.mark.parametrize("read_from", READ_FROM)
def test_what_no_member_keeps_is_trimmed(group: FakeGroup, read_from: str) -> None:
    """Readers are told where the log begins now."""
    for number, node in enumerate(group.nodes):
        node.begin_index = 10 + number
        node.bulk.fail_places = WRONG
    log = log_of(group, read_from)

    with pytest.raises(TrimmedError) as raised:
        indexes(log, 7, ALL)
    assert raised.value.begin_index == 10
    with pytest.raises(TrimmedError):
        log.positions_of((7, 30))


@pytest.mark.parametrize("read_from", READ_FROM)
def test_what_is_kept_is_never_called_trimmed(group: FakeGroup, read_from: str) -> None:
    """Where the log begins speaks against a member's error: that is raised, for readers would go on behind the entry.

    With ``failOnDataLoss=false`` they would do so silently.
    """
    log = log_of(group, read_from)
    for node in group.nodes:
        node.bulk.fail_places = WRONG
        node.bulk.fail_reads = [WRONG] * ALL

    with pytest.raises(IndexBeforeBeginError):
        log.positions_of((7,))
    with pytest.raises(IndexBeforeBeginError):
        log.indexes_at((700,))
    with pytest.raises(IndexBeforeBeginError):
        indexes(log, 7, ALL)


def subscribed(broker: RemotingHarness, **options: str) -> ClientLog:
    """The log of a broker with the topic T, as a reader of these topics sees it."""
    servers = {"bootstrap.servers": f"127.0.0.1:{broker.remoting_port}", "fetchTimeoutMs": "10000"}
    return ClientLog(ReadOptions.parse({**servers, **options}))


def test_a_topic_that_does_not_exist_is_an_error_unless_losses_are_none() -> None:
    """Whatever else is subscribed to; a deleted topic's messages can be read so."""
    with RemotingHarness(None, TopicConfig("T", 4, 4)) as broker:
        subscribed(broker, subscribe="T").check_topics()
        subscribed(broker, subscribe="T,U", failOnDataLoss="false").check_topics()
        subscribed(broker, subscribePattern="U.*").check_topics()
        with pytest.raises(OptionError, match="there is no topic U or V: create it first"):
            subscribed(broker, subscribe="T,U,V").check_topics()


def test_a_topic_that_one_may_not_see_counts_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may read the log may read it by a topic's name, although the broker tells nothing of the topic."""

    def denied(_admin: Admin, name: str) -> list[TopicInfo]:
        raise ForbiddenError(f"{name} is denied")

    monkeypatch.setattr(Admin, "topic", denied)
    with RemotingHarness(None, TopicConfig("T", 4, 4)) as broker:
        subscribed(broker, subscribe="T,hidden").check_topics()


def test_progress_before_the_logs_begin_is_published_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that retention has overtaken goes on: it is not the publishing that says what was lost."""
    published: list[tuple[str, int, Sequence[str]]] = []
    admin = SimpleNamespace(commit_position=lambda *arguments: published.append(arguments))

    def positions_of(_log: ClientLog, indexes: Sequence[int]) -> list[int]:
        if min(indexes) < 10:
            raise TrimmedError(10)
        return [100 * index for index in indexes]

    monkeypatch.setattr("dledger_spark.source.client_log.shared_admin", lambda *_: admin)
    monkeypatch.setattr(ClientLog, "positions_of", positions_of)
    log = ClientLog(ReadOptions.parse({"bootstrap.servers": "127.0.0.1:1", "subscribe": "T"}))
    log.publish("g", 7)
    log.publish("g", 12)
    assert [(group, position, list(topics)) for group, position, topics in published] == [
        ("g", 1000, ["T"]),
        ("g", 1200, ["T"]),
    ]


@pytest.mark.parametrize("checked", [True, False])
def test_times_ascend_unless_the_first_entry_has_no_checksums(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """RocketMQ writes none, and its clocks may go back; a log of which nothing is kept tells nothing."""
    data, _ = encode_record(1, 0, 0, b"body", 0, 1, 0)
    bare = bytearray(data)
    for name in ("chain_crc", "body_crc"):
        bare[ENTRY.at(name) : ENTRY.behind(name)] = bytes(ENTRY.behind(name) - ENTRY.at(name))
    chunk = SimpleNamespace(data=data if checked else bytes(bare))
    log = log_of(group, "leader")

    monkeypatch.setattr(ClientLog, "chunks", lambda _self, _first, _end: iter([chunk]))
    assert log.times_ascend() == checked
    bounds, whole = TimeBounds(5), IndexRange(0, ALL)
    monkeypatch.setattr(ClientLog, "index_at", lambda _self, _ms: 30)
    assert within_times(log, whole, bounds) == (IndexRange(30, ALL) if checked else whole)
    assert within_times(log, whole, TimeBounds()) == whole
    monkeypatch.setattr(ClientLog, "chunks", lambda _self, _first, _end: iter([]))
    assert not log.times_ascend()


@pytest.mark.parametrize("read_from", READ_FROM)
def test_a_member_that_lags_does_not_end_a_time_too_early(
    group: FakeGroup, monkeypatch: pytest.MonkeyPatch, read_from: str
) -> None:
    """It has committed no entry of then yet, and answers with its end. The time of each entry is its index here."""
    monkeypatch.setattr(
        FakeBulkLog,
        "place_at_time",
        lambda self, ms: self.place_of_index(LogIndex(min(ms, self.committed_range().end.index))),
    )
    for node in group.nodes[1:]:
        node.committed = LogIndex(20)
    log = log_of(group, read_from)

    assert {log.index_at(40) for _ in range(10)} == {40}
    assert {log.index_at(10) for _ in range(10)} == {10}
    assert {log.index_at(ALL + 5) for _ in range(10)} == {ALL}


def test_a_fetch_that_brings_something_may_be_lost_as_often_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """``fetchRetries`` counts failures in a row: a long read over a bad network ends."""
    fetched = []

    def lost_after_one(first: int, end: int, **_: object) -> Iterator[SimpleNamespace]:
        fetched.append(first)
        yield SimpleNamespace(end_index=first + 1)
        if first + 1 < end:
            raise JobError("lost")

    monkeypatch.setattr(ClientLog, "_client", SimpleNamespace(fetch_log=lost_after_one))
    monkeypatch.setattr(client_log, "is_retried_read", lambda _: True)
    log = ClientLog(ReadOptions.parse({"bootstrap.servers": "a:1", "fetchRetries": "1"}))

    assert [one.end_index for one in log.chunks(0, 5)] == [1, 2, 3, 4, 5]
    assert fetched == [0, 1, 2, 3, 4]


def test_times_only_narrow_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filter from long ago, or up to the future, adds no entries that were not asked for."""
    monkeypatch.setattr(ClientLog, "times_ascend", lambda _: True)
    monkeypatch.setattr(ClientLog, "index_at", lambda _, time_ms: time_ms)
    log = ClientLog(ReadOptions.parse({"bootstrap.servers": "a:1"}))

    for times, found in (((2, 20), (5, 9)), ((6, 8), (6, 8)), ((20, 30), (9, 9)), ((1, 2), (5, 5))):
        assert within_times(log, IndexRange(5, 9), TimeBounds(*times)) == IndexRange(*found)
