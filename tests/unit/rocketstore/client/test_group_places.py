"""What a member believes of a name server's routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dledger.client.security import ClientSecurity
from rocketstore.client.group_places import KnownToNameServers
from tests.unit.rocketstore.client.cluster_members import RETRIES, TOPIC, Known, two_brokers


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Known]:
    with two_brokers(tmp_path) as found:
        yield found


def test_a_broker_with_too_many_queues_is_left_out(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client remembers each of them; the sound brokers stay. RocketMQ's name servers take any number."""
    monkeypatch.setattr("rocketstore.nameserver.service.QUEUES_MAX", 100_000)
    known.register("b", queues=70_000)
    with closing(KnownToNameServers(known.server.address, 5.0, ClientSecurity())) as places:
        assert [one.group.name for one in places.find(TOPIC) or ()] == ["a"]


def test_only_brokers_that_answer_stay_without_a_route(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are gone, as for RocketMQ's clients."""
    for name in ("REFRESH_S", "DOUBTED_REFRESH_S"):
        monkeypatch.setattr(f"rocketstore.client.routes.{name}", 0.0)
    with closing(KnownToNameServers(known.server.address, 5.0, ClientSecurity())) as places:

        def names(*answering: str) -> list[str]:
            return [one.group.name for one in places.find(TOPIC, answering) or ()]

        assert names() == ["a", "b"]
        known.forget("b")
        assert (names("a", "b"), names("a"), names()) == (["a", "b"], ["a"], ["a"])
        known.forget("a")
        assert (names("a", "b"), names("b"), places.find(RETRIES)) == (["a", "b"], ["b"], None)
