"""The section on threads of ``ARCHITECTURE.md`` against running servers: their threads are those of the tables."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

import pytest

from dledger.client import DLedgerClient
from dledger.config import Member, ServerConfig, StoreConfig
from dledger.server import DLedgerServer
from dledger.types import NodeId
from dledger_cli.local.group import free_ports
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from rocketstore.remoting.codes import RequestCode
from rocketstore.server import BrokerServer
from rocketstore.settings import load_broker_settings
from tests.docs.documents import ROOT, table_below
from tests.support.counting import History
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

pytestmark = pytest.mark.lane("processes")  # real ones, which want a small machine for themselves

THREADS: Final = ROOT / "ARCHITECTURE.md"
_OF_GRPC: Final = re.compile(r"Thread-\d+ \((_serve|_run|_poll_wrapper)\)")
_SMALL: Final = {"mapped_file_size_commit_log": "1m", "max_hash_slot_num": "100", "max_index_num": "1000"}


def _rows(heading: str) -> dict[str, str]:
    """Thread name as the table writes it, to when it is there."""
    return {
        name: row[1]
        for row in table_below(THREADS, heading)
        for name in re.findall(r"`([^`]+)`", row[0])
        if not name.startswith("Thread-")
    }


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub("NODE|PEER", r"n\\d+", re.escape(name)).replace("_N", r"_\d+"))


def _names(before: set[threading.Thread]) -> set[str]:
    return {one.name for one in threading.enumerate() if one not in before and not _OF_GRPC.fullmatch(one.name)}


def _compare(running: Callable[[], set[str]], always: set[str], possible: set[str]) -> None:
    """Every thread has a row, and every row of ``always`` a thread."""
    wait_until(
        lambda: all(any(_pattern(name).fullmatch(one) for one in running()) for name in always),
        f"the threads {sorted(always)} run",
    )

    assert {one for one in running() if not any(_pattern(name).fullmatch(one) for name in always | possible)} == set()


@pytest.fixture
def before() -> set[threading.Thread]:
    """What runs already."""
    return set(threading.enumerate())


def _member_servers(directory: Path) -> Iterator[DLedgerServer]:
    ports = free_ports(3)
    members = tuple(Member(NodeId(f"n{number}"), "127.0.0.1", port) for number, port in enumerate(ports))
    store = StoreConfig(base_dir=directory, segment_bytes=1 << 20, index_segment_bytes=1 << 19)
    for member in members:
        yield DLedgerServer(ServerConfig(node_id=member.node_id, members=members, client_port=0, store=store))


@pytest.mark.slow
def test_the_threads_of_a_node_are_those_of_the_table(tmp_path: Path, before: set[threading.Thread]) -> None:
    """A group of three, after an append and a read."""
    rows = _rows("Threads of a node")
    always = {name for name, there in rows.items() if there in ("always", "not in a broker")}
    with ExitStack() as stack:
        servers = list(_member_servers(tmp_path))
        for server in servers:
            stack.callback(server.stop, graceful=False)
            server.start()
        with closing(DLedgerClient([server.client_address for server in servers], timeout_s=60)) as client:
            client.read(client.append(b"x").index)
        wanted = always | {"dledger-push-in-NODE", "dledger-control-in-NODE", "dledger-read-NODE_N"}

        _compare(lambda: _names(before), wanted, set(rows))

    wait_until(lambda: not _names(before), "nothing is left")


@pytest.mark.slow
def test_the_threads_of_a_state_machine_are_there_with_one_only(tmp_path: Path, before: set[threading.Thread]) -> None:
    """No thread and no cost without a machine."""
    own = {"dledger-apply-NODE", "dledger-snapshot-NODE", "dledger-fetch-NODE", "dledger-query-NODE_N"}
    for machine in (None, History()):
        rows = _rows("Threads of a node")
        (port,) = free_ports(1)
        store = StoreConfig(base_dir=tmp_path, segment_bytes=1 << 20, index_segment_bytes=1 << 19)
        config = ServerConfig(members=(Member(NodeId("n0"), "127.0.0.1", port),), client_port=0, store=store)
        server = DLedgerServer(config, state_machine=machine)
        with ExitStack() as stack:
            stack.callback(server.stop, graceful=False)
            server.start()
            with closing(DLedgerClient(server.client_address, timeout_s=60)) as client:
                client.append(b"x")
                if machine is not None:
                    client.query(b"")
            _compare(lambda: _names(before), own if machine else set(), set(rows) if machine else set(rows) - own)
        wait_until(lambda: not _names(before), "nothing is left")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("plain broker, ASYNC_FLUSH", {}),
        ("plain broker, SYNC_FLUSH", {"flush_disk_type": "SYNC_FLUSH"}),
        ("with the transient store pool", {"transient_store_pool_enable": "true"}),
        ("replicated broker", {"enableDLegerCommitLog": "true", "group": "g", "node_id": "n0"}),
    ],
)
def test_the_threads_of_a_broker_are_those_of_the_table(
    kind: str, flags: dict[str, str], tmp_path: Path, before: set[threading.Thread]
) -> None:
    """Of each kind, after a message."""
    replicated = kind == "replicated broker"
    rows = _rows("Threads of a broker")
    modes = {"always", kind, kind.partition(",")[0]}
    if kind.startswith("with"):
        modes |= {"plain broker", "plain broker, ASYNC_FLUSH"}
    always = {name for name, there in rows.items() if there in modes}
    possible = {"rocketstore-read_N", "uvloop_N"}
    if replicated:
        port, listen_port = free_ports(2)
        flags = flags | {"members": f"n0-127.0.0.1:{port}", "listen_port": str(listen_port)}
        node = _rows("Threads of a node")
        always |= {name for name, there in node.items() if there == "always" and "PEER" not in name}
        possible |= {name for name, there in node.items() if there != "not in a broker"}
    settings = {"listen_port": "0", "vip_port": "0", "store_path_root_dir": str(tmp_path), **_SMALL, **flags}
    config, _ = load_broker_settings(None, {}, settings)
    with ExitStack() as stack:
        broker = BrokerServer(config)
        stack.callback(broker.stop)
        broker.start()
        with Producer([broker.address], timeout_s=60) as producer:
            producer.send(Message("t", b"x"))

            _compare(lambda: _names(before) - _of_the_client(), always, possible)


def _of_the_client() -> set[str]:
    return {one.name for one in threading.enumerate() if one.name.startswith(("rocketmq-clients", "dledger-append"))}


@pytest.mark.slow
def test_the_threads_of_a_name_server_are_those_of_the_table(tmp_path: Path, before: set[threading.Thread]) -> None:
    """One that has written a value."""
    rows = _rows("Threads of a name server")
    always = {name for name, there in rows.items() if there == "always"}
    with running(config_in(tmp_path)) as server, calling(server) as caller:
        caller.ask(RequestCode.PUT_KV_CONFIG, namespace="n", key="k", value="v")
        _compare(lambda: _names(before), always, set(rows) - always)


def test_the_names_of_all_other_threads_stand_in_the_code() -> None:
    """Those that appear only with TLS, with access rules or in a process of their own."""
    sources = "".join(
        path.read_text()
        for package in ("dledger", "rocketstore", "dledger_cli", "cluster")
        for path in (ROOT / package).rglob("*.py")
    )

    for heading in ("Threads of a node", "Threads of a broker", "Threads of a name server", "Threads of the process"):
        for name in _rows(heading):
            stem = re.sub(r"(-PEER)?-NODE|_N|dledger-(?=dispatcher)", "", name)
            assert name == "MainThread" or stem in sources, name
