"""Large bodies of clients do not stop the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from dledger.remoting.codes import AnswerCode
from rocketstore.broker.clients import HEARTBEAT_SUBSCRIPTIONS_MAX
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker_remoting import requests
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import ConsumerData, HeartbeatData, LockQueuesBody, SubscriptionData
from rocketstore.remoting.topics import MessageQueue
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

WAIT_S = 120.0


def _heartbeat(group: str, subscriptions: int) -> bytes:
    data = tuple(SubscriptionData(f"topic-{number}") for number in range(subscriptions))
    return HeartbeatData("c1", (), (ConsumerData(group, subscription_data_set=data),)).encode()


class _Threads:
    """Holds what is decoded on a thread until it is let go, and knows how many there were at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.began = threading.Semaphore(0)
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()
        run = ReadThreads.run

        def held(read: object, *args: object, **kwargs: object) -> object:
            with self._lock:
                self._now += 1
                self.most = max(self.most, self._now)
            self.began.release()
            assert self.go.wait(WAIT_S)
            with self._lock:
                self._now -= 1
            assert callable(read)
            return read(*args, **kwargs)

        async def slow(self: ReadThreads, read: object, /, *args: object, **kwargs: object) -> object:
            return await run(self, held, read, *args, **kwargs)

        monkeypatch.setattr(ReadThreads, "run", slow)


@pytest.fixture
def threads(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Threads]:
    held = _Threads(monkeypatch)
    yield held
    held.go.set()


def test_others_go_on_while_a_large_heartbeat_is_decoded(
    broker: RemotingHarness, client: RemotingSocket, threads: _Threads
) -> None:
    """Fifty clients with a thousand subscriptions each would stop all others for a second."""
    beat = client.begin(RequestCode.HEART_BEAT, None, _heartbeat("g", 1000))
    assert threads.began.acquire(timeout=WAIT_S)
    with broker.dial() as other:
        assert other.send().code == 0
        assert other.subscribe("h", "T").code == 0
    threads.go.set()
    assert client.answer_to(beat).code == 0
    found = broker.groups.clients.consumers("g")
    assert found is not None
    assert len(found.subscriptions) == 1000


def test_a_goodbye_does_not_overtake_the_heartbeat_before_it(
    broker: RemotingHarness, client: RemotingSocket, threads: _Threads
) -> None:
    """The client would be a member for two minutes more, and have queues that nobody reads."""
    beat = client.begin(RequestCode.HEART_BEAT, None, _heartbeat("g", 1000))
    left = client.begin(RequestCode.UNREGISTER_CLIENT, {"clientID": "c1", "consumerGroup": "g"})
    assert threads.began.acquire(timeout=WAIT_S)
    assert client.send().code == 0
    threads.go.set()
    assert [client.answer_to(one).code for one in (beat, left)] == [0, 0]
    assert broker.groups.clients.consumers("g") is None


def test_a_small_heartbeat_does_not_overtake_a_large_one(
    broker: RemotingHarness, client: RemotingSocket, threads: _Threads
) -> None:
    """A group has the subscriptions of its last heartbeat."""
    beats = [client.begin(RequestCode.HEART_BEAT, None, _heartbeat("g", number)) for number in (1000, 1)]
    assert threads.began.acquire(timeout=WAIT_S)
    assert client.send().code == 0
    threads.go.set()
    assert [client.answer_to(one).code for one in beats] == [0, 0]
    found = broker.groups.clients.consumers("g")
    assert found is not None
    assert len(found.subscriptions) == 1


def test_large_bodies_are_decoded_one_after_the_other(broker: RemotingHarness, threads: _Threads) -> None:
    """Each takes the interpreter from the loop; pulls need the threads."""
    clients = [broker.dial(host=f"127.0.0.{number}") for number in range(1, 5)]
    try:
        beats = [one.begin(RequestCode.HEART_BEAT, None, _heartbeat("g", 1000)) for one in clients]
        assert threads.began.acquire(timeout=WAIT_S)
        with broker.dial() as other:
            assert other.send().code == 0
        threads.go.set()
        assert [one.answer_to(beat).code for one, beat in zip(clients, beats, strict=True)] == [0] * 4
        assert threads.most == 1
    finally:
        for one in clients:
            one.socket.close()


def test_a_host_rests_after_each_large_body(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storm of them would otherwise share the interpreter with everybody, half and half."""
    monkeypatch.setattr(requests, "REST", 1e9)
    monkeypatch.setattr(requests, "REST_S_MAX", 3600.0)
    with (
        broker.dial() as stormy,
        broker.dial() as beside,
        broker.dial(host="127.0.0.2") as other,
        broker.dial(host="127.0.0.3") as third,
    ):
        for one in (stormy, other):
            assert one.ask(RequestCode.HEART_BEAT, None, _heartbeat("g", 1000)).code == 0
        beside.begin(RequestCode.HEART_BEAT, None, _heartbeat("h", 1000))
        assert beside.send().code == 0
        assert third.ask(RequestCode.HEART_BEAT, None, _heartbeat("g", 1000)).code == 0, "which came later"
        assert broker.groups.clients.consumers("h") is None


def test_locks_of_many_queues_are_decoded_by_a_thread(client: RemotingSocket, threads: _Threads) -> None:
    queues = tuple(MessageQueue("T", "b", number) for number in range(1000))
    asked = client.begin(RequestCode.LOCK_BATCH_MQ, None, LockQueuesBody("c1", "g", queues).encode())
    assert threads.began.acquire(timeout=WAIT_S)
    threads.go.set()
    assert client.answer_to(asked).code == 0


def test_a_client_may_have_a_thousand_subscriptions_but_not_any_number(client: RemotingSocket) -> None:
    """The table of a group is made anew with each heartbeat, on the loop."""
    assert client.ask(RequestCode.HEART_BEAT, None, _heartbeat("g", 1000)).code == 0
    entry = b'{"topic":"t"}'
    many = b",".join([entry] * (HEARTBEAT_SUBSCRIPTIONS_MAX + 1))
    refused = client.ask(
        RequestCode.HEART_BEAT,
        None,
        b'{"clientID":"c1","consumerDataSet":[{"groupName":"g","subscriptionDataSet":[' + many + b"]}]}",
    )
    assert (refused.code, str(HEARTBEAT_SUBSCRIPTIONS_MAX) in refused.remark) == (AnswerCode.SYSTEM_ERROR, True)
