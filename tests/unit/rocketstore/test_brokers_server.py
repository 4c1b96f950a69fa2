"""Several brokers in one process: wired together, failing apart."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import ConfigError, DirectoryLockedError
from dledger.log_output import speaking_group
from dledger.monitoring import ConditionKind
from dledger.remoting.codes import AnswerCode
from dledger_cli.local.group import free_ports
from rocketstore.broker_config import BrokerConfig
from rocketstore.server import BrokerServer, BrokersServer, check_brokers_together
from rocketstore.settings import load_broker_settings
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until
from tests.unit.rocketstore.test_server import plain, pull, send

Named = list[tuple[str, BrokerConfig]]


def _config(root: Path, group: str, peer_port: int, listen_port: int, **more: str) -> BrokerConfig:
    flags = {
        "storePathRootDir": str(root / group),
        "enableDLegerCommitLog": "true",
        "dLegerGroup": group,
        "dLegerSelfId": "n0",
        "dLegerPeers": f"n0-127.0.0.1:{peer_port}",
        "listenPort": str(listen_port),
        "vipPort": "0",
        "grpcServerPort": "0",
        "index_segment_bytes": "32000",
        "warm_bytes": "0",
        "mappedFileSizeCommitLog": "1m",
        "mappedFileSizeConsumeQueue": "2000",
        "maxIndexNum": "100",
        "maxHashSlotNum": "40",
    }
    return load_broker_settings(None, {}, flags | more)[0]


@pytest.fixture
def named(tmp_path: Path) -> Named:
    """The brokers a and b, each its group's only member."""
    peer_port, *listen_ports = free_ports(3)
    ports = zip("ab", listen_ports, strict=True)
    return [(f"{group}.conf", _config(tmp_path, group, peer_port, port)) for group, port in ports]


@pytest.fixture
def server(named: Named) -> Iterator[BrokersServer]:
    """Both, started and masters."""
    server = BrokersServer(named)
    try:
        server.start()
        _wait_masters(server)
        yield server
    finally:
        server.stop(graceful=False)


def _wait_masters(server: BrokersServer) -> None:
    wait_until(lambda: all(one.store.role is not BrokerRole.SLAVE for one in server.servers.values()), "both lead")


def test_log_lines_name_the_group_that_they_are_about(named: Named) -> None:
    """Whichever part of a broker writes them, on whichever thread or loop, from its opening to its end."""
    lines: list[tuple[str, str, str]] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((speaking_group(), str(record.threadName), record.getMessage()))

    noting, log = Noting(), logging.getLogger("rocketstore")
    level = log.level
    log.addHandler(noting)
    log.setLevel(logging.INFO)
    try:
        server = BrokersServer([(name, replace(one, namesrv_addr="127.0.0.1:1")) for name, one in named])
        try:
            server.start()
            _wait_masters(server)
            wait_until(lambda: sum("127.0.0.1:1" in text for *_, text in lines) >= 2, "both have tried to register")
        finally:
            server.stop()
    finally:
        log.removeHandler(noting)
        log.setLevel(level)

    assert [one for one in lines if one[0] not in ("a", "b")] == []
    for group in "ab":
        mine = {text for speaker, _, text in lines if speaker == group}
        assert f"{group}/n0: master in term 1" in mine
        assert any(text.startswith("timed messages due before") for text in mine)


def _threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(("dledger-", "rocketstore-"))]


@pytest.fixture
def new_threads() -> Callable[[], list[str]]:
    """The names of our threads that were not there before the test; other tests' clients may have left theirs."""
    before = set(threading.enumerate())
    ours = ("dledger-", "rocketstore-")
    return lambda: [one.name for one in set(threading.enumerate()) - before if one.name.startswith(ours)]


def until_ended(new_threads: Callable[[], list[str]]) -> None:
    """Fails with their names."""
    with suppress(AssertionError):
        wait_until(lambda: new_threads() == [], "its threads have ended")
    assert new_threads() == []


def test_each_broker_has_messages_and_a_port_of_its_own(server: BrokersServer) -> None:
    """What is sent to one is not in the other, though no request names a group."""
    a, b = server.servers["a"], server.servers["b"]

    assert send(a, b"of a")[0].code is AnswerCode.SUCCESS
    assert send(b, b"of b")[0].code is AnswerCode.SUCCESS

    assert (pull(a), pull(b)) == ([b"of a"], [b"of b"])


def test_ports_loops_and_what_is_due_by_time_have_one_thread_for_all(server: BrokersServer) -> None:
    """A further broker costs the threads of its store, not those of its node's timers and loops."""
    del server
    names = _threads()

    for shared in ("timers", "checkpoint", "warm", "clean", "scrub", "client-rpc", "peers"):
        assert names.count(f"dledger-{shared}-n0") == 1, shared
    assert names.count("rocketstore-dispatch") == 2


def test_open_files_are_shared_out(tmp_path: Path, server: BrokersServer) -> None:
    """The queues of all brokers of a process together keep no more files open than those of one alone."""
    alone = BrokerServer(plain(tmp_path / "alone"))
    capacity = alone.store._derived.queues.descriptors.capacity
    alone.stop(graceful=False)

    assert sum(one.store._derived.queues.descriptors.capacity for one in server.servers.values()) <= capacity


@pytest.mark.parametrize("part", ["node", "store"])
def test_a_failed_broker_stops_and_the_other_goes_on(named: Named, server: BrokersServer, part: str) -> None:
    """N1: whichever part of it failed; with a condition at the other, its directory and ports free."""
    a, b = server.servers["a"], server.servers["b"]
    assert a.node is not None

    (a.node.fail if part == "node" else a._fail)(OSError("its disk broke"))

    wait_until(lambda: b.conditions.holds(ConditionKind.GROUP_FAILED), "the other one tells of it")
    assert send(b, b"goes on")[0].code is AnswerCode.SUCCESS
    assert server.wait(0) is None
    assert list(server.failures) == ["a"]
    wait_until(lambda: "dledger-end-a" not in _threads(), "it has ended")
    (peer_port,) = free_ports(1)
    config = named[0][1]
    again = _config(config.store.store_path_root_dir.parent, "a", peer_port, config.listen_port)
    one = BrokerServer(again)
    try:
        one.start()
    finally:
        one.stop(graceful=False)


def test_the_process_ends_when_no_broker_is_left(server: BrokersServer) -> None:
    """N1: with the status of a failure."""
    server.servers["a"].fail(OSError("its disk broke"))
    assert server.wait(0) is None

    server.servers["b"].fail(OSError("its disk broke, too"))

    assert server.wait(60) == 70


def test_a_broker_whose_disk_is_full_leaves_the_other_taking_messages(tmp_path: Path) -> None:
    """Each broker's room is its own: only the full one refuses, and says so."""
    peer_port, *listen_ports = free_ports(3)
    ratios = dict.fromkeys(("disk_check_ratio", "disk_clean_ratio", "disk_full_ratio"), "0.000000001")
    full = _config(tmp_path, "a", peer_port, listen_ports[0], **ratios)
    server = BrokersServer([("a.conf", full), ("b.conf", _config(tmp_path, "b", peer_port, listen_ports[1]))])
    try:
        server.start()
        a, b = server.servers["a"], server.servers["b"]
        wait_until(lambda: b.store.role is not BrokerRole.SLAVE, "the second one leads")
        wait_until(lambda: a.conditions.holds(ConditionKind.DISK_FULL), "the first one's disk counts as full")

        assert send(a, b"x")[0].code is not AnswerCode.SUCCESS
        assert send(b, b"x")[0].code is AnswerCode.SUCCESS
        assert not b.conditions.holds(ConditionKind.DISK_FULL)
        assert not server.failures
    finally:
        server.stop(graceful=False)


def test_a_stop_closes_everything(named: Named, new_threads: Callable[[], list[str]]) -> None:
    """Directories, ports and threads: the same process can start them again, and finds what was stored."""
    for number in range(2):
        server = BrokersServer(named)
        server.start()
        _wait_masters(server)
        for one in server.servers.values():
            assert send(one, b"%d" % number)[0].code is AnswerCode.SUCCESS
        assert all(pull(one) == [b"%d" % at for at in range(number + 1)] for one in server.servers.values())
        server.stop()

        assert server.wait(0) == 0
        until_ended(new_threads)


@pytest.mark.parametrize("taken", ["directory", "port"])
def test_a_broker_that_cannot_start_keeps_nothing_of_the_others_open(
    named: Named, taken: str, new_threads: Callable[[], list[str]]
) -> None:
    """The error is of that one; once its cause is gone, all start."""
    (_, config) = named[1]
    with ExitStack() as holding:
        if taken == "port":
            holder = holding.enter_context(socket.socket())
            holder.bind(("127.0.0.1", config.listen_port))
            holder.listen()
        else:
            other = BrokerServer(config)
            holding.callback(lambda: other.stop(graceful=False))
        with pytest.raises(ConfigError if taken == "port" else DirectoryLockedError):
            BrokersServer(named).start()
    until_ended(new_threads)

    server = BrokersServer(named)
    try:
        server.start()
        _wait_masters(server)
    finally:
        server.stop(graceful=False)


def _refused(named: Named) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        check_brokers_together(named)
    return refused.value.problems


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("listenPort", "is listenPort in a.conf and listenPort in b.conf"),
        ("vipPort", "is listenPort in a.conf and vipPort in b.conf"),
        ("grpcServerPort", "is listenPort in a.conf and grpcServerPort in b.conf"),
    ],
)
def test_a_port_of_two_brokers_is_refused_with_both_files(tmp_path: Path, setting: str, told: str) -> None:
    """One of them could not be reached; a default port counts as one that was set."""
    peer_port, one, other = free_ports(3)
    named = [
        ("a.conf", _config(tmp_path, "a", peer_port, one)),
        ("b.conf", _config(tmp_path, "b", peer_port, other, **{setting: str(one)})),
    ]

    (problem,) = _refused(named)
    assert problem.startswith(f"port {one} {told}: change one of them")


@pytest.mark.parametrize("hosts", [("", "0.0.0.0"), ("0.0.0.0", "")])
def test_a_port_of_all_addresses_is_everybodys(tmp_path: Path, hosts: tuple[str, str]) -> None:
    """Whichever of the two is named first."""
    peer_port, one = free_ports(2)
    named = [
        (f"{group}.conf", _config(tmp_path, group, peer_port, one, listen_host=host, insecure="true"))
        for group, host in zip("ab", hosts, strict=True)
    ]

    assert any(problem.startswith(f"port {one} is listenPort in a.conf") for problem in _refused(named))


def test_default_ports_that_meet_are_refused(tmp_path: Path) -> None:
    """The second of two brokers whose listenPorts are two apart would find its port taken."""
    defaults = {"vipPort": "20909", "grpcServerPort": "20913"}
    named = [
        ("a.conf", _config(tmp_path, "a", 20900, 20911, **defaults)),
        ("b.conf", _config(tmp_path, "b", 20900, 20913)),
    ]

    (problem,) = _refused(named)
    assert "port 20913 is grpcServerPort in a.conf and listenPort in b.conf" in problem


def test_a_plain_broker_needs_a_process_of_its_own(named: Named, tmp_path: Path) -> None:
    """It belongs to no group, and shares nothing."""
    (problem,) = _refused([*named, ("plain.conf", plain(tmp_path / "plain"))])
    assert problem.startswith("plain.conf is of a plain broker: start it in a process of its own")


def test_one_name_one_directory_and_differing_settings_of_the_process_are_refused(tmp_path: Path) -> None:
    """Everything at once, with both files."""
    peer_port, one, other = free_ports(3)
    root = tmp_path / "a"
    told = _refused(
        [
            ("a.conf", _config(tmp_path, "a", peer_port, one)),
            (
                "b.conf",
                _config(tmp_path, "b", peer_port, other, brokerName="a", storePathRootDir=str(root), metrics_port="9"),
            ),
        ]
    )

    assert any(text.startswith("metrics_port is 0 in a.conf and 9 in b.conf") for text in told)
    assert any(text.startswith("a.conf and b.conf both have brokerName=a") for text in told)
    assert any(text.startswith(f"{root} is storePathRootDir in a.conf and storePathRootDir in b.conf") for text in told)
