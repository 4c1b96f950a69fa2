"""RocketMQ 5's pop over remoting, as its Java client asks and reads it.

A broker divides queues as RocketMQ 5 does: every queue has somebody, and nobody has one that is not theirs.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.remoting.codes import AnswerCode, RequestError
from dledger.remoting.frame import Frame
from rocketstore.broker_remoting.pops import RULES, shares
from rocketstore.client.aio.received import ReceivedMessage, split_records
from rocketstore.remoting.codes import POLLING_FULL, RequestCode
from rocketstore.remoting.groups import ConsumeStats
from rocketstore.remoting.pop import ACKED_MAX, ACKS_MAX, CheckPoint
from rocketstore.remoting.topics import MessageQueue
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import RequestMode
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker.popping.harness import GROUP, TOPIC, PopBroker

CODE = RequestCode
NAMES = {"consumerGroup": GROUP, "topic": TOPIC}
PULL = TopicRequestMode("T", "g", RequestMode.PULL)


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PopBroker]:
    """Its receives that do not wait look at all queues, however slow this machine is."""
    monkeypatch.setattr("rocketstore.broker.popping.receiving.SCAN_S_MAX", 60.0)
    with PopBroker(tmp_path) as running:
        yield running


@pytest.fixture
def client(broker: PopBroker) -> Iterator[RemotingSocket]:
    with RemotingSocket(broker.server.port) as dialled:
        yield dialled


def pop_fields(**more: object) -> dict[str, object]:
    """As a Java client pops: 32 messages of any queue, for a minute, from the first on."""
    numbers = {"queueId": -1, "maxMsgNums": 32, "invisibleTime": 60_000, "pollTime": 0, "bornTime": 1, "initMode": 0}
    return {**NAMES, **numbers, "expType": "TAG", "exp": "*", "order": "false", **more}


def pop(client: RemotingSocket, **more: object) -> tuple[Frame, list[ReceivedMessage]]:
    answer = client.ask(CODE.POP_MESSAGE, pop_fields(**more))
    return answer, list(split_records(answer.body))


def point_of(message: ReceivedMessage) -> CheckPoint:
    return CheckPoint.parse(message.property("POP_CK"))


def ack(client: RemotingSocket, text: str, topic: str = TOPIC) -> int:
    """Of a message with this check point."""
    point = CheckPoint.parse(text)
    more = {"topic": topic, "queueId": point.queue_id, "extraInfo": text, "offset": point.offset}
    return client.ask(CODE.ACK_MESSAGE, NAMES | more).code


def without_handle(message: ReceivedMessage) -> str:
    """As clients put it together of an answer's numbers."""
    return str(point_of(message)._replace(rest=""))


class TestPops:
    """POP_MESSAGE and its answer."""

    def test_the_numbers_say_where_each_message_is(self, broker: PopBroker, client: RemotingSocket) -> None:
        """Clients look up each message's queue among them, and fail without."""
        broker.send([b"a", b"b", b"c"], 1)
        answer, messages = pop(client, maxMsgNums=2)
        assert (answer.code, [one.body for one in messages]) == (0, [b"a", b"b"])
        fields = answer.fields
        assert (fields["startOffsetInfo"], fields["msgOffsetInfo"]) == ("0 1 0", "0 1 0,1")
        assert (fields["invisibleTime"], fields["reviveQid"], fields["restNum"]) == ("60000", "0", "1")
        point = point_of(messages[1])
        assert (point.queue_id, point.offset, point.broker) == (1, 1, broker.broker.config.name)
        assert point.pop_time == int(fields["popTime"])
        assert not point.is_retry

    def test_nothing_in_time_is_told_so(self, client: RemotingSocket) -> None:
        """With the header, which clients read whatever the code."""
        answer, _ = pop(client)
        assert answer.code == AnswerCode.PULL_NOT_FOUND
        assert answer.fields.keys() >= {"popTime", "invisibleTime", "reviveQid", "restNum"}

    def test_messages_of_an_answer_that_is_refused_are_given_back(
        self, broker: PopBroker, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its account may not read them any more; others need not wait until the lease ends."""

        def revoked(*_: object) -> None:
            raise RequestError("revoked", AnswerCode.NO_PERMISSION)

        broker.send([b"a"])
        with monkeypatch.context() as patch:
            patch.setattr("rocketstore.broker_remoting.access.RemotingAccess.admit_again", revoked)
            assert pop(client)[0].code == AnswerCode.NO_PERMISSION
        (again,) = pop(client, pollTime=10_000)[1]
        assert again.body == b"a"

    def test_it_waits_as_long_as_it_asks(self, broker: PopBroker, client: RemotingSocket) -> None:
        """And an arrival ends that."""
        opaque = client.begin(CODE.POP_MESSAGE, pop_fields(pollTime=30_000))
        wait_until(lambda: broker.broker.counters().pop.waiting == 1, "it waits")
        with RemotingSocket(broker.server.port) as other:
            polling = other.ask(CODE.POLLING_INFO, NAMES | {"queueId": -1})
            assert polling.fields["pollingNum"] == "1"
        broker.send([b"new"])
        (message,) = split_records(client.answer_to(opaque).body)
        assert message.body == b"new"

    def test_who_hangs_up_waits_no_more(self, broker: PopBroker) -> None:
        """What comes later is for others."""
        with RemotingSocket(broker.server.port) as gone:
            gone.begin(CODE.POP_MESSAGE, pop_fields(pollTime=30_000))
            wait_until(lambda: broker.broker.counters().pop.waiting == 1, "it waits")
        wait_until(lambda: broker.broker.counters().pop.waiting == 0, "it is gone")

    @pytest.mark.parametrize(
        ("more", "code", "reason"),
        [
            ({"maxMsgNums": 33}, AnswerCode.INVALID_PARAMETER, "1 to 32 messages"),
            ({"order": "true"}, AnswerCode.INVALID_PARAMETER, "consumeMessageOrderly"),
            ({"topic": "nowhere"}, AnswerCode.TOPIC_NOT_EXIST, "does not exist"),
            ({"expType": "SQL92", "exp": "a >"}, AnswerCode.SUBSCRIPTION_PARSE_FAILED, ""),
        ],
    )
    def test_impossible_wishes_are_refused(
        self, client: RemotingSocket, more: dict[str, object], code: int, reason: str
    ) -> None:
        """By the codes that clients know."""
        answer = client.ask(CODE.POP_MESSAGE, pop_fields(**more))
        assert answer.code == code
        assert reason in answer.remark

    def test_a_full_window_is_told(
        self, broker: PopBroker, client: RemotingSocket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """P10: the client pauses, and asks again."""
        monkeypatch.setattr("rocketstore.pop.queue.WINDOW_MAX", 2)
        broker.send([b"a", b"b", b"c"])
        assert len(pop(client)[1]) == 2
        assert pop(client)[0].code == POLLING_FULL

    def test_order_is_counted(self, broker: PopBroker, client: RemotingSocket) -> None:
        """P8: of an ordered group, how often a queue's batch was delivered before."""
        broker.put_group(GroupConfig(GROUP, ordered=True))
        broker.send([b"a"])
        first, _ = pop(client, order="true", queueId=0, attemptId="A", invisibleTime=1000)
        assert (first.fields["reviveQid"], first.fields["orderCountInfo"]) == ("999", "0 0 0")

        def again() -> bool:
            answer, messages = pop(client, order="true", queueId=0, attemptId="B")
            return bool(messages) and answer.fields["orderCountInfo"] == "0 0 1"

        wait_until(again, "the batch comes again")

    def test_a_pull_of_the_same_group_is_refused(self, client: RemotingSocket) -> None:
        """P11: it names the client that pops."""
        pop(client)
        client.subscribe(GROUP, TOPIC)
        answer = client.ask(CODE.PULL_MESSAGE, pull_fields(GROUP, TOPIC))
        assert answer.code == AnswerCode.NO_PERMISSION
        assert "127.0.0.1:" in answer.remark

    def test_messages_are_looked_at_without_taking_them(self, broker: PopBroker, client: RemotingSocket) -> None:
        """PEEK_MESSAGE and NOTIFICATION."""
        asked = NAMES | {"queueId": -1, "pollTime": 0, "bornTime": 1}
        pop(client)
        assert client.ask(CODE.NOTIFICATION, asked).fields["hasMsg"] == "false"
        assert client.ask(CODE.PEEK_MESSAGE, NAMES | {"queueId": -1, "maxMsgNums": 9}).code != 0
        broker.send([b"a", b"b"])
        assert client.ask(CODE.NOTIFICATION, asked).fields["hasMsg"] == "true"
        for _ in range(2):
            peeked = client.ask(CODE.PEEK_MESSAGE, NAMES | {"queueId": -1, "maxMsgNums": 9})
            assert [one.body for one in split_records(peeked.body)] == [b"a", b"b"]
        assert len(pop(client)[1]) == 2


class TestAnswers:
    """What clients send back."""

    def test_a_message_is_acknowledged_by_its_check_point(self, broker: PopBroker, client: RemotingSocket) -> None:
        """As it was given, or put together of the numbers; once."""
        broker.send([b"a", b"b"])
        first, second = pop(client)[1]
        assert ack(client, first.property("POP_CK")) == 0
        assert ack(client, without_handle(second)) == 0
        assert ack(client, first.property("POP_CK")) == AnswerCode.NO_MESSAGE
        assert ack(client, without_handle(second)) == AnswerCode.NO_MESSAGE
        assert broker.window().commit == 2

    def test_numbers_of_an_older_delivery_are_refused(self, broker: PopBroker, client: RemotingSocket) -> None:
        """P6: its time was changed since."""
        broker.send([b"a"])
        (message,) = pop(client)[1]
        old = point_of(message)
        more = {"queueId": 0, "extraInfo": str(old), "offset": 0, "invisibleTime": 30_000}
        changed = client.ask(CODE.CHANGE_MESSAGE_INVISIBLETIME, NAMES | more)
        assert (changed.code, changed.fields["invisibleTime"]) == (0, "30000")
        assert ack(client, without_handle(message)) == AnswerCode.NO_MESSAGE
        new = old._replace(pop_time=int(changed.fields["popTime"]), invisible_time=30_000, rest="")
        assert ack(client, str(new)) == 0

    def test_another_master_knows_check_points_by_their_handles(
        self, broker: PopBroker, client: RemotingSocket
    ) -> None:
        """P5: numbers alone only say something to the one that gave the message out."""
        broker.send([b"a"])
        (message,) = pop(client)[1]
        role = broker.broker.store.role
        broker.broker.store.become_slave()
        broker.broker.store.become_master(role)
        assert ack(client, without_handle(message)) == AnswerCode.NO_MESSAGE
        assert ack(client, message.property("POP_CK")) == 0

    def test_many_are_acknowledged_by_bits(self, broker: PopBroker, client: RemotingSocket) -> None:
        """BATCH_ACK_MESSAGE: of each queue the first offset, and the distances from it."""
        broker.send([b"%d" % number for number in range(12)])
        messages = pop(client)[1]
        point = point_of(messages[0])
        bits = base64.b64encode((1 << 0 | 1 << 2 | 1 << 11).to_bytes(2, "little")).decode()
        entry = {"c": GROUP, "t": TOPIC, "r": "0", "so": 0, "q": 0, "rq": 0, "pt": point.pop_time, "it": 60_000}
        body = json.dumps({"brokerName": "b", "acks": [entry | {"b": bits}]}).encode()
        assert client.ask(CODE.BATCH_ACK_MESSAGE, body=body).code == 0
        settled = [broker.window().is_settled(offset) for offset in range(12)]
        assert [at for at, one in enumerate(settled) if one] == [0, 2, 11]
        answer = client.ask(CODE.BATCH_ACK_MESSAGE, body=body)
        assert (answer.code, "3 of 3 messages" in answer.remark) == (AnswerCode.NO_MESSAGE, True)
        assert client.ask(CODE.BATCH_ACK_MESSAGE, body=b'{"acks":[]}').code == AnswerCode.NO_MESSAGE

    def test_no_more_are_looked_at_than_may_be_acknowledged_at_once(
        self, broker: PopBroker, client: RemotingSocket
    ) -> None:
        """A request of a megabyte could name five million, for each of which the broker looks at a lease."""
        entry = {"c": GROUP, "t": TOPIC, "r": "0", "so": 0, "q": 0, "rq": 0, "pt": 0, "it": 60_000}
        many = entry | {"b": base64.b64encode(b"\xff" * (ACKED_MAX // 8)).decode()}
        never_read = entry | {"b": "!"}
        body = json.dumps({"brokerName": "b", "acks": [many, many, never_read]}).encode()
        answer = client.ask(CODE.BATCH_ACK_MESSAGE, body=body)
        assert (answer.code, f"at most {ACKS_MAX}" in answer.remark) == (AnswerCode.INVALID_PARAMETER, True)

    def test_a_message_that_comes_again_is_of_the_retry_topic(self, broker: PopBroker, client: RemotingSocket) -> None:
        """By RocketMQ's name of it, which clients send back with the acknowledgement."""
        broker.send([b"a"])
        pop(client, invisibleTime=1000)
        opaque = client.begin(CODE.POP_MESSAGE, pop_fields(pollTime=30_000))
        answer = client.answer_to(opaque)
        (again,) = split_records(answer.body)
        assert (answer.fields["startOffsetInfo"], point_of(again).is_retry) == ("1 0 0", True)
        assert again.decode().reconsume_times == 1
        assert ack(client, without_handle(again), f"%RETRY%{GROUP}_{TOPIC}") == 0


class TestAssignment:
    """QUERY_ASSIGNMENT, and what an administrator says about it (SET_MESSAGE_REQUEST_MODE)."""

    def assigned(
        self,
        client: RemotingSocket,
        topic: str = TOPIC,
        model: str = "CLUSTERING",
        client_id: str = "c1",
        rule: str = "",
    ) -> list[tuple[str, int]]:
        asked = {"topic": topic, "consumerGroup": GROUP, "clientId": client_id, "messageModel": model}
        answer = client.ask(CODE.QUERY_ASSIGNMENT, body=json.dumps(asked | {"strategyName": rule}).encode())
        assert answer.code == 0, answer.remark
        found = json.loads(answer.body)["messageQueueAssignments"]
        return [(one["mode"], one["messageQueue"]["queueId"]) for one in found]

    def set_mode(self, client: RemotingSocket, mode: str, share: int = 0, topic: str = TOPIC) -> Frame:
        """As mqadmin 5 asks."""
        body = {"topic": topic, "consumerGroup": GROUP, "mode": mode, "popShareQueueNum": share}
        return client.ask(CODE.SET_MESSAGE_REQUEST_MODE, body=json.dumps(body).encode())

    def test_clients_that_ask_shall_pop(self, broker: PopBroker, client: RemotingSocket) -> None:
        """Of all queues; what was sent back is pulled, and divided; who wants all gets every queue."""
        assert self.assigned(client) == [("POP", -1)]
        assert self.assigned(client, model="BROADCASTING") == [("PULL", 0), ("PULL", 1)]
        assert self.assigned(client, "nowhere") == []
        client.subscribe(GROUP, TOPIC, client_id="c1")
        wait_until(lambda: broker.broker.topics.find(f"%RETRY%{GROUP}") is not None, "the retry topic")
        assert self.assigned(client, f"%RETRY%{GROUP}") == [("PULL", 0)]

    def test_a_mode_is_kept_until_its_group_or_topic_is_deleted(
        self, broker: PopBroker, client: RemotingSocket, tmp_path: Path
    ) -> None:
        """Over a restart, and in every member's state: it is a message of the log."""
        client.subscribe(GROUP, TOPIC, client_id="c1")
        assert self.set_mode(client, "PULL").code == 0
        assert self.assigned(client) == [("PULL", 0), ("PULL", 1)]
        assert self.assigned(client, client_id="stranger") == []
        answer = json.loads(client.ask(CODE.GET_ALL_MESSAGE_REQUEST_MODE).body)["messageRequestModeMap"]
        assert (answer[TOPIC][GROUP]["mode"], answer[TOPIC][GROUP]["popShareQueueNum"]) == ("PULL", 0)
        broker.server.stop()
        with PopBroker(tmp_path) as again, RemotingSocket(again.server.port) as dialled:
            dialled.subscribe(GROUP, TOPIC, client_id="c1")
            assert self.assigned(dialled) == [("PULL", 0), ("PULL", 1)]
            again.run(again.broker.topics.delete(TOPIC))
            again.run(again.broker.topics.put([TopicConfig(TOPIC, 2, 2)]))
            assert self.assigned(dialled) == [("POP", -1)]
            assert self.set_mode(dialled, "PULL").code == 0
            again.run(again.broker.groups.delete(GROUP, with_offsets=True))
            assert again.broker.state.request_modes() == []

    def test_what_cannot_be_set_is_refused(self, broker: PopBroker, client: RemotingSocket) -> None:
        """And a rule that no broker knows is named."""
        answer = self.set_mode(client, "PULL", topic=f"%RETRY%{GROUP}")
        assert (answer.code, "retry topic" in answer.remark) == (AnswerCode.NO_PERMISSION, True)
        assert self.set_mode(client, "POP", -2).code != 0
        assert self.set_mode(client, "PULL", topic="no topic").code != 0
        body = json.dumps({"topic": TOPIC, "consumerGroup": GROUP, "strategyName": "MINE"}).encode()
        answer = client.ask(CODE.QUERY_ASSIGNMENT, body=body)
        assert (answer.code, "AVG" in answer.remark) == (AnswerCode.INVALID_PARAMETER, True)
        assert broker.broker.state.request_modes() == []

    def test_a_pop_of_one_queue_gets_what_is_to_be_tried_again(self, broker: PopBroker, client: RemotingSocket) -> None:
        """Where queues are shared by some, nobody pops from all; as in RocketMQ, retries come with any queue."""
        broker.send([b"a"])
        pop(client, invisibleTime=1000)
        answer = client.answer_to(client.begin(CODE.POP_MESSAGE, pop_fields(queueId=1, pollTime=30_000)))
        assert [one.decode().body for one in split_records(answer.body)] == [b"a"]


def test_what_was_given_out_is_in_flight(broker: PopBroker, client: RemotingSocket) -> None:
    """mqadmin 5 shows how much was given out beyond what is consumed."""
    broker.send([b"a", b"b", b"c"], 1)
    _, messages = pop(client, maxMsgNums=2)
    assert ack(client, without_handle(messages[0])) == 0
    answer = client.ask(CODE.GET_CONSUME_STATS, {"consumerGroup": GROUP})
    place = ConsumeStats.decode(answer.body).offset_table[MessageQueue(TOPIC, broker.broker.config.name, 1)]
    assert (place.broker_offset, place.consumer_offset, place.pull_offset) == (3, 1, 2)


def popping_mode(share: int) -> TopicRequestMode:
    return TopicRequestMode("T", "g", RequestMode.POP, share)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("queues", [1, 2, 7, 8])
@pytest.mark.parametrize("members", [1, 2, 3, 9])
def test_each_queue_is_pulled_by_one(name: str, queues: int, members: int) -> None:
    ids = [f"c{number}" for number in range(members)]
    found = [shares(PULL, RULES[name], range(queues), ids, me) for me in ids]
    assert sorted(one for each in found for one in each) == list(range(queues))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_the_rules_are_rocketmqs() -> None:
    """AllocateMessageQueueAveragely: runs, the first ones longer; by circle: one each in turn."""
    ids = ["a", "b", "c"]
    assert [shares(PULL, RULES["AVG"], range(8), ids, me) for me in ids] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [shares(PULL, RULES["AVG_BY_CIRCLE"], range(8), ids, me) for me in ids] == [[0, 3, 6], [1, 4, 7], [2, 5]]


@pytest.mark.parametrize("share", [-1, 0, 3, 9])
def test_without_a_share_or_with_one_for_all_everyone_pops_from_all(share: int) -> None:
    ids = ["a", "b", "c", "d"]
    assert shares(popping_mode(share), RULES["AVG"], range(8), ids, "a") == [-1]
    assert shares(popping_mode(share), RULES["AVG"], range(8), ids, "unknown") == [-1]


def test_a_share_adds_the_queues_of_those_behind() -> None:
    """In a circle: each queue is popped from by one more than the share says."""
    ids = ["a", "b", "c", "d"]
    found = {me: shares(popping_mode(1), RULES["AVG"], range(8), ids, me) for me in ids}
    assert found["a"] == [0, 1, 2, 3]
    assert found["d"] == [6, 7, 0, 1]
    assert set(Counter(one for each in found.values() for one in each).values()) == {2}
    assert shares(popping_mode(1), RULES["AVG"], range(8), ids, "unknown") == []


def test_more_consumers_than_queues_share_nothing() -> None:
    """As in RocketMQ: each has its own, if there is one."""
    ids = ["a", "b", "c", "d"]
    assert [shares(popping_mode(1), RULES["AVG"], range(3), ids, me) for me in ids] == [[0], [1], [2], []]
