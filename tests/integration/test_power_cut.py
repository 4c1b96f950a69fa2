"""Real power cuts under load, of one, two and all three members: nothing that was acknowledged is lost."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dledger.types import NodeId
from tests.integration.broker_harness import BrokerGroup
from tests.integration.harness import Group, WatchedGroup
from tests.support import power
from tests.support.power import LoopDisk

CUTS = 10
CUTS_SOAK = int(os.environ.get("CUTS", "300"))
ACKS = 60
ACKS_TIMEOUT_S = 60.0
ERROR = re.compile(r"^([\w.]+(?:Error|Exception):(?: \[Errno \d+\])?)", re.MULTILINE)
"""The last line of a traceback."""


@pytest.fixture
def give_disks(tmp_path: Path) -> Iterator[Callable[[WatchedGroup, Callable[[NodeId], Path]], dict[NodeId, LoopDisk]]]:
    """Gives every node of a group, before it is started, a disk of its own whose power can be cut."""
    power.need_loop_disks(tmp_path)
    with ExitStack() as disks:

        def give(group: WatchedGroup, where: Callable[[NodeId], Path]) -> dict[NodeId, LoopDisk]:
            made = {}
            for node in group.nodes:
                made[node] = LoopDisk(tmp_path / f"{node}.img", where(node))
                disks.callback(made[node].close)
                disks.callback(group.hard_kill)
            return made

        yield give


def cut_power(group: WatchedGroup, disks: dict[NodeId, LoopDisk], chance: random.Random) -> None:
    """Of one, two or three members at a time; each comes back as whatever its disk holds then.

    Before or after the process ends: what a power cut leaves is the same, but how far a process gets is not.
    """
    victims = chance.sample(sorted(group.nodes), chance.choice([1, 1, 2, 3]))
    power_first = chance.random() < 0.5
    for node in victims:
        if power_first:
            disks[node].cut()
        group.kill(node)
        if not power_first:
            disks[node].cut()
    for node in victims:
        disks[node].restore()
    group.start_all()


def nothing_but_lost_disks(group: WatchedGroup) -> None:
    """A member whose disk goes says that it stops; nothing else may come of it."""
    for node in group.nodes:
        errors = set(ERROR.findall(group.logs(node)))
        assert not errors - {"OSError: [Errno 5]", "dledger.errors.DiskError:"}, group.logs(node)[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [CUTS, pytest.param(CUTS_SOAK, marks=pytest.mark.soak)])
def test_acknowledged_entries_survive_power_cuts(
    make_group: Callable[..., Group],
    give_disks: Callable[[WatchedGroup, Callable[[NodeId], Path]], dict[NodeId, LoopDisk]],
    cuts: int,
) -> None:
    """Acknowledged is durable on a majority: also where all lose their power at the same time."""
    group = make_group()
    group.allowed_to_fail = set(group.nodes)
    disks = give_disks(group, group.store_dir)
    chance = random.Random(cuts)
    group.start_all()
    with group.workload() as load:
        for _ in range(cuts):
            load.history.wait_for_acks(chance.randint(1, ACKS), ACKS_TIMEOUT_S)
            cut_power(group, disks, chance)
        load.history.wait_for_acks(ACKS, ACKS_TIMEOUT_S)

    group.verify()
    nothing_but_lost_disks(group)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [4, pytest.param(CUTS_SOAK // 3, marks=pytest.mark.soak)])
def test_acknowledged_messages_survive_power_cuts(
    make_brokers: Callable[..., BrokerGroup],
    give_disks: Callable[[WatchedGroup, Callable[[NodeId], Path]], dict[NodeId, LoopDisk]],
    cuts: int,
) -> None:
    """The same of brokers: queues, key index and the state of consumers are built again from what the disk has left."""
    brokers = make_brokers()
    brokers.allowed_to_fail = set(brokers.nodes)
    disks = give_disks(brokers, brokers.root_dir)
    chance = random.Random(cuts)
    brokers.start_all()
    brokers.create_topic()
    with brokers.load() as load:
        for _ in range(cuts):
            load.history.wait_for_acks(chance.randint(1, ACKS), ACKS_TIMEOUT_S)
            cut_power(brokers, disks, chance)
            brokers.master()
        load.history.wait_for_acks(ACKS, ACKS_TIMEOUT_S)

    brokers.verify()
    nothing_but_lost_disks(brokers)
