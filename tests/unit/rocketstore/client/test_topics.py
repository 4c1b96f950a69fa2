"""What a client remembers of topics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import cast

import pytest

from dledger.errors import UnavailableError
from rocketstore.client import topic_cache
from rocketstore.client.connection import BrokerConnection
from tests.support.fake_broker import FakeBrokers


@pytest.fixture
def connection(brokers: FakeBrokers) -> Iterator[BrokerConnection]:
    made = BrokerConnection(brokers.addresses, timeout_s=0.3)
    yield made
    made.close()


def asked(brokers: FakeBrokers) -> int:
    return sum(node.calls.count("ListTopics") for node in brokers.nodes)


def test_topics_are_asked_for_once(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """Not with every message; unknown ones are not asked for at once again either."""
    cache = topic_cache.TopicCache(connection)

    for _ in range(100):
        assert cache.find("orders") is not None
        assert cache.find("none") is None

    assert asked(brokers) == 1


def test_a_changed_topic_is_noticed(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """At the latest when what is known is too old."""
    cache = topic_cache.TopicCache(connection)
    cache.find("orders")
    brokers.add_topic("orders", 8)
    cache.forget()

    found = cache.find("orders")

    assert found is not None
    assert found.write_queues == 8


def test_refused_messages_make_a_producer_ask_now_and_then(
    brokers: FakeBrokers, connection: BrokerConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of very many topics is no answer to every message that is refused."""
    monkeypatch.setattr(topic_cache, "UNKNOWN_REFRESH_S", 3600.0)
    cache = topic_cache.TopicCache(connection)
    cache.find("orders")

    for _ in range(20):
        cache.forget()
        cache.find("orders")

    assert asked(brokers) == 2


def test_only_what_is_known_is_told_while_another_asks(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """Who needs a topic that is not known waits for the answer: it may be there."""

    class Asking:
        """As if another one asked, and had just got its answer."""

        def locked(self) -> bool:
            return True

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    cache = topic_cache.TopicCache(connection)
    cache._lock = cast("threading.Lock", Asking())

    assert cache.find("orders") is not None
    cache.forget()
    assert cache.find("orders") is not None
    assert asked(brokers) == 1


def test_an_old_answer_is_better_than_none(brokers: FakeBrokers, connection: BrokerConnection) -> None:
    """While no broker answers, what was known goes on to count; what was not is an error."""
    cache = topic_cache.TopicCache(connection)
    cache.find("orders")
    for node in brokers.nodes:
        node.stop()
    cache.forget()

    assert cache.find("orders") is not None
    with pytest.raises(UnavailableError):
        cache.find("other")
