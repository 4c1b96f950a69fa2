"""What clients ask about their groups, over remoting."""

from __future__ import annotations

from rocketstore.remoting.bodies.clients import LockedQueuesBody, LockQueuesBody
from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.codes import RequestCode
from tests.support.remoting import RemotingSocket


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
