"""Topics, queries, offsets and status, against fake brokers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import grpc
import pytest

from cluster.local.group import free_ports
from dledger.client import shared
from dledger.errors import AccessDeniedError, DLedgerError, InvalidRequestError, UnavailableError
from rocketstore.client.admin import Admin, BrokerStatus
from rocketstore.client.aio.errors import BadAnswerError
from rocketstore.client.errors import NotFoundError, StoreFailedError
from rocketstore.client.topics import TopicInfo
from rocketstore.message.message import Message
from rocketstore.pb import broker_pb2 as pb
from tests.support.fake_broker import FakeBrokers


@pytest.fixture
def admin(brokers: FakeBrokers) -> Iterator[Admin]:
    with Admin(brokers.addresses) as made:
        yield made


def fail(brokers: FakeBrokers, method: str, code: grpc.StatusCode, times: int = 1, **told: str) -> None:
    for node in brokers.nodes:
        node.fail_calls[method] = deque([(code, "scripted", told)] * times)


def test_topics_are_created_changed_listed_and_deleted(admin: Admin) -> None:
    """Whatever broker is asked, the master does it."""
    admin.put_topic(TopicInfo("a", 2, 2))
    admin.put_topic(TopicInfo("a", 8, 8, 4))

    assert [topic.name for topic in admin.topics()] == ["a", "orders"]
    assert admin.topic("a") == TopicInfo("a", 8, 8, 4)
    admin.delete_topic("a")
    with pytest.raises(NotFoundError):
        admin.topic("a")
    with pytest.raises(NotFoundError):
        admin.delete_topic("a")


def test_a_change_follows_the_master(admin: Admin, brokers: FakeBrokers) -> None:
    """A slave refuses and names it, or does not."""
    admin.put_topic(TopicInfo("a"))
    brokers.elect(1)
    admin.put_topic(TopicInfo("b"))
    for node in brokers.nodes:
        node.hint = False
    brokers.elect(2)
    admin.put_topic(TopicInfo("c"))

    assert {"a", "b", "c"} <= brokers.topics.keys()


def test_queue_ranges(admin: Admin, brokers: FakeBrokers) -> None:
    """One row per queue, also for empty ones."""
    brokers.put(Message("orders", b"x", 1, store_timestamp=1_700_000_000_000))

    rows = admin.queue_ranges("orders")

    assert [(row.queue_id, row.min_offset, row.max_offset) for row in rows] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 0, 0),
        (3, 0, 0),
    ]
    assert [row.last_update_ms for row in rows] == [-1, 1_700_000_000_000, -1, -1]
    for node in brokers.nodes:
        node.fail_calls["TopicRanges"] = deque([(grpc.StatusCode.UNIMPLEMENTED, "older", {})])
    assert admin.queue_ranges("orders") == rows


def test_messages_are_found_by_id_key_unique_key_and_place(admin: Admin, brokers: FakeBrokers) -> None:
    """The same message four times."""
    result = brokers.put(Message("orders", b"x", 1, {"KEYS": "k1 k2", "UNIQ_KEY": "U"}))
    brokers.put(Message("orders", b"y", 1, {"KEYS": "k3"}))

    assert admin.message_by_id(result.message_id).body == b"x"
    assert [one.body for one in admin.messages_by_key("orders", "k2")] == [b"x"]
    assert [one.body for one in admin.messages_by_key("orders", "U", unique=True)] == [b"x"]
    messages, next_offset = admin.messages("orders", 1, 0, max_messages=1)
    assert ([one.body for one in messages], next_offset) == ([b"x"], 1)
    assert admin.messages_by_key("orders", "none") == []
    with pytest.raises(NotFoundError):
        admin.message_by_id("0" * 32)


def test_progress_and_reset(admin: Admin, brokers: FakeBrokers) -> None:
    """Lag per queue, queues that were never committed included; a reset may go back."""
    for number in range(4):
        brokers.put(Message("orders", b"x", 0, store_timestamp=1_700_000_000_000 + number))
    brokers.offsets["billing", "orders", 0] = 3

    assert admin.groups() == ["billing"]
    rows = {row.queue_id: (row.committed, row.lag) for row in admin.progress("billing")}
    assert rows == {0: (3, 1), 1: (-1, 0), 2: (-1, 0), 3: (-1, 0)}
    assert admin.reset_offsets("billing", "orders", 1_700_000_000_001) == {0: 1, 1: 0, 2: 0, 3: 0}
    assert admin.offsets("billing")["orders", 0] == 1
    assert admin.reset_offsets("billing", "orders", "last", [0]) == {0: 4}
    assert admin.reset_offsets("billing", "orders", "first", [0]) == {0: 0}
    with pytest.raises(NotFoundError):
        admin.progress("nobody")


def test_offsets_without_a_master_are_said_to_be_another_members(
    admin: Admin, brokers: FakeBrokers, caplog: pytest.LogCaptureFixture
) -> None:
    """It may lag; the master's are the group's."""
    brokers.offsets["billing", "orders", 0] = 3
    assert admin.offsets("billing") == {("orders", 0): 3}
    assert "no master" not in caplog.text
    brokers.elect(None)

    with Admin(brokers.addresses) as another:
        assert another.offsets("billing") == {("orders", 0): 3}

    assert "there is no master: the offsets of group billing are those that another member knows" in caplog.text


def test_progress_leaves_out_deleted_topics(admin: Admin, brokers: FakeBrokers) -> None:
    """Their offsets may outlive them."""
    brokers.offsets["billing", "deleted", 0] = 3

    assert admin.progress("billing") == []


@pytest.mark.parametrize("gone_first", [True, False])
def test_a_refusal_is_told_rather_than_another_brokers_silence(brokers: FakeBrokers, gone_first: bool) -> None:
    """With a wrong key and a broker that is down, the error names the key."""
    fail(brokers, "Status", grpc.StatusCode.UNAUTHENTICATED, times=10)
    addresses = [f"127.0.0.1:{free_ports(1)[0]}", brokers.addresses[0]]

    with Admin(addresses if gone_first else addresses[::-1]) as asking, pytest.raises(AccessDeniedError):
        asking.cluster()


def test_the_cluster_is_every_broker(brokers: FakeBrokers) -> None:
    """From one address all are found; who does not answer is told."""
    brokers.nodes[2].stop()

    with Admin(brokers.addresses[1]) as admin:
        found = admin.cluster()

    assert set(found) == set(brokers.addresses)
    master, slave, dead = (found[address] for address in brokers.addresses)
    assert isinstance(master, BrokerStatus)
    assert isinstance(slave, BrokerStatus)
    assert isinstance(dead, DLedgerError)
    assert (master.is_master, slave.is_master) == (True, False)
    assert slave.leader_address == master.address
    assert master.members == {node.node_id: node.address for node in brokers.nodes}


def test_a_broker_with_two_names_is_one(brokers: FakeBrokers) -> None:
    """The first name that was given counts."""
    other = f"localhost:{brokers.nodes[1].port}"
    with Admin([other, brokers.addresses[1]]) as admin:
        found = admin.cluster()

    assert len(found) == 3


def test_status_is_the_masters_unless_another_is_named(admin: Admin, brokers: FakeBrokers) -> None:
    """Without a master any broker's word."""
    assert admin.status().node_id == "n0"
    assert admin.status(brokers.addresses[2]).node_id == "n2"
    brokers.nodes[0].stop()
    brokers.elect(None)
    with Admin(brokers.addresses) as other:
        assert other.status().node_id in ("n1", "n2")


def test_nobody_answers(brokers: FakeBrokers) -> None:
    """One error, in time."""
    for node in brokers.nodes:
        node.stop()

    with Admin(brokers.addresses, timeout_s=0.3) as admin:
        with pytest.raises(UnavailableError):
            admin.cluster()
        with pytest.raises(UnavailableError):
            admin.topics()
        with pytest.raises(UnavailableError):
            admin.put_topic(TopicInfo("a"))


def test_a_passing_failure_is_repeated(admin: Admin, brokers: FakeBrokers) -> None:
    """Reads, and changes that come to the same if done twice."""
    fail(brokers, "ListTopics", grpc.StatusCode.UNAVAILABLE)
    assert admin.topics()
    fail(brokers, "PutTopic", grpc.StatusCode.INTERNAL)
    admin.put_topic(TopicInfo("a"))
    assert "a" in brokers.topics


@pytest.mark.parametrize(
    ("code", "told", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, {}, InvalidRequestError),
        (grpc.StatusCode.UNIMPLEMENTED, {}, InvalidRequestError),
        (grpc.StatusCode.PERMISSION_DENIED, {}, InvalidRequestError),
        (grpc.StatusCode.INTERNAL, {}, StoreFailedError),
    ],
)
def test_a_lasting_failure_is_a_typed_error(
    brokers: FakeBrokers,
    code: grpc.StatusCode,
    told: dict[str, str],
    kind: type[DLedgerError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Raised at once, or at the deadline."""
    monkeypatch.setattr(shared, "RETRY_WAIT_S_MIN", 0.5)  # no attempt has less than that to be answered in
    fail(brokers, "PutTopic", code, 99, **told)

    with Admin(brokers.addresses, timeout_s=1.5) as admin, pytest.raises(kind):
        admin.put_topic(TopicInfo("a"))


def test_records_that_are_none(admin: Admin, brokers: FakeBrokers) -> None:
    """A broker's garbage is its own kind of error."""
    brokers.put(Message("orders", b"x", 0, {"KEYS": "k"}))
    brokers.queues["orders", 0].records[0] = b"garbage"
    brokers.topics["bad"] = pb.Topic(name="bad", read_queues=-5)

    with pytest.raises(BadAnswerError):
        admin.messages_by_key("orders", "k")
    with pytest.raises(BadAnswerError):
        admin.topics()


@pytest.mark.parametrize("covered", [None, 1])
def test_many_topics_ranges_are_asked_for_until_all_are_covered(
    admin: Admin, brokers: FakeBrokers, covered: int | None
) -> None:
    """However few an answer covers; a topic that is gone is left out."""
    brokers.covered = covered
    admin.put_topic(TopicInfo("a", 1, 1))
    admin.put_topic(TopicInfo("b", 2, 2))
    brokers.put(Message("b", b"x", 1, store_timestamp=1_700_000_000_000))

    found = admin.topic_ranges(["a", "gone", "b"])

    assert list(found) == ["a", "b"]
    assert found["b"] == admin.queue_ranges("b")
    assert (found["b"][1].queue_id, found["b"][1].max_offset) == (1, 1)


@pytest.mark.parametrize("covered", [None, 1])
def test_many_groups_offsets_are_asked_for_until_all_are_covered(
    admin: Admin, brokers: FakeBrokers, covered: int | None
) -> None:
    """By topic and queue, as for one group."""
    brokers.covered = covered
    admin.set_offsets("g", "orders", {0: 3, 1: 4})
    admin.set_offsets("h", "orders", {1: 5})

    assert admin.group_offsets(["h", "g"]) == {
        "h": {("orders", 1): 5},
        "g": {("orders", 0): 3, ("orders", 1): 4},
    }


@pytest.mark.parametrize("covered", [0, -1, 3])
def test_a_broker_that_covers_nothing_is_not_asked_for_ever(admin: Admin, brokers: FakeBrokers, covered: int) -> None:
    """Nor believed when it covers more than it was asked for."""
    brokers.covered = covered

    with pytest.raises(BadAnswerError, match=f"answered for {covered} of 2 names"):
        admin.topic_ranges(["a", "b"])
