"""What the application's own code may do to a sender: raise, call back, close, give nonsense."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from dledger.client import DLedgerClient
from dledger.client.appender import Appender
from dledger.errors import InvalidRequestError, PendingFullError
from dledger.sending.futures import SentItem
from tests.support.fake_group import FakeGroup, fake_group
from tests.support.waiting import wait_until

PATIENCE_S = 30.0


@pytest.fixture
def group() -> Iterator[FakeGroup]:
    with fake_group(1) as made:
        yield made


@pytest.fixture
def client(group: FakeGroup) -> Iterator[DLedgerClient]:
    with DLedgerClient(group.addresses, timeout_s=PATIENCE_S) as made:
        yield made


def within(what: Callable[[], object]) -> None:
    """Fails if it takes for ever: on a thread that may then stay."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_callback_that_raises_keeps_nobody_else_from_being_told(client: DLedgerClient, group: FakeGroup) -> None:
    """And breaks nothing: also with an error of ours, as ``result`` raises it."""
    told: list[object] = []

    def raises(_future: object) -> None:
        raise InvalidRequestError("mine") if told else ZeroDivisionError

    with client.appender(batch_entries=2) as appender:
        appender.append(b"a").result(PATIENCE_S)
        group.nodes[0].hold = True
        first, second = appender.append(b"b"), appender.append(b"c")
        for future in (first, second):
            future.add_done_callback(raises)
            future.add_done_callback(told.append)
        wait_until(lambda: len(group.nodes[0].held) == 1, "under way")
        group.nodes[0].hold = False
        group.nodes[0].release()
        wait_until(lambda: len(told) == 2, "both are told")
        first.add_done_callback(raises)  # at once
        assert appender.append(b"d").result(PATIENCE_S).index == 3
    assert group.nodes[0].repeated == 0, "the stream was not broken by it"


@pytest.mark.parametrize("error", [None, InvalidRequestError("no")])
def test_a_callback_may_close_its_sender(
    client: DLedgerClient, group: FakeGroup, error: InvalidRequestError | None
) -> None:
    closed = threading.Event()
    appender = client.appender()

    def close(_future: object) -> None:
        appender.close()
        closed.set()

    group.nodes[0].fail_appends = [error]
    appender.append(b"a").add_done_callback(close)
    assert closed.wait(PATIENCE_S)
    within(appender.close)


def test_a_callback_may_close_the_client(client: DLedgerClient, group: FakeGroup) -> None:
    """What is under way then is unknown, at once."""
    client.append(b"a")
    sender = client._direct
    assert sender is not None
    closed = threading.Event()

    def close(_future: object) -> None:
        client.close()
        closed.set()

    group.nodes[0].hold = True
    batch, place = sender.add(b"b")
    wait_until(lambda: len(group.nodes[0].held) == 1, "under way")
    other, at = sender.add(b"c")
    wait_until(lambda: len(group.nodes[0].held) == 2, "under way")
    SentItem(batch, place).add_done_callback(close)
    group.nodes[0].release(1)
    assert closed.wait(PATIENCE_S)
    failure = SentItem(other, at).exception(PATIENCE_S)
    assert failure is not None
    assert failure.outcome == "unknown"


def test_a_callback_waits_for_nothing_that_waits_for_it(client: DLedgerClient, group: FakeGroup) -> None:
    raised: list[BaseException] = []

    def wait(appender: Appender, what: Callable[[], Any]) -> None:
        del appender
        try:
            what()
        except Exception as error:  # noqa: BLE001
            raised.append(error)

    with client.appender(batch_entries=1, pending_bytes_max=1) as appender:
        group.nodes[0].hold = True
        first = appender.append(b"a")
        wait_until(lambda: len(group.nodes[0].held) == 1, "under way")
        first.add_done_callback(lambda _future: wait(appender, appender.flush))
        first.add_done_callback(lambda _future: appender.append(b"b"))
        first.add_done_callback(lambda _future: wait(appender, lambda: appender.append(b"c")))
        group.nodes[0].hold = False
        group.nodes[0].release()
        wait_until(lambda: len(raised) == 2, "both are refused")
    assert [type(one) for one in raised] == [InvalidRequestError, PendingFullError]
    assert group.nodes[0].bodies() == [b"a", b"b"]


@pytest.mark.parametrize("wrong", ["text", None, 7])
def test_what_is_no_bytes_harms_nothing_else(client: DLedgerClient, group: FakeGroup, wrong: object) -> None:
    with pytest.raises((TypeError, InvalidRequestError)):
        client.append(wrong)  # type: ignore[arg-type]
    assert client.append(b"a").index == 0

    with client.appender(linger_ms=50) as appender:
        good = [appender.append(b"b")]
        try:
            bad = [appender.append(wrong)]  # type: ignore[arg-type]
        except TypeError:
            bad = []
        good.append(appender.append(b"c"))
        assert [one.result(PATIENCE_S).index for one in good] == [1, 2]
        for one in bad:
            failure = one.exception(PATIENCE_S)
            assert isinstance(failure, InvalidRequestError)
            assert failure.outcome == "not_applied"
    assert group.nodes[0].bodies() == [b"a", b"b", b"c"]


def test_what_raises_while_a_stream_is_opened_ends_nothing(
    client: DLedgerClient, group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gRPC does on a channel that somebody closes at that moment."""
    opened = client._channels.channel
    failures = iter([ValueError("closed")])

    def channel(address: str, number: int = 0) -> grpc.Channel:
        if client._directory.leader is not None and (failure := next(failures, None)) is not None:
            raise failure
        return opened(address, number)

    monkeypatch.setattr(client._channels, "channel", channel)
    with client.appender() as appender:
        assert appender.append(b"a").result(PATIENCE_S).index == 0
    assert next(failures, None) is None


def test_an_unknown_error_of_one_is_not_changed_by_a_callback(client: DLedgerClient, group: FakeGroup) -> None:
    group.nodes[0].fail_appends = [InvalidRequestError("no")]
    with client.appender() as appender:
        future = appender.append(b"a")
        future.add_done_callback(lambda one: one.result())
        failure = future.exception(PATIENCE_S)
        assert appender.append(b"b").result(PATIENCE_S).index == 0
    assert failure is not None
    assert failure.outcome == "not_applied"
