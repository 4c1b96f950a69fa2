"""Resets of a leader's connections while the processors are starved: what a false alarm would come from."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from tests.integration.harness import ProxiedGroup

SPINNERS: Final = 4
"""Processes that want a processor each, all the time."""
PAUSE_S_MAX: Final = 1.0
"""The longest time from one reset to the next: with far less, starved members have no time to talk to each other."""
_SPIN: Final = "while True: pass"


@contextmanager
def starved_processors() -> Iterator[None]:
    """Nobody gets a processor when it needs one."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(SPINNERS)]
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
        for one in spinning:
            one.wait()


def reset_connections(group: ProxiedGroup, dice: random.Random, *, resets: int, until_s: float) -> int:
    """Break all connections that the leader has made to a follower, again and again.

    Returns how often, which is at most ``resets``; ``until_s``: on the clock of ``time.monotonic``.
    """
    leader = group.leader()
    followers = [node for node in group.nodes if node != leader]
    pause = threading.Event()
    done = 0
    while done < resets and time.monotonic() < until_s:
        group.network.cut(leader, dice.choice(followers))
        done += 1
        pause.wait(dice.uniform(0, PAUSE_S_MAX))
    return done


def assert_no_false_election(group: ProxiedGroup, dice: random.Random, *, resets: int, until_s: float) -> int:
    """Under full load, with starved processors, resets cost no election and no entry; returns how many there were.

    The group's election timeout must be one that a starved machine keeps: then only a suspicion can end the term.
    """
    term, leader = group.term(), group.leader()
    with group.workload() as load, starved_processors():
        load.history.wait_for_acks(20)
        done = reset_connections(group, dice, resets=resets, until_s=until_s)
        load.history.wait_for_acks(20)
    told = [line for node in group.nodes for line in group.logs(node).splitlines() if f" in term {term}" not in line]
    changes = "\n".join(line for line in told if " in term " in line)
    assert "leader_gone" not in changes, f"a live leader was suspected:\n{changes}"
    assert (group.term(), group.leader()) == (term, leader), f"a live leader was replaced:\n{changes}"
    group.verify()
    return done
