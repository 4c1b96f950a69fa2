"""A plain master and its slave as whole brokers in this process."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from dledger.monitoring import ConditionKind
from dledger.remoting.codes import AnswerCode
from dledger.store.fs import FileSystem
from dledger.types import NodeId
from dledger_cli import certs
from dledger_cli.local.group import free_ports
from dledger_cli.local.tcp_proxy import ProxyNetwork
from rocketstore.client.aio.errors import SendStatus
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.remoting.runtime import HaStatus
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in
from tests.unit.rocketstore.nameserver.wire import running as name_server_running
from tests.unit.rocketstore.test_server import commit, pull, send

_SMALL = {
    "mappedFileSizeCommitLog": "1m",
    "maxHashSlotNum": "100",
    "maxIndexNum": "400",
    "mappedFileSizeConsumeQueue": "2000",
    "vipPort": "0",
    "listenPort": "0",
    "haListenPort": "0",
    "haSendHeartbeatInterval": "200",
}


@contextmanager
def broker(directory: Path, **settings: str) -> Iterator[BrokerServer]:
    """A broker until the end of the block."""
    flags = _SMALL | {"storePathRootDir": str(directory)} | settings
    flags = {name: value for name, value in flags.items() if value}  # unset, if empty
    server = BrokerServer(load_broker_settings(None, {}, flags)[0]).start()
    try:
        yield server
    finally:
        server.stop()
        assert server.fatal is None


def port_for_slaves() -> str:
    """A free one."""
    return str(free_ports(1)[0])


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ExitStack]:
    assert tmp_path.is_dir()  # until the brokers have stopped
    with ExitStack() as one:
        yield one


def pair(
    stack: ExitStack, tmp_path: Path, role: str = "ASYNC_MASTER", **settings: str
) -> tuple[BrokerServer, BrokerServer]:
    """A master, and a slave that follows it."""
    ha_port = port_for_slaves()
    master = stack.enter_context(broker(tmp_path / "m", brokerRole=role, **settings | {"haListenPort": ha_port}))
    slave = stack.enter_context(
        broker(tmp_path / "s", brokerRole="SLAVE", brokerId="1", haMasterAddress=f"127.0.0.1:{ha_port}")
    )
    replication = master.replication
    assert replication is not None
    wait_until(lambda: len(replication.slaves()) == 1, "the slave follows")
    return master, slave


def has_all(slave: BrokerServer, master: BrokerServer) -> None:
    """Wait until everything can be read at the slave, which first applies what the log says of topics."""
    wait_until(
        lambda: (
            slave.store.log.max_offset == master.store.log.max_offset
            and not slave.store.dispatch_behind_bytes
            and slave.state.topics() == master.state.topics()
        ),
        "the slave has it",
    )


def test_a_slave_serves_what_the_master_has_taken(stack: ExitStack, tmp_path: Path) -> None:
    """Messages, topics, offsets of groups, also once the master is gone; and it takes none."""
    master, slave = pair(stack, tmp_path)
    send(master, b"one", b"two")
    commit(master, "g", 1)
    has_all(slave, master)
    wait_until(lambda: slave.state.offset("g", "T", 0) == 1, "offsets are applied")

    master.stop()

    assert len(pull(slave)) == 2
    with RemotingSocket(slave.port) as client:
        client.subscribe("g", "T")
        answer = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))
        assert answer.code == AnswerCode.SUCCESS
        assert b"one" in answer.body
        refused = client.send()
        assert refused.code != AnswerCode.SUCCESS
    assert send(slave, b"three")[0].code == AnswerCode.SERVICE_NOT_AVAILABLE
    wait_until(lambda: slave.conditions.holds(ConditionKind.NOT_REPLICATING), "it says that it follows nobody")


def ha_status(broker: BrokerServer) -> HaStatus:
    """What RocketMQ 5's `mqadmin haStatus` asks for."""
    with RemotingSocket(broker.port) as client:
        answer = client.ask(RequestCode.GET_BROKER_HA_STATUS)
        assert answer.code == 0
        return HaStatus.decode(answer.body)


def test_both_tell_how_they_stand(stack: ExitStack, tmp_path: Path) -> None:
    """As the tools of RocketMQ 5 ask."""
    master, slave = pair(stack, tmp_path)
    send(master, b"one", b"two")
    has_all(slave, master)
    end = master.store.log.end_offset

    def acknowledged() -> bool:
        return [one.diff for one in ha_status(master).ha_connection_info] == [0]

    wait_until(acknowledged, "the slave has acknowledged everything")
    told = ha_status(master)
    assert (told.master, told.master_commit_log_max_offset, told.in_sync_slave_nums) == (True, end, 1)
    (connection,) = told.ha_connection_info
    assert (connection.slave_ack_offset, connection.in_sync, bool(connection.addr)) == (end, True, True)
    told = ha_status(slave)
    client = told.ha_client_runtime_info
    assert (told.master, client.max_offset, client.master_flush_offset, client.activated) == (False, end, end, True)
    assert client.master_addr.endswith(f":{master.replication.port if master.replication else 0}")
    assert client.last_read_timestamp > 0


def test_a_sync_master_answers_once_a_slave_has_it(stack: ExitStack, tmp_path: Path) -> None:
    """PUT_OK means two copies; without a slave the producer learns that there is one."""
    master, slave = pair(stack, tmp_path, "SYNC_MASTER", slaveTimeout="30000")
    for number in range(20):
        (result,) = send(master, b"%d" % number)
        assert result.code == AnswerCode.SUCCESS
        assert slave.store.log.end_offset > result.position
    slave.stop()
    replication = master.replication
    assert replication is not None
    wait_until(lambda: not replication.slaves(), "the slave is gone")
    (result,) = send(master, b"alone")
    assert result.code == AnswerCode.SLAVE_NOT_AVAILABLE
    with Producer([master.address]) as producer:
        assert producer.send(Message("T", b"x")).status == SendStatus.SLAVE_NOT_AVAILABLE


def test_too_few_replicas_close_the_master(stack: ExitStack, tmp_path: Path) -> None:
    """``minInSyncReplicas=2``: nothing is taken that would have one copy, and something again with a slave."""
    ha_port = port_for_slaves()
    settings = {"brokerRole": "SYNC_MASTER", "minInSyncReplicas": "2", "haListenPort": ha_port, "slaveTimeout": "30000"}
    master = stack.enter_context(broker(tmp_path / "m", **settings))
    refusal = master.store.refusal
    assert refusal is not None
    assert "min_in_sync_replicas" in refusal.reason
    with ExitStack() as inner:
        inner.enter_context(
            broker(tmp_path / "s", brokerRole="SLAVE", brokerId="1", haMasterAddress=f"127.0.0.1:{ha_port}")
        )
        wait_until(lambda: master.store.refusal is None, "it takes messages")
        assert send(master, b"one")[0].code == AnswerCode.SUCCESS
    wait_until(lambda: master.store.refusal is not None, "it takes none")


def suggested(broker: BrokerServer, offset: int = 0) -> str:
    """The broker id that a consumer is sent to for its next pull."""
    with RemotingSocket(broker.port) as client:
        client.subscribe("g", "T")
        answer = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T", offset))
        assert answer.code == AnswerCode.SUCCESS
        return answer.fields["suggestWhichBrokerId"]


def test_consumers_that_are_far_behind_are_sent_to_a_slave_and_back(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``slaveReadEnable``, as in RocketMQ: which slave is a setting of the group; once in memory, the master again."""
    master, slave = pair(stack, tmp_path, slaveReadEnable="true")
    send(master, b"one", b"two")
    has_all(slave, master)
    assert suggested(master) == "0"
    with monkeypatch.context() as patch:
        for one in (master, slave):
            patch.setattr(one.store._reader, "memory_bytes_max", 0)
        assert suggested(master) == "1"
        assert suggested(slave) == "0"  # there it is not enabled
        change = {"groupName": "g", "brokerId": 0, "whichBrokerWhenConsumeSlowly": 5, "retryQueueNums": 1}
        with RemotingSocket(master.port) as client:
            made = client.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, json.dumps(change).encode())
            assert made.code == AnswerCode.SUCCESS
            assert suggested(master) == "5"
            off = client.ask(RequestCode.UPDATE_BROKER_CONFIG, {}, b"slaveReadEnable=false")
            assert off.code == AnswerCode.SUCCESS
        assert suggested(master) == "0"
    assert suggested(master) == "0"


def test_a_broker_shows_its_port_for_slaves(stack: ExitStack, tmp_path: Path) -> None:
    """GET_BROKER_CONFIG, as it is: also if it was not set."""
    master = stack.enter_context(broker(tmp_path / "m"))
    assert master.replication is not None
    with RemotingSocket(master.port) as client:
        shown = client.ask(RequestCode.GET_BROKER_CONFIG, {}).body.decode().splitlines()
    assert f"haListenPort={master.replication.port}" in shown
    assert "slaveReadEnable=false" in shown


def test_a_slave_finds_its_master_by_the_name_server(stack: ExitStack, tmp_path: Path) -> None:
    """No address of the master is configured; the route shows both, and the slave passes on what the master may do."""
    name_server = stack.enter_context(name_server_running(config_in(tmp_path)))
    known = {"namesrvAddr": name_server.address, "registerNameServerPeriod": "10000"}
    master = stack.enter_context(broker(tmp_path / "m", **known, haListenPort=port_for_slaves()))
    wait_until(lambda: master.is_ready, "the master serves")
    slave = stack.enter_context(broker(tmp_path / "s", brokerRole="SLAVE", brokerId="1", **known))
    replication = master.replication
    assert replication is not None
    wait_until(lambda: len(replication.slaves()) == 1, "the slave follows")
    with RemotingSocket(slave.port) as client:
        assert client.send(body=b"passed on").code == AnswerCode.SUCCESS
    has_all(slave, master)
    assert len(pull(slave)) == 1


def secured(directory: Path) -> dict[str, str]:
    """Settings of a broker with a certificate."""
    certs.make_authority(directory)
    certs.make_node(directory, "n0", ["127.0.0.1", "own-name"])
    return {
        "tls_cert_path": str(directory / "n0.crt"),
        "tls_key_path": str(directory / "n0.key"),
        "tls_trust_cert_path": str(directory / "ca.crt"),
    }


def test_slaves_use_tls_if_they_must(stack: ExitStack, tmp_path: Path) -> None:
    """``haTls``: a slave whose certificate has a name of the pair follows, and one without is not served."""
    tls, ha_port = secured(tmp_path / "certs") | {"ha_tls_names": "own-name"}, port_for_slaves()
    master = stack.enter_context(broker(tmp_path / "m", **tls, haTls="true", haListenPort=ha_port))
    replication = master.replication
    assert replication is not None
    follows = {"brokerRole": "SLAVE", "haMasterAddress": f"127.0.0.1:{ha_port}"}
    plain = stack.enter_context(broker(tmp_path / "p", **follows, brokerId="1"))
    slave = stack.enter_context(broker(tmp_path / "s", **follows, **tls, haTls="true", brokerId="2"))
    wait_until(lambda: [one.broker_id for one in replication.slaves()] == [2], "the slave follows")
    assert master.store.put(Message("T", b"one", 0)).ok
    has_all(slave, master)
    assert plain.replication is not None
    view = plain.replication.master()
    assert view is not None
    assert not view.is_connected
    assert plain.store.log.end_offset == 0


def test_where_clients_are_checked_slaves_are_not_let_in_unchecked(stack: ExitStack, tmp_path: Path) -> None:
    """With TLS for clients and none for slaves, there is no port for them unless somebody asks for it."""
    tls = secured(tmp_path / "certs")
    listen_port = port_for_slaves()
    closed = broker(tmp_path / "c", **tls, listenPort=listen_port, haListenPort="")
    with closed as master:
        assert master.replication is not None
        assert master.replication.port == 0
    ha_port = port_for_slaves()
    asked = stack.enter_context(broker(tmp_path / "a", **tls, haListenPort=ha_port))
    assert asked.replication is not None
    assert asked.replication.port == int(ha_port)


# -- faults ------------------------------------------------------------------------------------------------------------

_M, _S = NodeId("m"), NodeId("s")


@contextmanager
def network_to(ha_port: str) -> Iterator[tuple[ProxyNetwork, str]]:
    """A network between slave and master; and the master's address there."""
    with ProxyNetwork({_M: ("127.0.0.1", int(ha_port)), _S: ("127.0.0.1", 1)}) as network:
        yield network, f"127.0.0.1:{network.port(_S, _M)}"


def test_a_master_that_is_stopped_has_sent_everything(stack: ExitStack, tmp_path: Path) -> None:
    """Also an ASYNC_MASTER, which does not wait for slaves otherwise."""
    ha_port = port_for_slaves()
    network, address = stack.enter_context(network_to(ha_port))
    master = stack.enter_context(broker(tmp_path / "m", haListenPort=ha_port, slaveTimeout="30000"))
    slave = stack.enter_context(broker(tmp_path / "s", brokerRole="SLAVE", brokerId="1", haMasterAddress=address))
    replication = master.replication
    assert replication is not None
    wait_until(lambda: len(replication.slaves()) == 1, "the slave follows")
    network.delay(_M, _S, 0.5)
    end = send(master, *(b"%d" % number for number in range(50)))[-1].position
    master.stop()
    assert slave.store.log.end_offset > end
    wait_until(lambda: slave.store.max_offset("T", 0) == 50, "the slave shows them")


def test_a_slave_that_acknowledges_nothing_delays_each_send_for_so_long(stack: ExitStack, tmp_path: Path) -> None:
    """``slaveTimeout``: then the producer hears FLUSH_SLAVE_TIMEOUT; from a slave too far behind, at once that."""
    ha_port = port_for_slaves()
    settings = {"slaveTimeout": "300", "haSlaveFallbehindMax": "20000", "haHousekeepingInterval": "600000"}
    settings |= {"haListenPort": ha_port}
    master = stack.enter_context(broker(tmp_path / "m", brokerRole="SYNC_MASTER", **settings))
    replication = master.replication
    assert replication is not None
    link = stack.enter_context(socket.create_connection(("127.0.0.1", int(ha_port))))
    link.sendall(bytes(8))  # RocketMQ's way to ask for everything; and no word more
    wait_until(lambda: len(replication.slaves()) == 1, "it follows")
    (result,) = send(master, b"one")
    assert result.code == AnswerCode.FLUSH_SLAVE_TIMEOUT
    (result,) = send(master, b"x" * 20_000)
    assert result.code in (AnswerCode.FLUSH_SLAVE_TIMEOUT, AnswerCode.SLAVE_NOT_AVAILABLE)
    (result,) = send(master, b"two")
    assert result.code == AnswerCode.SLAVE_NOT_AVAILABLE
    wait_until(lambda: master.conditions.holds(ConditionKind.NOT_REPLICATING), "the master says so")
    assert replication.slaves()[0].lag_bytes > 20_000


@pytest.mark.soak  # a slave asks name servers every ten seconds
def test_master_and_slave_may_be_started_again_in_any_order(stack: ExitStack, tmp_path: Path) -> None:
    """With the slave connected, with another port, without the name server that told of it: the slave follows again."""
    name_server_config = config_in(tmp_path)
    known: dict[str, str] = {"registerNameServerPeriod": "10000"}
    slave_settings = {"brokerRole": "SLAVE", "brokerId": "1"}
    total = 0

    def round_of(master_port: str, slave: BrokerServer) -> None:
        nonlocal total
        with broker(tmp_path / "m", **known, haListenPort=master_port) as master:
            replication = master.replication
            assert replication is not None
            wait_until(lambda: len(replication.slaves()) == 1, "the slave follows")
            send(master, b"%d" % total)
            total += 1
            has_all(slave, master)

    with name_server_running(name_server_config) as name_server:
        known["namesrvAddr"] = name_server.address
        first, last = port_for_slaves(), port_for_slaves()
        for _ in range(2):
            with broker(tmp_path / "s", **slave_settings, **known) as slave:
                round_of(first, slave)
                round_of(first, slave)
        slave = stack.enter_context(broker(tmp_path / "s", **slave_settings, **known))
        round_of(last, slave)
    round_of(last, slave)
    assert slave.store.max_offset("T", 0) == total == 6


def test_a_masters_full_disk_stops_puts_and_not_its_slave(stack: ExitStack, tmp_path: Path) -> None:
    """Nothing that was refused comes to the slave, and both go on when there is room."""
    master, slave = pair(stack, tmp_path, "SYNC_MASTER")
    (before,) = send(master, b"before")
    assert before.code == AnswerCode.SUCCESS
    with patch.object(FileSystem, "allocate", _no_room_below(tmp_path / "m")):
        results = [send(master, b"x" * 900_000)[0] for _ in range(6)]
    refused = [one for one in results if one.code != AnswerCode.SUCCESS]
    assert refused
    assert all("no space left" in one.remark for one in refused), refused
    has_all(slave, master)
    wait_until(lambda: send(master, b"x" * 900_000)[0].code == AnswerCode.SUCCESS, "there is room")
    has_all(slave, master)
    assert slave.store.max_offset("T", 0) == master.store.max_offset("T", 0)


def _no_room_below(directory: Path) -> Callable[[FileSystem, int, int], None]:
    """``FileSystem.allocate`` as if the disk of this directory were full, and no other."""
    allocate = FileSystem.allocate

    def refuse(fs: FileSystem, fd: int, length: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(directory):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(fs, fd, length)

    return refuse
