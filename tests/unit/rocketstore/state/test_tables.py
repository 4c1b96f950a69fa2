"""Copies of the tables: fast, and independent of each other whatever is applied to either."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from rocketstore.state.changes import Change, CommitOffsets, DeleteGroup, DeleteTopic, QueueOffset
from rocketstore.state.tables import Tables


def offsets_of(tables: Tables) -> dict[str, dict[tuple[str, int], int]]:
    return {group: dict(noted) for group, noted in tables.groups.items()}


def changes(dice: random.Random) -> Iterator[Change]:
    while True:
        group, topic = dice.choice("gh"), dice.choice("TU")
        offset = QueueOffset(topic, dice.randrange(3), dice.randrange(100))
        kinds = (
            CommitOffsets(group, (offset,), dice.random() < 0.5),
            DeleteTopic(topic, ((0, 5),)),
            DeleteGroup(group),
        )
        yield dice.choices(kinds, (8, 1, 1))[0]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_applied_to_one_copy_no_other_changes(seed: int) -> None:
    """A snapshot is written from a copy while the state goes on."""
    dice = random.Random(seed)
    coming = changes(dice)
    all_of_them = [Tables()]
    for _ in range(60):
        one = dice.choice(all_of_them)
        others = {id(other): offsets_of(other) for other in all_of_them if other is not one}
        if dice.random() < 0.1:
            all_of_them.append(one.copy())
            assert offsets_of(all_of_them[-1]) == offsets_of(one)
        elif dice.random() < 0.1:
            one.put_back(lambda _topic, _queue: 40)
        else:
            one.apply(next(coming))
        assert one.offset_count == sum(map(len, one.groups.values()))
        assert all(offsets_of(other) == others[id(other)] for other in all_of_them if id(other) in others)


def test_a_copy_takes_no_time_for_offsets_that_do_not_change() -> None:
    """The tables are locked meanwhile, and a million offsets are 50 ms."""
    tables = Tables(CommitOffsets(group, (QueueOffset("T", 0, 5),)) for group in "gh")
    copy = tables.copy()
    tables.apply(CommitOffsets("g", (QueueOffset("T", 0, 6),)))
    tables.apply(CommitOffsets("g", (QueueOffset("T", 1, 6),)))
    assert copy.groups["h"] is tables.groups["h"]
    assert (copy.groups["g"], tables.groups["g"]) == ({("T", 0): 5}, {("T", 0): 6, ("T", 1): 6})
