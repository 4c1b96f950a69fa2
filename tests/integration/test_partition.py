"""Partitions: a majority goes on, a minority acknowledges nothing, and after the heal there is one history."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from dledger.client import DLedgerClient
from dledger.errors import DLedgerError
from dledger.types import NodeId
from tests.integration.harness import Group, ProxiedGroup
from tests.integration.namespaces import NamespacedGroup
from tests.support.history import AppendOp, Outcome


def append_to_one(group: Group, node: NodeId, value: bytes, timeout_s: float = 1.5) -> Outcome:
    """Append through one node only, recording what it answers; a client that repeats would go on to another node."""
    began = time.monotonic()
    client = DLedgerClient(
        [group.nodes[node].client_address],
        group=group.name,
        timeout_s=timeout_s,
        security=group.security,
        enable_idempotence=False,
    )
    with closing(client):
        try:
            operation = AppendOp(value, began, time.monotonic(), Outcome.ACKED, client.append(value).index)
        except DLedgerError as error:
            operation = AppendOp(value, began, time.monotonic(), Outcome(error.outcome), error=str(error))
    group.history.record(operation)
    return operation.outcome


def test_minority_commits_nothing_and_the_majority_goes_on(proxied: ProxiedGroup) -> None:
    """The leader alone on one side: it must not acknowledge, the two others elect and do."""
    proxied.append(50)
    old = proxied.leader()
    committed = proxied.status(old).committed_index

    proxied.network.partition([old])
    lonely = append_to_one(proxied, old, b"to the minority")
    new = proxied.leader(other_than=old)
    crowded = append_to_one(proxied, new, b"to the majority", timeout_s=60)
    proxied.wait_deposed(old)
    stuck_at = proxied.status(old).committed_index
    proxied.network.heal_all()

    assert lonely is not Outcome.ACKED
    assert crowded is Outcome.ACKED
    assert stuck_at == committed
    proxied.verify()


@pytest.mark.parametrize("way", ["mute", "deaf", "both"])
def test_partitioned_leader_under_load(proxied: ProxiedGroup, way: str) -> None:
    """The leader cannot send, cannot receive, or neither: a new one serves, the old one gives up and comes back.

    A leader that still sends heartbeats but hears no answer must fall silent, or nobody else can be elected (trap 24).
    """
    network = proxied.network
    with proxied.workload() as load:
        load.history.wait_for_acks(100)
        old = proxied.leader()
        for other in proxied.followers(old):
            if way in ("mute", "both"):
                network.block(old, other)
            if way in ("deaf", "both"):
                network.block(other, old)
        proxied.leader(other_than=old)
        load.history.wait_for_acks(100)
        proxied.wait_deposed(old)
        network.heal_all()
        load.history.wait_for_acks(100)

    proxied.verify()


def test_isolated_follower_does_not_disturb_after_the_heal(proxied: ProxiedGroup) -> None:
    """It campaigns in vain, without raising its term (pre-vote), and simply follows again."""
    with proxied.workload() as load:
        load.history.wait_for_acks(100)
        term, follower = proxied.term(), proxied.followers(proxied.leader())[0]
        proxied.network.partition([follower])
        proxied.wait_for(lambda all_: all_[follower].leader is None, "the follower misses its leader")
        load.history.wait_for_acks(200)
        proxied.network.heal_all()
        load.history.wait_for_acks(50)

    proxied.verify()
    assert proxied.term() == term


def test_flapping_connections_lose_nothing(proxied: ProxiedGroup) -> None:
    """Connections that end again and again in the middle of pushes: every lost one is compared and sent anew."""
    with proxied.workload() as load:
        for _ in range(8):
            load.history.wait_for_acks(50)
            proxied.network.cut()
        load.history.wait_for_acks(50)

    proxied.verify()


def test_slow_links_cost_no_election(proxied: ProxiedGroup) -> None:
    """100 ms each way is slow for a LAN and no reason to elect."""
    term = proxied.term()
    for node in proxied.nodes:
        for other in proxied.followers(node):
            proxied.network.delay(node, other, 0.1)

    with proxied.workload() as load:
        load.history.wait_for_acks(200)

    assert proxied.term() == term
    proxied.network.heal_all()
    proxied.verify()


@pytest.mark.parametrize("way", ["mute", "deaf", "both"])
def test_real_packet_loss_around_the_leader(namespaced: NamespacedGroup, way: str) -> None:
    """The same with network namespaces, where packets really vanish, acknowledgements of TCP included."""
    with namespaced.workload() as load:
        load.history.wait_for_acks(100)
        old = namespaced.leader()
        for other in namespaced.followers(old):
            if way in ("mute", "both"):
                namespaced.drop(old, other)
            if way in ("deaf", "both"):
                namespaced.drop(other, old)
        namespaced.leader(other_than=old)
        load.history.wait_for_acks(100)
        namespaced.wait_deposed(old)
        namespaced.heal_all()
        load.history.wait_for_acks(100)

    namespaced.verify()
