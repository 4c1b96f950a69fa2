"""Three conf files start a group, and what users do with it works before and after its master is killed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable

from click.testing import CliRunner, Result

from dledger.remoting.codes import AnswerCode
from dledger.types import NodeId
from dledger_cli.cli import main
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import MessageQueue
from tests.integration.broker_harness import QUEUES, BrokerGroup
from tests.support.broker_load import TOPIC
from tests.support.remoting import RemotingSocket
from tests.support.waiting import PATIENCE_S, wait_until

DELAY_S = 3
PLACES = {0: 3, 1: 10, 2: 1, 3: 2}
"""A group's offset in each queue."""


def commands(brokers: BrokerGroup, nodes: Iterable[NodeId]) -> Callable[..., Result]:
    """Run ``dledger`` commands against some brokers, as a user types them."""
    addresses = ",".join(brokers.nodes[node].client_address for node in nodes)

    def run(*words: str) -> Result:
        result = CliRunner().invoke(main, list(words), env={"DLEDGER_BROKER": addresses})
        assert result.exit_code == 0, f"{words}: {result.output}"
        return result

    return run


def use_as_people_do(brokers: BrokerGroup, dledger: Callable[..., Result], round_: str) -> str:
    """Send, find, consume, look at progress; gives the id of a message."""
    key = f"order-{round_}"
    sent = dledger("message", "send", "-t", TOPIC, "--keys", key, "--tags", round_, "--queue", "1", f"hello {round_}")
    message_id = sent.output.strip()
    by_id = json.loads(dledger("message", "query-by-id", message_id, "--json").output)
    with Admin(brokers.addresses) as admin:
        wait_until(lambda: bool(admin.messages_by_key(TOPIC, key)), "it is indexed")
    by_key = json.loads(dledger("message", "query-by-key", "-t", TOPIC, key, "--json").output)
    dledger("message", "send", "-t", TOPIC, "--key", "alice", f"first of {round_}", f"second of {round_}")
    consumed = dledger("message", "consume", "-t", TOPIC, "-g", "people", "--from", "first").output.splitlines()
    progress = json.loads(dledger("consumer", "progress", "-g", "people", "--json").output)

    assert by_id["body"] == by_key["body"] == f"hello {round_}"
    assert sorted(consumed) == sorted([f"hello {round_}", f"first of {round_}", f"second of {round_}"])
    assert consumed.index(f"first of {round_}") < consumed.index(f"second of {round_}")
    assert {row["queue_id"]: row["lag"] for row in progress} == dict.fromkeys(range(QUEUES), 0)
    return message_id


def test_what_people_do_works_before_and_after_the_master_dies(brokers: BrokerGroup) -> None:
    """One sends, consumes and queries; the group remembers where the consumers are, and every old message."""
    everybody = commands(brokers, brokers.nodes)
    master = brokers.master()
    everybody("topic", "create", "news", "-q", "3")
    message_id = use_as_people_do(brokers, everybody, "before")

    brokers.kill(master)
    new = brokers.master(other_than=master)
    survivors = commands(brokers, brokers.followers(master))
    use_as_people_do(brokers, everybody, "after")

    old = json.loads(survivors("message", "query-by-id", message_id, "--json").output)
    listed = json.loads(survivors("cluster", "list", "--json").output)["brokers"]
    status = json.loads(survivors("broker", "status", "--json").output)
    topics = json.loads(survivors("topic", "list", "--json").output)
    queues = json.loads(survivors("topic", "status", "news", "--json").output)
    assert old["body"] == "hello before"
    assert [one["address"] for one in listed if one.get("is_master")] == [brokers.nodes[new].client_address]
    assert (status["role"], status["raft_role"], status["node_id"]) == ("SYNC_MASTER", "LEADER", new)
    assert {"news", TOPIC} <= {one["name"] for one in topics}
    assert len(queues) == 3


def test_topics_groups_and_offsets_survive_every_kill(brokers: BrokerGroup) -> None:
    """First the master dies, then everybody at once; what was acknowledged of the broker state is there, everywhere."""
    with Producer(brokers.addresses) as producer:
        for number in range(40):
            producer.send(Message(TOPIC, b"%d" % number), queue=number % QUEUES)
    with Admin(brokers.addresses, timeout_s=60) as admin:
        admin.put_topic(TopicInfo("gone", 2, 2, 6))
        admin.put_topic(TopicInfo("read-only", 5, 3, 4))
        admin.delete_topic("gone")
        offsets = {MessageQueue(TOPIC, brokers.name, queue): place for queue, place in PLACES.items()}
        admin.set_offsets("people", offsets)
        expected = (offsets, [TopicInfo("read-only", 5, 3, 4, brokers.name)], ["people"])

        master = brokers.master()
        brokers.kill(master)
        brokers.master(other_than=master)
        after_one = (admin.offsets("people"), admin.topic("read-only"), admin.groups_of_topic(TOPIC))
        brokers.start(master)
        for node in brokers.nodes:
            brokers.kill(node)
        brokers.start_all()
        brokers.master()
        after_all = (admin.offsets("people"), admin.topic("read-only"), admin.groups_of_topic(TOPIC))
        names = [topic.name for topic in admin.topics()]

    assert after_one == after_all == expected
    assert "gone" not in names
    brokers.wait_topic("read-only")
    wait_until(lambda: all(noted_by(brokers, node) == PLACES for node in brokers.nodes), "all have the offsets")


def noted_by(brokers: BrokerGroup, node: NodeId) -> dict[int, int]:
    """What this broker itself says of the group's offsets."""
    with RemotingSocket(brokers.nodes[node].client_port) as client:
        asked = {"consumerGroup": "people", "topic": TOPIC}
        answers = {
            queue: client.ask(RequestCode.QUERY_CONSUMER_OFFSET, asked | {"queueId": queue}) for queue in range(QUEUES)
        }
    return {queue: int(one.fields["offset"]) for queue, one in answers.items() if one.code == AnswerCode.SUCCESS}


def test_a_topic_that_is_made_again_begins_empty(brokers: BrokerGroup) -> None:
    """No old message is delivered, nor by the next master; queue offsets go on, so groups cannot mix them up."""
    with Producer(brokers.addresses) as producer, Admin(brokers.addresses) as admin:
        old = [producer.send(Message(TOPIC, b"old"), queue=0).offset for _ in range(3)]
        admin.delete_topic(TOPIC)
        brokers.create_topic()
        new = producer.send(Message(TOPIC, b"new"), queue=0).offset
        with Consumer(brokers.addresses, group="one", topics=TOPIC, start="first") as consumer:
            before = [one.body for one in consumer.poll(10, 60)]
        master = brokers.master()
        brokers.kill(master)
        brokers.master(other_than=master)
        with Consumer(brokers.addresses, group="two", topics=TOPIC, start="first") as consumer:
            after = [one.body for one in consumer.poll(10, 60)]
        ranges = [(one.min_offset, one.max_offset) for one in admin.queue_ranges(TOPIC)]

    assert (old, new) == ([0, 1, 2], 3)
    assert before == after == [b"new"]
    assert ranges == [(3, 4), (0, 0), (0, 0), (0, 0)]


def test_delayed_messages_are_delivered_by_whoever_is_the_master_then(make_brokers: Callable[..., BrokerGroup]) -> None:
    """Stored by one master, delivered by the next: none too early, and the progress survives a restart.

    Each once, but for what the killed master itself had delivered just before: its progress may not tell of that yet.
    """
    brokers = make_brokers(settings={"messageDelayLevel": f"1s {DELAY_S}s"})
    brokers.start_all()
    brokers.create_topic()
    with Producer(brokers.addresses) as producer:
        for number in range(30):
            letter = Message(TOPIC, b"later-%d" % number, delay_level=2 if number % 3 else 1)
            producer.send(letter, queue=number % QUEUES)
    master = brokers.master()
    brokers.kill(master)
    killed_ms = time.time() * 1000
    got: list[tuple[bytes, int, int]] = []
    with Consumer(brokers.addresses, topics=TOPIC, assign="all", start="first") as consumer:
        ends_at = time.monotonic() + PATIENCE_S
        while len({body for body, *_ in got}) < 30 and time.monotonic() < ends_at:
            got += [(one.body, one.born_timestamp, one.store_timestamp) for one in consumer.poll(100, 0.2)]
        brokers.start(master)
        now = brokers.master()
        code = brokers.stop(now)
        brokers.master(other_than=now)
        brokers.start(now)
        with Producer(brokers.addresses) as producer:
            producer.send(Message(TOPIC, b"last", delay_level=1), queue=0)
        while all(body != b"last" for body, *_ in got) and time.monotonic() < ends_at + PATIENCE_S:
            got += [(one.body, one.born_timestamp, one.store_timestamp) for one in consumer.poll(100, 0.2)]

    times = Counter(body for body, *_ in got)
    early = [
        one
        for one in got
        if one[2] - one[1] < 1000 * (DELAY_S if int(one[0][6:] or 0) % 3 else 1) and one[0] != b"last"
    ]
    assert code == 0
    assert set(times) == {b"last", *(b"later-%d" % number for number in range(30))}
    by_the_killed = {body for body, _, stored_ms in got if stored_ms <= killed_ms}
    assert {body for body, count in times.items() if count > 1} <= by_the_killed
    assert max(times.values()) <= 2
    assert not early
