"""Histories that no group may show: the checker must refuse each."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from dledger.types import AppendedBatch, EntryId, LogIndex, StoredRun, Term
from tests.sim.checker import Checker, Violation
from tests.sim.clients import Read
from tests.sim.options import choose
from tests.sim.producers import Session
from tests.sim.simulation import Simulation


def committed(*bodies: bytes) -> Checker:
    """A checker that has seen these committed, from index 0 on."""
    checker = Simulation(choose(0, 1000)).checker
    for index, body in enumerate(bodies):
        checker.committed.append(EntryId(Term(1), LogIndex(index)))
        checker.records.append(bytes(48) + body)
        checker.bodies[body] = index
    return checker


def read(checker: Checker) -> Read:
    """A read that begins now, at a member that ends before it is answered."""
    node: Any = SimpleNamespace(name="n0", core=None, operations=[])
    asked = Read(checker, node)
    node.operations.append(asked)
    return asked


def test_a_read_sees_what_another_one_saw_before() -> None:
    """Also if nobody was told that it is stored: who has read it has told others."""
    checker = committed(b"a", b"b")
    read(checker).done(LogIndex(1))
    later = read(checker)

    with pytest.raises(Violation, match="a stale read"):
        later.done(LogIndex(0))


def test_overlapping_reads_see_either() -> None:
    """The second began before the first had ended."""
    checker = committed(b"a", b"b")
    first, second = read(checker), read(checker)

    first.done(LogIndex(1))
    second.done(LogIndex(0))


@pytest.mark.parametrize("first_index", [1, 0], ids=["there", "somewhere"])
def test_a_read_sees_what_was_acknowledged_as_stored_before(first_index: int) -> None:
    """A producer was told that its entry is in the log: an acknowledgement like any other."""
    checker = committed(b"a", b"p/0 ")
    simulation: Any = SimpleNamespace(checker=checker)
    repeated = AppendedBatch(Term(1), LogIndex(0), LogIndex(-1), (), (StoredRun(LogIndex(first_index), 1),))
    Session(simulation, Random(1), "p").observe_ack(0, [b"p/0 "], repeated)

    with pytest.raises(Violation, match="a stale read"):
        read(checker).done(LogIndex(0))
