"""What a stream reads next: committed entries only, limits, AvailableNow, the first batch, trimmed logs."""

from __future__ import annotations

from functools import partial

import pytest

from dledger_spark.errors import DataLossError
from dledger_spark.options import ReadOptions
from dledger_spark.source.client_log import IndexRange
from dledger_spark.source.live import planned_range
from dledger_spark.source.stream import LogOffset, OffsetError, StreamProgress
from tests.support.fake_group_log import FakeGroupLog


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def progress(log: FakeGroupLog, clock: Clock | None = None, **options: object) -> StreamProgress:
    """A stream's progress with these options, by their names in Spark."""
    texts = {name: str(value) for name, value in options.items()}
    return StreamProgress(ReadOptions.parse({"bootstrap.servers": "h:1", **texts}), log, clock or Clock())


def ranges(stream: StreamProgress, start: LogOffset, end: LogOffset) -> list[IndexRange]:
    """How the batch between two offsets is cut."""
    return stream.plan(start, end)[1]


def at(index: int, initial: int = 0) -> LogOffset:
    return LogOffset("c", "g", index, initial)


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({}, 10),
        ({"startingOffsets": "latest"}, 10),
        ({"startingOffsets": "earliest"}, 2),
        ({"startingOffsets": '{"index": 7}'}, 7),
        ({"startingOffsets": "-2"}, 2),
        ({"startingTimestamp": "5"}, 5),
    ],
)
def test_stream_begins_where_it_is_told(options: dict[str, str], index: int) -> None:
    """By word, by index, by time; at the end by default; and it remembers in every offset."""
    log = FakeGroupLog([100] * 10, begin=2)

    assert progress(log, None, **options).initial() == at(index, index)


def test_uncommitted_entries_are_not_read() -> None:
    """What may still be taken back is not in any batch."""
    log = FakeGroupLog([100] * 10)
    log.committed_end = 6

    assert progress(log).next_end(at(0), limited=False) == at(6)


def test_offset_does_not_go_back_with_a_node_that_is_behind() -> None:
    """A follower that knows less is no reason to read anything again."""
    log = FakeGroupLog([100] * 5)
    log.leads = False

    assert progress(log).next_end(at(8), limited=False) == at(8)


def test_new_leader_that_knows_less_to_be_committed_is_waited_for() -> None:
    """It has the entries but must commit one of its own term first: nothing is lost."""
    log = FakeGroupLog([100] * 10)
    log.committed_end = 4

    assert progress(log).next_end(at(8), limited=False) == at(8)


def test_leader_whose_log_ends_before_the_checkpoint_stops_the_stream() -> None:
    """Another log under the same name: its entries are not the ones that come next."""
    with pytest.raises(DataLossError, match="committed log ends at 5"):
        progress(FakeGroupLog([100] * 5)).next_end(at(8), limited=False)


def test_stream_cannot_begin_behind_the_end() -> None:
    """The error speaks of where to begin, not of what was read; told to, the stream begins at the end."""
    log = FakeGroupLog([100] * 5)
    options = {"startingOffsets": '{"index": 8}'}

    with pytest.raises(DataLossError, match="starts at entry 8, but the committed log of group g ends before"):
        progress(log, None, **options).initial()
    with pytest.raises(DataLossError, match="starts at entry 8"):
        progress(log, None, **options).next_end(at(8, 8), limited=False)

    assert progress(log, None, **options, failOnDataLoss="false").initial() == at(5, 5)
    assert progress(log, None, startingOffsets='{"index": 5}').initial() == at(5, 5)


def test_stream_may_begin_where_no_leader_is_sure_yet() -> None:
    """A node that knows less than the leader will is no reason to refuse."""
    log = FakeGroupLog([100] * 10)
    log.committed_end = 4

    assert progress(log, None, startingOffsets='{"index": 8}').initial() == at(8, 8)
    log.sizes, log.leads = [100] * 5, False
    assert progress(log, None, startingOffsets='{"index": 8}').initial() == at(8, 8)


@pytest.mark.parametrize("index", [5, 6])
def test_batch_cannot_begin_behind_the_end(index: int) -> None:
    """It would be empty in silence; right at the end it is empty, and with ``failOnDataLoss=false``."""
    log = FakeGroupLog([100] * 5)
    texts = {"bootstrap.servers": "h:1", "startingOffsets": f'{{"index": {index}}}'}

    if index == 6:
        with pytest.raises(DataLossError, match="starts at entry 6"):
            planned_range(ReadOptions.parse(texts), log, log.committed())
    else:
        assert planned_range(ReadOptions.parse(texts), log, log.committed()) == IndexRange(5, 5)
    texts["failOnDataLoss"] = "false"
    assert planned_range(ReadOptions.parse(texts), log, log.committed()) == IndexRange(5, 5)


def test_a_batch_from_a_member_that_is_behind_is_empty() -> None:
    """The group is further, and holds what was asked for: nothing is lost, and nothing is there to read yet."""
    log = FakeGroupLog([100] * 10)
    log.committed_end = 4
    options = ReadOptions.parse({"bootstrap.servers": "h:1", "readFrom": "any", "startingOffsets": '{"index": 8}'})

    assert planned_range(options, log, log.committed()) == IndexRange(8, 8)


def test_times_bound_a_batch_within_what_was_committed_when_it_was_planned() -> None:
    """A time that is to come stands for the end, which may have moved on when it is asked for."""
    log = FakeGroupLog([100] * 5)
    state = log.committed()
    log.sizes += [100] * 5
    options = {"bootstrap.servers": "h:1", "startingTimestamp": "3", "endingTimestamp": "99"}

    assert planned_range(ReadOptions.parse(options), log, state) == IndexRange(3, 5)
    assert planned_range(ReadOptions.parse({**options, "startingTimestamp": "98"}), log, state) == IndexRange(5, 5)


def test_stream_goes_on_in_a_shorter_log_if_told_to() -> None:
    """At its end: nobody knows which of its entries were read."""
    stream = progress(FakeGroupLog([100] * 5), failOnDataLoss="false")

    assert stream.next_end(at(8), limited=False) == at(5)
    assert ranges(stream, at(8), at(5)) == [IndexRange(5, 5)]


def test_rows_per_trigger_are_limited() -> None:
    """And not where Spark says that limits do not count."""
    stream = progress(FakeGroupLog([100] * 10), maxOffsetsPerTrigger=3)

    assert stream.next_end(at(4), limited=True) == at(7)
    assert stream.next_end(at(4), limited=False) == at(10)


def test_bytes_per_trigger_are_limited_but_one_entry_is_always_read() -> None:
    """Else a stream would stand still before a large one."""
    stream = progress(FakeGroupLog([100, 100, 5000, 100]), maxBytesPerTrigger=250)

    ends = [at(0)]
    while ends[-1].index < 4:
        ends.append(stream.next_end(ends[-1], limited=True))

    assert [one.index for one in ends] == [0, 2, 3, 4]


def test_both_limits_hold_together() -> None:
    """The tighter one decides."""
    stream = progress(FakeGroupLog([100] * 10), maxOffsetsPerTrigger=5, maxBytesPerTrigger=300)

    assert stream.next_end(at(0), limited=True) == at(3)


def test_few_rows_are_waited_for_and_not_for_ever() -> None:
    """``minOffsetsPerTrigger`` puts a batch off until there are enough, at most ``maxTriggerDelay``."""
    log, clock = FakeGroupLog([100] * 20), Clock()
    stream = progress(log, clock, minOffsetsPerTrigger=10, maxTriggerDelay="30s")
    assert stream.next_end(at(0), limited=True) == at(20)

    log.sizes += [100] * 5
    assert stream.next_end(at(20), limited=True) == at(20)
    clock.now = 29
    assert stream.next_end(at(20), limited=True) == at(20)
    clock.now = 30
    assert stream.next_end(at(20), limited=True) == at(25)
    log.sizes += [100] * 10
    assert stream.next_end(at(25), limited=True) == at(35)


def test_available_now_ends_at_the_end_of_its_beginning() -> None:
    """Whatever comes meanwhile; limits count on the way, the minimum does not."""
    log = FakeGroupLog([100] * 10)
    stream = progress(log, maxOffsetsPerTrigger=4, minOffsetsPerTrigger=5)
    stream.stop_at_present_end()
    log.sizes += [100] * 50

    ends = [at(0)]
    while len(ends) < 2 or ends[-1] != ends[-2]:
        ends.append(stream.next_end(ends[-1], limited=True))

    assert [one.index for one in ends] == [0, 4, 8, 10, 10]
    log.committed_end = 6  # as a member that is behind says
    assert stream.next_end(at(4), limited=True) == at(6)


def test_report_tells_the_present_end_whatever_the_limits() -> None:
    """That is what the lag is counted from."""
    assert progress(FakeGroupLog([100] * 10), maxOffsetsPerTrigger=1).present_end().index == 10


def test_first_batch_is_planned_from_its_own_beginning_after_a_restart() -> None:
    """``latest`` has moved beyond the planned end by then: the rows between are not lost."""
    stream = progress(FakeGroupLog([100] * 30))

    assert ranges(stream, LogOffset("c", "g", 29, 29), LogOffset("c", "g", 11, 3)) == [IndexRange(3, 11)]


def test_batch_without_work_is_one_empty_range() -> None:
    """Spark wants a partition even then."""
    assert ranges(progress(FakeGroupLog([100] * 9)), at(5, 1), at(5, 1)) == [IndexRange(5, 5)]


def test_batch_is_cut_as_told() -> None:
    """By number of partitions, by records."""
    log = FakeGroupLog([100] * 10)

    assert len(ranges(progress(log, minPartitions=4), at(0), at(10))) == 4
    assert ranges(progress(log, maxRecordsPerPartition=4), at(2), at(10)) == [IndexRange(2, 6), IndexRange(6, 10)]


@pytest.mark.parametrize("plan", ["next_end", "plan"])
def test_trimmed_log_below_the_checkpoint_is_told_with_the_lost_range(plan: str) -> None:
    """Exactly which entries are gone, and what to do."""
    stream = progress(FakeGroupLog([100] * 30, begin=12))

    look = partial(stream.next_end, at(5), limited=True) if plan == "next_end" else partial(stream.plan, at(5), at(20))

    with pytest.raises(DataLossError, match=r"entries 5 to 11 \(7 entries\) of group g .*failOnDataLoss=false"):
        look()


def test_stream_goes_on_behind_the_gap_if_told_to() -> None:
    """With what is still kept of the batch, or none of it."""
    log = FakeGroupLog([100] * 30, begin=12)
    stream = progress(log, failOnDataLoss="false", maxOffsetsPerTrigger=3)

    assert stream.next_end(at(5), limited=True) == at(15)
    assert ranges(stream, at(5), at(15)) == [IndexRange(12, 15)]
    assert ranges(stream, at(5), at(11)) == [IndexRange(11, 11)]


@pytest.mark.parametrize("fail", ["true", "false"])
def test_log_that_is_trimmed_while_planning_is_noticed(fail: str) -> None:
    """Between two looks at it: an error with the range, or the rest of the batch."""
    log = FakeGroupLog([100] * 30)
    log.trims = [4]
    stream = progress(log, failOnDataLoss=fail, minPartitions=2)

    if fail == "true":
        with pytest.raises(DataLossError, match="entries 0 to 3"):
            ranges(stream, at(0), at(8))
    else:
        assert ranges(stream, at(0), at(8)) == [IndexRange(4, 6), IndexRange(6, 8)]


def test_checkpoint_of_another_cluster_is_refused() -> None:
    """Its numbers would read the wrong rows."""
    with pytest.raises(OffsetError, match="cluster 'other'"):
        progress(FakeGroupLog([100] * 9)).next_end(LogOffset("other", "g", 1, 0), limited=False)
