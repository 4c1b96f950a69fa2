"""What clients ask about their groups, over remoting."""

from __future__ import annotations

from rocketstore.broker.clients import SILENT_S_MAX
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import HeartbeatData, LockedQueuesBody, LockQueuesBody, ProducerData
from rocketstore.remoting.topics import MessageQueue
from tests.support.remoting import RemotingSocket, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness


def test_a_queue_is_the_same_by_whatever_name_of_a_broker(client: RemotingSocket) -> None:
    """All of them are this broker's: two names would let two clients have the queue. The answer has the name given."""

    def lock(client_id: str, broker: str) -> tuple[MessageQueue, ...]:
        body = LockQueuesBody(client_id, "g", (MessageQueue("T", broker, 0),)).encode()
        return LockedQueuesBody.decode(client.ask(RequestCode.LOCK_BATCH_MQ, {}, body).body).locked

    assert lock("a", "b") == (MessageQueue("T", "b", 0),)
    assert lock("b", "B") == ()
    unlocked = LockQueuesBody("a", "g", (MessageQueue("T", "B", 0),)).encode()
    assert client.ask(RequestCode.UNLOCK_BATCH_MQ, {}, unlocked).code == 0
    assert lock("b", "b") == (MessageQueue("T", "b", 0),)


def test_a_client_without_heartbeats_is_dropped(broker: RemotingHarness, client: RemotingSocket) -> None:
    """From its groups, of consumers and of producers; its connection ends, so that it finds out."""
    assert client.subscribe("g", "T").code == 0
    tables = broker.groups.clients
    assert (tables.consumers("g") is not None, "g" in tables.producer_groups()) == (True, True)

    def later() -> None:
        tables._now = lambda: 2 * SILENT_S_MAX + 1e9
        broker.groups.hang_up_on_the_silent()

    broker.on_loop(later)
    assert client.is_hung_up
    wait_until(lambda: tables.consumers("g") is None and "g" not in tables.producer_groups(), "it is no member")


def test_a_connection_has_one_client_id_and_none_when_it_is_gone(
    broker: RemotingHarness, client: RemotingSocket
) -> None:
    """Else one client names ids without end, each with a connection that stays in memory; and who replies to a client
    that is gone hears of an error of the broker's.
    """
    tables = broker.groups.clients
    with broker.dial() as asker:
        for number in range(3):
            beat = HeartbeatData(f"asker{number}", (ProducerData("p"),))
            assert asker.ask(RequestCode.HEART_BEAT, {}, beat.encode()).code == 0
        assert [tables.producer_by_id(f"asker{number}") is not None for number in range(3)] == [False, False, True]
    wait_until(lambda: "p" not in tables.producer_groups(), "it is gone")
    assert not tables._producer_at
    fields = send_fields("T", properties="REPLY_TO_CLIENT\x01asker2")
    assert "channel of <asker2> not found" in client.ask(RequestCode.SEND_REPLY_MESSAGE_V2, fields, b"x").remark
