"""When producers are asked, how often, and what the next master knows of it."""

from __future__ import annotations

import pytest

from rocketstore.broker.transactions import run
from rocketstore.broker.transactions.checks import CheckRound, Rounds, decode_rounds, due_at, times_checked
from rocketstore.broker.transactions.halves import Half, OpenHalves, committed, half_of
from rocketstore.message.message import Message
from rocketstore.state.changes import TopicConfig
from rocketstore.state.publisher import StateDone
from rocketstore.types import CHECKED_TOO_OFTEN_TOPIC, OP_TOPIC, TRANSACTION_CHECKS_TOPIC
from tests.support.waiting import ManualClock
from tests.unit.rocketstore.broker.transactions.bench import GROUP, half
from tests.unit.rocketstore.broker.transactions.fakes import BUSY, Log, Master

INTERVAL_MS = 60_000


def test_a_producer_is_asked_in_every_round_once_it_is_due(log: Log, clock: ManualClock) -> None:
    master = Master(log, clock)
    master.prepare()
    assert master.after(INTERVAL_MS - 1) == []
    master.prepare()  # too new for the first round
    assert [master.after(one) for one in (1, INTERVAL_MS - 1, 1, INTERVAL_MS)] == [[1], [], [2, 1], [3, 2]]


def test_the_next_master_counts_on(log: Log, clock: ManualClock) -> None:
    first = Master(log, clock)
    first.prepare()
    assert [first.after(INTERVAL_MS) for _ in range(2)] == [[1], [2]]
    first.run.stop()
    second = Master(log, clock)
    assert second.after(INTERVAL_MS) == [3]
    assert len(second.messages(TRANSACTION_CHECKS_TOPIC)) == 3


def test_rounds_by_a_clock_that_was_ahead_do_not_count(log: Log, clock: ManualClock) -> None:
    """Otherwise the next master would give a transaction up about which nobody was asked."""
    ahead = Master(log, ManualClock(clock.now_ms + 1000 * INTERVAL_MS), transaction_check_max=3)
    ahead.prepare()
    assert [ahead.after(INTERVAL_MS) for _ in range(3)] == [[1], [2], [3]]
    ahead.run.stop()
    second = Master(log, clock, transaction_check_max=3)
    second.prepare()
    assert [sorted(second.after(INTERVAL_MS)) for _ in range(2)] == [[1], [1, 2]]
    assert second.messages(CHECKED_TOO_OFTEN_TOPIC) == []


def test_rounds_in_which_nobody_could_be_asked_do_not_count(log: Log, clock: ManualClock) -> None:
    """The only producer is down for long: it is asked when it is back, and by the next master, too."""
    master = Master(log, clock, transaction_check_max=2)
    place = master.prepare()
    master.is_anybody_there = lambda _check: False
    assert [master.after(INTERVAL_MS) for _ in range(5)] == [[1]] * 5
    assert master.messages(TRANSACTION_CHECKS_TOPIC)[1:] == [], "no round to be told to the next master"
    master.run.stop()
    master = Master(log, clock, transaction_check_max=2)
    master.is_anybody_there = lambda _check: False
    assert [master.after(INTERVAL_MS) for _ in range(5)] == [[1]] * 5
    master.is_anybody_there = lambda _check: True
    assert master.after(INTERVAL_MS) == [1]
    assert master.end(place)
    assert master.messages(CHECKED_TOO_OFTEN_TOPIC) == []


def test_who_never_comes_back_does_not_shut_others_out(log: Log, clock: ManualClock) -> None:
    """Once all places are taken, the oldest that nobody was there for as often as others are asked make room; they are
    kept where an operator finds them. What may still be asked about stays, and so does everything while there is room.
    """
    master = Master(log, clock, transaction_check_max=2, transactions_open_max=4)
    places = [master.prepare() for _ in range(3)]
    master.is_anybody_there = lambda _check: False
    for _ in range(5):
        master.after(INTERVAL_MS)
    assert len(master.run.halves) == 3
    places.append(master.prepare())
    assert master.run.refusal(GROUP)
    master.after(INTERVAL_MS)
    master.after(0)
    assert len(master.messages(CHECKED_TOO_OFTEN_TOPIC)) == 2
    assert not master.run.refusal("others")
    master.is_anybody_there = lambda _check: True
    assert master.end(places[2])
    assert master.end(places[3])


def test_of_a_group_that_could_not_be_asked_about_all_each_counts_by_itself(log: Log, clock: ManualClock) -> None:
    """Its members take so many checks at a time. The next master asks about those again that had been asked."""
    master = Master(log, clock, transaction_check_max=2)
    master.prepare()
    unlucky = master.prepare()
    master.is_anybody_there = lambda check: check.queue_offset != unlucky.queue_offset
    assert [sorted(master.after(INTERVAL_MS)) for _ in range(2)] == [[1, 1], [1, 2]]
    master.run.stop()
    second = Master(log, clock, transaction_check_max=2)
    assert [sorted(second.after(INTERVAL_MS)) for _ in range(3)] == [[1, 1], [2, 2], []]
    assert len(second.messages(CHECKED_TOO_OFTEN_TOPIC)) == 2


def test_what_an_answer_that_comes_late_says_counts(log: Log, clock: ManualClock) -> None:
    """One that asks slowly has asked all the same."""
    master = Master(log, clock, transaction_check_max=2)
    master.prepare()
    master.held = []
    assert master.after(INTERVAL_MS) == [1]
    (done,) = master.held
    master.held = None
    done()
    assert [master.after(INTERVAL_MS) for _ in range(2)] == [[2], []]


def test_the_topic_of_what_is_given_up_is_made_sometime(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that takes nothing just then is no reason to hide it from operators for ever."""
    made: list[str] = []

    def put_topic(topic: TopicConfig, done: StateDone, *, automatic: bool = False) -> None:
        made.append(topic.name)
        done(BUSY)

    master = Master(log, clock, transaction_check_max=1)
    monkeypatch.setattr(master.state, "topic", lambda _name: None)
    monkeypatch.setattr(master.state, "put_topic", put_topic)
    for _ in range(2):
        master.prepare()
        assert [master.after(INTERVAL_MS) for _ in range(2)] == [[1], []]
    assert made == [CHECKED_TOO_OFTEN_TOPIC] * 2


def test_time_without_a_master_does_not_count(log: Log, clock: ManualClock) -> None:
    first = Master(log, clock)
    first.prepare()
    first.run.stop()
    clock.now_ms += 100 * INTERVAL_MS
    second = Master(log, clock)
    assert [second.after(INTERVAL_MS) for _ in range(2)] == [[1], [2]]


def test_a_message_may_put_its_checks_off(log: Log, clock: ManualClock) -> None:
    master = Master(log, clock)
    master.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="90")
    master.prepare(CHECK_IMMUNITY_TIME_IN_SECONDS="-1")
    assert [master.after(INTERVAL_MS) for _ in range(2)] == [[1], [1, 2]]


def test_what_nobody_answers_for_is_given_up(log: Log, clock: ManualClock) -> None:
    master = Master(log, clock, transaction_check_max=2)
    place = master.prepare(b"kept")
    assert [master.after(INTERVAL_MS) for _ in range(4)] == [[1], [2], [], []]
    (kept,) = master.messages(CHECKED_TOO_OFTEN_TOPIC)
    assert (kept.body, kept.properties["REAL_TOPIC"], kept.properties["TRANSACTION_CHECK_TIMES"]) == (b"kept", "T", "2")
    assert [one.body for one in master.messages(OP_TOPIC)] == [b"%d" % place.queue_offset]
    assert len(master.run.halves) == 0


def test_what_is_older_than_the_log_is_kept_is_given_up(log: Log, clock: ManualClock) -> None:
    master = Master(log, clock)
    master.prepare()
    clock.now_ms += 72 * 3_600_000
    assert master.after(INTERVAL_MS) == []
    assert len(master.messages(CHECKED_TOO_OFTEN_TOPIC)) == 1


def test_a_refused_end_of_one_that_is_given_up_is_tried_again(log: Log, clock: ManualClock) -> None:
    master = Master(log, clock, transaction_check_max=1)
    master.prepare()
    assert master.after(INTERVAL_MS) == [1]
    master.store.modes[CHECKED_TOO_OFTEN_TOPIC] = "refused"
    assert master.after(INTERVAL_MS) == []
    assert master.messages(OP_TOPIC) == []
    master.after(INTERVAL_MS)
    assert len(master.messages(OP_TOPIC)) == 1


def test_rounds_wait_for_those_who_ask_but_not_for_ever(log: Log, clock: ManualClock) -> None:
    master = Master(log, clock)
    for _ in range(300):
        master.prepare()
    master.held = []
    assert len(master.after(INTERVAL_MS)) == 256
    assert master.after(29_999) == []
    assert len(master.after(1)) == 44
    assert [len(master.held), master.after(1000)] == [2, []]
    for done in master.held:
        done()
    master.held = None
    assert len(master.after(INTERVAL_MS)) == 300


def test_the_next_are_asked_about_once_all_have_asked(log: Log, clock: ManualClock) -> None:
    """There are several who ask, for clients of several kinds: the slowest decides, up to a limit."""
    master = Master(log, clock)
    for _ in range(300):
        master.prepare()
    slow: list[int] = []
    master.run._checks._askers.add(lambda checks, _done: slow.append(len(checks)))
    assert len(master.after(INTERVAL_MS)) == 256
    assert (master.after(29_999), slow) == ([], [256])
    assert len(master.after(1)) == 44


def test_a_round_that_takes_longer_than_the_interval_is_the_only_one(log: Log, clock: ManualClock) -> None:
    """Everybody is asked once in it, also if those who ask are slow: else its first ones are given up too early."""
    master = Master(log, clock)
    for _ in range(600):
        master.prepare()
    master.held = []
    asked: list[list[int]] = []
    for wait_ms in (INTERVAL_MS, 30_000, 30_000):
        master.after(wait_ms)
        asked.append([one.queue_offset for one in master.asked])
    assert [len(one) for one in asked] == [256, 256, 88]
    assert len({one for each in asked for one in each}) == 600
    assert len(master.after(30_000)) == 256  # the next one


def test_rounds_never_say_to_look_for_commits_behind_one_without_an_op(log: Log, clock: ManualClock) -> None:
    first = Master(log, clock)
    place = first.prepare()
    first.prepare()
    first.store.put(committed(first.store.read_record(place.offset) or b""))
    commit = log.records[-1].head.offset
    first.store.put(Message("T", b"later"))
    first.run.step()
    first.store.modes[OP_TOPIC] = "refused"
    assert first.after(INTERVAL_MS) == [1]
    first.run.stop()
    (stored,) = [decode_rounds(one.body) for one in first.messages(TRANSACTION_CHECKS_TOPIC)]
    assert 0 < stored.scanned <= commit
    second = Master(log, clock)
    second.run.step()
    assert [one.queue_offset for one in second.run.halves] == [1]


def test_rounds_never_say_to_look_behind_what_has_not_been_taken_in(
    log: Log, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log shows more at once than our thread takes in: a commit without its op may be among the rest."""
    monkeypatch.setattr(run, "ARRIVED_AT_ONCE", 1)
    first = Master(log, clock)
    first.prepare()
    place = first.prepare()
    clock.now_ms += INTERVAL_MS
    for _ in range(3):
        first.store.put(half(b"later"))
    first.store.put(committed(first.store.read_record(place.offset) or b""))
    first.store.put(Message("T", b"later"))
    first.run.step()
    first.run.step()  # the round ends when all were asked
    first.run.stop()
    (stored,) = [decode_rounds(one.body) for one in first.messages(TRANSACTION_CHECKS_TOPIC)]
    assert stored.scanned <= place.offset
    assert not Master(log, clock).end(place)


def test_a_damaged_op_hides_no_commit(log: Log, clock: ManualClock) -> None:
    """All commits before some position had their ops; but which one had this op?"""
    first = Master(log, clock)
    first.prepare()
    place = first.prepare()
    assert first.end(place)
    assert first.after(INTERVAL_MS) == [1]
    first.run.stop()
    at, op = next((at, one) for at, one in enumerate(log.records) if one.head.topic == OP_TOPIC)
    log.records[at] = op._replace(record=bytes(len(op.record)))
    second = Master(log, clock)
    assert not second.end(place)
    second.after(1000)
    assert len(second.messages("T")) == 1


def test_rounds_are_read_as_written() -> None:
    a, b = frozenset("a"), frozenset("ab")
    rounds = Rounds((CheckRound(1, a), CheckRound(2, b), CheckRound(3, a)), 77)
    assert decode_rounds(rounds.encode()) == rounds
    assert rounds.then(9, ["b", "x" * 256], 78, 3) == Rounds(
        (CheckRound(2, b), CheckRound(3, a), CheckRound(9, frozenset("b"))), 78
    )
    assert rounds.then(9, [], 78, 3) == Rounds(rounds.rounds, 78)


def test_rounds_of_an_earlier_version_do_not_count() -> None:
    """They do not say whether anybody was asked."""
    assert decode_rounds(b'{"version":1,"rounds":[1,2],"scanned":5}') == Rounds((), 5)


def test_rounds_name_so_many_groups_at_most() -> None:
    """Those of the others are asked more often."""
    rounds = Rounds((CheckRound(1, frozenset(f"g{number:06}" for number in range(20_000))),))
    assert len(rounds.encode()) < 400_000
    (kept,) = decode_rounds(rounds.encode()).rounds
    assert len(kept.groups) == 10_000


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[]", b"7", b"\xff", b'{"version":3,"rounds":[],"groups":[],"scanned":5}',
     b'{"version":2,"rounds":5,"groups":[],"scanned":5}', b'{"version":2,"rounds":[[1,[0]]],"groups":[],"scanned":5}',
     b'{"version":2,"rounds":[[-1,[]]],"groups":[],"scanned":5}', b'{"version":2,"rounds":[],"groups":[7],"scanned":5}',
     b'{"version":2,"rounds":[["1",[]]],"groups":[],"scanned":5}', b'{"version":1,"rounds":[1],"scanned":-5}',
     b'{"version":2,"rounds":[[1,[true]]],"groups":["a","b"],"scanned":5}'],
)  # fmt: skip
def test_rounds_that_cannot_be_read_are_none(body: bytes) -> None:
    """Then the producer is asked more often, and more of the log is read."""
    assert decode_rounds(body) == Rounds()


@pytest.mark.parametrize(
    ("text", "due_ms"),
    [
        ("", 1006),
        ("3", 4000),
        ("x", 1006),
        ("-1", 1006),
        ("9999999999", 1006),
        ("0", 1000),
        ("999999999", 1000 + 30 * 24 * 3_600_000),
    ],
)
def test_when_a_check_is_due(text: str, due_ms: int) -> None:
    """Whatever a message asks for: at the latest after a month, for nobody can end it while its producer is gone."""
    found = half_of(0, 0, 1000, f"CHECK_IMMUNITY_TIME_IN_SECONDS\x01{text}\x02PGROUP\x01{GROUP}".encode())
    assert (due_at(found, 6), found.group) == (due_ms, GROUP)


def test_the_first_of_two_commits_is_the_one_whose_op_is_missing() -> None:
    """A second one comes if a master could not know of the first: what is noted stays before both."""
    halves = OpenHalves()
    halves.add(Half(0, 50, 10, GROUP, None, 0))
    halves.committed(50, 100, 1000)
    halves.committed(50, 200, 2000)
    assert (halves.oldest_commit, [one.op_due_ms for one in halves.unfinished]) == (100, [1000])


def test_what_rocketmq_has_counted_counts() -> None:
    rounds = Rounds(tuple(CheckRound(time_ms, frozenset((GROUP,))) for time_ms in (5, 20, 30)))
    assert times_checked(Half(0, 0, 10, GROUP, None, 3), rounds, 5) == 5
    assert half_of(0, 0, 0, b"TRANSACTION_CHECK_TIMES\x014").checked_before == 4
