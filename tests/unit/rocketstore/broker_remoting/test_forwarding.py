"""A slave passes on what only the master may do, once, and says where it came from."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dledger.access.quota import HostQuota
from dledger.remoting.codes import AnswerCode
from dledger.remoting.frame import cut
from rocketstore.broker.mastership import GroupView
from rocketstore.broker_remoting import access
from rocketstore.broker_remoting.access import BORN_HOST
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.groups import SubscriptionGroupConfig
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket, send_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.broker_remoting.harness import RemotingHarness, captured


@pytest.fixture
def master() -> Iterator[RemotingHarness]:
    with RemotingHarness() as harness:
        yield harness


@pytest.fixture
def slave(master: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotingHarness]:
    monkeypatch.setattr(access, "TIMEOUT_S", 30.0)
    with RemotingHarness() as harness:
        harness.become(BrokerRole.SLAVE)
        address = f"127.0.0.1:{master.remoting_port}"
        harness.view = GroupView("FOLLOWER", 3, "n1", address, {"n0": "", "n1": address})
        yield harness


@pytest.fixture
def client(slave: RemotingHarness) -> Iterator[RemotingSocket]:
    with slave.dial() as dialled:
        yield dialled


def test_a_message_sent_to_a_slave_is_stored_by_the_master(master: RemotingHarness, client: RemotingSocket) -> None:
    answers = [client.send(body=b"%d" % number) for number in range(3)]
    assert [(one.code, one.fields["queueOffset"]) for one in answers] == [(0, "0"), (0, "1"), (0, "2")]
    assert [decode_record(one.record).body for one in master.store.log.records] == [b"0", b"1", b"2"]


def test_the_messages_of_a_client_stay_in_order_also_while_the_master_is_being_reached(
    master: RemotingHarness, client: RemotingSocket
) -> None:
    """Those of an ordered queue are sent one after the other, but some clients do not wait."""
    opaques = [client.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T"), b"%d" % number) for number in range(300)]
    assert {client.answer_to(one).code for one in opaques} == {0}
    assert [int(decode_record(one.record).body) for one in master.store.log.records] == list(range(300))


def test_one_host_cannot_use_up_what_is_passed_on(slave: RemotingHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A master that does not answer makes requests wait at its slaves."""
    monkeypatch.setattr(slave.remoting._forwarding, "_quota", HostQuota(8, 6))
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        host, port = silent.getsockname()
        address = f"{host}:{port}"
        slave.view = GroupView("FOLLOWER", 3, "n1", address, {"n0": "", "n1": address})
        greedy, other = (stack.enter_context(slave.dial(host=one)) for one in ("127.0.0.1", "127.0.0.2"))
        opaques = [greedy.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T"), b"%d" % number) for number in range(7)]
        refused = greedy.answer_to(opaques[-1])
        assert (refused.code, "too many" in refused.remark) == (AnswerCode.SERVICE_NOT_AVAILABLE, True)
        other.begin(RequestCode.SEND_MESSAGE_V2, send_fields("T"), b"other")
        link = stack.enter_context(silent.accept()[0])
        link.settimeout(30)
        received = bytearray()
        while not (bodies := [one.body for one in cut(received)[0]]) or bodies[-1] != b"other":
            received += link.recv(1 << 16)
        assert bodies == [b"0", b"1", b"2", b"3", b"4", b"5", b"other"]


def test_reads_are_answered_where_they_are_asked(slave: RemotingHarness, client: RemotingSocket) -> None:
    assert client.ask(RequestCode.GET_MAX_OFFSET, {"topic": "T", "queueId": 0}).code == 0
    assert client.subscribe("g", "T").code == 0
    assert client.ask(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"}).code == 0


def test_offsets_are_committed_at_the_master(master: RemotingHarness, client: RemotingSocket) -> None:
    where = {"consumerGroup": "g", "topic": "T", "queueId": 0, "commitOffset": 7}
    client.tell(RequestCode.UPDATE_CONSUMER_OFFSET, where)
    wait_until(lambda: master.state.committed == {("g", "T", 0): 7}, "the offset is committed")


def test_what_administrators_change_is_changed_at_the_master(
    master: RemotingHarness, slave: RemotingHarness, client: RemotingSocket
) -> None:
    assert captured(client, "F60").code == 0
    group = SubscriptionGroupConfig("h", retry_max_times=3).encode()
    assert client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, group).code == 0
    assert master.state.group("h").retry_times_max == 3
    master.state.committed["h", "T", 0] = 0
    assert client.ask(RequestCode.CLONE_GROUP_OFFSET, {"srcGroup": "h", "destGroup": "i"}).code == 0
    assert master.state.offset("i", "T", 0) == 0
    removed = {"groupName": "h", "removeOffset": "true"}
    assert client.ask(RequestCode.DELETE_SUBSCRIPTIONGROUP, removed).code == 0
    assert client.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    assert (sorted(master.state.table), master.state.groups()) == (["T2"], ["i"])
    assert (sorted(slave.state.table), slave.state.groups()) == (["T"], [])


def test_nothing_is_passed_on_twice(master: RemotingHarness, client: RemotingSocket) -> None:
    master.become(BrokerRole.SLAVE)  # and knows itself for the leader's address: a circle, if it passed on
    assert client.send().code == AnswerCode.SERVICE_NOT_AVAILABLE
    fields = send_fields("T") | {BORN_HOST: "192.0.2.1:5"}
    assert client.ask(RequestCode.SEND_MESSAGE_V2, fields).code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_two_slaves_that_take_each_other_for_the_master_pass_a_request_on_once(
    master: RemotingHarness, slave: RemotingHarness, client: RemotingSocket
) -> None:
    """While a group elects, each may know another leader."""
    master.become(BrokerRole.SLAVE)
    address = f"127.0.0.1:{slave.remoting_port}"
    master.view = GroupView("FOLLOWER", 3, "n2", address, {"n0": "", "n2": address})
    assert client.send().code == AnswerCode.SERVICE_NOT_AVAILABLE
    assert master.client._open == {}


def test_a_stranger_is_not_believed_where_a_request_comes_from(master: RemotingHarness) -> None:
    """Else it could have the limits of others, and none of its own."""
    with master.dial() as stranger:
        stranger.ask(RequestCode.SEND_MESSAGE_V2, send_fields("T") | {BORN_HOST: "192.0.2.1:5"}, b"x")
        (stored,) = master.store.log.records
        assert decode_record(stored.record).born_host.ip == b"\x7f\0\0\1"


def test_without_a_master_clients_are_told_to_try_another_broker(
    slave: RemotingHarness, client: RemotingSocket
) -> None:
    slave.view = GroupView("CANDIDATE", 4, "", "", {})
    assert client.send().code == AnswerCode.SERVICE_NOT_AVAILABLE


def test_a_master_that_hangs_up_leaves_the_outcome_open(
    master: RemotingHarness, slave: RemotingHarness, client: RemotingSocket
) -> None:
    assert client.send().code == 0
    master.stop()
    refused = client.send()
    assert refused.code in (AnswerCode.SERVICE_NOT_AVAILABLE, AnswerCode.SYSTEM_ERROR)
