"""A whole broker in this process: plain and as the only member of a DLedger group."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import grpc
import pytest
from grpc_health.v1 import health_pb2

from dledger.client import ClientSecurity, DLedgerClient
from dledger.errors import (
    AccessDeniedError,
    AppendsNotServedError,
    ConfigError,
    DirectoryLockedError,
    InvalidRequestError,
)
from dledger.remoting.codes import AnswerCode
from dledger_cli.local.group import free_ports
from rocketstore.broker_config import BrokerConfig
from rocketstore.broker_remoting.pulls import SUBSCRIPTION, SUSPEND
from rocketstore.client.aio.received import split_records
from rocketstore.message.ids import parse_offset_message_id
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import RuntimeInfo
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from rocketstore.types import BrokerRole
from tests.support.remoting import RemotingSocket, pull_fields, send_fields
from tests.support.waiting import PATIENCE_S, wait_until

_SMALL = {
    "mappedFileSizeCommitLog": "1m",
    "maxHashSlotNum": "100",
    "maxIndexNum": "400",
    "mappedFileSizeConsumeQueue": "2000",
    "vipPort": "0",
}


def plain(tmp_path: Path, **more: str) -> BrokerConfig:
    """A plain broker on any free port."""
    flags = {"storePathRootDir": str(tmp_path), "listenPort": "0", **_SMALL}
    return load_broker_settings(None, {}, flags | more)[0]


def alone(tmp_path: Path, **more: str) -> BrokerConfig:
    """The only member of a group."""
    peer_port, listen_port = free_ports(2)
    flags = {
        "storePathRootDir": str(tmp_path),
        "enableDLegerCommitLog": "true",
        "dLegerGroup": "G",
        "dLegerSelfId": "n0",
        "dLegerPeers": f"n0-127.0.0.1:{peer_port}",
        "listenPort": str(listen_port),
        "index_segment_bytes": "32000",
        "warm_bytes": "0",
        **_SMALL,
    }
    return load_broker_settings(None, {}, flags | more)[0]


@contextmanager
def running(config: BrokerConfig) -> Iterator[BrokerServer]:
    """A broker that takes messages, until the end of the block."""
    server = BrokerServer(config)
    try:
        server.start()
        wait_until(lambda: server.store.role is not BrokerRole.SLAVE, "it is master")
        yield server
    finally:
        server.stop()


class Sent(NamedTuple):
    """What was answered; where the message is in its queue and in the log, -1 if it was refused."""

    code: AnswerCode
    remark: str
    queue_offset: int
    position: int


def send(server: BrokerServer, *bodies: bytes, properties: str = "") -> list[Sent]:
    """Messages for queue 0 of topic T."""
    with RemotingSocket(server.port) as client:
        fields = send_fields("T", properties=properties)
        begun = [client.begin(RequestCode.SEND_MESSAGE_V2, fields, body) for body in bodies]
        answers = [client.answer_to(one) for one in begun]
    return [
        Sent(
            AnswerCode(one.code),
            one.remark,
            int(one.fields.get("queueOffset", -1)),
            parse_offset_message_id(one.fields["msgId"])[1] if one.fields.get("msgId") else -1,
        )
        for one in answers
    ]


def pull(server: BrokerServer, offset: int = 0, topic: str = "T") -> list[bytes]:
    """The bodies that queue 0 of topic T holds of all that is stored, waiting for something."""
    assert server.store.wait_dispatched(PATIENCE_S)
    own = {"sysFlag": SUBSCRIPTION | SUSPEND, "subscription": "*", "maxMsgNums": 100, "suspendTimeoutMillis": 60_000}
    with RemotingSocket(server.port) as client:
        answer = client.ask(RequestCode.PULL_MESSAGE, pull_fields("readers", topic, offset) | own)
    return [one.body for one in split_records(answer.body)] if answer.code == AnswerCode.SUCCESS else []


def commit(server: BrokerServer, group: str, offset: int) -> None:
    """Of a group, in queue 0 of topic T."""
    fields = {"consumerGroup": group, "topic": "T", "queueId": 0, "commitOffset": offset}
    with RemotingSocket(server.port) as client:
        assert client.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields).code == AnswerCode.SUCCESS


@pytest.fixture(params=[plain, alone], ids=["plain", "dledger"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> BrokerConfig:
    """Both kinds of broker."""
    make: Callable[[Path], BrokerConfig] = request.param
    return make(tmp_path)


def test_a_member_finds_out_by_itself_whether_it_has_caught_up(tmp_path: Path) -> None:
    """Nobody has to ask first, and come again: the first question to a member that is ready is answered."""
    server = BrokerServer(alone(tmp_path))
    found: list[bool] = []
    look = server._has_caught_up

    def noted() -> bool:
        found.append(look())
        return found[-1]

    server._has_caught_up = noted
    try:
        server.start()
        wait_until(lambda: found[-1:] == [True], "it has looked, and has caught up")
    finally:
        server.stop()


def test_messages_offsets_and_topics_survive_a_restart(config: BrokerConfig) -> None:
    """Sent and committed before the stop, there after the start; queue offsets go on where they were."""
    with running(config) as server:
        assert [one.queue_offset for one in send(server, b"0", b"1")] == [0, 1]
        wait_until(lambda: pull(server) == [b"0", b"1"], "both can be pulled")
        commit(server, "g", 1)

    with running(config) as server:
        assert send(server, b"2")[0].queue_offset == 2
        wait_until(lambda: pull(server) == [b"0", b"1", b"2"], "all can be pulled")
        with RemotingSocket(server.port) as client:
            asked = {"consumerGroup": "g", "topic": "T", "queueId": 0}
            assert client.ask(RequestCode.QUERY_CONSUMER_OFFSET, asked).fields["offset"] == "1"


def test_open_transactions_survive_a_restart(config: BrokerConfig) -> None:
    """RocketMQ's producer prepares two, ends one, and the other after the restart, as it is asked."""
    config = replace(config, transaction_check_interval=100, transaction_time_out=0)
    prepared = "TRAN_MSG\x01true\x02PGROUP\x01producers\x02KEYS\x01"
    with running(config) as server, RemotingSocket(server.port) as client:
        wait_until(lambda: server.transactions.is_running, "it is quite the master")
        answers = [client.send(body=body, properties=prepared + body.decode()) for body in (b"a", b"b")]
        assert [one.code for one in answers] == [0, 0]
        _, offset = parse_offset_message_id(answers[0].fields["msgId"])
        fields = {"producerGroup": "producers", "tranStateTableOffset": 0, "commitLogOffset": offset, "msgId": "a"}
        client.tell(RequestCode.END_TRANSACTION, fields | {"commitOrRollback": 8})
        wait_until(lambda: len(pull(server)) == 1, "the first is committed")

    with running(config) as server, RemotingSocket(server.port) as client:
        assert client.subscribe("producers", "T").code == 0
        check = client.request(RequestCode.CHECK_TRANSACTION_STATE)
        names = ("tranStateTableOffset", "commitLogOffset", "msgId")
        fields = {"producerGroup": "producers", **{name: check.fields.get(name, "") for name in names}}
        for _ in range(2):
            client.tell(RequestCode.END_TRANSACTION, fields | {"commitOrRollback": 8, "fromTransactionCheck": "true"})
        wait_until(lambda: len(pull(server)) == 2, "the other is committed")
        wait_until(lambda: server.transactions.open_count == 0, "none is open")
        assert len(pull(server)) == 2


def test_the_status_names_this_broker_as_the_one_to_send_to(config: BrokerConfig) -> None:
    """Clients find the master by it."""
    with running(config) as server:
        with RemotingSocket(server.port) as client:
            told = RuntimeInfo.decode(client.ask(RequestCode.GET_BROKER_RUNTIME_INFO).body)

        in_group = config.dledger is not None
        assert told.role == ("LEADER" if in_group else "")
        assert dict(told.members) == ({config.node_id: server.address} if in_group else {})


def test_health_and_reflection_are_served(config: BrokerConfig) -> None:
    """What probes and grpcurl ask for."""
    with running(config) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=None, response_deserializer=None
        )
        found = health_pb2.HealthCheckResponse.FromString(check(b"", timeout=60))
        assert found.status == health_pb2.HealthCheckResponse.SERVING


def test_a_delayed_message_is_delivered(tmp_path: Path) -> None:
    """The schedule service runs on a master."""
    with running(plain(tmp_path, messageDelayLevel="1s")) as server:
        (result,) = send(server, b"later", properties="DELAY\x011")
        assert result.code == AnswerCode.SUCCESS

        assert pull(server) == [b"later"]


def test_a_second_broker_on_one_directory_is_refused(config: BrokerConfig) -> None:
    """Before it opens a port."""
    with running(config), pytest.raises(DirectoryLockedError):
        BrokerServer(config)


def test_a_taken_port_is_an_error_that_leaves_nothing_running(tmp_path: Path) -> None:
    """And the directory free."""
    with running(plain(tmp_path / "one")) as server:
        other = BrokerServer(plain(tmp_path / "two", listenPort=str(server.port)))
        with pytest.raises(ConfigError, match="port is in use"):
            other.start()

    with running(plain(tmp_path / "two")):
        pass


def test_a_taken_port_of_a_member_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What ends a start is told, and nothing else: the node has closed its log by then, and flushed it."""
    config = alone(tmp_path)
    with socket.create_server(("127.0.0.1", config.grpc_bind_port or 0)):
        broker = BrokerServer(config)
        with pytest.raises(ConfigError, match="cannot listen on the gRPC address"):
            broker.start()
    assert not [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]
    assert "did not stop cleanly" not in caplog.text

    with running(config):
        pass


def test_the_raft_log_can_be_looked_at_but_not_written_at_the_brokers_port(tmp_path: Path) -> None:
    """The log service is served there, too; a raw entry would be no message."""
    config = alone(tmp_path)
    with running(config) as server, DLedgerClient(server.address, group="G") as client:
        assert client.metadata(server.address).end_index >= 0
        with pytest.raises(AppendsNotServedError):
            client.append(b"raw")


_RULES: Final = """\
accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  topicPerms:
  - G=PUB|SUB
"""


def test_only_an_administrator_reads_the_raft_log_at_the_brokers_port(tmp_path: Path) -> None:
    """It holds the messages of all topics; the accounts are the broker's."""
    rules = tmp_path / "rules.yml"
    rules.write_text(_RULES)
    rules.chmod(0o600)
    flags = {"acl_enable": "true", "acl_file": str(rules)}
    with running(alone(tmp_path, **flags)) as server:

        def read(key: str = "", secret: str = "") -> int:
            security = ClientSecurity(access_key=key, secret_key=secret)
            with DLedgerClient(server.address, group="G", security=security) as client:
                return len(client.read(0, count=1)) + sum(chunk.count > 0 for chunk in client.fetch_log(0, 1))

        assert read("root", "root-secret") == 2
        for account in (("alice", "alice-secret"), ("root", "guessed"), ("", "")):
            with pytest.raises(AccessDeniedError):
                read(*account)


def test_a_broker_without_a_raft_log_says_so(tmp_path: Path) -> None:
    """At once: no other address would help."""
    with (
        running(plain(tmp_path)) as server,
        DLedgerClient(server.address, group="G", timeout_s=3600) as client,
        pytest.raises(InvalidRequestError, match="without a replicated log"),
    ):
        client.metadata()


def test_a_member_that_fails_takes_its_broker_along(tmp_path: Path) -> None:
    """Exit status 70: whoever watches the process starts it again, another member leads meanwhile."""
    with running(alone(tmp_path)) as server:
        server.store.failure = RuntimeError("dispatch failed")

        assert server.wait(60) == 70
        assert server.fatal is server.store.failure


@pytest.mark.parametrize("part", ["state", "schedule", "transactions"])
@pytest.mark.parametrize("make", [plain, alone])
def test_a_thread_that_no_broker_can_do_without_takes_it_along(
    tmp_path: Path, make: Callable[[Path], BrokerConfig], part: str
) -> None:
    """Topics and consumer offsets, and delayed messages, would else stand still in a process that looks alive."""
    failure = RuntimeError("a bug")
    with running(make(tmp_path)) as server:
        getattr(server, part)._supervisor.report(failure)

        assert server.wait(60) == 70
        assert server.fatal is failure


def test_threads_of_a_broker_that_fail_take_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching one is watched, too."""

    def broken() -> bool:
        raise RuntimeError("a bug")

    with running(alone(tmp_path)) as server:
        monkeypatch.setattr(server, "_has_caught_up", broken)

        assert server.wait(60) == 70
        assert str(server.fatal) == "a bug"


def test_what_cannot_work_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    """Settings that contradict each other, and repairing a log that nobody else has."""
    config = plain(tmp_path)
    with pytest.raises(ConfigError, match="must be at least 1"):
        BrokerServer(replace(config, read_threads=0))
    with pytest.raises(ConfigError, match="--repair"):
        BrokerServer(config, repair=True)
    assert not list(tmp_path.iterdir())


def test_stopping_twice_and_before_the_start_is_harmless(config: BrokerConfig) -> None:
    """As signals come."""
    server = BrokerServer(config)
    server.stop()
    server.stop()
    server.start()

    assert server.wait(0) == 0


def test_a_plain_broker_is_refused_on_a_members_directory(tmp_path: Path) -> None:
    """A new log beside the group's would hide its messages; the member goes on as before."""
    own = alone(tmp_path)
    BrokerServer(own).stop()
    BrokerServer(plain(tmp_path)).stop()  # nothing is stored yet
    with running(own) as server:
        send(server, b"kept")

    with pytest.raises(ConfigError, match="messages would become unreadable"):
        BrokerServer(plain(tmp_path))

    with running(own) as server:
        assert pull(server) == [b"kept"]
