"""What is submitted: batching, order across failures, limits; and what an application's callbacks may do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from dledger.client import AppendFuture, DLedgerClient
from dledger.client.aio import appending as module
from dledger.errors import (
    DLedgerError,
    IdentityError,
    InvalidRequestError,
    LeaderNotReadyError,
    PendingFullError,
    TermChangedError,
    UnavailableError,
)
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.waiting import wait_until

PATIENCE_S = 120.0


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group() as made:
        yield made


@pytest.fixture
def client(group: FakeGroup) -> Iterator[DLedgerClient]:
    with DLedgerClient(group.addresses, timeout_s=PATIENCE_S) as made:
        yield made


@pytest.fixture
def plain(group: FakeGroup) -> Iterator[DLedgerClient]:
    """A client whose appends are not known again when they are repeated."""
    with DLedgerClient(group.addresses, enable_idempotence=False) as made:
        yield made


@pytest.fixture
def tens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten entries go in a request, at most."""
    monkeypatch.setattr(module, "_SUBMITTED", replace(module._SUBMITTED, batch_items=10))


def bodies_of(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def is_lost(client: DLedgerClient, address: str) -> bool:
    """Whether the client has no connection to this node."""
    return address not in client._client._connections._links


def test_a_lone_entry_does_not_wait_for_others(client: DLedgerClient) -> None:
    """Nothing waits for a batch to fill."""
    future = client.submit(b"a")

    assert future.result(60).index == 0
    assert future.done()
    assert future.exception() is None


def test_a_callback_comes_once_whenever_it_is_given(client: DLedgerClient, group: FakeGroup) -> None:
    """Before or after the entry is done."""
    called: list[AppendFuture] = []
    group.nodes[0].hold = True
    future = client.submit(b"a")
    future.add_done_callback(called.append)
    wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
    assert not future.done()
    group.nodes[0].release()
    wait_until(lambda: called == [future], "the callback")
    future.add_done_callback(called.append)

    assert called == [future, future]


@pytest.mark.usefixtures("tens")
def test_the_order_is_kept_when_a_batch_is_refused(client: DLedgerClient, group: FakeGroup) -> None:
    """Those after a refused one must not overtake it, although they are in flight already."""
    group.nodes[0].fail_appends = [None, None, PendingFullError("full"), None, LeaderNotReadyError("not yet")]
    bodies = bodies_of(200)

    futures = [client.submit(body) for body in bodies]

    assert [future.exception() for future in futures] == [None] * 200
    assert group.nodes[0].bodies() == bodies


@pytest.mark.usefixtures("tens")
def test_a_new_leader_costs_no_entry_and_no_order(client: DLedgerClient, group: FakeGroup) -> None:
    """In the middle of thousands."""
    bodies = bodies_of(3000)

    for number, body in enumerate(bodies):
        client.submit(body)
        if number == 1500:
            client.flush()
            group.elect(1)
    client.flush()

    assert group.nodes[1].bodies() == bodies


@pytest.mark.usefixtures("tens")
def test_what_was_not_sent_to_a_killed_leader_goes_to_the_next(client: DLedgerClient, group: FakeGroup) -> None:
    """In order and without a gap."""
    bodies = bodies_of(100)
    client.submit(b"first").result(60)
    group.kill(0)
    wait_until(lambda: is_lost(client, group.addresses[0]), "the loss to be noticed")
    futures = [client.submit(body) for body in bodies]
    group.elect(2)

    assert [future.exception(60) for future in futures] == [None] * 100
    assert group.nodes[2].bodies() == [b"first", *bodies]


def test_without_idempotence_an_unknown_outcome_is_told(plain: DLedgerClient, group: FakeGroup) -> None:
    """It is the caller's decision whether to risk a repetition; later entries are stored."""
    group.nodes[0].fail_appends = [TermChangedError("lost")]
    lost = plain.submit(b"a")
    plain.flush()

    error = lost.exception()
    assert isinstance(error, TermChangedError)
    assert error.outcome == "unknown"
    assert plain.submit(b"b").result().index == 0


def test_without_idempotence_what_was_in_flight_at_a_broken_connection_is_unknown(
    plain: DLedgerClient, group: FakeGroup
) -> None:
    """Sent, and the node is gone."""
    group.nodes[0].hold = True
    future = plain.submit(b"a")
    wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
    group.kill(0)

    error = future.exception(60)
    assert error is not None
    assert error.outcome == "unknown"


def test_at_the_deadline_only_what_was_sent_is_unknown(group: FakeGroup) -> None:
    """What was never sent, because no leader was left, is not applied."""
    group.nodes[0].hold = True
    with DLedgerClient(group.addresses, timeout_s=2.0) as client:
        first = client.submit(b"a")
        wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
        errors = [first.exception(60)]
        for number in range(3):
            group.kill(number)
        wait_until(lambda: is_lost(client, group.addresses[0]), "the loss to be noticed")

        errors.append(client.submit(b"b").exception(60))

    assert [error.outcome for error in errors if error is not None] == ["unknown", "not_applied"]
    assert isinstance(errors[1], UnavailableError)


def test_without_a_group_all_fails_within_the_deadline(group: FakeGroup) -> None:
    """Not applied, and closing does not hang."""
    for number in range(3):
        group.kill(number)
    started = time.monotonic()

    with DLedgerClient(group.addresses, timeout_s=0.5) as client:
        future = client.submit(b"a")

    assert time.monotonic() - started < 60
    error = future.exception()
    assert isinstance(error, UnavailableError)
    assert error.outcome == "not_applied"


def test_a_hopeless_mistake_is_told_at_once(group: FakeGroup) -> None:
    """A wrong group is not retried until the deadline."""
    with DLedgerClient(group.addresses, group="other", timeout_s=30) as client:
        assert isinstance(client.submit(b"a").exception(60), IdentityError)


# --- what callbacks may do ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tens")
def test_a_callback_that_raises_keeps_nobody_else_from_being_told(client: DLedgerClient, group: FakeGroup) -> None:
    """And breaks nothing: also with an error of ours, as ``result`` raises it."""
    told: list[object] = []

    def raises(_future: object) -> None:
        raise InvalidRequestError("mine") if told else ZeroDivisionError

    client.submit(b"a").result(PATIENCE_S)
    group.nodes[0].hold = True
    first, second = client.submit(b"b"), client.submit(b"c")
    for future in (first, second):
        future.add_done_callback(raises)
        future.add_done_callback(told.append)
    wait_until(lambda: len(group.nodes[0].held) >= 1, "under way")
    group.nodes[0].hold = False
    group.nodes[0].release()
    wait_until(lambda: len(told) == 2, "both are told")
    first.add_done_callback(raises)  # at once
    assert client.submit(b"d").result(PATIENCE_S).index == 3
    assert group.nodes[0].repeated == 0, "the connection was not broken by it"


@pytest.mark.parametrize("error", [None, InvalidRequestError("no")])
def test_a_callback_may_close_its_client(group: FakeGroup, error: InvalidRequestError | None) -> None:
    """Nothing waits for ever, and closing again does nothing."""
    client = DLedgerClient(group.addresses, timeout_s=PATIENCE_S)
    closed = threading.Event()

    def close(_future: object) -> None:
        client.close()
        closed.set()

    group.nodes[0].fail_appends = [error]
    client.submit(b"a").add_done_callback(close)

    assert closed.wait(PATIENCE_S)
    thread = threading.Thread(target=client.close, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("use", [lambda client: client.flush(), lambda client: client.append(b"c")])
def test_a_callback_waits_for_nothing_that_waits_for_it(
    client: DLedgerClient, group: FakeGroup, use: Callable[[DLedgerClient], object]
) -> None:
    """It is told so; it may submit."""
    raised: list[DLedgerError] = []

    def wait(_future: object) -> None:
        try:
            use(client)
        except DLedgerError as error:
            raised.append(error)

    group.nodes[0].hold = True
    first = client.submit(b"a")
    first.add_done_callback(wait)
    first.add_done_callback(lambda _future: client.submit(b"b"))
    group.nodes[0].hold = False
    group.nodes[0].release()
    wait_until(lambda: len(group.nodes[0].bodies()) == 2, "the other one is stored")

    assert [type(one) for one in raised] == [UnavailableError]
    assert group.nodes[0].bodies() == [b"a", b"b"]


@pytest.mark.parametrize("wrong", ["text", None, 7])
def test_what_is_no_bytes_harms_nothing_else(client: DLedgerClient, group: FakeGroup, wrong: object) -> None:
    """Neither those beside it nor those after it."""
    with pytest.raises((TypeError, InvalidRequestError)):
        client.append(wrong)  # type: ignore[arg-type]
    assert client.append(b"a").index == 0

    good = [client.submit(b"b")]
    try:
        bad = [client.submit(wrong)]  # type: ignore[arg-type]
    except TypeError:
        bad = []
    good.append(client.submit(b"c"))
    assert [one.result(PATIENCE_S).index for one in good] == [1, 2]
    for one in bad:
        failure = one.exception(PATIENCE_S)
        assert isinstance(failure, InvalidRequestError)
        assert failure.outcome == "not_applied"
    assert group.nodes[0].bodies() == [b"a", b"b", b"c"]


def test_an_error_is_not_changed_by_a_callback(client: DLedgerClient, group: FakeGroup) -> None:
    """That raises it again."""
    group.nodes[0].fail_appends = [InvalidRequestError("no")]
    future = client.submit(b"a")
    future.add_done_callback(lambda one: one.result())
    failure = future.exception(PATIENCE_S)

    assert client.submit(b"b").result(PATIENCE_S).index == 0
    assert failure is not None
    assert failure.outcome == "not_applied"
