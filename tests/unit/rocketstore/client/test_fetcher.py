"""When a consumer's pulling tries again, and how often it says why nothing comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from dledger.backoff import Backoff
from dledger.client.shared import RETRY_WAIT_S_MIN
from dledger.errors import DLedgerError, UnavailableError
from rocketstore.client import fetcher
from rocketstore.client.connection import BrokerConnection
from rocketstore.client.fetcher import PullOptions, QueueFetcher

DOWN = UnavailableError("the broker is down")


def pauses_of(monkeypatch: pytest.MonkeyPatch, sessions: Sequence[bool | DLedgerError]) -> list[float]:
    """The pauses between sessions that end so, one after the other; none is waited for."""
    left, pauses = list(sessions), list[float]()

    class Noted(Backoff):
        def pause(self) -> float:
            pauses.append(super().pause())
            return 0.0

    def session(one: QueueFetcher) -> bool:
        if not left:
            one._stop.set()
            return False
        ended = left.pop(0)
        if isinstance(ended, DLedgerError):
            raise ended
        return ended

    monkeypatch.setattr(fetcher, "Backoff", Noted)
    monkeypatch.setattr(QueueFetcher, "_session", session)
    connection = cast(BrokerConnection, None)  # no session is opened
    QueueFetcher(connection, 0, 0, PullOptions("billing", "orders"), lambda: None).join()
    return pauses


def test_pulling_begins_anew_with_the_shortest_pause_once_a_broker_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A session that ended without an answer shows nothing."""
    pauses = pauses_of(monkeypatch, [DOWN, DOWN, False, DOWN, True, DOWN])

    assert pauses == [RETRY_WAIT_S_MIN * factor for factor in (1, 2, 4, 1)]


def test_why_nothing_comes_is_told_once_until_something_has_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that fails again after an hour is news; a failure that goes on is none."""
    pauses_of(monkeypatch, [DOWN, DOWN, DOWN, True, DOWN, DOWN])

    assert [record.message for record in caplog.records] == ["queue 0 of orders: the broker is down; retrying"] * 2
