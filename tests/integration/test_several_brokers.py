"""Brokers of three groups in each of three processes, which share the writing and fail apart (design notes §7)."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pytest
from click.testing import CliRunner

from dledger.types import NodeId
from dledger_cli import cli
from dledger_cli.local.brokers import SeveralBrokers
from rocketstore.client import Admin, Consumer, DLedgerError, Message, Producer, TopicInfo
from tests.integration.harness import N0, N1, N2
from tests.support.small_disk import fill, small_disk
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

pytestmark = pytest.mark.lane("processes")

TOPIC: Final = "orders"
GROUPS: Final = ("a", "b", "c")
LEADERS: Final = {"a": N0, "b": N1, "c": N2}
SMALL: Final = {
    "mappedFileSizeCommitLog": "4m",
    "mappedFileSizeConsumeQueue": "4000",
    "maxHashSlotNum": "500",
    "maxIndexNum": "2000",
    "election_timeout_ms_min": "8000",
    "election_timeout_ms_max": "9000",
}
GAP_MAX_S: Final = 7.0
"""Less than it takes to wait for an election; a killed master's address says at once that it is gone."""
TIMEOUT_S: Final = 120
DISK_MIB: Final = 64


@dataclass
class _Sending:
    """Sends to one group, one message after the other; used as a context."""

    brokers: SeveralBrokers
    group: str
    acknowledged: list[tuple[bytes, float]] = field(default_factory=list)
    """Bodies, and when each was acknowledged, in seconds."""
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"sending-{self.group}")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with Producer(self.brokers.addresses_of(self.group), timeout_s=30) as producer:
            number = 0
            while not self._stopping.is_set():
                body = f"{self.group} {number}".encode()
                try:
                    producer.send(Message(TOPIC, body))
                except DLedgerError as error:
                    if error.outcome != "unknown":
                        self.failure = error
                        return
                else:
                    self.acknowledged.append((body, time.monotonic()))
                number += 1
                self._stopping.wait(0.005)

    def wait_acknowledged(self, count: int, since_s: float = 0) -> None:
        """Until so many were acknowledged since a moment."""

        def enough() -> bool:
            assert self.failure is None, self.failure
            return sum(at > since_s for _, at in self.acknowledged) >= count

        wait_until(enough, f"{count} messages to {self.group}", TIMEOUT_S)

    def longest_gap_s(self) -> float:
        """The longest time without an acknowledgement."""
        return max(after - before for before, after in pairwise(at for _, at in self.acknowledged))


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[SeveralBrokers]:
    """Three groups on three processes, each process leading one; the topic is in all."""
    with SeveralBrokers(tmp_path, GROUPS, settings=SMALL) as running_brokers:
        _create_topic(running_brokers)
        running_brokers.lead(LEADERS, TIMEOUT_S)
        yield running_brokers


def _create_topic(brokers: SeveralBrokers) -> None:
    for group in GROUPS:
        brokers.master_of(group, TIMEOUT_S)
        with brokers.admin_of(group, TIMEOUT_S) as admin:
            admin.put_topic(TopicInfo(TOPIC, 2, 2, 6))


def _received(brokers: SeveralBrokers, group: str, wanted: set[bytes]) -> list[bytes]:
    """What a consumer gets of a group, until it has got all that is wanted."""
    found: list[bytes] = []
    with Consumer(brokers.addresses_of(group), group="billing", topics=TOPIC, start="first", assign="all") as consumer:

        def has_all() -> bool:
            found.extend(message.body for message in consumer.poll(timeout_s=1.0))
            return wanted <= set(found)

        wait_until(has_all, f"everything acknowledged by {group} is there", TIMEOUT_S, poll_s=0)
    return found


def test_a_killed_process_concerns_the_groups_it_led_only(brokers: SeveralBrokers) -> None:
    """The group that it led goes on at another; others hardly notice; each has all it acknowledged, and only its own.

    Others that waited for an election, or as long for the killed process, would have a longer gap.
    """
    with _Sending(brokers, "a") as a, _Sending(brokers, "b") as b, _Sending(brokers, "c") as c:
        for one in (a, b, c):
            one.wait_acknowledged(100)
        brokers.kill(N0)
        killed_s = time.monotonic()
        for one in (a, b, c):
            one.wait_acknowledged(100, killed_s)
        for one in (b, c):
            assert one.longest_gap_s() < GAP_MAX_S
        assert brokers.master_of("a", other_than=N0) != N0
        brokers.start(N0)
    for one in (a, b, c):
        sent = {body for body, _ in one.acknowledged}
        assert all(body.startswith(f"{one.group} ".encode()) for body in _received(brokers, one.group, sent))
    assert [brokers.stop(node) for node in brokers.nodes] == [0, 0, 0]


def test_the_name_server_spreads_a_topic_over_the_masters(tmp_path: Path) -> None:
    """Created once, it is in every group; a producer uses all three masters, and a consumer reads them all."""
    with running(config_in(tmp_path)) as server:
        settings = {**SMALL, "namesrvAddr": server.address}
        with SeveralBrokers(tmp_path, GROUPS, settings=settings) as brokers:
            brokers.lead(LEADERS, TIMEOUT_S)

            def run(*words: str) -> tuple[int, str]:
                done = CliRunner().invoke(cli.main, list(words), env={"DLEDGER_NAMESRV": server.address})
                return done.exit_code, done.output

            wait_until(lambda: run("cluster", "list")[0] == 0, "all masters have registered", TIMEOUT_S)
            wait_until(lambda: run("cluster", "list")[1].count("SYNC_MASTER") == 3, "three masters", TIMEOUT_S)
            assert run("topic", "create", TOPIC, "--queues", "2")[0] == 0
            sent = {b"%d" % number for number in range(60)}
            with Producer(name_servers=server.address) as producer:
                places = [producer.send(Message(TOPIC, body)).broker for body in sorted(sent)]
            received: list[bytes] = []
            with Consumer(name_servers=server.address, group="billing", topics=TOPIC, start="first") as consumer:

                def is_complete() -> bool:
                    received.extend(one.body for one in consumer.poll(timeout_s=1.0))
                    return len(received) >= len(sent)

                wait_until(is_complete, "all have come", TIMEOUT_S, poll_s=0)

            assert {group: places.count(group) for group in GROUPS} == dict.fromkeys(GROUPS, 20)
            assert sorted(received) == sorted(sent)


def test_a_group_whose_disks_are_full_stops_alone(tmp_path: Path) -> None:
    """Its messages are refused while others' are stored on the same machines; with room, it goes on with all it had.

    Its limit is lowered at all three; the next test fills a disk.
    """
    with SeveralBrokers(tmp_path, GROUPS, settings=SMALL) as brokers:
        _create_topic(brokers)
        with Producer(brokers.addresses_of("a"), timeout_s=TIMEOUT_S) as producer:
            producer.send(Message(TOPIC, b"before"))
        _stop_all(brokers)
        ratios = ("disk_check_ratio", "disk_clean_ratio", "disk_full_ratio")
        brokers.lines["a"] = dict.fromkeys(ratios, "0.000000001")
        brokers.start_all()
        for node in brokers.nodes:
            wait_until(lambda node=node: _conditions(brokers, node, "a") == ["disk_full"], "it is full", TIMEOUT_S)  # type: ignore[misc]

        for group in "bc":
            with Producer(brokers.addresses_of(group), timeout_s=TIMEOUT_S) as producer:
                producer.send(Message(TOPIC, b"stored"))
            assert _received(brokers, group, {b"stored"}) == [b"stored"]
            assert [_conditions(brokers, node, group) for node in brokers.nodes] == [[], [], []]
        with Producer(brokers.addresses_of("a"), timeout_s=2) as producer, pytest.raises(DLedgerError) as refused:
            producer.send(Message(TOPIC, b"refused"))
        assert refused.value.outcome == "not_applied"
        _stop_all(brokers)
        brokers.lines["a"] = {}
        brokers.start_all()
        with Producer(brokers.addresses_of("a"), timeout_s=TIMEOUT_S) as producer:
            producer.send(Message(TOPIC, b"after"))
        assert sorted(_received(brokers, "a", {b"before", b"after"})) == [b"after", b"before"]


def test_a_full_disk_under_one_group_concerns_that_one_only(tmp_path: Path) -> None:
    """Its leader, whose disk is full, hands over and loses nothing; others on that machine hardly notice.

    The bound is that of a killed process.
    """
    brokers = SeveralBrokers(tmp_path, GROUPS, settings={**SMALL, "index_segment_bytes": "1m"})
    directory = brokers.root_dir_of(N0, "a")
    with small_disk(directory, DISK_MIB), brokers:
        _create_topic(brokers)
        brokers.lead(LEADERS, TIMEOUT_S)
        with _Sending(brokers, "a") as a, _Sending(brokers, "b") as b, _Sending(brokers, "c") as c:
            for one in (a, b, c):
                one.wait_acknowledged(100)
            fill(directory / "rest")
            assert brokers.master_of("a", TIMEOUT_S, other_than=N0) != N0
            for one in (a, b, c):
                one.wait_acknowledged(100, time.monotonic())
            for one in (b, c):
                assert one.longest_gap_s() < GAP_MAX_S
            assert [_conditions(brokers, N0, group) for group in GROUPS] == [["disk_full"], [], []]
            assert [brokers.master_of(group) for group in "bc"] == [N1, N2]

            (directory / "rest").unlink()
            wait_until(lambda: _conditions(brokers, N0, "a") == [], "there is room again", TIMEOUT_S)
            brokers.lead({"a": N0}, TIMEOUT_S)
            for one in (a, b, c):
                one.wait_acknowledged(100, time.monotonic())
        for one in (a, b, c):
            _received(brokers, one.group, {body for body, _ in one.acknowledged})


def _stop_all(brokers: SeveralBrokers) -> None:
    for node in brokers.nodes:
        assert brokers.stop(node, TIMEOUT_S) == 0


def _conditions(brokers: SeveralBrokers, node: NodeId, group: str) -> list[str]:
    """The kinds of a broker's conditions, other than those that pass after a start; none if it does not answer."""
    with brokers.admin_of(group) as admin:
        try:
            told = admin.status(brokers.address(node, group)).runtime.conditions
        except DLedgerError:
            return []
    return [kind for kind in told if kind != "no_standing"]


def test_a_broker_that_fails_stops_alone(tmp_path: Path) -> None:
    """Its process goes on serving the other groups, and peers elect another master (N1)."""
    with SeveralBrokers(tmp_path, GROUPS, settings=SMALL) as brokers:
        _create_topic(brokers)
        node = brokers.master_of("a")
        data = brokers.root_dir_of(node, "a") / f"dledger-{node}" / "data"
        data.rename(data.with_name("gone"))
        wait_until(lambda: "group a stops in this process" in brokers.logs(node), "it fails", TIMEOUT_S)

        assert brokers.is_running(node)
        assert brokers.master_of("a", TIMEOUT_S, other_than=node) != node
        for group in GROUPS:
            with Producer(brokers.addresses_of(group), timeout_s=TIMEOUT_S) as producer:
                producer.send(Message(TOPIC, b"goes on"))
        with brokers.admin_of("b") as admin:
            told = admin.status(brokers.address(node, "b")).runtime.problems
        assert [(one.kind, one.subject) for one in told] == [("group_failed", "a")]
        assert brokers.stop(node) == 0


def test_the_process_named_its_groups(brokers: SeveralBrokers) -> None:
    """Its line says where each broker is."""
    node = NodeId("n1")
    line = next(one for one in brokers.logs(node).splitlines() if " is ready: " in one)

    assert "broker n1 of groups a, b, c" in line
    assert all(f"{group} {brokers.address(node, group)}" in line for group in GROUPS)


def test_rebalance_gives_each_process_its_share_again(tmp_path: Path) -> None:
    """After a restart one process leads everything; a dry run moves nothing; a process that is down is named."""
    with running(config_in(tmp_path)) as server:
        settings = {**SMALL, "namesrvAddr": server.address}
        with SeveralBrokers(tmp_path, GROUPS, settings=settings) as brokers:

            def rebalance(*words: str) -> tuple[int, dict[str, Any]]:
                command = ["cluster", "rebalance", "--json", "--namesrv", server.address, "--wait", str(TIMEOUT_S)]
                done = CliRunner().invoke(cli.main, [*command, *words])
                return done.exit_code, json.loads(done.stdout)

            def led() -> list[int]:
                return [len(groups) for groups in rebalance("--dry-run")[1]["machines"].values()]

            brokers.lead(dict.fromkeys(GROUPS, N1), TIMEOUT_S)
            wait_until(lambda: _registered(server.address) == 9, "all have registered", TIMEOUT_S)

            code, told = rebalance("--dry-run")
            assert (code, [one["from_node"] for one in told["moves"]]) == (0, ["n1", "n1"])
            assert [brokers.master_of(group) for group in GROUPS] == [N1, N1, N1]

            code, told = rebalance()
            assert (code, told["balanced"], len(told["moves"])) == (0, True, 2)
            assert [len(groups) for groups in told["machines"].values()] == [1, 1, 1]
            assert sorted(brokers.master_of(group) for group in GROUPS) == [N0, N1, N2]

            brokers.kill(N0)
            for group in GROUPS:
                assert brokers.master_of(group, TIMEOUT_S, other_than=N0) != N0
            code, told = rebalance()
            assert code == 1
            assert any("n0" in text and "it does not answer: start it" in text for text in told["problems"])
            brokers.start(N0)
            wait_until(lambda: rebalance()[0] == 0, "the restarted one has its share", TIMEOUT_S)
            assert led() == [1, 1, 1]


def _registered(name_server: str) -> int:
    with Admin(name_servers=name_server) as admin:
        try:
            return sum(len(one.readable) for one in admin.brokers())
        except DLedgerError:  # nobody yet
            return 0
