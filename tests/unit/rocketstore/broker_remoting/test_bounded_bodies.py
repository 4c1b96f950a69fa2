"""What a client sends of itself is bounded before anything is done with it, and done in parts."""

from __future__ import annotations

from rocketstore.broker.clients import HEARTBEAT_SUBSCRIPTIONS_MAX
from rocketstore.broker.groups import LOCKED_AT_ONCE, batched
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import (
    GROUPS_MAX,
    LOCK_QUEUES_MAX,
    ConsumerData,
    HeartbeatData,
    LockedQueuesBody,
    LockQueuesBody,
    ProducerData,
    SubscriptionData,
)
from rocketstore.remoting.topics import MessageQueue
from tests.support.remoting import RemotingSocket
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


def queues(count: int) -> tuple[MessageQueue, ...]:
    """Of one topic."""
    return tuple(MessageQueue("T", "b", number) for number in range(count))


def test_so_many_queues_are_locked_at_once_and_no_more(broker: RemotingHarness, client: RemotingSocket) -> None:
    """All that are asked for, in parts; more are refused, and none of them is locked."""
    most = client.ask(RequestCode.LOCK_BATCH_MQ, {}, LockQueuesBody("me", "g", queues(LOCK_QUEUES_MAX)).encode())
    assert len(LockedQueuesBody.decode(most.body).locked) == LOCK_QUEUES_MAX
    more = LockQueuesBody("me", "h", queues(LOCK_QUEUES_MAX + 1)).encode()
    assert client.ask(RequestCode.LOCK_BATCH_MQ, {}, more).code != 0
    with broker.dial() as other:
        body = LockQueuesBody("other", "h", queues(1)).encode()
        assert len(LockedQueuesBody.decode(other.ask(RequestCode.LOCK_BATCH_MQ, {}, body).body).locked) == 1
    assert (
        client.ask(RequestCode.UNLOCK_BATCH_MQ, {}, LockQueuesBody("me", "g", queues(LOCK_QUEUES_MAX)).encode()).code
        == 0
    )
    with broker.dial() as other:
        body = LockQueuesBody("other", "g", queues(LOCK_QUEUES_MAX)).encode()
        found = other.ask(RequestCode.LOCK_BATCH_MQ, {}, body).body
        assert len(LockedQueuesBody.decode(found).locked) == LOCK_QUEUES_MAX
    assert client.ask(RequestCode.LOCK_BATCH_MQ, {}, LockQueuesBody("me", "g").encode()).code == 0


def test_parts_are_all_of_it() -> None:
    """None twice, none left out; one empty part if there is nothing."""
    for count in (0, 1, LOCKED_AT_ONCE, LOCKED_AT_ONCE + 1, 3 * LOCKED_AT_ONCE):
        queues = [("T", number) for number in range(count)]
        parts = list(batched(queues))
        assert [one for part in parts for one in part] == queues
        assert all(len(part) <= LOCKED_AT_ONCE for part in parts)


def test_a_heartbeat_names_so_many_groups_and_topics_at_most(broker: RemotingHarness, client: RemotingSocket) -> None:
    """Each costs the loop something, every half minute, from every client."""
    topics = tuple(SubscriptionData(f"t{number}") for number in range(HEARTBEAT_SUBSCRIPTIONS_MAX // 2 + 1))
    too_many = (
        HeartbeatData(
            "me", (), (ConsumerData("g", subscription_data_set=topics), ConsumerData("h", subscription_data_set=topics))
        ),
        HeartbeatData("me", tuple(ProducerData(f"p{number}") for number in range(GROUPS_MAX + 1))),
    )
    for beat in too_many:
        assert client.ask(RequestCode.HEART_BEAT, {}, beat.encode()).code != 0
    assert broker.groups.clients.consumers("g") is None
    good = HeartbeatData("me", (), (ConsumerData("g", subscription_data_set=topics),))
    assert client.ask(RequestCode.HEART_BEAT, {}, good.encode()).code == 0
