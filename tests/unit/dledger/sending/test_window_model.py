"""Whatever goes wrong, each item is stored once, in order, and everybody is told the truth about it."""

from __future__ import annotations

import random

import pytest

from dledger.errors import DLedgerError, InvalidRequestError
from dledger.sending.batch import OutgoingBatch, ProducerNumbering, is_unknown
from dledger.sending.window import WindowOptions
from tests.support.sweeps import thinned
from tests.unit.dledger.sending.world import REFUSED, World

ITEMS = 60
Told = list[tuple[bytes, OutgoingBatch[None, int], int]]


def bad_day(seed: int, *, numbered: bool) -> tuple[World, Told]:
    """Items added over a while, some of them ones that nobody takes, on streams that fail; then all is well again."""
    dice = random.Random(seed)
    options = WindowOptions(
        linger_ms=dice.choice([0.0, 2.0, 10.0]),
        batch_items=dice.choice([1, 3, 8]),
        inflight_requests_max=dice.choice([1, 3, 32]),
        timeout_ms=dice.choice([300.0, 5000.0]),
    )
    world = World(
        options, numbering=ProducerNumbering() if numbered else None, seed=seed, faults=dice.choice([0.1, 0.3, 0.6])
    )
    world.log.producers_max = dice.choice([1, 2, 1000])
    told: Told = []

    def add(number: int) -> None:
        payload = (REFUSED if dice.random() < 0.03 else b"") + b"%04d" % number
        timeout_ms = 50.0 if dice.random() < 0.1 else None
        batch, place = world.window.add(payload, world.now_ms, timeout_ms=timeout_ms)
        told.append((payload, batch, place))

    at_ms = 0.0
    for number in range(ITEMS):
        at_ms += dice.choice([0.0, 0.0, 1.0, 20.0])
        world.later(at_ms, lambda number=number: add(number))  # type: ignore[misc]

    def heal() -> None:
        world.faults, world.is_frozen = 0.0, False

    world.later(at_ms * dice.random(), lambda: setattr(world, "is_frozen", dice.random() < 0.3))
    world.later(at_ms + 1000, heal)
    world.run()
    return world, told


@pytest.mark.sweep
@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("seed", thinned(range(120)))
def test_everybody_is_told_the_truth(seed: int, *, numbered: bool) -> None:
    """A place is where the item is, what was certainly refused is nowhere, and numbered items are there once."""
    world, told = bad_day(seed, numbered=numbered)

    entries = world.log.entries
    assert not world.window.pending_items
    assert world.window.pending_bytes == 0
    assert len(told) == ITEMS
    for payload, batch, place in told:
        assert batch.done
        outcome = batch.outcomes[place]
        assert outcome is not None
        if not isinstance(outcome, DLedgerError):
            assert entries[outcome] == payload
        elif outcome.outcome == "not_applied":
            assert payload not in entries, outcome
        if not payload.startswith(REFUSED):
            assert not isinstance(outcome, InvalidRequestError), "a refused item harms no other"
    if world.log.producers_max > 100 and numbered:
        assert len(entries) == len(set(entries)), "stored once"
        known = {payload for payload, batch, place in told if not is_unknown(batch.outcomes[place])}
        stored = [entry for entry in entries if entry in known]
        assert stored == sorted(stored), "in the order in which they were added"
