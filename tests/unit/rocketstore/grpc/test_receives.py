"""Receives and what consumers say of messages then: the protocol's requests, answers and codes."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

import pytest

from dledger.rpc.clients.connections import Leases
from rocketstore.broker.popping.requests import Receive, Received
from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.state.changes import GroupConfig
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import GatewayClient, GatewayHarness, consumer_settings, endpoints, message

T = pb.Resource(name="T")
G = pb.Resource(name="g")
_TERMINATED = pbs.NotifyClientTerminationResponse


def receive(client: GatewayClient, **fields: object) -> tuple[pb.Status, Sequence[pb.Message]]:
    """One receive that does not wait, for a minute."""
    request = pbs.ReceiveMessageRequest(group=G, message_queue=pb.MessageQueue(topic=T, id=0), batch_size=32)
    request.invisible_duration.seconds = 60
    request.long_polling_timeout.seconds = 0
    request.MergeFrom(pbs.ReceiveMessageRequest(**fields))  # type: ignore[arg-type]  # whatever its fields are
    answers = client.calls("ReceiveMessage", request, pbs.ReceiveMessageResponse)
    (status,) = [one.status for one in answers if one.HasField("status")]
    messages = [one.message for one in answers if one.HasField("message")]
    assert answers[0].HasField("status")
    assert answers[-1].HasField("delivery_timestamp") == bool(messages)
    return status, messages


def ack(client: GatewayClient, *handles: str, group: pb.Resource = G) -> pbs.AckMessageResponse:
    """AckMessage."""
    entries = [pbs.AckMessageEntry(message_id=f"m{at}", receipt_handle=one) for at, one in enumerate(handles)]
    request = pbs.AckMessageRequest(group=group, topic=T, entries=entries)
    return client.call("AckMessage", request, pbs.AckMessageResponse)


@pytest.fixture
def started(broker: GatewayHarness, client: GatewayClient) -> GatewayClient:
    """Its group begins here."""
    assert receive(client)[0].code == pb.MESSAGE_NOT_FOUND
    return client


class TestReceiving:
    """ReceiveMessage and QueryAssignment."""

    def test_answers_count_until_they_are_sent(
        self, broker: GatewayHarness, started: GatewayClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A client that asks again and again, and reads nothing, would fill the memory."""
        for number in range(8):
            started.send(message(bytes(3 * 1024 * 1024), message_id=f"m{number}"))
        request = pbs.ReceiveMessageRequest(group=G, message_queue=pb.MessageQueue(topic=T, id=0), batch_size=32)
        request.invisible_duration.seconds = 60
        root = broker.broker.shares.quotas.of("@test", "test", "test")._root
        sizes: list[int] = []
        resize = Leases.resize

        def noted(leases: Leases, size: int) -> None:
            resize(leases, size)
            sizes.append(root.answer_bytes)

        monkeypatch.setattr(Leases, "resize", noted)
        answers = started.calls("ReceiveMessage", request, pbs.ReceiveMessageResponse, 60)
        assert sum(one.HasField("message") for one in answers) >= 1
        assert sum(one > 1024 * 1024 for one in sizes) >= 3  # read, with its status unsent, and unsent
        wait_until(lambda: root.answer_bytes == 0, "all is sent")

    def test_a_message_arrives_as_it_was_sent(self, started: GatewayClient) -> None:
        """With its digest, encoding, handle and attempt, without which official clients lose it."""
        given = message(b"hello", message_id="01A", tag="new", keys=["k1", "k2"])
        given.user_properties["colour"] = "red"
        started.send(given)
        status, (found,) = receive(started)
        system = found.system_properties
        assert status.code == pb.OK
        assert (found.body, found.topic.name, dict(found.user_properties)) == (b"hello", "T", {"colour": "red"})
        assert (system.message_id, system.tag, list(system.keys)) == ("01A", "new", ["k1", "k2"])
        assert (system.message_type, system.body_encoding) == (pb.NORMAL, pb.IDENTITY)
        digest = hashlib.md5(b"hello", usedforsecurity=False).hexdigest().upper()
        assert (system.body_digest.type, system.body_digest.checksum) == (pb.MD5, digest)
        assert system.delivery_attempt == 1
        assert system.receipt_handle
        assert 58 <= system.invisible_duration.seconds <= 60

    def test_what_does_not_fit_when_it_is_readable_comes_again(
        self, broker: GatewayHarness, started: GatewayClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compressed bodies that grow are in one answer as far as it has room; the loop unpacks none of them."""
        threads: list[str] = []

        def grown(record: bytes, _: int, *, topic: str = "") -> pb.Message:
            threads.append(threading.current_thread().name)
            return pb.Message(topic=pb.Resource(name=topic), body=bytes(len(record) + 600))

        given: list[str] = []

        def noted(group: str, topic: str, handles: Sequence[str]) -> None:
            assert (group, topic) == ("g", "T")
            given.extend(handles)

        broker.broker.popping.give_back = noted  # type: ignore[method-assign]  # to see what is given back
        monkeypatch.setattr("rocketstore.grpc.receives.to_client", grown)
        monkeypatch.setattr("rocketstore.grpc.receives.is_compressed", lambda _record: True)
        monkeypatch.setattr("rocketstore.grpc.receives.REPACKED_BYTES_MAX", 1500)
        for number in range(4):
            started.send(message(message_id=f"0{number}"))
        assert len(receive(started)[1]) == 2
        assert len(given) == 2
        broker.on_loop(lambda: given.append(threading.current_thread().name))
        assert given[-1] not in threads

    def test_an_answer_that_is_not_given_leaves_none_of_its_messages_out(
        self, broker: GatewayHarness, started: GatewayClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither those that were made readable before it failed: nobody would get them for a minute."""
        read: list[bytes] = []

        def third_fails(record: bytes, _: int, *, topic: str = "") -> pb.Message:
            read.append(record)
            if len(read) == 3:
                raise Refusal(RefusalKind.UNAVAILABLE, "the broker stops")
            return pb.Message(topic=pb.Resource(name=topic))

        given: list[str] = []
        broker.broker.popping.give_back = lambda *what: given.extend(what[2])  # type: ignore[method-assign]
        monkeypatch.setattr("rocketstore.grpc.receives.to_client", third_fails)
        monkeypatch.setattr("rocketstore.grpc.receives.is_compressed", lambda _record: True)
        for number in range(4):
            started.send(message(message_id=f"0{number}"))
        assert not receive(started)[1]
        assert len(set(given)) == 4

    def test_the_queue_that_is_named_does_not_matter(self, started: GatewayClient) -> None:
        """Simple consumers ask for one after the other, and would wait at an empty one."""
        for number in range(4):
            started.send(message(message_id=f"0{number}"))
        assert len(receive(started)[1]) == 4

    def test_nothing_in_time_is_no_error(self, started: GatewayClient) -> None:
        """But a code that clients know."""
        status, messages = receive(started)
        assert (status.code, list(messages)) == (pb.MESSAGE_NOT_FOUND, [])

    def test_a_poll_is_answered_before_the_client_hangs_up(self, started: GatewayClient) -> None:
        """However long it asks to wait."""
        request = pbs.ReceiveMessageRequest(group=G, message_queue=pb.MessageQueue(topic=T), batch_size=1)
        request.invisible_duration.seconds = 60
        request.long_polling_timeout.seconds = 3600
        (answer,) = started.calls("ReceiveMessage", request, pbs.ReceiveMessageResponse, timeout_s=1.0)
        assert answer.status.code == pb.MESSAGE_NOT_FOUND

    def test_a_group_begins_when_it_subscribes(self, broker: GatewayHarness, client: GatewayClient) -> None:
        """P9: since its first consumer that is still there has said so, or at the end of the queues."""
        assert broker.gateway.registry.subscribed_since_ms("g", "T") == 0
        before_ms = broker.broker.loop.clock.wall_ms()
        client.telemetry(consumer_settings("g", "T")).next()
        since_ms = broker.gateway.registry.subscribed_since_ms("g", "T")
        assert before_ms <= since_ms <= broker.broker.loop.clock.wall_ms()
        asked: list[int] = []
        popping = broker.broker.popping
        receive_it = popping.receive

        async def noted(wish: Receive, leases: Leases, owner: str = "") -> Received:
            asked.append(wish.since_ms)
            return await receive_it(wish, leases, owner)

        popping.receive = noted  # type: ignore[method-assign]  # to see what is asked
        assert receive(client)[0].code == pb.MESSAGE_NOT_FOUND
        assert asked == [since_ms]
        with broker.dial("client-2") as other:
            other.telemetry(consumer_settings("g", "T")).next()
            client.call("NotifyClientTermination", pbs.NotifyClientTerminationRequest(group=G), _TERMINATED)
            assert broker.gateway.registry.subscribed_since_ms("g", "T") == since_ms
            other.call("NotifyClientTermination", pbs.NotifyClientTerminationRequest(group=G), _TERMINATED)
        assert broker.gateway.registry.subscribed_since_ms("g", "T") == 0
        assert not broker.gateway.registry._subscribers

    def test_filters_are_those_of_the_request(self, started: GatewayClient) -> None:
        """By tags, and by conditions; a wrong one is refused."""
        started.send(message(message_id="01", tag="A"))
        started.send(message(message_id="02", tag="B"))
        (found,) = receive(started, filter_expression=pb.FilterExpression(type=pb.TAG, expression="B||C"))[1]
        assert found.system_properties.message_id == "02"
        wrong = pb.FilterExpression(type=pb.SQL, expression="a >")
        assert receive(started, filter_expression=wrong)[0].code == pb.ILLEGAL_FILTER_EXPRESSION

    def test_wrong_times_are_refused(self, started: GatewayClient) -> None:
        """Push consumers give none; others must."""
        request = pbs.ReceiveMessageRequest(group=G, message_queue=pb.MessageQueue(topic=T), batch_size=1)
        (answer,) = started.calls("ReceiveMessage", request, pbs.ReceiveMessageResponse)
        assert answer.status.code == pb.ILLEGAL_INVISIBLE_TIME
        assert receive(started, auto_renew=True)[0].code == pb.MESSAGE_NOT_FOUND

    def test_assignments_are_any_queue_or_each(self, broker: GatewayHarness, client: GatewayClient) -> None:
        """One for a group without order, which every member gets; one per queue for an ordered group."""
        request = pbs.QueryAssignmentRequest(topic=T, group=G, endpoints=endpoints("127.0.0.1:8081"))

        def assigned() -> list[int]:
            answer = client.call("QueryAssignment", request, pbs.QueryAssignmentResponse)
            assert answer.status.code == pb.OK
            assert all(one.message_queue.permission == pb.READ_WRITE for one in answer.assignments)
            return [one.message_queue.id for one in answer.assignments]

        assert assigned() == [-1]
        broker.state.configs["g"] = GroupConfig("g", ordered=True)
        assert assigned() == [0, 1, 2, 3]

    def test_an_ordered_group_gets_its_queue(self, broker: GatewayHarness, client: GatewayClient) -> None:
        """P8: and the same batch for the same attempt."""
        broker.state.configs["g"] = GroupConfig("g", ordered=True)
        assert receive(client)[0].code == pb.MESSAGE_NOT_FOUND
        for number in range(3):
            client.send(message(message_id=f"0{number}", kind=pb.FIFO, message_group="x"))
        (queue_id,) = {one.head.queue_id for one in broker.store.log.records}
        queue = pb.MessageQueue(topic=T, id=queue_id)
        status, first = receive(client, message_queue=queue, attempt_id="A")
        assert (status.code, len(first)) == (pb.OK, 3)
        assert receive(client, message_queue=queue, attempt_id="B")[0].code == pb.MESSAGE_NOT_FOUND
        again = receive(client, message_queue=queue, attempt_id="A")[1]
        handles = [[one.system_properties.receipt_handle for one in some] for some in (first, again)]
        assert handles[0] == handles[1]


class TestAnswers:
    """AckMessage, ChangeInvisibleDuration, ForwardMessageToDeadLetterQueue, NotifyClientTermination."""

    def take(self, client: GatewayClient, count: int = 1, **fields: object) -> list[str]:
        """The handles of new messages."""
        for number in range(count):
            client.send(message(message_id=f"0{number}"))
        found = receive(client, **fields)[1]
        assert len(found) == count
        return [one.system_properties.receipt_handle for one in found]

    def test_each_entry_has_its_result(self, started: GatewayClient) -> None:
        """Several codes are one of their own; a handle that is settled never becomes valid again."""
        first, second = self.take(started, 2)
        answer = ack(started, first)
        assert (answer.status.code, answer.entries[0].status.code) == (pb.OK, pb.OK)
        answer = ack(started, first, second)
        assert answer.status.code == pb.MULTIPLE_RESULTS
        assert [one.status.code for one in answer.entries] == [pb.INVALID_RECEIPT_HANDLE, pb.OK]
        assert [one.message_id for one in answer.entries] == ["m0", "m1"]
        assert ack(started, second).status.code == pb.INVALID_RECEIPT_HANDLE
        assert ack(started).status.code == pb.BAD_REQUEST

    def test_a_changed_time_has_a_new_handle(self, started: GatewayClient) -> None:
        """P6: the old one is refused."""
        (handle,) = self.take(started)
        request = pbs.ChangeInvisibleDurationRequest(group=G, topic=T, receipt_handle=handle)
        request.invisible_duration.seconds = 30
        answer = started.call("ChangeInvisibleDuration", request, pbs.ChangeInvisibleDurationResponse)
        assert answer.status.code == pb.OK
        assert ack(started, handle).status.code == pb.INVALID_RECEIPT_HANDLE
        assert ack(started, answer.receipt_handle).status.code == pb.OK

    def test_a_message_that_is_given_up_is_a_dead_letter(self, broker: GatewayHarness, started: GatewayClient) -> None:
        """With the attempts that its consumer made."""
        (handle,) = self.take(started)
        request = pbs.ForwardMessageToDeadLetterQueueRequest(
            group=G, topic=T, receipt_handle=handle, message_id="01", delivery_attempt=3, max_delivery_attempts=3
        )
        answer = started.call("ForwardMessageToDeadLetterQueue", request, pbs.ForwardMessageToDeadLetterQueueResponse)
        assert answer.status.code == pb.OK
        assert broker.store.max_offset("%DLQ%g", 0) == 1
        answer = started.call("ForwardMessageToDeadLetterQueue", request, pbs.ForwardMessageToDeadLetterQueueResponse)
        assert answer.status.code == pb.INVALID_RECEIPT_HANDLE

    def test_a_client_that_ends_leaves_its_messages(self, broker: GatewayHarness, started: GatewayClient) -> None:
        """Those whose leases the broker prolongs for it: they come again after a second, as one more attempt."""
        with broker.dial("client-2") as other:
            other.telemetry(consumer_settings("g", "T")).next()
            (handle,) = self.take(other, auto_renew=True)
            request = pbs.NotifyClientTerminationRequest(group=G)
            other.call("NotifyClientTermination", request, pbs.NotifyClientTerminationResponse)
            found: list[pb.Message] = []

            def comes_again() -> bool:
                found.extend(receive(started)[1])
                return bool(found)

            wait_until(comes_again, "the message comes again")
            assert found[0].system_properties.delivery_attempt == 2
            assert found[0].topic.name == "T"
            assert ack(other, handle).status.code == pb.INVALID_RECEIPT_HANDLE
