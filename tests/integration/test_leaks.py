"""Half an hour of load and a killed leader every minute: what a member has of the machine stays what it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.harness import N2, Group

MINUTES = int(os.environ.get("MINUTES", "30"))
WARM_UP = 5
"""Minutes until caches and pools are what they will be."""
LOOKS = 5
"""The least of so many minutes counts: connections that come and go with a leader are none that stay."""
BETWEEN_KILLS_S = 60.0
MEMORY_GROWS_MAX = 16 << 20
COUNTS_GROW_MAX = 5


OF_THE_LOG = ("/data/", "/index/")
"""Files that a growing log has more of; how many of them stay open has a bound and tests of its own."""


class Held(NamedTuple):
    """What a process has, besides the files of its log."""

    anonymous_bytes: int
    threads: int
    descriptors: int
    maps: int


def held_by(pid: int) -> Held:
    """By now."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Held(
        int(status["RssAnon"].split()[0]) << 10,
        int(status["Threads"]),
        sum(not of_the_log(target_of(one)) for one in (process / "fd").iterdir()),
        sum(not of_the_log(line) for line in (process / "maps").read_text().splitlines()),
    )


def grown(seen: list[Held], name: str) -> int:
    """By how much more of it there is at the end than after the first minutes."""
    numbers = [int(getattr(one, name)) for one in seen]
    return min(numbers[-LOOKS:]) - min(numbers[WARM_UP:][:LOOKS] or numbers)


def target_of(descriptor: Path) -> str:
    """What a descriptor is of; empty if it was closed meanwhile."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def of_the_log(line: str) -> bool:
    """Whether it names a file of the log."""
    return any(part in line for part in OF_THE_LOG)


@pytest.mark.soak
def test_a_member_that_sees_leaders_die_holds_no_more_than_before(make_group: Callable[..., Group]) -> None:
    """One member of three never leads, so it lives all the time: through every election, reconnection and catch-up.

    Its first minutes fill what is kept; from then on memory, threads, descriptors and mappings are flat, and in the
    end all members hold the same.
    """
    group = make_group(settings={"preferred_leaders": "n0,n1", "segment_bytes": "64m", "index_segment_bytes": "4m"})
    group.start_all()
    group.leader()
    seen: list[Held] = []
    with group.workload() as load:
        for _ in range(MINUTES):
            until = time.monotonic() + BETWEEN_KILLS_S
            while time.monotonic() < until:
                load.history.wait_for_acks(100)
            leader = group.leader()
            if leader != N2:
                group.kill(leader)
                group.leader(other_than=leader)
                group.start(leader)
            load.history.wait_for_acks(100)
            seen.append(held_by(group.pid(N2)))

    told = "\n".join(map(str, seen))
    assert grown(seen, "anonymous_bytes") < MEMORY_GROWS_MAX, told
    for name in ("threads", "descriptors", "maps"):
        assert grown(seen, name) <= COUNTS_GROW_MAX, f"{name}:\n{told}"
    digests = group.digests()
    assert len(set(digests.values())) == 1, digests
