"""The pipelining appender: batching, order across failures, limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from dledger.client import Appender, AppendFuture, DLedgerClient
from dledger.client.appender import ENTRY_OVERHEAD_BYTES, AppenderOptions
from dledger.client.shared import AppendResult
from dledger.errors import (
    EntryTooLargeError,
    IdentityError,
    LeaderNotReadyError,
    PendingFullError,
    QuorumAckTimeoutError,
    TermChangedError,
    UnavailableError,
)
from dledger.sending.stream import Stream
from dledger.sending.threads import Links
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.waiting import wait_until


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group() as made:
        yield made


@pytest.fixture
def client(group: FakeGroup) -> Iterator[DLedgerClient]:
    with DLedgerClient(group.addresses) as made:
        yield made


@pytest.fixture
def plain(group: FakeGroup) -> Iterator[DLedgerClient]:
    """A client whose appends are not known again when they are repeated."""
    with DLedgerClient(group.addresses, enable_idempotence=False) as made:
        yield made


def bodies_of(count: int) -> list[bytes]:
    return [b"%06d" % number for number in range(count)]


def test_appender_batches_and_keeps_the_order(client: DLedgerClient, group: FakeGroup) -> None:
    """Many appends, few requests; every future knows its own entry."""
    bodies = bodies_of(5000)

    with client.appender(batch_entries=500) as appender:
        futures = [appender.append(body) for body in bodies]

    assert group.nodes[0].bodies() == bodies
    assert [future.result().index for future in futures] == list(range(5000))
    assert futures[7].result().position == group.nodes[0].entries[7].position
    assert len(group.nodes[0].batches) <= 20
    assert appender.failed_entries == 0


def test_appender_sends_a_lone_entry_after_the_linger(client: DLedgerClient) -> None:
    """Nothing waits for a batch to fill."""
    with client.appender(linger_ms=5) as appender:
        future = appender.append(b"a")

        assert future.result(5).index == 0
        assert future.done()
        assert future.exception() is None


def test_appender_calls_back_once_whenever_asked(client: DLedgerClient, group: FakeGroup) -> None:
    """Before or after the entry is done."""
    called: list[AppendFuture] = []
    group.nodes[0].hold = True
    with client.appender() as appender:
        future = appender.append(b"a")
        future.add_done_callback(called.append)
        wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
        with pytest.raises(TimeoutError):
            future.result(0.01)
        assert not future.done()
        group.nodes[0].release()
        wait_until(lambda: called == [future], "the callback")
        future.add_done_callback(called.append)

    assert called == [future, future]


def test_appender_keeps_the_order_when_refused(client: DLedgerClient, group: FakeGroup) -> None:
    """Batches after a refused one must not overtake it, although they are in flight already."""
    group.nodes[0].fail_appends = [None, None, PendingFullError("full"), None, LeaderNotReadyError("not yet")]
    bodies = bodies_of(200)

    with client.appender(batch_entries=10) as appender:
        for body in bodies:
            appender.append(body)

    assert group.nodes[0].bodies() == bodies
    assert appender.failed_entries == 0


def test_appender_follows_a_new_leader_in_order(client: DLedgerClient, group: FakeGroup) -> None:
    """A change of leaders in the middle costs no entry and no order."""
    bodies = bodies_of(3000)

    with client.appender(batch_entries=50) as appender:
        for number, body in enumerate(bodies):
            appender.append(body)
            if number == 1500:
                appender.flush()
                group.elect(1)

    assert group.nodes[1].bodies() == bodies
    assert appender.failed_entries == 0


def test_appender_survives_a_killed_leader(client: DLedgerClient, group: FakeGroup) -> None:
    """What was not sent is appended after the failover, in order and without a gap."""
    bodies = bodies_of(100)
    with client.appender(batch_entries=10) as appender:
        appender.append(b"first").result(5)
        group.kill(0)
        wait_until(lambda: _is_disconnected(appender), "the loss to be noticed")
        futures = [appender.append(body) for body in bodies]
        group.elect(2)
        results = [future.exception(10) for future in futures]

    assert results == [None] * 100
    assert group.nodes[2].bodies() == [b"first", *bodies]


def test_appender_without_idempotence_tells_an_unknown_outcome(plain: DLedgerClient, group: FakeGroup) -> None:
    """It is the caller's decision whether to risk a repetition."""
    group.nodes[0].fail_appends = [TermChangedError("lost")]

    with plain.appender() as appender:
        lost = appender.append(b"a")
        appender.flush()
        kept = appender.append(b"b")

    error = lost.exception()
    assert isinstance(error, TermChangedError)
    assert error.outcome == "unknown"
    assert kept.result().index == 0
    assert appender.failed_entries == 1


def test_appender_without_idempotence_repeats_an_unknown_outcome_if_told_to(
    plain: DLedgerClient, group: FakeGroup
) -> None:
    """At least once."""
    group.nodes[0].fail_appends = [QuorumAckTimeoutError("?"), None, TermChangedError("lost")]

    with plain.appender(batch_entries=1, retry_unknown=True) as appender:
        futures = [appender.append(body) for body in (b"a", b"b", b"c")]

    assert [future.exception() for future in futures] == [None, None, None]
    assert group.nodes[0].bodies() == [b"a", b"b", b"c"]


def test_appender_without_idempotence_in_flight_at_a_broken_stream_is_unknown(
    plain: DLedgerClient, group: FakeGroup
) -> None:
    """Sent, and the node is gone."""
    group.nodes[0].hold = True
    with plain.appender() as appender:
        future = appender.append(b"a")
        wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
        group.kill(0)

        error = future.exception(5)

    assert error is not None
    assert error.outcome == "unknown"


def test_appender_gives_up_at_the_deadline(client: DLedgerClient, group: FakeGroup) -> None:
    """What was in flight is unknown; what was never sent, because no leader was left, is not applied."""
    group.nodes[0].hold = True
    with client.appender(timeout_s=0.3, batch_entries=1) as appender:
        first = appender.append(b"a")
        wait_until(lambda: len(group.nodes[0].held) == 1, "in flight")
        errors = [first.exception(5)]
        for number in range(3):
            group.kill(number)
        wait_until(lambda: _is_disconnected(appender), "the loss to be noticed")

        errors.append(appender.append(b"b").exception(5))

    assert [error.outcome for error in errors if error is not None] == ["unknown", "not_applied"]
    assert isinstance(errors[1], UnavailableError)


def _is_disconnected(appender: Appender) -> bool:
    return appender._sender._stream is None


def test_appender_without_a_group_fails_within_its_deadline(group: FakeGroup, client: DLedgerClient) -> None:
    """Not applied, and close does not hang."""
    for number in range(3):
        group.kill(number)
    started = time.monotonic()

    with client.appender(timeout_s=0.5) as appender:
        future = appender.append(b"a")

    assert time.monotonic() - started < 10
    error = future.exception()
    assert isinstance(error, UnavailableError)
    assert error.outcome == "not_applied"


def test_appender_tells_a_hopeless_mistake_at_once(group: FakeGroup) -> None:
    """A wrong group is not retried until the deadline."""
    with DLedgerClient(group.addresses, group="other", timeout_s=30) as client, client.appender() as appender:
        error = appender.append(b"a").exception(5)

    assert isinstance(error, IdentityError)


def test_appender_goes_on_after_a_batch_that_cannot_be_stored() -> None:
    """Only that batch fails."""
    with fake_group(1, max_entry_bytes=1000) as group, DLedgerClient(group.addresses) as client:
        with client.appender(batch_entries=1) as appender:
            futures = [appender.append(body) for body in (b"a", b"x" * 2000, b"b", b"c")]

        errors = [future.exception() for future in futures]
        assert [type(error) for error in errors] == [type(None), EntryTooLargeError, type(None), type(None)]
        assert group.nodes[0].bodies() == [b"a", b"b", b"c"]


def test_appender_blocks_when_too_much_is_pending(client: DLedgerClient, group: FakeGroup) -> None:
    """Bounded: until there is room, or with ``PendingFullError``."""
    group.nodes[0].hold = True
    with client.appender(pending_bytes_max=10, timeout_s=30) as appender:
        window = appender._sender._window
        patient = window.options
        appender.append(b"x" * 10)
        wait_until(lambda: bool(group.nodes[0].held), "in flight")
        assert appender.full

        window.options = replace(patient, timeout_ms=200.0)  # shorter than the first one's, which so cannot make room
        with pytest.raises(PendingFullError, match="pending_bytes_max=10"):
            appender.append(b"y")

        window.options = patient
        group.nodes[0].hold = False
        releasing = threading.Timer(0.1, group.nodes[0].release)
        releasing.start()
        assert appender.append(b"z").exception(30) is None
        releasing.join()


def test_appender_is_closed_for_good(client: DLedgerClient) -> None:
    """Close flushes, joins its thread, and may be repeated."""
    before = set(threading.enumerate())
    appender = client.appender()
    future = appender.append(b"a")

    appender.close()
    appender.close()

    assert future.result().index == 0
    with pytest.raises(UnavailableError, match="closed"):
        appender.append(b"b")
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if "dledger" in t.name], "threads joined")


def _nobody(*_: object) -> Stream[None, AppendResult]:
    raise UnavailableError("nobody is there")


def test_empty_entries_are_bounded_too() -> None:
    """Each costs memory whatever its body; counted by bodies alone, any number of empty ones could wait."""
    options = AppenderOptions(pending_bytes_max=10 * ENTRY_OVERHEAD_BYTES, timeout_s=0.2)

    with Appender(Links(_nobody, lambda: None, lambda _address, _error: None), options) as appender:
        for _ in range(9):
            appender.append(b"")
        before = appender.full
        appender.append(b"")
        after = appender.full

    assert (before, after) == (False, True)
    assert appender.failed_entries == 10
    assert not appender.full
