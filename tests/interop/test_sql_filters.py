"""SQL92 filters with RocketMQ: its filter's verdicts, its clients with our broker, our clients with its brokers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from dledger.errors import InvalidRequestError
from rocketstore.client import Message, Sql, TopicInfo
from rocketstore.client.aio import Admin, Consumer, Producer
from rocketstore.client.aio.errors import RefusedError
from rocketstore.message.sql import SqlCondition
from rocketstore.nameserver.server import NameServer
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from tests.interop import java, rocketmq, rocketmq5
from tests.interop.sql_cases import Sentences, properties_of, verdicts
from tests.interop.test_python_consumer import DEADLINE_S, TOPIC, _gather, _ready, apache
from tests.interop.test_rocketmq_5 import ours
from tests.support.on_loop import on_loop
from tests.unit.rocketstore.nameserver.wire import config_in
from tests.unit.rocketstore.nameserver.wire import running as name_server_running

pytestmark = pytest.mark.interop

CASES: Final = 20_000
CONDITION: Final = "amount > 2 AND (region IN ('EU', 'UK') OR region IS NULL) AND NOT (amount = 6)"
AMOUNTS: Final = ("1", "2", "3", "many", "5", "6", "7")
WANTED: Final = [b"3", b"5", b"7"]
"""The amounts of those that fulfil it, which are the bodies; the last one is among them."""


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


def _verdict(line: str) -> str:
    expression, *parts = line.split("\t")
    try:
        result = SqlCondition(expression).result(properties_of(parts))
    except InvalidRequestError:
        return "R"
    return {True: "T", False: "F", None: "N"}[result]


def test_random_conditions_have_rocketmqs_verdicts() -> None:
    """Others in each run; the seed repeats them."""
    seed = random.SystemRandom().randrange(1 << 32)
    sentences = Sentences(seed)
    lines = [sentences.line() for _ in range(CASES)]
    told = verdicts(lines)
    assert {*told} == {"T", "F", "N", "R"}
    wrong = [(line, one, _verdict(line)) for line, one in zip(lines, told, strict=True) if _verdict(line) != one]
    assert wrong == [], f"seed {seed}"


async def _send(name_server: str) -> None:
    """Messages of all amounts to a topic of one queue."""
    async with Admin(name_servers=name_server, timeout_s=DEADLINE_S) as admin:
        await admin.put_topic(TopicInfo(TOPIC, read_queues=1, write_queues=1))
    async with Producer(name_servers=name_server, timeout_s=DEADLINE_S) as producer:
        for amount in AMOUNTS:
            regions = {"region": "EU"} if amount in "57" else {"region": "US"} if amount == "6" else {}
            properties = {"amount": amount, **regions}
            await producer.send(Message(TOPIC, amount.encode(), properties=properties), queue=0)


@pytest.fixture
def name_server(tmp_path: Path) -> Iterator[NameServer]:
    with name_server_running(config_in(tmp_path)) as started:
        yield started


@pytest.fixture
def broker(tmp_path: Path, name_server: NameServer) -> Iterator[BrokerServer]:
    with ours(tmp_path / "store", namesrvAddr=name_server.address) as started:
        yield started


@pytest.mark.parametrize("way", ["4.9 push", "5.5 push", "5.5 poll"])
@on_loop
async def test_javas_consumers_get_what_fulfils_the_condition(
    tmp_path: Path, broker: BrokerServer, name_server: NameServer, way: str
) -> None:
    """By heartbeats and by pulls that bring it."""
    await _ready(name_server.address)
    await _send(name_server.address)
    run = rocketmq.client if way.startswith("4") else rocketmq5.client
    what = "poll" if way.endswith("poll") else "sql"
    got = run(tmp_path / "c", what, name_server.address, TOPIC, str(len(WANTED)), CONDITION)
    assert sorted(one.encode() for one in got) == WANTED
    assert broker.measure().service.filter_errors > 0


@pytest.mark.parametrize("run", [rocketmq.client, rocketmq5.client])
@pytest.mark.parametrize("is_on", [True, False])
@on_loop
async def test_javas_consumers_do_not_start_with_what_is_not_served(
    tmp_path: Path, name_server: NameServer, run: Callable[..., list[str]], *, is_on: bool
) -> None:
    """A wrong condition with the place, and any where the broker has no conditions."""
    settings = {"enablePropertyFilter": str(is_on).lower(), "namesrvAddr": name_server.address}
    with ours(tmp_path / "store", **settings):
        await _ready(name_server.address)
        await _send(name_server.address)
        condition = "amount > 2 OR" if is_on else CONDITION
        (told,) = run(tmp_path / "c", "sql", name_server.address, TOPIC, "1", condition)
    if is_on:
        assert told.startswith("refused 23 ")
        assert "wrong at character 14" in told
    else:
        assert told.startswith("refused 1 The broker does not support consumer to filter message by SQL92")


@pytest.mark.parametrize("release", [4, 5])
@on_loop
async def test_our_consumer_filters_at_apaches_brokers(tmp_path: Path, release: int) -> None:
    """In a group and alone, and an ``Admin`` too."""
    with apache(release, tmp_path, enablePropertyFilter="true") as name_server:
        await _ready(name_server)
        await _send(name_server)
        wanted = Sql(CONDITION)
        async with Consumer(name_servers=name_server, group="sql", topics={TOPIC: wanted}, start="first") as member:
            assert [one.body for one in await _gather(member, len(WANTED))] == WANTED
        async with Consumer(name_servers=name_server, topics={TOPIC: wanted}, assign=[0], start="first") as reader:
            assert [one.body for one in await _gather(reader, len(WANTED))] == WANTED
        async with Admin(name_servers=name_server, timeout_s=DEADLINE_S) as admin:
            messages, _ = await admin.messages(MessageQueue(TOPIC, "theirs", 0), 0, expression=wanted)
            assert [one.body for one in messages] == WANTED


@pytest.mark.parametrize("release", [4, 5])
@on_loop
async def test_our_consumer_does_not_start_at_a_broker_of_apaches_without_conditions(
    tmp_path: Path, release: int
) -> None:
    """Their default; with a group and without."""
    with apache(release, tmp_path) as name_server:
        await _ready(name_server)
        await _send(name_server)
        for group in ("sql", ""):
            consumer = Consumer(
                name_servers=name_server,
                group=group,
                topics={TOPIC: Sql(CONDITION)},
                assign=None if group else "all",
            )
            with pytest.raises(RefusedError, match="does not support consumer to filter message by SQL92"):
                await consumer.start()
            await consumer.close()
