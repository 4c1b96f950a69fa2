"""A plain master and its slave as processes: what a SYNC_MASTER acknowledged outlives it, whatever happens."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dledger.types import NodeId
from tests.integration.classic_harness import ClassicBrokers, ClassicLoad
from tests.integration.conftest import Adopt
from tests.integration.harness import N0, N1
from tests.support.waiting import wait_until

PATIENCE_S = 120.0
MakeClassic = Callable[..., ClassicBrokers]


@pytest.fixture
def make_classic(adopt: Adopt, tmp_path: Path) -> MakeClassic:
    """Make a master and slaves that run; the arguments are ``ClassicBrokers``'s."""

    def make(**options: object) -> ClassicBrokers:
        brokers = adopt(ClassicBrokers(tmp_path / "pair", **options))  # type: ignore[arg-type]  # any of them
        brokers.start_pair()
        brokers.create_topic()
        return brokers

    return make


def return_as_slave(brokers: ClassicBrokers, node: NodeId) -> str:
    """Start the old master as slave; if it has what its successor never got, wipe it. Returns what it said."""
    brokers.start(node)
    end = brokers.end_of(brokers.head)
    why = ""

    def known() -> bool:
        nonlocal why
        why = brokers.problem_of(node)
        return "wipe" in why or (not why and brokers.end_of(node) >= end)

    wait_until(known, f"{node} follows, or says why it does not")
    if why:
        assert "took over at offset" in why or "differs from the master's" in why, why
        assert brokers.stop(node) == 0
        brokers.wipe(node)
        brokers.start(node)
    brokers.wait_followed(by=[node])
    return why


@pytest.mark.parametrize(
    ("flush", "least"),
    [
        pytest.param("async", "1", id="async", marks=pytest.mark.soak),
        pytest.param("async", "2", id="async-min2"),
        pytest.param("sync", "2", id="sync-min2", marks=pytest.mark.soak),
    ],
)
def test_what_was_acknowledged_is_with_the_slave_when_the_master_is_killed(
    make_classic: MakeClassic, flush: str, least: str
) -> None:
    """Read at the slave while the master is gone; then the slave is master, and the old one its slave."""
    brokers = make_classic(flush=flush, settings={"minInSyncReplicas": least})
    with ClassicLoad(brokers) as load:
        load.history.wait_for_acks(300, PATIENCE_S)
        brokers.kill(N0)
    brokers.check(N1)
    brokers.promote(N1)
    brokers.check(N1)

    return_as_slave(brokers, N0)
    with ClassicLoad(brokers) as load:
        load.history.wait_for_acks(200, PATIENCE_S)
    for node in (N1, N0):
        brokers.check(node)
    assert [brokers.stop(node) for node in (N1, N0)] == [0, 0]  # the master first
    brokers.same_logs()


def test_a_master_that_slept_acknowledges_nothing_after_its_successor_took_over(make_classic: MakeClassic) -> None:
    """SIGSTOP under load; what it answers when it wakes is no PUT_OK, unless the slave had it before."""
    brokers = make_classic()
    with ClassicLoad(brokers) as load:
        load.history.wait_for_acks(200, PATIENCE_S)
        brokers.pause(N0)
        assert brokers.stop(N1) == 0
        brokers.head = N1
        brokers.start(N1)
        brokers.resume(N0)
        wait_until(
            lambda: bool(load.statuses & {"SLAVE_NOT_AVAILABLE", "FLUSH_SLAVE_TIMEOUT"}), "it is alone", PATIENCE_S
        )
    brokers.check(N1)
    brokers.kill(N0)
    return_as_slave(brokers, N0)
    brokers.check(N0)


@pytest.mark.parametrize(
    "sides",
    [
        pytest.param((N0, N1), id="to-slave", marks=pytest.mark.soak),
        pytest.param((N1, N0), id="to-master"),
        pytest.param((N0, N1, N0), id="both", marks=pytest.mark.soak),
    ],
)
def test_a_partitioned_master_acknowledges_nothing(make_classic: MakeClassic, sides: tuple[NodeId, ...]) -> None:
    """Bytes of one way or both are held back: producers learn it in time, and the slave has what was acknowledged.

    After the heal both go on; then the master dies within another partition.
    """
    brokers = make_classic(network=True)
    network = brokers.network
    ways = list(itertools.pairwise(sides))
    with ClassicLoad(brokers) as load:
        load.history.wait_for_acks(200, PATIENCE_S)
        for way in ways:
            network.block(*way)
        wait_until(
            lambda: bool(load.statuses & {"SLAVE_NOT_AVAILABLE", "FLUSH_SLAVE_TIMEOUT"}), "it is alone", PATIENCE_S
        )
        for way in ways:
            network.heal(*way)
        load.history.wait_for_acks(200, PATIENCE_S)
        for way in ways:
            network.block(*way)
        brokers.kill(N0)
        network.cut()
    brokers.check(N1)
    brokers.promote(N1)
    brokers.check(N1)


def test_a_slave_that_is_killed_while_it_writes_goes_on_behind_a_whole_record(make_classic: MakeClassic) -> None:
    """Under load, with large and small messages: every start finds a sound log, and in the end it is the master's."""
    brokers = make_classic(role="ASYNC_MASTER")
    with ClassicLoad(brokers, pace_s=0.001) as load:
        for _ in range(3):
            load.history.wait_for_acks(200, PATIENCE_S)
            brokers.kill(N1)
            load.history.wait_for_acks(100, PATIENCE_S)
            brokers.start(N1)
    brokers.wait_followed()
    brokers.check(N1)
    assert [brokers.stop(node) for node in (N0, N1)] == [0, 0]
    brokers.same_logs()


def test_a_master_replaced_by_an_older_copy_of_its_directory_is_not_followed(make_classic: MakeClassic) -> None:
    """The slave keeps what it has, says why it stands still, also when the copy has grown; and it can be master."""
    brokers = make_classic(role="ASYNC_MASTER")
    with ClassicLoad(brokers) as load:
        load.history.wait_for_acks(100, PATIENCE_S)
    assert brokers.stop(N0) == 0
    copy = brokers.directory / "copy"
    shutil.copytree(brokers.root_dir(N0), copy)
    brokers.start(N0)
    with ClassicLoad(brokers) as load:
        load.history.wait_for_acks(200, PATIENCE_S)
    brokers.wait_followed()
    had = brokers.end_of(N1)
    brokers.kill(N0)
    brokers.wipe(N0)
    shutil.move(copy, brokers.root_dir(N0))
    (brokers.root_dir(N0) / "lock").unlink(missing_ok=True)

    brokers.start(N0)
    brokers.wait_condition(N1, "bytes more than the master")
    history, brokers.history = brokers.history, type(brokers.history)()
    with ClassicLoad(brokers) as load:  # what the copy takes is not with the slave, which nobody has promised
        wait_until(lambda: brokers.end_of(N0) > had, "the copy has grown")
    brokers.wait_condition(N1, "differs from the master's")
    assert brokers.end_of(N1) == had
    brokers.history = history
    brokers.check(N1)
    assert brokers.stop(N0) == 0
    brokers.promote(N1)
    brokers.check(N1)


@pytest.mark.parametrize("role", ["ASYNC_MASTER", pytest.param("SYNC_MASTER", marks=pytest.mark.soak)])
def test_a_master_that_is_stopped_leaves_everything_to_its_slave(make_classic: MakeClassic, role: str) -> None:
    """SIGTERM under load: what it acknowledged until then is with the slave, whatever its role and the network."""
    brokers = make_classic(role=role, network=True, settings={"slaveTimeout": "60000"})
    network = brokers.network
    network.delay(N0, N1, 0.3)
    with ClassicLoad(brokers, pace_s=0.0005) as load:
        load.history.wait_for_acks(500, PATIENCE_S)
        assert brokers.stop(N0) == 0
    brokers.check(N1)
    brokers.promote(N1)
    brokers.check(N1)
    assert return_as_slave(brokers, N0) == ""


@pytest.mark.soak
def test_masters_and_slaves_are_killed_in_turn(make_classic: MakeClassic) -> None:
    """Nothing acknowledged is lost or moved over many changes of the master, with kills of slaves between."""
    brokers = make_classic(settings={"minInSyncReplicas": "2"})
    for round_ in range(6):
        master = brokers.head
        (slave,) = brokers.slaves
        with ClassicLoad(brokers) as load:
            load.history.wait_for_acks(150, PATIENCE_S)
            brokers.kill(slave)
            if round_ % 2:
                brokers.start(slave)
                load.history.wait_for_acks(150, PATIENCE_S)
                brokers.kill(master)
            else:
                brokers.start(slave)
                brokers.wait_followed()
                brokers.pause(master)
                brokers.kill(master)
        brokers.check(slave)
        brokers.promote(slave)
        return_as_slave(brokers, master)
        brokers.check(master)
    assert [brokers.stop(node) for node in (brokers.head, *brokers.slaves)] == [0, 0]
    brokers.same_logs()
