"""However much administrators ask, sends and pulls go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from dledger.remoting.codes import AnswerCode
from dledger.rpc import loops
from rocketstore.broker import statistics
from rocketstore.broker.broker import Broker
from rocketstore.broker.reading import ReadThreads
from rocketstore.broker.refusal import Refusal
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting import administration
from rocketstore.broker_remoting.administration import Administration
from rocketstore.remoting.codes import RequestCode
from tests.support.remoting import RemotingSocket, pull_fields
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness

WAIT_S = 120.0


class _SlowDisk:
    """Reads of times wait until it is let go; knows how many do."""

    def __init__(self, broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go = threading.Event()
        self.waiting = threading.Semaphore(0)
        monkeypatch.setattr(broker.store, "store_time", self._read)

    def _read(self, _topic: str, _queue_id: int, _offset: int) -> int:
        self.waiting.release()
        assert self._go.wait(WAIT_S)
        return 1

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture
def disk(broker: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[_SlowDisk]:
    slow = _SlowDisk(broker, monkeypatch)
    yield slow
    slow.let_go()


def test_sends_and_pulls_go_on_while_administrators_wait(client: RemotingSocket, disk: _SlowDisk) -> None:
    """They have half of the threads at most."""
    client.subscribe("g", "T")
    client.send()
    asked = [client.begin(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"}) for _ in range(20)]
    for _ in range(2):
        assert disk.waiting.acquire(timeout=WAIT_S)
    assert client.send().code == 0
    assert client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T")).code == 0
    assert client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": 0}).fields["offset"] == "2"
    disk.let_go()
    assert {client.answer_to(one).code for one in asked} == {0}


def test_too_many_requests_of_administrators_are_refused(
    client: RemotingSocket, disk: _SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(administration, "READS_WAITING_MAX", 1)
    client.send()
    asked = [client.begin(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"}) for _ in range(3)]
    for _ in range(2):
        assert disk.waiting.acquire(timeout=WAIT_S)
    refused = client.ask(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"})
    assert (refused.code, refused.remark.startswith("[OVERLOAD]")) == (AnswerCode.SYSTEM_BUSY, True)
    disk.let_go()
    assert {client.answer_to(one).code for one in asked} == {0}


def test_a_read_that_nobody_waits_for_takes_its_thread_until_it_ends() -> None:
    """Otherwise requests that time out would take all threads in the end."""
    began, go = threading.Semaphore(0), threading.Event()

    def slow() -> None:
        began.release()
        assert go.wait(WAIT_S)

    async def run(readers: ReadThreads) -> None:
        parts = SimpleNamespace(config=BrokerConfig(read_threads=2), loop=SimpleNamespace(readers=readers))
        admin = Administration(cast("Broker", parts))
        first = asyncio.create_task(admin.read(slow))
        assert await asyncio.to_thread(began.acquire, timeout=WAIT_S)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(admin.read(slow))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (admin.waiting, began.acquire(blocking=False)) == (1, False)
        go.set()
        await asyncio.wait_for(second, WAIT_S)
        assert admin.waiting == 0

    readers = ReadThreads(2)
    try:
        loops.run(run(readers))
    finally:
        go.set()
        readers.close()


def test_an_answer_about_too_many_queues_is_not_made() -> None:
    statistics.check_queues(statistics.QUEUES_MAX)
    with pytest.raises(Refusal, match="20001 queues"):
        statistics.check_queues(statistics.QUEUES_MAX + 1)


def test_one_host_cannot_use_up_what_administrators_may_ask(
    broker: RemotingHarness, disk: _SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of the waiting reads at most are of one host."""
    with broker.dial() as greedy, broker.dial(host="127.0.0.2") as other:
        greedy.send()
        asked = [greedy.begin(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"}) for _ in range(300)]
        refused = greedy.answer_to(asked[-1])
        assert (refused.code, "127.0.0.1" in refused.remark) == (AnswerCode.SYSTEM_BUSY, True)
        waiting = other.begin(RequestCode.GET_TOPIC_STATS_INFO, {"topic": "T"})
        disk.let_go()
        assert other.answer_to(waiting).code == 0
