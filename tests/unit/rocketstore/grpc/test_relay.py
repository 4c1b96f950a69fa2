"""G1, G2: every member takes every call, and the leader carries it out, whoever that is while the call lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread
from unittest.mock import Mock

import grpc
import pytest

from dledger.remoting.codes import AnswerCode, FrameError
from dledger.remoting.frame import Frame
from dledger.rpc.clients.connections import Leases
from rocketstore.broker.clients import SILENT_S_MAX
from rocketstore.broker.mastership import GroupView
from rocketstore.broker.popping.requests import Receive, Received
from rocketstore.broker_config import BrokerConfig
from rocketstore.grpc import calls
from rocketstore.grpc.calls import CallHeaders, GatewayCall
from rocketstore.grpc.relay import PassedCall, join, split
from rocketstore.message.record import decode_record
from rocketstore.pb import definition_pb2 as pb
from rocketstore.pb import service_pb2 as pbs
from rocketstore.remoting.codes import MemberCode
from rocketstore.state.changes import GroupConfig, TopicConfig
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.rocketstore.grpc.harness import (
    GatewayClient,
    GatewayHarness,
    consumer_settings,
    message,
    producer_settings,
)


@pytest.fixture
def leader() -> Iterator[GatewayHarness]:
    with GatewayHarness() as harness:
        yield harness


@pytest.fixture
def member(leader: GatewayHarness) -> Iterator[GatewayHarness]:
    with GatewayHarness() as harness:
        harness.become(BrokerRole.SLAVE)
        follow(harness, leader)
        for one in (leader, harness):  # each believes requests only from these
            wait_until(lambda one=one: bool(one.broker.member_hosts.known), "it knows its members' addresses")  # type: ignore[misc]
        yield harness


@pytest.fixture
def client(member: GatewayHarness) -> Iterator[GatewayClient]:
    with member.dial() as dialled:
        yield dialled


def follow(harness: GatewayHarness, leader: GatewayHarness) -> None:
    address, own = f"127.0.0.1:{leader.remoting_port}", f"127.0.0.1:{harness.remoting_port}"
    harness.view = GroupView("FOLLOWER", 3, "n0x", address, {"n0x": address, harness.config.node_id: own})
    leader.view = GroupView("LEADER", 3, leader.config.node_id, address, harness.view.members)


def lead_nowhere(harness: GatewayHarness) -> None:
    harness.view = GroupView("CANDIDATE", 4, "", "", harness.view.members)


def leader_seen_by(harness: GatewayHarness) -> str:
    seen: list[str] = []
    harness.on_loop(lambda: seen.append(harness.gateway.relay.leader()))
    return seen[0]


def test_what_a_member_is_sent_is_stored_by_the_leader(leader: GatewayHarness, client: GatewayClient) -> None:
    """The client sees no difference; its own address is in the record, not the member's."""
    answer = client.send(message(b"hello"))
    assert (answer.status.code, answer.entries[0].status.code) == (pb.OK, pb.OK)
    found = decode_record(leader.store.log.records[0].record)
    assert (found.body, found.born_host.ip) == (b"hello", b"\x7f\0\0\1")


def test_nothing_of_a_call_stays_at_either_member(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """Answered, refused or not done in time: members pass on millions."""
    assert client.send(message()).status.code == pb.OK
    assert client.send(message(b"")).status.code == pb.MESSAGE_BODY_EMPTY
    leader.store.hold_results = True
    try:
        assert client.send(message(message_id="held"), timeout_s=1).status.code == pb.SLAVE_PERSISTENCE_TIMEOUT
    except grpc.RpcError as late:  # on a busy machine the client's own deadline comes first
        if late.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    leader.store.release_results()
    wait_until(lambda: not leader.gateway.relay._running, "the leader has forgotten them")
    wait_until(lambda: not member.gateway.relay._asked, "the member has, too")


def test_refusals_of_the_leader_reach_the_client(client: GatewayClient) -> None:
    """In the answer's status, as if there were no member in between."""
    assert client.send(message(b"")).status.code == pb.MESSAGE_BODY_EMPTY


def test_a_call_waits_until_there_is_a_leader(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """A client repeats a refused send at once, three times, and gives up: an election takes longer."""
    lead_nowhere(member)
    found: list[pb.Code] = []
    thread = Thread(target=lambda: found.append(client.send(message(b"held")).status.code))
    thread.start()
    wait_until(lambda: member.server.connections._calls.total() == 1, "the call has come in")
    assert not found
    follow(member, leader)
    thread.join()
    assert found == [pb.OK]
    assert len(leader.store.log.records) == 1


def test_without_a_leader_the_answer_comes_before_the_clients_deadline(
    member: GatewayHarness, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it, the client would know nothing, and send the message again."""
    monkeypatch.setattr(calls, "SPARE_S", 59.5)
    lead_nowhere(member)
    began = time.monotonic()
    status = client.send(message(), timeout_s=60).status
    assert status.code == pb.HA_NOT_AVAILABLE
    assert "no leader" in status.message
    assert time.monotonic() - began > 0.4


def test_a_leader_that_is_none_any_more_is_asked_no_longer(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """It may be gone without hanging up: what it was asked is asked of the next one. The id is looked for in the log,
    because the old leader may have stored the message; here nobody has. So it is with every call, not the first alone.
    """
    assert client.send(message(b"before", message_id="00")).status.code == pb.OK
    watch = member.gateway.relay._watch
    wait_until(lambda: watch is None or watch.done(), "nothing is asked any more")
    with GatewayHarness() as silent:
        silent.store.hold_results = True
        follow(member, silent)
        silent_address = f"127.0.0.1:{silent.remoting_port}"
        wait_until(lambda: leader_seen_by(member) == silent_address, "the member looks for its leader again")
        found: list[pb.Code] = []
        thread = Thread(target=lambda: found.append(client.send(message(b"moved")).status.code))
        thread.start()
        wait_until(lambda: len(silent.store.held) == 1, "the old leader has the call")
        follow(member, leader)
        thread.join()
        assert found == [pb.OK]
        assert [decode_record(one.record).body for one in leader.store.log.records] == [b"before", b"moved"]
        silent.store.release_results()


def test_a_message_that_the_old_leader_has_stored_is_not_stored_again(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """The new leader finds its id in the log, and answers with its place."""
    assert client.send(message(b"once", message_id="kept")).entries[0].offset == 0
    window = leader.gateway.sends.window
    leader.on_loop(window._owners.clear)  # the new leader remembers nothing of the old one's
    leader.on_loop(leader.gateway.role_changed)
    answer = client.send(message(b"once", message_id="kept"))
    assert (answer.status.code, answer.entries[0].offset) == (pb.OK, 0)
    assert len(leader.store.log.records) == 1


def test_the_leader_hears_of_clients_at_other_members(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """By their settings and with each heartbeat: whom to ask, and who is in a group."""
    client.telemetry(consumer_settings("G", "T")).next()
    wait_until(lambda: leader.groups.clients.consumers("G") is not None, "the leader knows it")
    assert client.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK
    known = leader.gateway.registry.find("client-1")
    assert known is not None
    assert (known.member, known.group) == (member.config.node_id, "G")
    client.call("NotifyClientTermination", pbs.NotifyClientTerminationRequest(), pbs.NotifyClientTerminationResponse)
    assert leader.groups.clients.consumers("G") is None


def test_settings_are_the_leaders(leader: GatewayHarness, member: GatewayHarness, client: GatewayClient) -> None:
    """A member's state may be old: a consumer that is not told that its group is ordered handles messages at once.

    While there is no leader a client keeps what it had; once there is one, it hears the news with a heartbeat.
    """
    leader.state.configs["G"] = GroupConfig("G", retry_times_max=4, ordered=True)
    stream = client.telemetry(consumer_settings("G", "T"))
    settings = stream.next().settings
    assert (settings.subscription.fifo, settings.backoff_policy.max_attempts) == (True, 5)
    lead_nowhere(member)
    wait_until(lambda: leader_seen_by(member) == "", "the member sees it")
    stream.send(pbs.TelemetryCommand(settings=consumer_settings("G", "T")))
    settings = stream.next().settings
    assert (settings.subscription.fifo, settings.backoff_policy.max_attempts) == (True, 5)
    leader.state.configs["G"] = GroupConfig("G", retry_times_max=7)
    follow(member, leader)
    wait_until(lambda: leader_seen_by(member) != "", "the member sees it")
    assert client.heartbeat(pb.PUSH_CONSUMER, "G").code == pb.OK
    settings = stream.next().settings
    assert (settings.subscription.fifo, settings.backoff_policy.max_attempts) == (False, 8)


def test_a_stream_outlives_heartbeats_that_go_to_other_members(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """Only the leader hears of all: a member that takes the lead gives a client the usual time for its next one."""
    stream = client.telemetry(consumer_settings("G", "T"))
    stream.next()
    tables, now = member.groups.clients, 1e9

    def later(by: float) -> None:
        nonlocal now
        now += by
        tables._now = lambda: now
        member.groups.hang_up_on_the_silent()

    member.on_loop(lambda: later(2 * SILENT_S_MAX))
    command = pbs.TelemetryCommand(reconnect_endpoints_command=pbs.ReconnectEndpointsCommand(nonce="n"))
    tell = leader.gateway.relay.tell_member
    assert leader.bridge.run(tell(member.config.node_id, "client-1", command.SerializeToString()))
    assert stream.next() == command

    member.become(BrokerRole.SYNC_MASTER)
    member.on_loop(lambda: later(SILENT_S_MAX / 2))
    assert member.gateway.registry.streams == 1
    member.on_loop(lambda: later(SILENT_S_MAX))
    assert stream.next().status.code == pb.FORBIDDEN


def test_commands_of_the_leader_reach_clients_of_members(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """A client's stream ends at one member, and its transactions at the leader."""
    stream = client.telemetry(producer_settings("T"))
    stream.next()
    command = pbs.TelemetryCommand(reconnect_endpoints_command=pbs.ReconnectEndpointsCommand(nonce="n"))
    tell = leader.gateway.relay.tell_member
    node = member.config.node_id
    assert leader.bridge.run(tell(node, "client-1", command.SerializeToString()))
    assert stream.next() == command
    assert not leader.bridge.run(tell(node, "unknown", b""))
    assert not leader.bridge.run(tell("n9", "client-1", b""))


@pytest.mark.parametrize("where", ["leader", "member"])
def test_messages_that_do_not_reach_their_client_are_given_back(
    leader: GatewayHarness, member: GatewayHarness, where: str
) -> None:
    """A receive that is answered when its client is gone, with the leader's answer on its way or written in part."""
    entry = leader if where == "leader" else member
    given = _note_returns(leader)
    with entry.dial() as client:
        client.calls("ReceiveMessage", _wish(), pbs.ReceiveMessageResponse)
        client.send(message(b"lost"))
        held = Event()
        popping = leader.broker.popping
        receive = popping.receive

        async def answer_late(wish: Receive, leases: Leases, owner: str = "") -> Received:
            found = await receive(wish, leases, owner)
            held.set()
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(10)  # until the call is cancelled, which this one does not notice any more
            return found

        popping.receive = answer_late  # type: ignore[method-assign]  # to have the client go at that moment
        call = client.begin("ReceiveMessage", _wish())
        assert held.wait(60)
        call.cancel()  # type: ignore[no-untyped-call]  # gRPC's
    wait_until(lambda: len(given) == 1, "the message is given back")


def test_an_answer_that_arrives_as_its_client_goes_is_given_back(member: GatewayHarness) -> None:
    """In one turn of the loop: the leader is not told of the cancellation any more, and takes it for delivered."""
    relay, given = member.gateway.relay, list[bytes]()

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        call = Mock(GatewayCall, headers=CallHeaders(), method="ReceiveMessage", host="127.0.0.1", port=1)
        call.remaining_s.return_value = 60.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(relay._client, "call", never)
            asking = asyncio.ensure_future(relay.ask("a:1", call, b"", has_stream=False, unwanted=given.extend))
            while not relay._asked:
                await asyncio.sleep(0)
            (found,) = relay._asked
            found.set_result([b"answer"])
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert asking.cancelled()

    member.bridge.run(test())
    assert given == [b"answer"]


def test_messages_for_which_a_member_has_no_room_are_given_back(
    leader: GatewayHarness, member: GatewayHarness, client: GatewayClient
) -> None:
    """Its clients do not read what they asked for; the leader's room is its own."""
    given = _note_returns(leader)
    client.calls("ReceiveMessage", _wish(), pbs.ReceiveMessageResponse)
    client.send(message(b"later"))
    occupied = member.config.limits.answer_bytes_max
    root = member.broker.shares.quotas.root
    member.on_loop(lambda: root.change_answer(occupied))
    assert client.calls("ReceiveMessage", _wish(), pbs.ReceiveMessageResponse)[0].status.code == pb.TOO_MANY_REQUESTS
    wait_until(lambda: len(given) == 1, "the message is given back")
    member.on_loop(lambda: root.change_answer(-occupied))
    wish = _wish()
    wish.long_polling_timeout.seconds = 8
    (_, found, _) = client.calls("ReceiveMessage", wish, pbs.ReceiveMessageResponse)
    assert found.message.body == b"later"
    wait_until(lambda: root.answer_bytes == 0, "it is read")


def _note_returns(leader: GatewayHarness) -> list[str]:
    """The handles that are given back from now on."""
    popping, found = leader.broker.popping, list[str]()
    give_back = popping.give_back

    def noted(group: str, topic: str, handles: Sequence[str]) -> None:
        assert (group, topic) == ("g", "T")
        found.extend(handles)
        give_back(group, topic, handles)

    popping.give_back = noted  # type: ignore[method-assign]  # to see what is given back
    return found


def _wish() -> pbs.ReceiveMessageRequest:
    queue = pb.MessageQueue(topic=pb.Resource(name="T"))
    request = pbs.ReceiveMessageRequest(group=pb.Resource(name="g"), message_queue=queue, batch_size=1)
    request.invisible_duration.seconds = 3600
    request.long_polling_timeout.seconds = 0
    return request


class Elsewhere(GatewayHarness):
    """Its members are not on this machine."""

    member_host = "192.0.2.1"


def test_only_members_give_commands_and_say_where_calls_come_from() -> None:
    """Whoever else connects speaks for itself: what it says of a client's address is not believed."""
    with Elsewhere() as leader, RemotingSocket(leader.remoting_port) as stranger:
        refused = stranger.ask(MemberCode.GATEWAY_COMMAND, {"clientId": "client-1"})
        assert refused.code == AnswerCode.SYSTEM_ERROR
        assert "only a member" in refused.remark
        request = pbs.SendMessageRequest(messages=[message()]).SerializeToString()
        fields = {"method": "SendMessage", "origin": "192.0.2.9:5", "remainingMs": "1000", "x-mq-client-id": "c"}
        answer = stranger.ask(MemberCode.GATEWAY_CALL, fields, request)
        assert pbs.SendMessageResponse.FromString(split(answer.body)[0]).status.code == pb.OK
        found = decode_record(leader.store.log.records[0].record)
        assert found.born_host.ip == b"\x7f\0\0\1"


def test_a_call_that_lacks_something_is_refused(leader: GatewayHarness) -> None:
    """Also a method that nobody passes on."""
    with RemotingSocket(leader.remoting_port) as stranger:
        assert stranger.ask(MemberCode.GATEWAY_CALL, {"method": "SendMessage"}).code == AnswerCode.SYSTEM_ERROR
        fields = {"method": "Nothing", "origin": "127.0.0.1:5", "remainingMs": "1000"}
        assert stranger.ask(MemberCode.GATEWAY_CALL, fields).code == AnswerCode.SYSTEM_ERROR


def test_answers_are_split_as_they_were_joined() -> None:
    """Each with its length; what ends too early is refused."""
    answers = [b"", b"a", b"bc" * 1000]
    assert split(join(answers)) == answers
    for cut in (join(answers)[:-1], b"\0\0"):
        with pytest.raises(FrameError):
            split(cut)
    assert split(Frame(0, 0).body) == []


@pytest.mark.parametrize("creates", [False, True])
def test_a_topic_that_a_member_does_not_have_yet_is_the_leaders(creates: bool) -> None:
    """G1: a client that has just created a topic asks any member for its route, which may not have applied that yet."""
    config = replace(BrokerConfig(), auto_create_topic_enable=creates)
    with GatewayHarness(config, TopicConfig("New", 2, 2)) as leader, GatewayHarness(config) as member:
        member.become(BrokerRole.SLAVE)
        follow(member, leader)
        with member.dial() as client:
            answer = client.route("New", "10.0.0.1:8081")
            assert (answer.status.code, len(answer.message_queues)) == (pb.OK, 2)
            assert client.route("none").status.code == (pb.OK if creates else pb.TOPIC_NOT_FOUND)


def test_only_the_leader_says_that_there_is_no_topic(
    leader: GatewayHarness, client: GatewayClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G1: a member that is taken for the leader and is none does not; the client is held until there is one."""
    leader.become(BrokerRole.SLAVE)
    asked = Event()
    serve = leader.gateway.relay._serve

    async def noted(passed: PassedCall, data: bytes) -> Sequence[bytes]:
        try:
            return await serve(passed, data)
        finally:
            asked.set()

    monkeypatch.setattr(leader.gateway.relay, "_serve", noted)
    found: list[pb.Code] = []
    thread = Thread(target=lambda: found.append(client.route("new").status.code))
    thread.start()
    assert asked.wait(60)
    leader.become(BrokerRole.SYNC_MASTER)
    thread.join()
    assert found == [pb.OK]
