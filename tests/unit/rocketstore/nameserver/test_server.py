"""A name server at its port: frames of the real programs, and what each request does."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dledger.config import ClientAuth, SecurityConfig
from dledger.errors import ConfigError
from dledger.remoting.codes import AnswerCode
from dledger.remoting.connection import RemotingConnection
from dledger.remoting.fastjson import loads
from dledger.remoting.frame import FLAG_ONEWAY, Frame, HeaderForm, encode
from dledger.values import parse_address
from rocketstore.nameserver import server as server_module
from rocketstore.nameserver import service as service_module
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.service import DECODED_AT_ONCE_BYTES_MAX, NameService
from rocketstore.nameserver.tables import SILENCE_MS, RouteTables
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.topics import DataVersion, RegisterBrokerBody
from tests.unit.rocketstore.nameserver.wire import TIMEOUT_S, Caller, calling, config_in, running
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NameServer]:
    """With default settings."""
    with running(config_in(tmp_path)) as started:
        yield started


@pytest.fixture
def caller(server: NameServer) -> Iterator[Caller]:
    """A connection to it."""
    with calling(server) as made:
        yield made


def _same(found: Frame, expected: Frame) -> None:
    """All that a client looks at, the version apart; a remark may be shorter."""
    assert (found.code, found.opaque, found.flag, found.form) == (
        expected.code,
        expected.opaque,
        expected.flag,
        expected.form,
    )
    assert dict(found.fields) == dict(expected.fields)
    assert expected.remark.startswith(found.remark)
    if found.body or expected.body:
        assert _as_told_by_4(loads(found.body)) == loads(expected.body)


def _as_told_by_4(value: object) -> object:
    """Without what RocketMQ 5 adds, whose Rust client fails where it is missing; others ignore it."""
    if isinstance(value, dict):
        assert "brokerAddrs" not in value or value["enableActingMaster"] is False
        return {name: _as_told_by_4(one) for name, one in value.items() if name != "enableActingMaster"}
    return [_as_told_by_4(one) for one in value] if isinstance(value, list) else value


def test_frames_of_the_real_programs_are_answered_as_by_the_real_one(caller: Caller) -> None:
    """A broker of 4.9.7 registers, changes a topic and goes; mqadmin and clients of three languages ask."""
    for request, answer in (("F1", "F2"), ("F3", "F4"), ("F5", "F6"), ("F7", "F8")):
        _same(caller.send(GOLDEN[request].data), GOLDEN[answer].frame)

    assert caller.send(GOLDEN["F61"].data).code == AnswerCode.SUCCESS
    assert caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T2")["queueDatas"][0]["writeQueueNums"] == 4
    for request in ("F50", "F74", "F81"):
        frame = GOLDEN[request].frame
        found = caller.send(GOLDEN[request].data)
        assert (found.opaque, found.form) == (frame.opaque, frame.form)
    assert caller.send(GOLDEN["F66"].data).code == AnswerCode.SUCCESS
    assert caller.json(RequestCode.GET_BROKER_CLUSTER_INFO) == {"brokerAddrTable": {}, "clusterAddrTable": {}}


def test_a_binary_header_is_answered_with_one(caller: Caller) -> None:
    """F50 and F51, with the route that was captured."""
    caller.register(0, "127.0.0.1:20911", name="broker-a", topics=("ProbeTopic",))
    caller.register(1, "127.0.0.1:20921", name="broker-a", topics=())

    found = caller.send(GOLDEN["F50"].data)

    expected = GOLDEN["F51"].frame
    assert found.form is HeaderForm.BINARY
    assert json.loads(found.body)["queueDatas"] == json.loads(expected.body)["queueDatas"]
    assert json.loads(found.body)["brokerDatas"][0]["brokerAddrs"] == {"0": "127.0.0.1:20911", "1": "127.0.0.1:20921"}


def test_slaves_and_deposed_leaders_are_told_the_master(caller: Caller) -> None:
    """With the term that our brokers send along."""
    assert dict(caller.register(0, "a:1", term=5).fields) == {}
    assert dict(caller.register(1, "b:1", term=5, compressed=True).fields) == {
        "masterAddr": "a:1",
        "haServerAddr": "ha-a:1",
    }

    caller.register(0, "b:1", term=6)
    late = caller.register(0, "a:1", term=5)

    assert (late.code, late.fields["masterAddr"]) == (AnswerCode.SUCCESS, "b:1")
    route = caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
    assert route["brokerDatas"] == [
        {"brokerAddrs": {"0": "b:1"}, "brokerName": "g", "cluster": "c", "enableActingMaster": False}
    ]


def test_a_broker_that_hangs_up_is_dropped(server: NameServer, caller: Caller) -> None:
    """At once; one that unregisters in time as well, and of another name nothing."""
    with calling(server) as broker:
        broker.register(0, "a:1")
        broker.register(0, "x:1", name="h")
        where = {"brokerName": "h", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
        assert broker.ask(RequestCode.UNREGISTER_BROKER, **where).code == AnswerCode.SUCCESS
        assert list(caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]) == ["g"]
        broker.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            broker.receive()

    assert caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"] == {}
    assert caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").code == AnswerCode.TOPIC_NOT_EXIST


def test_a_topic_that_was_deleted_at_its_broker_is_forgotten(caller: Caller) -> None:
    """Unless the broker is one of Java's, whose registration may contain changed topics only."""
    for version, complete, topics in ((1, True, ["T", "U"]), (1, True, ["T", "U"]), (2, False, ["T", "U"])):
        caller.register(0, "a:1", topics=("T", "U") if version == 1 else ("T",), version=version, complete=complete)
        assert caller.json(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)["topicList"] == topics
    caller.register(0, "a:1", topics=("T",), version=3, complete=True)
    assert caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="U").code == AnswerCode.TOPIC_NOT_EXIST


def test_a_broker_may_ask_whether_it_must_register(caller: Caller) -> None:
    """QUERY_DATA_VERSION, with forceRegister=false."""
    where = {"brokerName": "g", "brokerAddr": "a:1", "clusterName": "c", "brokerId": "0"}

    def ask(version: int) -> tuple[str, bytes]:
        answer = caller.ask(RequestCode.QUERY_DATA_VERSION, DataVersion(version).encode(), **where)
        return answer.fields["changed"], answer.body

    assert ask(3) == ("true", b"")
    caller.register(0, "a:1", version=3)
    assert ask(3) == ("false", DataVersion(3).encode())
    assert ask(4) == ("true", DataVersion(3).encode())


def test_lists_of_topics(caller: Caller) -> None:
    """All, of a cluster, those named after clusters and brokers, and those of units."""
    caller.register(0, "a:1", topics=("T", "U"))

    def topics(code: RequestCode, **fields: str) -> list[str]:
        found: list[str] = caller.json(code, **fields)["topicList"]
        return found

    assert topics(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == ["T", "U"]
    assert topics(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="c") == ["T", "U"]
    assert topics(RequestCode.GET_TOPICS_BY_CLUSTER, cluster="d") == []
    assert caller.json(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS) == {"brokerAddr": "a:1", "topicList": ["c", "g"]}
    for code in (
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
    ):
        assert topics(code) == []


def test_permissions_and_topics_are_changed(caller: Caller) -> None:
    """As `mqadmin wipeWritePerm`, `addWritePerm` and `deleteTopic` do it."""
    caller.register(0, "a:1", topics=("T", "U"))

    def permission() -> int:
        found: int = caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")["queueDatas"][0]["perm"]
        return found

    assert dict(caller.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="g").fields) == {"wipeTopicCount": "2"}
    assert permission() == 4
    assert dict(caller.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="g").fields) == {"addTopicCount": "2"}
    assert permission() == 6
    assert caller.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="T").code == AnswerCode.SUCCESS
    assert caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").code == AnswerCode.TOPIC_NOT_EXIST


def test_values_are_kept_over_a_restart_and_ordered_topics_are_told(tmp_path: Path) -> None:
    """As `mqadmin updateOrderConf` sets them: brokers get all orders, clients that of their topic, if switched on."""
    order = {"namespace": "ORDER_TOPIC_CONFIG", "key": "T"}
    with running(config_in(tmp_path)) as server, calling(server) as caller:
        assert caller.ask(RequestCode.GET_KV_CONFIG, **order).code == AnswerCode.QUERY_NOT_FOUND
        missing = caller.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="ORDER_TOPIC_CONFIG")
        assert missing.code == AnswerCode.QUERY_NOT_FOUND
        assert caller.ask(RequestCode.PUT_KV_CONFIG, **order, value="g:4").code == AnswerCode.SUCCESS
        caller.ask(RequestCode.PUT_KV_CONFIG, namespace="n", key="k", value="v")
        assert caller.ask(RequestCode.DELETE_KV_CONFIG, namespace="n", key="k").code == AnswerCode.SUCCESS
        caller.register(0, "a:1")
        assert "orderTopicConf" not in caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")

    with running(config_in(tmp_path, order_message_enable=True)) as server, calling(server) as caller:
        assert dict(caller.ask(RequestCode.GET_KV_CONFIG, **order).fields) == {"value": "g:4"}
        assert caller.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace="n").code == AnswerCode.QUERY_NOT_FOUND
        assert json.loads(caller.register(0, "a:1", topics=("T", "U")).body) == {"table": {"T": "g:4"}}
        assert caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")["orderTopicConf"] == "g:4"
        assert "orderTopicConf" not in caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="U")


def test_settings_are_shown_and_one_of_them_changes_meanwhile(caller: Caller) -> None:
    """As `mqadmin getNamesrvConfig` and `updateNamesrvConfig` ask."""
    lines = caller.ask(RequestCode.GET_NAMESRV_CONFIG).body.decode().splitlines()
    assert "orderMessageEnable=false" in lines
    assert not [line for line in lines if line.startswith(("security", "tls_"))]

    assert caller.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"orderMessageEnable=true\n").code == AnswerCode.SUCCESS
    assert b"orderMessageEnable=true\n" in caller.ask(RequestCode.GET_NAMESRV_CONFIG).body
    refused = caller.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"listenPort=1\n")
    assert (refused.code, "restart" in refused.remark) == (AnswerCode.NO_PERMISSION, True)
    for wrong in (b"orderMessageEnable=perhaps\n", b"orderMessageEnable=\\u12\n"):
        assert caller.ask(RequestCode.UPDATE_NAMESRV_CONFIG, wrong).code == AnswerCode.SYSTEM_ERROR


@pytest.mark.parametrize(
    ("fields", "body", "remark"),
    [
        ({"brokerAddr": ""}, b"{}", "invalid address"),
        ({"brokerAddr": "a"}, b"{}", "invalid address"),
        ({"brokerName": " "}, b"{}", "brokerName must have"),
        ({"clusterName": "c" * 256}, b"{}", "clusterName must have"),
        ({"brokerId": "-2"}, b"{}", "brokerId=-2"),
        ({"brokerId": "x"}, b"{}", "brokerId"),
        ({"haServerAddr": "h" * 256}, b"{}", "haServerAddr"),
        ({"bodyCrc32": "1"}, b"{}", "crc32 not match"),
        (
            {},
            b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"T":{"topicName":"T","readQueueNums":2147483647}}}}',
            "a topic must have 0 to 65536 queues",
        ),
        ({"brokerName": "g\x1b[31m"}, b"{}", "brokerName must have printable characters only, not 'g\\x1b[31m'"),
        ({"clusterName": "c\nforged line"}, b"{}", "clusterName must have printable"),
        ({"clusterName": "c\u202egnp"}, b"{}", "clusterName must have printable"),
        ({"haServerAddr": "h\x07:1"}, b"{}", "haServerAddr must have printable"),
        ({"brokerAddr": "a\r:1"}, b"{}", "brokerAddr"),
        (
            {},
            b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"a\\u001bb":{"topicName":"a\\u001bb"}}}}',
            "a topic must have printable",
        ),
        ({}, b"{", "malformed body"),
        ({}, b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"":{"topicName":""}}}}', "a topic must have"),
        ({"compressed": "true"}, b"{}", "not zlib"),
    ],
)
def test_a_malformed_registration_is_answered_and_changes_nothing(
    caller: Caller, fields: dict[str, str], body: bytes, remark: str
) -> None:
    """With the reason; the connection goes on."""
    good = {"brokerName": "g", "brokerAddr": "a:1", "clusterName": "c", "brokerId": "0", "haServerAddr": "h:1"}

    answer = caller.ask(RequestCode.REGISTER_BROKER, body, **(good | fields))

    assert answer.code == AnswerCode.SYSTEM_ERROR
    assert remark in answer.remark
    assert caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"] == {}


def test_a_registration_that_repeats_is_not_decoded_again(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute apart, and the same but for the term: it renews, and its topics are there as before."""
    decoded: list[bool] = []
    of_request = RegisterBrokerBody.of_request

    def counted(body: bytes, *, compressed: bool, version: int, crc32: int) -> RegisterBrokerBody:
        decoded.append(compressed)
        return of_request(body, compressed=compressed, version=version, crc32=crc32)

    monkeypatch.setattr(RegisterBrokerBody, "of_request", staticmethod(counted))
    for term in (1, 1, 2):
        assert caller.register(0, "a:1", term=term).code == AnswerCode.SUCCESS
    assert decoded == [False]
    caller.register(0, "a:1", term=2, compressed=True)
    caller.register(0, "a:1", term=2, version=2)
    caller.register(0, "b:1", term=3, version=2)
    caller.register(0, "a:1", term=4, version=2)  # it had lost its place
    assert decoded == [False, True, False, False, False]

    route = caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")
    assert route["brokerDatas"][0]["brokerAddrs"] == {"0": "a:1"}


def test_a_large_registration_holds_nobody_up(
    server: NameServer, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is decoded beside the loop; what its broker says after it takes effect after it."""
    begun, go = threading.Event(), threading.Event()
    of_request = RegisterBrokerBody.of_request

    def slow(body: bytes, *, compressed: bool, version: int, crc32: int) -> RegisterBrokerBody:
        if len(body) > DECODED_AT_ONCE_BYTES_MAX:
            begun.set()
            assert go.wait(TIMEOUT_S)
        return of_request(body, compressed=compressed, version=version, crc32=crc32)

    monkeypatch.setattr(RegisterBrokerBody, "of_request", staticmethod(slow))
    many = tuple(f"topic-{number}" for number in range(1000))
    with calling(server) as broker, calling(server) as gone:
        broker.send_registration(0, "a:1", topics=many)
        gone.send_registration(0, "x:1", name="gone", topics=many)
        broker.send_registration(0, "a:1", version=2, topics=("last",))
        assert begun.wait(TIMEOUT_S)
        assert caller.register(0, "b:1", name="h").code == AnswerCode.SUCCESS
        assert list(caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]) == ["h"]
        gone.socket.close()
        go.set()
        assert [broker.receive().code, broker.receive().code] == [AnswerCode.SUCCESS] * 2
        found = caller.json(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)["topicList"]

        assert (
            caller.register(0, "b:1", name="h", version=2, topics=many).code == AnswerCode.SUCCESS
        )  # after all others
        assert found == sorted(("T", "last", *many))
        assert list(caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]) == ["g", "h"]


def test_the_large_registrations_of_one_host_hold_no_others_up(
    server: NameServer, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may send sixteen megabytes on each of its connections, and anybody may register by default."""
    begun, go = threading.Event(), threading.Event()
    of_request = RegisterBrokerBody.of_request
    decoded: list[int] = []

    def slow(body: bytes, *, compressed: bool, version: int, crc32: int) -> RegisterBrokerBody:
        found = of_request(body, compressed=compressed, version=version, crc32=crc32)
        decoded.append(found.topics.data_version.counter)
        begun.set()
        assert go.wait(TIMEOUT_S)
        return found

    monkeypatch.setattr(RegisterBrokerBody, "of_request", staticmethod(slow))
    many = tuple(f"topic-{number}" for number in range(1000))
    with ExitStack() as stack:
        hosts = ["127.0.0.1"] * 3 + ["127.0.0.2"]
        brokers = [stack.enter_context(calling(server, host)) for host in hosts]
        for number, broker in enumerate(brokers):
            broker.send_registration(0, f"a:{number + 1}", name=f"b{number}", topics=many, version=number)
            assert begun.wait(TIMEOUT_S)
        for _ in range(20):  # turns of the loop in which all of them find that they must wait
            assert caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"] == {}
        go.set()
        assert [one.receive().code for one in brokers] == [AnswerCode.SUCCESS] * 4
    assert decoded[:2] == [0, 3]
    assert sorted(decoded) == [0, 1, 2, 3]


def test_what_was_registered_by_a_slave_is_decoded_again_for_the_master(caller: Caller) -> None:
    """Its topics count from then on only."""
    assert caller.register(1, "a:1", topics=("T",)).code == AnswerCode.SUCCESS
    assert caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T").code == AnswerCode.TOPIC_NOT_EXIST
    assert caller.register(0, "a:1", topics=("T",)).code == AnswerCode.SUCCESS
    assert caller.json(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="T")["queueDatas"][0]["brokerName"] == "g"


def test_whoever_is_silent_is_removed_and_hung_up_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only the first time."""
    now_ms = 0
    monkeypatch.setattr(server_module, "SCAN_INTERVAL_S", 0.01)
    monkeypatch.setattr(service_module, "_now_ms", lambda: now_ms)
    with running(config_in(tmp_path)) as server, calling(server) as caller:
        for name in ("g", "h"):
            with calling(server) as broker:
                broker.register(0, "a:1", name=name)
                now_ms += SILENCE_MS + 1
                with pytest.raises((EOFError, ConnectionError)):
                    broker.receive()
            assert caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"] == {}


def test_what_is_missing_unknown_or_too_long_is_answered(caller: Caller) -> None:
    """RocketMQ's codes and words."""
    assert caller.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC).remark == "the custom field <topic> is null"
    assert caller.ask(RequestCode.SEND_MESSAGE).code == AnswerCode.REQUEST_CODE_NOT_SUPPORTED
    where = {"brokerName": "g", "brokerAddr": "a:1", "clusterName": "c", "brokerId": "0"}
    long = caller.ask(RequestCode.QUERY_DATA_VERSION, b" " * 5000, **where)
    assert (long.code, "5000 bytes" in long.remark) == (AnswerCode.SYSTEM_ERROR, True)


def test_only_some_addresses_may_register_or_change_anything(tmp_path: Path) -> None:
    """Whoever asks may ask from everywhere."""
    config = config_in(tmp_path, allowed_brokers="10.0.0.0/8", allowed_admins="10.0.0.*")
    with running(config) as server, calling(server) as caller:
        where = {"brokerName": "g", "brokerAddr": "a:1", "clusterName": "c", "brokerId": "0"}
        refused = [
            caller.register(0, "a:1"),
            caller.ask(RequestCode.UNREGISTER_BROKER, **where),
            caller.ask(RequestCode.QUERY_DATA_VERSION, DataVersion().encode(), **where),
            caller.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="g"),
            caller.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="g"),
            caller.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="T"),
            caller.ask(RequestCode.PUT_KV_CONFIG, namespace="n", key="k", value="v"),
            caller.ask(RequestCode.DELETE_KV_CONFIG, namespace="n", key="k"),
            caller.ask(RequestCode.UPDATE_NAMESRV_CONFIG, b"orderMessageEnable=true"),
        ]
        assert {one.code for one in refused} == {AnswerCode.NO_PERMISSION}
        assert caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"] == {}
        assert not (tmp_path / "kv" / "kvConfig.json").exists()

    with running(config_in(tmp_path, allowed_brokers="127.0.0.1,::1")) as server, calling(server) as caller:
        assert caller.register(0, "a:1").code == AnswerCode.SUCCESS


def test_one_host_cannot_have_all_connections_and_strangers_are_hung_up_on(tmp_path: Path) -> None:
    """A client that speaks HTTP is no client."""
    with running(config_in(tmp_path, host_connections_max=1)) as server, calling(server) as first:
        first.register(0, "a:1")
        with calling(server) as second, pytest.raises((EOFError, ConnectionResetError)):
            second.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
        with socket.create_connection(parse_address(server.address), TIMEOUT_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert b"".join(iter(lambda: stranger.recv(1000), b"")).startswith(b"HTTP/1.1 400 ")
        assert list(first.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]) == ["g"]


def test_it_starts_once_stops_for_good_and_says_where_it_listens(tmp_path: Path) -> None:
    """Whoever waits is told; the port of another one is refused."""
    with running(config_in(tmp_path)) as server:
        assert server.wait(0) is None
        host, port = parse_address(server.address)
        assert host == "127.0.0.1"
        other = NameServer(config_in(tmp_path / "other"))
        object.__setattr__(other.config, "listen_port", port)
        with pytest.raises(ConfigError, match=str(port)):
            other.start()
        assert other.wait(TIMEOUT_S) == 0

    assert server.wait(0) == 0
    assert server.start().wait(0) == 0


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """Plaintext for other machines among them."""
    with pytest.raises(ConfigError, match=r"allowed_admins: invalid address .*\n?.*") as found:
        NameServer(config_in(tmp_path, listen_host="0.0.0.0", allowed_admins="nowhere", topics_max=0))

    assert [word for word in ("insecure=true", "topics_max=0", "allowed_admins") if word not in str(found.value)] == []
    with pytest.raises(ConfigError, match="tls_trust_cert_path"):
        NameServer(
            config_in(tmp_path, security=SecurityConfig(tls_cert_path=tmp_path, tls_client_auth=ClientAuth.NONE))
        )


LISTS = (
    RequestCode.GET_BROKER_CLUSTER_INFO,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
    RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
    RequestCode.GET_TOPICS_BY_CLUSTER,
    RequestCode.GET_UNIT_TOPIC_LIST,
)


def test_a_question_that_wants_no_answer_is_not_looked_at(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would cost the name server what an answer costs, and the sender nothing."""
    asked: list[str] = []
    for name in ("brokers", "topics", "topics_of_cluster", "topics_with", "route"):
        monkeypatch.setattr(RouteTables, name, lambda *_, name=name: asked.append(name))
    data = b"".join(
        encode(Frame(code, 7, {"cluster": "c", "topic": "T"}, flag=FLAG_ONEWAY))
        for code in (*LISTS, RequestCode.GET_ROUTEINFO_BY_TOPIC)
    )
    caller.socket.sendall(data)
    assert caller.ask(RequestCode.GET_NAMESRV_CONFIG).code == AnswerCode.SUCCESS  # all before it have been taken
    assert asked == []


@pytest.mark.parametrize("code", LISTS)
def test_a_list_is_made_once_for_all_who_ask_until_something_changes(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, code: RequestCode
) -> None:
    """It takes tens of milliseconds with all the topics that there may be; who asks again gets the same bytes."""
    made: list[str] = []

    def counted(name: str) -> Callable[..., object]:
        real = getattr(RouteTables, name)

        def make(*args: object) -> object:
            made.append(name)
            return real(*args)

        return make

    for name in ("brokers", "topics", "topics_of_cluster", "topics_with"):
        monkeypatch.setattr(RouteTables, name, counted(name))
    caller.register(0, "a:1", topics=("T",))
    first = [caller.ask(code, cluster="c").body for _ in range(3)]
    assert (len(set(first)), len(made)) == (1, 1)
    caller.register(0, "a:1", topics=("T",))  # as every half minute
    assert caller.ask(code, cluster="c").body == first[0]
    assert len(made) == 1
    caller.register(0, "b:1", name="h", cluster="c2", topics=("T", "U"), version=2)
    assert caller.ask(code, cluster="c").code == AnswerCode.SUCCESS
    assert len(made) == 2


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"cluster": "d"}, id="cluster"),
        pytest.param({"address": "b:1"}, id="address"),
        pytest.param({"broker_id": 1, "address": "b:1"}, id="slave"),
    ],
)
def test_a_list_is_never_older_than_the_last_registration(caller: Caller, changed: dict[str, Any]) -> None:
    """Also where all topics stay as they were: whoever asks again learns of the other cluster, address or slave."""
    same: dict[str, Any] = {"broker_id": 0, "address": "a:1", "cluster": "c", "topics": ("T",)}
    caller.register(**same)
    before = loads(caller.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body)
    caller.register(**same | changed)
    after = loads(caller.ask(RequestCode.GET_BROKER_CLUSTER_INFO).body)
    assert isinstance(before, dict)
    assert isinstance(after, dict)
    assert before["clusterAddrTable"] == {"c": ["g"]}
    assert after["clusterAddrTable"] == {changed.get("cluster", "c"): ["g"]}
    told = after["brokerAddrTable"]["g"]["brokerAddrs"]
    assert told[str(changed.get("broker_id", 0))] == changed.get("address", "a:1")


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """The thread of the test runs while the server's, which lets go for moments every 2 ms, is busy."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_whoever_asks_for_much_holds_nobody_else_up(server: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions have their turns, of a short time each, by address: the other one's comes before the hundred others."""
    answered: list[str] = []
    real = NameService._topics

    def topics(self: NameService, connection: RemotingConnection, frame: Frame) -> Frame:
        answered.append(connection.place.host)
        end = time.thread_time() + 0.002
        while time.thread_time() < end:
            pass
        self._tables.changes += 1
        return real(self, connection, frame)

    monkeypatch.setattr(NameService, "_topics", topics)
    code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
    with running(server.config) as busy, calling(busy) as many, calling(busy, "127.0.0.2") as other:
        many.socket.sendall(encode(Frame(code, 7)) * 512)
        assert many.receive().code == AnswerCode.SUCCESS
        assert other.ask(code).code == AnswerCode.SUCCESS
        assert answered.index("127.0.0.2") < 256


def test_an_answer_waits_for_nobody_elses_half_request(server: NameServer, caller: Caller) -> None:
    """One connection holds a frame back for ever, another sends a million requests and reads no answers."""
    route = encode(Frame(RequestCode.GET_BROKER_CLUSTER_INFO, 1))
    with calling(server) as slow, calling(server) as greedy:
        slow.socket.sendall(b"\x00\xff\x00\x00")
        greedy.socket.setblocking(False)
        sent = 0
        while sent < 1 << 20:
            try:
                sent += greedy.socket.send(route * 1000)
            except BlockingIOError:
                break
        assert caller.register(0, "a:1").code == AnswerCode.SUCCESS
        assert list(caller.json(RequestCode.GET_BROKER_CLUSTER_INFO)["brokerAddrTable"]) == ["g"]
