"""Access control of real brokers: topics, groups and administration, while a group goes on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from dledger.client import ClientSecurity, DLedgerClient
from dledger.errors import AccessDeniedError
from rocketstore.client import (
    Admin,
    ConnectionEndedError,
    DLedgerError,
    ForbiddenError,
    Message,
    MessageQueue,
    TopicInfo,
)
from tests.integration.access_harness import ALICE, BOB, NOBODY, RULES, SecuredBrokers, unharmed
from tests.integration.conftest import Adopt
from tests.support.waiting import wait_until


@pytest.fixture
def secured(adopt: Adopt, tmp_path: Path) -> SecuredBrokers:
    """Three brokers with access control, a master and the topics orders and paid."""
    made = adopt(SecuredBrokers(tmp_path / "brokers"))
    made.start_all()
    made.master()
    made.create_topic("orders", 2)
    made.create_topic("paid", 2)
    return made


def everything(brokers: SecuredBrokers, security: ClientSecurity, message_id: str) -> dict[str, Callable[[], object]]:
    """What clients do, each with clients of its own."""

    def asking(ask: Callable[[Admin], object]) -> Callable[[], object]:
        def run() -> object:
            with brokers.admin(3, security=security) as admin:
                return ask(admin)

        return run

    def send(topic: str) -> Callable[[], object]:
        def run() -> object:
            with brokers.producer(3, security=security) as producer:
                return producer.send(Message(topic, b"x"))

        return run

    def consume(group: str, topic: str) -> Callable[[], object]:
        def run() -> object:
            with brokers.consumer_of(security, group, topic, timeout_s=3) as consumer:
                return consumer.poll(timeout_s=3)

        return run

    def raw_log() -> object:
        with closing(DLedgerClient(brokers.addresses, group=brokers.name, timeout_s=3, security=security)) as client:
            return client.read(0)

    return {
        "send orders": send("orders"),
        "send paid": send("paid"),
        "send a new topic": send("new"),
        "consume orders": consume("billing", "orders"),
        "consume paid": consume("", "paid"),
        "consume orders as another group": consume("other", "orders"),
        "query by key": asking(lambda admin: admin.messages_by_key("orders", "k")),
        "query by id": asking(lambda admin: admin.message_by_id(message_id)),
        "read the raw log": raw_log,
        "reset the offsets of another group": asking(
            lambda admin: admin.set_offsets("other", {MessageQueue("orders", brokers.name, 0): 0})
        ),
        "offsets of another group": asking(lambda admin: admin.offsets("other")),
        "make a topic": asking(lambda admin: admin.put_topic(TopicInfo("made", 1, 1, 6))),
        "delete a topic": asking(lambda admin: admin.delete_topic("paid")),
        "list topics": asking(lambda admin: admin.topics()),
        "status": asking(lambda admin: admin.status(brokers.addresses[0])),
        "cluster": asking(lambda admin: admin.brokers()),
    }


@pytest.mark.parametrize(
    ("security", "allowed", "said"),
    [
        (NOBODY, set(), "an access key and its secret"),
        (ClientSecurity(access_key="alice", secret_key="wrong-secret"), set(), "unknown access key, or"),
        (
            ALICE,
            {
                "send orders",
                "consume orders",
                "query by key",
                "query by id",
                "list topics",
                "status",
                "cluster",
            },
            "alice is not allowed to do this: ",
        ),
        (BOB, {"consume paid", "list topics", "status", "cluster"}, "bob is not allowed to do this: "),
    ],
    ids=["no key", "wrong secret", "alice", "bob"],
)
def test_everybody_may_what_the_rules_say_and_nobody_else_notices(
    secured: SecuredBrokers, security: ClientSecurity, allowed: set[str], said: str
) -> None:
    """Producers, consumers and administrators; topics, groups and the raw log."""
    with secured.producer() as producer:
        message_id = producer.send(Message("orders", b"of root", keys="k"), queue=1).offset_id
        producer.send(Message("paid", b"of root"), queue=0)
    done: set[str] = set()
    errors: dict[str, DLedgerError] = {}
    with unharmed(secured):
        for name, work in everything(secured, security, message_id).items():
            try:
                work()
            except DLedgerError as error:
                errors[name] = error
            else:
                done.add(name)

    assert done == allowed, errors
    assert {name: one for name, one in errors.items() if not isinstance(one, ForbiddenError | AccessDeniedError)} == {}
    assert [str(one) for one in errors.values() if said not in str(one)] == []
    assert {one.outcome for one in errors.values()} <= {"not_applied"}
    with secured.admin() as root:
        assert not {"new", "made"} & {topic.name for topic in root.topics()}


def test_lists_show_what_one_may_use(secured: SecuredBrokers) -> None:
    """Others' topics are nobody's business."""
    with secured.admin(security=ALICE) as alice, secured.admin(security=BOB) as bob, secured.admin() as root:
        assert [topic.name for topic in alice.topics()] == ["orders"]
        assert [topic.name for topic in bob.topics()] == ["paid"]
        assert {"orders", "paid"} <= {topic.name for topic in root.topics()}


def test_a_batch_is_refused_topic_by_topic(secured: SecuredBrokers) -> None:
    """What the sender may send is stored."""
    with secured.producer(security=ALICE) as producer:
        good = [producer.submit(Message("orders", b"good"), queue=0) for _ in range(3)]
        bad = [producer.submit(Message("paid", b"bad"), queue=0) for _ in range(3)]

        assert [one.result().offset for one in good] == [0, 1, 2]
        assert [type(one.exception()) for one in bad] == [ForbiddenError] * 3


def test_a_revoked_key_ends_producers_and_waiting_consumers(secured: SecuredBrokers) -> None:
    """A pull that waits: nothing that comes later is handed out, until the key is back; others do not notice."""
    with_bob = RULES.replace("- paid=SUB", "- paid=PUB|SUB\n  groupPerms:\n  - readers=SUB")
    secured.rules.write(with_bob)
    with unharmed(secured), secured.producer(3, security=BOB) as producer:
        wait_until(lambda: allowed(lambda: producer.send(Message("paid", b"1"), queue=0)), "bob may send")
        with secured.consumer_of(BOB, "readers", "paid", timeout_s=3) as consumer:
            wait_until(lambda: bool(consumer.poll(timeout_s=3)), "bob may consume")

            secured.rules.write(RULES.replace("- accessKey: bob", "- accessKey: bill"))
            wait_until(lambda: not allowed(lambda: producer.send(Message("paid", b"2"), queue=0)), "bob is out")
            with secured.producer() as root:
                root.send(Message("paid", b"not for bob"), queue=0)

            late = [one.body for _ in range(3) for one in consumer.poll(timeout_s=1)]
            assert b"not for bob" not in late
            secured.rules.write(with_bob)
            wait_until(lambda: allowed(lambda: producer.send(Message("paid", b"3"), queue=0)), "bob is back")
            wait_until(lambda: b"3" in [one.body for one in consumer.poll(timeout_s=3)], "to consume, too")


def allowed(work: Callable[[], object]) -> bool:
    """Whether it was done; what is on its way when a stream is ended has an unknown outcome."""
    try:
        work()
    except (ForbiddenError, ConnectionEndedError):
        return False
    return True


def test_a_failover_needs_no_new_keys(secured: SecuredBrokers) -> None:
    """Producers and consumers sign for the new master."""
    with (
        secured.producer(20, allow_duplicates=True, security=ALICE) as producer,
        secured.consumer_of(ALICE, "billing", "orders", timeout_s=60) as consumer,
    ):
        producer.send(Message("orders", b"before"), queue=0)
        got = [one.body for one in consumer.poll(timeout_s=10)]
        secured.kill(secured.master())
        producer.send(Message("orders", b"after"), queue=0)

        def came() -> bool:
            got.extend(one.body for one in consumer.poll(timeout_s=5))
            return b"after" in got

        wait_until(came, "it came")

    assert got[0] == b"before"


def test_a_plain_broker_is_guarded_too(adopt: Adopt, tmp_path: Path) -> None:
    """It has no node that would do it."""
    broker = adopt(SecuredBrokers(tmp_path / "plain", size=1, plain=True))
    broker.start_all()
    broker.master()
    with broker.producer(security=ALICE) as alice, broker.producer(3, security=NOBODY) as nobody:
        alice.send(Message("orders", b"x"))
        with pytest.raises(
            ForbiddenError,
            match="NO_PERMISSION: AclException: alice is not allowed to do this: SEND_NUMBERED needs PUB on topic paid",
        ):
            alice.send(Message("paid", b"x"))
        with pytest.raises(ForbiddenError, match="an access key and its secret"):
            nobody.send(Message("orders", b"x"))
    with broker.admin(security=ALICE) as alice_admin, pytest.raises(ForbiddenError):
        alice_admin.delete_topic("orders")
    broker.rules.write(RULES.replace("- orders=PUB|SUB", "- orders=DENY"))
    with broker.producer(3, security=ALICE) as alice:
        wait_until(lambda: not allowed(lambda: alice.send(Message("orders", b"x"))), "the new rules are in force")
