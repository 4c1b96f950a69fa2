"""SIGTERM hands over, SIGSTOP is survived: the service gap is short, and nobody reads what is stale."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

from tests.integration.harness import DEAF, SILENCE_S, Group
from tests.support.history import Outcome, longest_gap_s
from tests.support.waiting import wait_until
from tests.support.workload import Workload, linearizable_read

GAP_MAX_S = SILENCE_S - 1
"""Less than it takes to miss a leader that does not hand over."""


def ends_of(load: Workload) -> list[float]:
    """When acknowledgements came."""
    return [one.ended for one in load.history.appends if one.outcome is Outcome.ACKED]


def test_graceful_stop_of_the_leader_hands_over_quickly(make_group: Callable[..., Group]) -> None:
    """A leader that is told to stop transfers first (dissertation §3.10): a short gap, and no storm of unknowns."""
    group = make_group(settings=DEAF)
    group.start_all()
    group.leader()
    with group.workload(timeout_s=60) as load:
        load.history.wait_for_acks(200)
        leader = group.leader()

        code = group.stop(leader)
        load.history.wait_for_acks(200)

        unknown = load.history.count(Outcome.UNKNOWN)
        gap_s = longest_gap_s(ends_of(load))
        group.start(leader)

    assert code == 0
    assert unknown == 0, [one.error for one in load.history.appends if one.outcome is Outcome.UNKNOWN][:3]
    assert gap_s < GAP_MAX_S
    group.verify()


def test_stopped_follower_is_not_missed(steady: Group) -> None:
    """A follower that leaves and returns costs neither a gap nor an election."""
    with steady.workload() as load:
        load.history.wait_for_acks(100)
        term, follower = steady.term(), steady.followers(steady.leader())[0]

        code = steady.stop(follower)
        load.history.wait_for_acks(100)
        steady.start(follower)
        load.history.wait_for_acks(100)

    assert code == 0
    assert steady.term() == term
    assert longest_gap_s(ends_of(load)) < GAP_MAX_S
    steady.verify()


def test_resumed_old_leader_never_answers_a_stale_linearizable_read(group: Group) -> None:
    """A leader that slept through an election must ask a quorum before it reads (trap 25, etcd #20418)."""
    group.append(10)
    old = group.leader()
    address = group.nodes[old].client_address
    finished = threading.Event()

    def keep_reading() -> None:
        with closing(group.client(timeout_s=1.0)) as reader:
            while not finished.is_set():
                if (read := linearizable_read(reader, 0, address)) is not None:
                    group.history.record(read)

    readers = [threading.Thread(target=keep_reading) for _ in range(4)]
    for reader in readers:
        reader.start()
    try:
        wait_until(lambda: len(group.history.reads) >= 8, "reads from the leader")
        group.pause(old)
        new = group.leader(other_than=old)
        group.append(50)
        group.resume(old)
        group.wait_for(
            lambda all_: old in all_ and (hint := all_[old].leader) is not None and hint.node_id == new,
            "the old leader follows the new one",
        )
    finally:
        finished.set()
        group.resume(old)
        for reader in readers:
            reader.join()

    group.verify()


def test_paused_leader_is_replaced_and_rejoins(group: Group) -> None:
    """SIGSTOP of the leader for longer than the election timeout, under load: no loss, and it follows afterwards."""
    with group.workload() as load:
        load.history.wait_for_acks(100)
        old = group.leader()
        group.pause(old)
        new = group.leader(other_than=old)
        load.history.wait_for_acks(100)
        term = group.status(new).term
        group.resume(old)
        group.wait_for(lambda all_: old in all_ and all_[old].term >= term, "the old leader learns the term")
        load.history.wait_for_acks(100)

    group.verify()


def test_paused_follower_catches_up(steady: Group) -> None:
    """SIGSTOP of a follower: the group goes on in the same term, and the follower gets what it missed."""
    with steady.workload() as load:
        load.history.wait_for_acks(100)
        term, follower = steady.term(), steady.followers(steady.leader())[0]
        steady.pause(follower)
        load.history.wait_for_acks(500)
        steady.resume(follower)
        load.history.wait_for_acks(50)

    steady.verify()
    assert steady.term() == term, "its pre-votes are refused by those that hear the leader"
