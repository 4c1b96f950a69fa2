"""What brokers say of classic replication: read back as it was written, and bounded, whoever wrote it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocketstore.remoting.runtime import HA_TEXT_MAX, NEVER, SLAVES_MAX, FollowerFacts, HaFacts

SLAVE = HaFacts(
    True, 4, 900, "silent", master="m:1", is_connected=True, master_end=950, lag_bytes=50, lag_ms=70, contact_ms=3
)
MASTER = HaFacts(
    False,
    4,
    900,
    followers=(FollowerFacts(1, "[::1]:5", 800, 100, 20, True), FollowerFacts(-1, "h:6", 0, 900, 2000, False)),
    copies=2,
    copies_wanted=3,
)


@pytest.mark.parametrize("facts", [SLAVE, MASTER, HaFacts(True), HaFacts(False), HaFacts(True, is_promoted=True)])
def test_facts_are_read_as_they_were_written(facts: HaFacts) -> None:
    """Both roles."""
    assert HaFacts.of(facts.table()) == facts


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (SLAVE, "follows, 50 bytes behind"),
        (replace(SLAVE, lag_bytes=0), "follows"),
        (replace(SLAVE, is_connected=False), "does not follow: silent"),
        (MASTER, "2 of 3 copies"),
        (replace(MASTER, copies=3), ""),
        (replace(MASTER, problem="another"), "another"),
    ],
)
def test_people_are_told_what_is_wrong(facts: HaFacts, words: str) -> None:
    """In lists of brokers."""
    assert facts.words == words


def test_a_broker_that_says_nothing_has_none() -> None:
    """RocketMQ's, and members of groups."""
    assert HaFacts.of({"brokerRole": "SLAVE"}) is None


def test_malformed_values_count_as_not_said() -> None:
    """Of any broker that is registered; long texts are cut."""
    table = SLAVE.table() | {"haEpoch": "x" * 30, "haEndOffset": "9" * 30, "haLagMs": "-7", "haProblem": "p" * 1000}
    found = HaFacts.of(table)
    assert found == replace(SLAVE, epoch=0, end=0, lag_ms=NEVER, problem="p" * HA_TEXT_MAX)
    many = HaFacts.of(MASTER.table() | {"haSlaves": "1,h:1,2,3,4,true;" * 1000 + "nonsense"})
    assert many is not None
    assert len(many.followers) == SLAVES_MAX
