"""Offsets committed with pulls: replicated together, and never in the place of a newer one."""

from __future__ import annotations

import pytest

from rocketstore.broker import offsets
from rocketstore.remoting.codes import RequestCode
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

NEVER_S = 3600.0
KEY = ("g", "T", 0)


def pull(client: RemotingSocket, commit: int, queue_id: int = 0) -> None:
    fields = pull_fields("g", "T", commit, sysFlag=5, subscription="*", commitOffset=commit, queueId=queue_id)
    client.ask(RequestCode.PULL_MESSAGE, fields)


@pytest.fixture
def _only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "PULLED_INTERVAL_S", NEVER_S)


def test_they_are_committed_soon(broker: RemotingHarness, client: RemotingSocket) -> None:
    pull(client, 1)
    wait_until(lambda: broker.state.committed.get(KEY) == 1, "committed")
    pull(client, 0)
    wait_until(lambda: broker.state.committed.get(KEY) == 0, "committed, though lower")


@pytest.mark.usefixtures("_only_when_told")
def test_the_last_one_of_each_queue_counts(
    broker: RemotingHarness, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of pulls per second must not be as many changes of the replicated state; nor may many wait."""
    monkeypatch.setattr(offsets, "PULLED_MAX", 2)
    for commit in (1, 2, 3):
        pull(client, commit)
    assert not broker.state.committed
    pull(client, 4, queue_id=1)
    assert broker.state.committed == {KEY: 3, ("g", "T", 1): 4}


@pytest.mark.usefixtures("_only_when_told")
def test_what_waits_is_committed_at_the_end() -> None:
    with RemotingHarness() as broker, broker.dial() as client:
        pull(client, 3)
    assert broker.state.committed == {KEY: 3}


@pytest.mark.usefixtures("_only_when_told")
def test_an_update_meanwhile_is_newer() -> None:
    with RemotingHarness() as broker, broker.dial() as client:
        broker.state.committed[KEY] = 1
        pull(client, 3)
        update = {"consumerGroup": "g", "topic": "T", "queueId": 0, "commitOffset": 1}
        assert client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, update).code == 0
    assert broker.state.committed == {KEY: 1}


@pytest.mark.usefixtures("_only_when_told")
def test_a_reset_meanwhile_is_newer() -> None:
    """By an administrator; likewise if the group or the topic was deleted."""
    with RemotingHarness() as broker, broker.dial() as client:
        broker.state.committed[KEY] = 2
        pull(client, 3)
        broker.state.committed[KEY] = 0
    assert broker.state.committed == {KEY: 0}


@pytest.mark.usefixtures("_only_when_told")
def test_a_reset_is_newer_than_what_a_consumer_commits_that_has_not_heard_of_it() -> None:
    """While it goes on to pull, as it does until it is told."""
    with RemotingHarness() as broker, broker.dial() as client:
        broker.state.committed[KEY] = 2
        pull(client, 3)
        broker.state.committed[KEY] = 0
        pull(client, 4)
    assert broker.state.committed == {KEY: 0}


@pytest.mark.usefixtures("_only_when_told")
def test_a_slave_commits_nothing() -> None:
    with RemotingHarness() as broker, broker.dial() as client:
        pull(client, 3)
        broker.become(BrokerRole.SLAVE)
        pull(client, 4, queue_id=1)
    assert not broker.state.committed
