"""What a window sends when, one rule at a time; ``test_window_model`` mixes them all."""

from __future__ import annotations

import itertools

import pytest

from dledger.client.aio.appending import APPEND_RULES
from dledger.client.shared import AppendResult
from dledger.errors import (
    ConfigError,
    DLedgerError,
    InvalidRequestError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PendingFullError,
    RequestTimeoutError,
    UnavailableError,
)
from dledger.sending import window as window_module
from dledger.sending.batch import AllStored, OutgoingBatch, ProducerNumbering
from dledger.sending.futures import wait_for
from dledger.sending.window import LOOK_AFTER_MS, Window, WindowOptions
from dledger.types import LogIndex, Position, Term
from tests.unit.dledger.sending.world import REFUSED, RULES, World

ONE_EACH = WindowOptions(linger_ms=0.0, batch_items=1)


def named() -> ProducerNumbering:
    """Whose names are n0, n1, ..."""
    names = itertools.count()
    return ProducerNumbering(make_name=lambda: f"n{next(names)}")


def opened(options: WindowOptions = ONE_EACH, *, numbering: ProducerNumbering | None = None) -> Window[None, int]:
    """A window with an open stream on which one batch has succeeded."""
    made: Window[None, int] = Window(options, RULES, numbering)
    add(made, b"first")
    made.step(0.0)
    made.connected()
    store(made, *sent(made))
    made.done.clear()
    return made


def add(window: Window[None, int], *payloads: bytes, now_ms: float = 0.0) -> list[OutgoingBatch[None, int]]:
    return [window.add(payload, now_ms)[0] for payload in payloads]


def sent(window: Window[None, int], now_ms: float = 0.0) -> list[OutgoingBatch[None, int]]:
    """All that the window wants to have sent now."""
    return list(iter(lambda: window.next_to_send(now_ms), None))


def store(window: Window[None, int], *batches: OutgoingBatch[None, int], now_ms: float = 0.0) -> None:
    for batch in batches:
        window.answered(batch, AllStored(range(len(batch.sent))), now_ms)


def fail(
    window: Window[None, int], error: DLedgerError, *batches: OutgoingBatch[None, int], now_ms: float = 0.0
) -> None:
    for batch in batches:
        window.answered(batch, error, now_ms)


def bodies(batches: list[OutgoingBatch[None, int]]) -> list[list[bytes]]:
    return [[batch.payloads[place] for place in batch.sent] for batch in batches]


def test_one_batch_is_under_way_until_one_has_succeeded() -> None:
    """Else everything would be sent to somebody who refuses it."""
    window: Window[None, int] = Window(ONE_EACH, RULES, named())
    add(window, b"a", b"b", b"c")
    wish = window.step(0.0)
    assert wish.connect_until_ms == ONE_EACH.timeout_ms
    assert sent(window) == []

    window.connected()
    first = sent(window)
    assert bodies(first) == [[b"a"]]
    store(window, *first)
    assert bodies(sent(window)) == [[b"b"], [b"c"]]


def test_an_answer_of_the_last_stream_opens_no_window_on_the_next() -> None:
    """It says nothing of who is asked now."""
    window = opened(numbering=None)
    refused, stored = add(window, b"a", b"b")
    sent(window)
    fail(window, NotLeaderError("not here any more"), refused)
    store(window, stored)
    add(window, b"c")
    window.step(1000.0)
    window.connected()

    assert sent(window, 1000.0) == [refused]


def test_what_is_in_doubt_is_sent_again_to_a_server_that_remembers_it_and_to_no_other() -> None:
    """Also after a restart: from then on it is the new server's memory that counts."""
    window = opened(numbering=named())
    fates = []
    for number, memory in enumerate(("before", "before", "after", "after", "last")):
        (batch,) = add(window, b"%d" % number)
        window.step(0.0)
        assert sent(window) == [batch]
        fail(window, RequestTimeoutError("no answer"), batch)
        window.step(1000.0)
        window.connected(memory)
        again = sent(window, 1000.0)
        fates.append([one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] if batch.done else again)
        store(window, *again, now_ms=1000.0)

    assert [fate if fate == ["unknown"] else len(fate) for fate in fates] == [1, 1, ["unknown"], 1, ["unknown"]]


def test_a_late_answer_says_which_numbers_are_taken() -> None:
    """Else what comes next gets one of them once more, and the server takes it for a repetition: it is lost."""
    window = opened(numbering=named())
    (late,) = add(window, b"late")
    assert sent(window) == [late]
    window.step(late.give_up_at_ms)
    assert late.done
    store(window, late, now_ms=late.give_up_at_ms)
    (following,) = add(window, b"next", now_ms=late.give_up_at_ms)
    for _ in range(2):
        window.step(late.give_up_at_ms)
        window.connected()
        assert sent(window, late.give_up_at_ms) == [following]
        assert following.sequence == late.sequence
        fail(window, NotLeaderError("not here"), following, now_ms=late.give_up_at_ms)


def test_what_is_added_while_no_request_may_be_sent_goes_together() -> None:
    """Also without any linger."""
    window = opened(WindowOptions(linger_ms=0.0, inflight_requests_max=2), numbering=named())

    under_way = []
    for number in range(10):
        add(window, b"%d" % number)
        under_way += sent(window)
    assert bodies(under_way) == [[b"0"], [b"1"]]

    store(window, under_way[0])
    assert bodies(sent(window)) == [[b"%d" % number for number in range(2, 10)]]


@pytest.mark.parametrize(("requests", "items", "expected"), [(3, 100, 3), (100, 5, 5)])
def test_no_more_is_under_way_than_allowed(requests: int, items: int, expected: int) -> None:
    """Requests and items are bounded, whichever is less."""
    options = WindowOptions(linger_ms=0.0, batch_items=1, inflight_requests_max=requests, inflight_items_max=items)
    window = opened(options, numbering=named())

    add(window, *(b"%d" % number for number in range(20)))

    assert len(sent(window)) == expected


def test_a_batch_larger_than_all_that_may_be_under_way_goes_alone() -> None:
    """It could never be sent otherwise."""
    window = opened(WindowOptions(linger_ms=0.0, inflight_items_max=2), numbering=named())

    window.add_whole([b"a", b"b", b"c"], 0.0)

    assert bodies(sent(window)) == [[b"a", b"b", b"c"]]


def test_nothing_goes_under_a_new_name_while_something_is_under_way_under_the_old_one() -> None:
    """What the server refuses under one name does not keep it from storing what follows under another one."""
    window = opened(numbering=named())
    batches = add(window, b"a", b"b", b"refused", b"d")
    sent(window)
    lost = RequestTimeoutError("the stream ended")
    fail(window, lost, batches[0], batches[1])
    fail(window, InvalidRequestError("never"), batches[2])
    fail(window, lost, batches[3])
    window.step(1000.0)
    window.connected()

    (first,) = sent(window)
    store(window, first)
    assert bodies(sent(window)) == [[b"b"]]
    store(window, batches[1])
    assert [(batch.producer, batch.sequence) for batch in sent(window)] == [("n1", 0)]
    assert batches[3].producer == "n1", "nothing is ever stored behind the number of the refused one"


def test_a_refused_item_is_found_among_those_that_went_with_it() -> None:
    """Where the server refuses all of a request for one item in it."""
    world = World(WindowOptions(linger_ms=1.0), numbering=named())
    payloads = [b"%02d" % number for number in range(16)]
    payloads[11] = REFUSED
    told = [world.window.add(payload, 0.0) for payload in payloads]
    world.run()

    assert [place for batch, place in told if isinstance(batch.outcomes[place], InvalidRequestError)] == [11]
    assert world.log.entries == [one for one in payloads if one != REFUSED]
    assert len(world.requests) <= 12
    assert len({producer for producer, _, _ in world.requests}) == 1


def test_what_is_to_be_stored_together_is_refused_together() -> None:
    """All or nothing."""
    world = World(WindowOptions(linger_ms=0.0), numbering=named())
    batch = world.window.add_whole([b"a", REFUSED, b"b"], 0.0)
    world.run()

    assert [type(outcome) for outcome in batch.outcomes] == [InvalidRequestError] * 3
    assert world.log.entries == []


def test_an_answer_that_comes_too_late_still_counts_for_what_follows() -> None:
    """Who sent it was told that nobody knows; the name and its numbers go on."""
    window = opened(numbering=named())
    late, _ = window.add(b"late", 0.0, timeout_ms=50.0)
    sent(window)
    window.step(50.0)
    assert late.done
    assert [outcome.outcome for outcome in late.outcomes if isinstance(outcome, RequestTimeoutError)] == ["unknown"]

    store(window, late, now_ms=60.0)
    add(window, b"next", now_ms=60.0)
    (following,) = sent(window, 60.0)
    assert (following.producer, following.sequence) == ("n0", 2)
    assert window.pending_bytes == following.size


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(RequestTimeoutError("lost"), ("n1", 0)), (InvalidRequestError("never"), ("n0", 1))],
    ids=["unknown", "refused"],
)
def test_what_turns_out_late_not_to_be_stored_leaves_no_hole(answer: DLedgerError, expected: tuple[str, int]) -> None:
    """Else whatever follows would wait for its number."""
    window = opened(numbering=named())
    late, _ = window.add(b"late", 0.0, timeout_ms=50.0)
    sent(window)
    window.step(50.0)

    fail(window, answer, late, now_ms=60.0)
    add(window, b"next", now_ms=60.0)
    window.step(60.0)
    if not window.is_connected:
        window.connected()
    (following,) = sent(window, 60.0)
    assert (following.producer, following.sequence) == expected


def test_a_short_time_out_of_one_call_ends_no_stream() -> None:
    """Others wait on it."""
    window = opened(numbering=named())
    window.add(b"hasty", 0.0, timeout_ms=50.0)
    window.add(b"patient", 0.0)
    sent(window)

    assert window.step(100.0).leave == ""
    assert window.is_connected
    assert window.step(LOOK_AFTER_MS).leave != ""


def test_a_silent_server_is_left_once_another_one_leads() -> None:
    """A frozen one ends no connection; a slow one is not left."""
    window = opened(numbering=named())
    (batch,) = add(window, b"a")
    sent(window)
    assert not window.step(LOOK_AFTER_MS - 1).look
    assert window.step(LOOK_AFTER_MS).look
    assert not window.step(LOOK_AFTER_MS).look, "one look at a time"

    window.looked(LOOK_AFTER_MS + 5, is_led_by_another=False)
    wish = window.step(LOOK_AFTER_MS + 5)
    assert (wish.leave, wish.look) == ("", False), "a group that is late would get later by the questions"
    window.looked(2 * LOOK_AFTER_MS, is_led_by_another=True)
    assert "another server leads" in window.step(2 * LOOK_AFTER_MS).leave
    fail(window, RequestTimeoutError("it ended"), batch, now_ms=2 * LOOK_AFTER_MS)
    assert window.step(2 * LOOK_AFTER_MS).connect_until_ms is not None


def test_a_look_for_one_answer_says_nothing_of_the_next() -> None:
    """It was begun because of what is answered by now; what was sent since is not overdue."""
    window = opened(numbering=named())
    (batch,) = add(window, b"a")
    sent(window)
    assert window.step(LOOK_AFTER_MS).look
    store(window, batch, now_ms=LOOK_AFTER_MS + 1)
    add(window, b"b", now_ms=LOOK_AFTER_MS + 1)
    assert sent(window, LOOK_AFTER_MS + 1)

    window.looked(LOOK_AFTER_MS + 5, is_led_by_another=True)

    assert window.step(LOOK_AFTER_MS + 5).leave == ""


def test_what_is_doubtful_is_not_sent_to_a_server_that_has_forgotten() -> None:
    """It could be stored a second time, as that of a new producer."""
    window: Window[None, int] = Window(ONE_EACH, RULES, named())
    (doubtful,) = add(window, b"a")
    window.step(0.0)
    window.connected("memory 1")
    fail(window, RequestTimeoutError("it ended"), *sent(window))
    add(window, b"b")
    window.step(1000.0)

    window.connected("memory 2")
    window.step(1000.0)

    assert doubtful.done
    assert bodies(sent(window)) == [[b"b"]]


def test_a_server_that_tells_nothing_of_its_memory_makes_no_other_one_forgotten() -> None:
    """What became doubtful at the first one still is when that comes back, and has forgotten it."""
    window: Window[None, int] = Window(ONE_EACH, RULES, named())
    (doubtful,) = add(window, b"a")
    for now_ms, memory in ((0.0, "memory 1"), (1000.0, ""), (2000.0, "memory 2")):
        window.step(now_ms)
        assert not doubtful.done
        window.connected(memory)
        fail(window, RequestTimeoutError("it ended"), *sent(window, now_ms), now_ms=now_ms)

    assert doubtful.done


def test_nothing_is_sent_again_without_time_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is certainly not stored would become unknown."""
    monkeypatch.setattr(window_module, "RETRY_STEP_MS", 100.0)
    window = opened(WindowOptions(linger_ms=0.0, timeout_ms=1000.0), numbering=named())
    (batch,) = add(window, b"a")
    sent(window)
    fail(window, NotLeaderError("not here"), batch, now_ms=800.0)
    window.step(900.0)
    window.connected()

    assert sent(window, 901.0) == []
    window.step(1000.0)
    assert [type(outcome) for outcome in batch.outcomes] == [UnavailableError]


def test_a_limit_is_told_as_a_person_would() -> None:
    """What is left of 5 s after the leader was looked for is still 5 s to whoever reads it."""
    window = Window(WindowOptions(timeout_ms=4999.99), RULES, None)
    (batch,) = add(window, b"a")

    window.step(5000.0)

    assert "within 5 s" in str(batch.outcomes[0])


def test_an_abandoned_window_sends_nothing_more() -> None:
    """What was under way is unknown, the rest was certainly not stored."""
    window = opened(WindowOptions(linger_ms=0.0, batch_items=1, inflight_requests_max=1), numbering=named())
    under_way, waiting = add(window, b"a", b"b")
    sent(window)

    window.fail_all(UnavailableError("closed"), 1.0)
    fail(window, RequestTimeoutError("it ended"), under_way, now_ms=2.0)

    assert not window.pending_items
    assert [one.outcome for one in (*under_way.outcomes, *waiting.outcomes)] == ["unknown", "not_applied"]  # type: ignore[union-attr]
    with pytest.raises(UnavailableError):
        window.add(b"c", 3.0)


def test_given_numbers_follow_each_other() -> None:
    """What is missing is told; what is behind a lost one fails with it."""
    window = opened(WindowOptions(linger_ms=0.0, batch_items=1), numbering=None)
    with pytest.raises(InvalidRequestError, match="enable_idempotence"):
        window.check_number(0)

    window = Window(ONE_EACH, RULES, ProducerNumbering("mine"))
    window.check_number(7)
    first, _ = window.add(b"a", 0.0, sequence=7)
    with pytest.raises(OutOfOrderSequenceError, match="next is 8"):
        window.check_number(9)
    window.check_number(8)
    second, _ = window.add(b"b", 0.0, sequence=8)
    window.step(0.0)
    window.connected()
    fail(window, InvalidRequestError("never"), *sent(window))
    window.step(1.0)

    assert [type(one) for one in (*first.outcomes, *second.outcomes)] == [InvalidRequestError, OutOfOrderSequenceError]
    window.check_number(7)


def test_after_given_numbers_have_failed_new_ones_survive_the_next_failure() -> None:
    """What became of the former ones has been told: it says nothing of those that the application gives now."""
    window: Window[None, int] = Window(ONE_EACH, RULES, ProducerNumbering("mine"))
    for number in (0, 1):
        window.add(b"x", 0.0, sequence=number)
    window.step(0.0)
    window.connected()
    fail(window, InvalidRequestError("never"), *sent(window))
    again, _ = window.add(b"y", 1.0, sequence=0)
    fail(window, NotLeaderError("not here"), *sent(window, 1.0), now_ms=1.0)
    window.step(1000.0)
    window.connected()
    assert sent(window, 1000.0) == [again]


def test_given_numbers_follow_what_was_taken() -> None:
    """Not what was offered: only a part of it may have found room."""
    window: Window[None, int] = Window(ONE_EACH, RULES, ProducerNumbering("mine"))
    _, _, count = window.add_some([b"a", b"b"], 0, 0.0, sequence=5)
    assert count == 1

    with pytest.raises(OutOfOrderSequenceError, match="next is 6"):
        window.check_number(7)
    window.check_number(6)


def test_a_full_server_is_asked_again_after_a_pause() -> None:
    """Longer each time, and never longer than an election; at first no longer than a planned change of leaders."""
    window = opened(numbering=named())
    (batch,) = add(window, b"a")
    now_ms, pauses = 0.0, []
    for _ in range(7):
        (under_way,) = sent(window, now_ms)
        fail(window, PendingFullError("full"), under_way, now_ms=now_ms)
        pauses.append(0.0)
        while (wish := window.step(now_ms)).connect_until_ms is None:
            pauses[-1] += wish.wake_at_ms - now_ms
            now_ms = wish.wake_at_ms
        window.connected()

    assert not batch.done
    assert pauses == [0.0, 10.0, 20.0, 40.0, 80.0, 100.0, 100.0]


def test_the_numbers_of_a_lost_part_are_not_given_to_the_next_one() -> None:
    """If the lost one was stored after all, the server would take the next one for its repetition."""
    window = opened(WindowOptions(linger_ms=1.0), numbering=named())
    (batch, *_) = add(window, b"a", b"b", b"c", b"d")
    now_ms = 1.0
    for answer in (InvalidRequestError("one of them"), RequestTimeoutError("it ended"), InvalidRequestError("never")):
        now_ms += 1000.0
        window.step(now_ms)
        window.connected()
        assert sent(window, now_ms) == [batch]
        fail(window, answer, batch, now_ms=now_ms)
    window.step(now_ms)
    window.connected()

    assert bodies(sent(window, now_ms)) == [[b"c", b"d"]]
    assert (batch.producer, batch.sequence) == ("n1", 0)


def test_a_late_refusal_makes_nothing_certain_that_was_unknown() -> None:
    """It is of the second attempt: the number may be taken, and what follows must not get it."""
    window = opened(numbering=named())
    late, _ = window.add(b"late", 0.0, timeout_ms=2000.0)
    fail(window, RequestTimeoutError("it ended"), *sent(window))
    window.step(1900.0)
    window.connected()
    assert sent(window, 1900.0) == [late]
    window.step(2000.0)
    assert late.done

    fail(window, InvalidRequestError("the limits have changed"), late, now_ms=2001.0)
    add(window, b"next", now_ms=2001.0)
    window.step(2001.0)
    (following,) = sent(window, 2001.0)
    assert (following.producer, following.sequence) == ("n1", 0)


def test_an_abandoned_window_forgets_nothing_that_was_refused_or_never_sealed() -> None:
    """Also while it waits for the answers to others, or for more items: each is told that it is not stored."""
    window = opened(WindowOptions(linger_ms=0.0, batch_items=1), numbering=named())
    refused, under_way = add(window, b"a", b"b")
    sent(window)
    fail(window, NotLeaderError("not here"), refused)
    lingering, _ = window.add(b"c", 0.0)
    patient: Window[None, int] = Window(WindowOptions(linger_ms=10_000.0), RULES, named())
    unsealed, _ = patient.add(b"d", 0.0)

    for one in (window, patient):
        one.fail_all(UnavailableError("closed"), 1.0)
    fail(window, RequestTimeoutError("it ended"), under_way, now_ms=2.0)

    assert not window.pending_items
    assert not patient.pending_items
    for batch in (refused, lingering, unsealed):
        assert batch.done
        assert [type(outcome) for outcome in batch.outcomes] == [UnavailableError]


def test_all_that_waits_is_counted_however_it_was_added() -> None:
    """Else there is no bound, or never room again."""
    window: Window[None, int] = Window(WindowOptions(linger_ms=10_000.0), RULES, named())
    whole = window.add_whole([b"a", b"b"], 0.0)
    window.step(0.0)
    window.connected()
    assert window.pending_bytes == whole.size == 2 * 65
    window.add(b"c", 0.0)
    assert window.pending_bytes == 3 * 65

    store(window, *sent(window))
    assert window.pending_bytes == 65


def test_an_item_with_a_time_out_of_its_own_shares_no_batch() -> None:
    """A batch has one deadline."""
    window: Window[None, int] = Window(WindowOptions(linger_ms=10_000.0), RULES, named())
    patient, _ = window.add(b"patient", 0.0)
    hasty, _ = window.add(b"hasty", 0.0, timeout_ms=50.0)

    window.seal()
    window.step(50.0)

    assert (patient.done, hasty.done) == (False, True)


@pytest.mark.parametrize("wrong", [{"batch_items": 0}, {"timeout_ms": 0.0}, {"linger_ms": -1.0}])
def test_impossible_options_are_refused(wrong: dict[str, float]) -> None:
    """With what is wrong."""
    with pytest.raises(ConfigError, match=next(iter(wrong)).split("_")[0]):
        WindowOptions(**wrong)  # type: ignore[arg-type]


def test_what_waits_for_something_lost_holds_up_nothing_behind_it() -> None:
    """However much time it has left: only a late copy of what is lost could still help."""
    window = opened(numbering=named())
    lost, _ = window.add(b"lost", 0.0, timeout_ms=100.0)
    orphan, _ = window.add(b"orphan", 0.0, timeout_ms=600_000.0)
    assert sent(window) == [lost, orphan]
    fail(window, RequestTimeoutError("the stream ended"), lost, orphan)
    window.broken(0.0)
    (other,) = add(window, b"other")
    assert window.step(1000.0).connect_until_ms is not None
    assert lost.done
    window.connected()

    assert sent(window, 1000.0) == [orphan]
    fail(window, OutOfOrderSequenceError("2 does not follow 1"), orphan, now_ms=1000.0)
    assert [one.outcome for one in orphan.outcomes if isinstance(one, DLedgerError)] == ["unknown"]
    assert window.step(2000.0).connect_until_ms is not None
    window.connected()
    assert sent(window, 2000.0) == [other]
    assert (other.producer, other.sequence) == ("n1", 0)


def test_what_is_refused_late_counts_for_nothing() -> None:
    """Neither do those before it: they may be missing just as well."""
    numbering = named()
    window = opened(numbering=numbering)
    first, second = (window.add(payload, 0.0, timeout_ms=100.0)[0] for payload in (b"a", b"b"))
    assert sent(window) == [first, second]
    window.step(200.0)
    fail(window, NotLeaderError("not here"), first, second, now_ms=200.0)
    (other,) = add(window, b"c", now_ms=200.0)
    window.step(300.0)
    window.connected()
    assert sent(window, 300.0) == [other]
    assert (other.producer, other.sequence) == ("n0", 1)


def test_of_given_numbers_only_those_of_what_is_taken_are_used_up() -> None:
    """Else what comes next would get a number that is another one's."""
    window: Window[None, int] = Window(WindowOptions(batch_items=2), RULES, ProducerNumbering("mine"))
    batch, place, count = window.add_some([b"0", b"1", b"2"], 0, 0.0, sequence=0)
    assert (batch.sequence, place, count) == (0, 0, 2)
    with pytest.raises(OutOfOrderSequenceError, match="next is 2"):
        window.check_number(3)
    window.add_some([b"0", b"1", b"2"], 2, 0.0, sequence=2)
    window.check_number(3)


@pytest.mark.parametrize("is_late", [False, True])
def test_an_answer_that_makes_no_sense_says_nothing_of_what_is_stored(*, is_late: bool) -> None:
    """A place too few: the others may be stored, too."""
    window: Window[None, AppendResult] = Window(WindowOptions(linger_ms=0.0), APPEND_RULES, named())
    batch = window.add_whole([b"a", b"b"], 0.0, timeout_ms=100.0)
    window.step(0.0)
    window.connected()
    assert window.next_to_send(0.0) is batch
    if is_late:
        window.step(200.0)
    window.answered(batch, AllStored([AppendResult(LogIndex(0), Term(1), Position(0))]), 200.0)

    assert [one.outcome for one in batch.outcomes if isinstance(one, DLedgerError)] == ["unknown"] * 2
    other = window.add_whole([b"c"], 200.0)
    window.step(300.0)
    window.connected()
    assert window.next_to_send(300.0) is other
    assert (other.producer, other.sequence) == ("n1", 0), "nobody knows what the other name is at"


def test_nothing_lingers_beyond_its_time() -> None:
    window: Window[None, int] = Window(WindowOptions(linger_ms=60_000.0, timeout_ms=100.0), RULES, named())
    (batch,) = add(window, b"a")
    assert window.step(0.0).wake_at_ms == 100.0
    window.step(100.0)
    assert batch.done


def test_whoever_asks_again_and_again_leaves_nothing_behind() -> None:
    window = opened()
    (batch,) = add(window, b"a")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            wait_for(batch, 0.0)
    assert not batch.callbacks


def test_an_item_that_never_left_says_what_it_waited_for() -> None:
    """A server that cannot be reached is something else than one that is busy with earlier requests."""
    unreachable: Window[None, int] = Window(ONE_EACH, RULES)
    (lonely,) = add(unreachable, b"a")
    unreachable.step(0.0)
    busy = opened(WindowOptions(linger_ms=0.0, batch_items=1, inflight_requests_max=1))
    _under_way, behind = add(busy, b"a", b"b")
    sent(busy)

    for window in (unreachable, busy):
        window.step(ONE_EACH.timeout_ms)

    assert "no connection to a leader was open yet" in str(lonely.outcomes[0])
    assert "earlier requests were still in flight" in str(behind.outcomes[0])


@pytest.mark.parametrize(
    ("refusal", "is_told"),
    [(PendingFullError("too much waits"), True), (OutOfOrderSequenceError("not its turn"), False)],
)
def test_an_item_behind_a_refused_one_says_what_the_server_lacked(refusal: DLedgerError, is_told: bool) -> None:
    """But not what was wrong with another item only."""
    window = opened()
    (first,) = add(window, b"a")
    sent(window)
    (behind,) = add(window, b"b")
    fail(window, refusal, first)
    window.step(ONE_EACH.timeout_ms)

    (outcome,) = behind.outcomes
    assert isinstance(outcome, UnavailableError)
    assert outcome.outcome == "not_applied"
    assert (str(refusal) in str(outcome)) is is_told
    assert (outcome.__cause__ is refusal) is is_told


def test_a_refusal_that_has_passed_is_no_reason() -> None:
    window = opened(WindowOptions(linger_ms=0.0, batch_items=1, inflight_requests_max=1))
    (first,) = add(window, b"a")
    sent(window)
    fail(window, PendingFullError("too much waits"), first)
    window.step(1000.0)
    window.connected()
    store(window, *sent(window, 1000.0), now_ms=1000.0)
    _under_way, behind = add(window, b"b", b"c", now_ms=1000.0)
    sent(window, 1000.0)
    window.step(1000.0 + ONE_EACH.timeout_ms)

    assert "earlier requests were still in flight" in str(behind.outcomes[0])
