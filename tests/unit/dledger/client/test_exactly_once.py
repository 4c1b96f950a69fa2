"""Appends that are repeated until it is known what became of them, against fake nodes that know producers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from dledger.client import DLedgerClient
from dledger.client.aio import appending as module
from dledger.client.aio.appending import INFLIGHT_REQUESTS_MAX
from dledger.errors import (
    DLedgerError,
    EntryTooLargeError,
    NotLeaderError,
    OutOfOrderSequenceError,
    PendingFullError,
    QuorumAckTimeoutError,
    RequestTimeoutError,
    TermChangedError,
    TooManyProducersError,
    UnavailableError,
    UnknownProducerError,
)
from dledger.sending import window
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.waiting import wait_until


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group() as made:
        yield made


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry that is submitted has a request of its own."""
    monkeypatch.setattr(module, "_SUBMITTED", replace(module._SUBMITTED, batch_items=1))


@pytest.fixture
def tens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten entries go in a request, at most."""
    monkeypatch.setattr(module, "_SUBMITTED", replace(module._SUBMITTED, batch_items=10))


@pytest.fixture
def client(group: FakeGroup) -> Iterator[DLedgerClient]:
    with DLedgerClient(group.addresses) as made:
        yield made


@pytest.mark.parametrize("error", [TermChangedError("lost"), QuorumAckTimeoutError("late")])
def test_an_unknown_outcome_is_repeated(client: DLedgerClient, group: FakeGroup, error: DLedgerError) -> None:
    """It ends with the certainty that the entry is stored."""
    group.nodes[0].fail_appends = [None, error]
    client.append(b"a")

    assert client.append(b"b").index == 1
    assert group.nodes[0].bodies() == [b"a", b"b"]


def test_an_append_whose_answer_was_lost_is_found_again(client: DLedgerClient, group: FakeGroup) -> None:
    """The leader has stored it, and dies; the next one tells where it is."""
    client.append(b"a")
    group.nodes[0].hold = True
    with ThreadPoolExecutor(1) as pool:
        appended = pool.submit(client.append, b"b")
        wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
        group.elect(1)
        group.kill(0)
        result = appended.result()

    assert result.index == 1
    assert group.nodes[1].bodies() == [b"a", b"b"]
    assert group.nodes[1].repeated == 1


def test_a_frozen_leader_is_left_when_another_one_leads(client: DLedgerClient, group: FakeGroup) -> None:
    """It answers nothing and ends no connection; the deadline is far away."""
    client.append(b"a")
    group.nodes[0].hold = True
    with ThreadPoolExecutor(1) as pool:
        appended = pool.submit(client.append, b"b", timeout_s=30)
        wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
        group.elect(2)

        result = appended.result(timeout=60)

    assert result.index == 1
    assert group.nodes[2].bodies() == [b"a", b"b"]


def test_many_threads_survive_lost_answers(client: DLedgerClient, group: FakeGroup) -> None:
    """All that was under way is sent again in order; nothing is stored twice, nothing is refused."""
    bodies = [b"%d" % number for number in range(60)]
    client.append(b"first")
    group.nodes[0].hold = True
    with ThreadPoolExecutor(60) as pool:
        futures = [pool.submit(client.append, body) for body in bodies[:40]]
        wait_until(lambda: len(group.nodes[0].held) == INFLIGHT_REQUESTS_MAX, "in flight")
        group.elect(1)
        group.nodes[1].fail_appends = [None, TermChangedError("lost"), PendingFullError("full"), None, None]
        group.kill(0)
        futures += [pool.submit(client.append, body) for body in bodies[40:]]
        places = [future.result().index for future in futures]

    stored = group.nodes[1].bodies()
    assert sorted(stored[1:]) == sorted(bodies)
    assert [stored[place] for place in places] == bodies


def test_only_the_deadline_leaves_an_outcome_unknown(client: DLedgerClient, group: FakeGroup) -> None:
    """Then the error says so, and what comes later gets a name of its own."""
    client.append(b"a")
    group.nodes[0].fail_appends = [TermChangedError("lost")] * 100

    with pytest.raises(RequestTimeoutError, match=r"whether it was stored within 0\.3 s: ") as caught:
        client.append(b"b", timeout_s=0.3)
    group.nodes[0].fail_appends = []  # the last attempt may come only now

    assert caught.value.outcome == "unknown"
    index = client.append(b"c").index
    assert group.nodes[0].bodies()[index] == b"c"
    assert len(group.nodes[0].producers) == 2


def test_a_refused_append_uses_up_no_name(client: DLedgerClient, group: FakeGroup) -> None:
    """What is certainly not stored leaves no hole."""
    for number in range(5):
        client.append(b"a")
        group.nodes[0].fail_appends = [EntryTooLargeError("large")]
        with pytest.raises(EntryTooLargeError):
            client.append(b"large")
        assert client.append(b"b").index == 2 * number + 1

    assert len(group.nodes[0].producers) == 1


def test_a_client_that_was_forgotten_goes_on_under_a_new_name(client: DLedgerClient, group: FakeGroup) -> None:
    """It was idle for longer than the group remembers producers."""
    client.append(b"a")
    group.nodes[0].producers.clear()

    assert client.append(b"b").index == 1
    assert group.nodes[0].bodies() == [b"a", b"b"]


@pytest.mark.usefixtures("single")
def test_what_waits_behind_a_forgotten_append_in_doubt_goes_on_at_once(group: FakeGroup) -> None:
    """Nothing can tell any more what became of it, so that is told; the rest does not wait out its time-out."""
    node = group.nodes[0]
    with DLedgerClient(group.addresses, timeout_s=60) as client:
        client.submit(b"a").result(60)
        node.fail_appends = [TermChangedError("lost")]
        node.producers.clear()
        futures = [client.submit(b"%d" % number) for number in range(10)]

        with pytest.raises(DLedgerError) as caught:
            futures[0].result(timeout=60)
        indexes = [one.result(timeout=60).index for one in futures[1:]]

    assert caught.value.outcome == "unknown"
    assert [node.bodies()[index] for index in indexes] == [b"%d" % number for number in range(1, 10)]


def test_without_room_for_a_producer_appends_are_not_numbered(client: DLedgerClient, group: FakeGroup) -> None:
    """They are stored, in one attempt; what is unknown then is told, not repeated."""
    node = group.nodes[0]
    node.fail_appends = [TooManyProducersError("4096 producers")]

    assert client.append(b"a").index == 0
    assert client.append(b"b").index == 1
    node.fail_appends = [QuorumAckTimeoutError("no quorum")]
    with pytest.raises(QuorumAckTimeoutError) as caught:
        client.append(b"c")

    assert caught.value.outcome == "unknown"
    assert node.producers == {}
    node.fail_appends = [TooManyProducersError("4096 producers")]
    with pytest.raises(TooManyProducersError):
        client.append_as("job", 0, [b"d"])


@pytest.mark.usefixtures("single")
def test_what_is_submitted_goes_on_without_room_for_a_producer(client: DLedgerClient, group: FakeGroup) -> None:
    """All is stored, once and in order, though nothing is numbered."""
    node = group.nodes[0]
    node.fail_appends = [TooManyProducersError("4096 producers")]

    futures = [client.submit(b"%d" % number) for number in range(20)]

    assert [future.result().index for future in futures] == list(range(20))
    assert node.bodies() == [b"%d" % number for number in range(20)]


def test_without_a_leader_nothing_was_applied(
    client: DLedgerClient, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is certain, also of what was numbered already."""
    monkeypatch.setattr(window, "RETRY_STEP_MS", 500.0)  # no attempt has less than that to be refused in
    client.append(b"a")
    group.nodes[0].fail_appends = [NotLeaderError("no leader")] * 1000

    with pytest.raises((NotLeaderError, UnavailableError)) as caught:
        client.append(b"b", timeout_s=1.2)

    assert caught.value.outcome == "not_applied"


def test_append_as_repeats_under_the_given_name(client: DLedgerClient, group: FakeGroup) -> None:
    """An application decides what is the same; requests are split, and each is known again."""
    bodies = [b"%d" % number for number in range(1500)]
    client.append(b"another")
    first = client.append_as("job/0", 0, bodies)
    group.nodes[0].fail_appends = [None, TermChangedError("lost")]

    again = client.append_as("job/0", 0, [*bodies, b"new"])

    assert [one.index for one in again] == [*range(1, 1502)]
    assert again[:-1] == first
    assert group.nodes[0].bodies() == [b"another", *bodies, b"new"]
    assert client.producer_sequence("job/0") == 1501
    assert client.producer_sequence("job/1") == 0


def test_append_as_tells_what_is_wrong_with_the_numbers(client: DLedgerClient, group: FakeGroup) -> None:
    """Only the application can know how to go on."""
    client.append_as("job", 0, [b"a"])

    with pytest.raises(OutOfOrderSequenceError):
        client.append_as("job", 2, [b"c"])
    with pytest.raises(UnknownProducerError):
        client.append_as("other", 1, [b"c"])
    group.nodes[0].fail_appends = [TermChangedError("lost")] * 100
    late = (RequestTimeoutError, UnavailableError)  # the time may end while the last answer is awaited, or before that
    with pytest.raises((TermChangedError, *late)) as caught:
        client.append_as("job", 1, [b"b"], timeout_s=0.3)
    assert caught.value.outcome == "unknown"
    assert group.nodes[0].bodies() == [b"a"]


def test_a_refusal_after_an_unknown_outcome_leaves_it_unknown(client: DLedgerClient, group: FakeGroup) -> None:
    """The refusal is of the repetition: what was sent first may be stored all the same."""
    group.nodes[0].fail_appends = [TermChangedError("lost"), EntryTooLargeError("limits have changed")]

    with pytest.raises(DLedgerError) as caught:
        client.append_as("job", 0, [b"a"])

    assert caught.value.outcome == "unknown"


def test_an_interrupted_append_does_not_hold_up_others(client: DLedgerClient, group: FakeGroup) -> None:
    """Whoever gives up waiting leaves its place; later ones learn whether they are stored."""
    client.append(b"a")
    group.nodes[0].hold = True
    errors: list[DLedgerError] = []

    def give_up_soon() -> None:
        try:
            client.append(b"b", timeout_s=0.2)
        except DLedgerError as error:
            errors.append(error)

    thread = threading.Thread(target=give_up_soon)
    thread.start()
    wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
    thread.join()
    group.nodes[0].hold = False

    assert client.append(b"c").index == 2
    assert errors[0].outcome == "unknown"


@pytest.mark.usefixtures("tens")
def test_what_is_unknown_is_repeated_and_keeps_the_order(client: DLedgerClient, group: FakeGroup) -> None:
    """Many batches under way, answers lost, refusals in between: every entry is stored once, in order."""
    bodies = [b"%04d" % number for number in range(300)]
    client.submit(b"first").result(60)
    group.nodes[0].hold = True
    futures = [client.submit(body) for body in bodies]
    wait_until(lambda: len(group.nodes[0].held) > 3, "in flight")
    group.elect(1)
    group.nodes[1].fail_appends = [None, TermChangedError("lost"), PendingFullError("full"), None, None]
    group.kill(0)

    assert [future.result(60).index for future in futures] == list(range(1, 301))
    assert group.nodes[1].bodies() == [b"first", *bodies]


def test_what_is_submitted_leaves_a_frozen_leader(group: FakeGroup) -> None:
    """Long before its deadline."""
    with DLedgerClient(group.addresses, timeout_s=60) as client:
        client.submit(b"a").result(60)
        group.nodes[0].hold = True
        frozen = client.submit(b"b")
        wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
        group.elect(2)

        assert frozen.result(60).index == 1


@pytest.mark.usefixtures("single")
def test_what_follows_a_refused_batch_is_stored_under_the_same_name() -> None:
    """The number of the refused one is given to what comes next."""
    with fake_group(1, max_entry_bytes=1000) as group, DLedgerClient(group.addresses, timeout_s=60) as client:
        futures = [client.submit(body) for body in (b"a", b"x" * 2000, b"b", b"c", b"x" * 2000, b"d")]

        errors = [type(future.exception()) for future in futures]
        assert errors == [type(None), EntryTooLargeError, type(None), type(None), EntryTooLargeError, type(None)]
        assert group.nodes[0].bodies() == [b"a", b"b", b"c", b"d"]
        assert len(group.nodes[0].producers) == 1


@pytest.mark.usefixtures("single")
def test_after_an_unknown_end_another_name_is_taken(group: FakeGroup) -> None:
    """What was given up may be stored; what comes later must not depend on that."""
    with DLedgerClient(group.addresses, timeout_s=2.0) as client:
        client.submit(b"a").result(60)
        group.nodes[0].fail_appends = [TermChangedError("lost")] * 1000
        lost = client.submit(b"lost").exception(60)
        group.nodes[0].fail_appends = []
        client.submit(b"b").result(60)

    assert lost is not None
    assert lost.outcome == "unknown"
    assert group.nodes[0].bodies() == [b"a", b"b"]
    assert len(group.nodes[0].producers) == 2


@pytest.mark.usefixtures("single")
def test_a_client_that_was_forgotten_submits_under_another_name(client: DLedgerClient, group: FakeGroup) -> None:
    """Nobody hears of it."""
    client.submit(b"a").result(60)
    group.nodes[0].producers.clear()
    futures = [client.submit(b"b"), client.submit(b"c")]

    assert [future.result(60).index for future in futures] == [1, 2]
    assert group.nodes[0].bodies() == [b"a", b"b", b"c"]
