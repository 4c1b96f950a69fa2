"""The replicated tables: rows say what shall be, for one generation of a window."""

from __future__ import annotations

import json
import random

import pytest

from rocketstore.pop.tables import (
    UNLOCKED,
    FifoLock,
    LeaseWindow,
    MalformedRowError,
    Parked,
    PopPlace,
    PopRow,
    PopTables,
    advanced,
    check_row,
    row_from_json,
    row_json,
    zeros,
)

PLACE = PopPlace("group", "T", 3)
LOCK = FifoLock("attempt", 12, 14, 1_700_000_000_000, 2, 9)
FULL = PopRow(
    PLACE,
    7,
    10,
    11,
    60,
    64,
    1_700_000_000_000,
    1 << 20,
    13,
    0b1011,
    ((20, Parked(1_700_000_060_000, 1, 5)), (12, Parked(5, 0, 6))),
    (11,),
    LOCK,
)


def _opened() -> PopTables:
    tables = PopTables()
    assert tables.apply(PopRow(PLACE, 1, 10, reserved=20), None) == 10
    return tables


def test_a_row_comes_back_as_it_was_written() -> None:
    for row in (FULL, PopRow(PLACE, 1), PopRow(PLACE, 1, 0), PopRow(PLACE, 2, fifo=UNLOCKED)):
        check_row(row)
        assert row_from_json(json.loads(json.dumps(row_json(row)))) == row


@pytest.mark.parametrize(
    "spoilt",
    [
        PopRow(PopPlace("no good", "T", 0), 1),
        PopRow(PopPlace("group", "T", 65_536), 1),
        PopRow(PLACE, 0),
        PopRow(PLACE, 1, reserved=-1),
        PopRow(PLACE, 1, opens_at=-2),
        PopRow(PLACE, 1, settled=1 << 8192),
        PopRow(PLACE, 1, parked=((1, Parked(-1, 0, 0)),)),
        PopRow(PLACE, 1, unparked=(2**63,)),
        PopRow(PLACE, 1, fifo=LOCK._replace(attempt_id="a" * 65)),
    ],
)
def test_a_row_that_could_not_be_read_back_is_refused(spoilt: PopRow) -> None:
    with pytest.raises(MalformedRowError, match="pop row"):
        check_row(spoilt)


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        ["group", "T", 0, 1],
        ["group", "T", True, 1, {}],
        ["group", "T", 0, 1, []],
        ["group", "T", 0, 1, {"what": 1}],
        ["group", "T", 0, 1, {"reserved": "1"}],
        ["group", "T", 0, 1, {"settled": [0, "?"]}],
        ["group", "T", 0, 1, {"parked": [[1, 2, 3]]}],
        ["group", "T", 0, 1, {"fifo": ["a", 1, 2, 3, 4]}],
    ],
)
def test_what_is_no_row_is_malformed(value: object) -> None:
    with pytest.raises(MalformedRowError, match="pop row"):
        row_from_json(value)


def test_commit_moves_over_what_is_settled_or_parked() -> None:
    tables = _opened()
    assert tables.apply(PopRow(PLACE, 1, settled_from=11, settled=0b101), 10) == 10
    window = tables.windows[PLACE]
    assert list(zeros(window.settled, window.commit, window.reserved))[:3] == [10, 12, 14]
    assert tables.apply(PopRow(PLACE, 1, parked=((10, Parked(99, 1, 4)),)), 10) == 12
    assert tables.windows[PLACE].parked == {10: Parked(99, 1, 4)}
    assert tables.apply(PopRow(PLACE, 1, unparked=(10,), settled_from=12, settled=1), 12) == 14
    assert not tables.windows[PLACE].parked


def test_what_may_be_out_reaches_beyond_what_is_reserved() -> None:
    """P1: until more than that is reserved; a power cut takes it away with the end of the log."""
    tables = _opened()
    assert tables.windows[PLACE].reach == 20
    tables.apply(PopRow(PLACE, 1, ahead=28), 10)
    assert (tables.windows[PLACE].reserved, tables.windows[PLACE].reach) == (20, 28)
    copied = PopTables()
    for row in tables.as_rows():
        copied.apply(row, None)
    assert copied.windows == tables.windows
    tables.put_back(lambda _topic, _queue_id: 13)
    assert tables.windows[PLACE].reach == 13
    tables.apply(PopRow(PLACE, 2, reserved=40), 10)
    assert tables.windows[PLACE].reach == 40


def test_a_row_that_is_applied_twice_or_late_does_no_harm() -> None:
    """A leader that does not know what became of a tick writes its rows again."""
    choose = random.Random(5)
    for _ in range(200):
        once, often = _opened(), _opened()
        rows, settled = [], 0
        for _ in range(choose.randint(1, 6)):
            settled |= 1 << choose.randrange(10)
            rows.append(PopRow(PLACE, 1, reserved=20, settled_from=10, settled=settled, numbers=choose.randrange(9)))
        for row in rows:
            once.apply(row, 10)
            often.apply(row, 10)
            if choose.random() < 0.5:
                often.apply(choose.choice(rows[: rows.index(row) + 1]), 10)
        assert once.windows == often.windows


def test_rows_of_another_generation_do_not_count() -> None:
    """P12: what was written for a window that somebody has reset meanwhile."""
    tables = _opened()
    assert tables.moved(PLACE, 5, reset=True) == 5
    assert PLACE not in tables.windows
    assert tables.apply(PopRow(PLACE, 1, settled_from=10, settled=1), 5) is None
    assert tables.apply(PopRow(PLACE, 1, 5), 5) is None, "a generation is used once"
    assert tables.apply(PopRow(PLACE, 2, 10), 5) is None, "the group has another offset than the leader thought"
    assert tables.apply(PopRow(PLACE, 2, 5), 5) == 5
    assert tables.epoch == 2


def test_a_commit_of_others_moves_the_window_and_keeps_what_is_parked() -> None:
    tables = _opened()
    tables.apply(PopRow(PLACE, 1, settled_from=15, settled=0b11, parked=((11, Parked(99, 1, 4)),)), 10)
    assert tables.moved(PLACE, 15, reset=False) == 17, "15 and 16 are settled"
    window = tables.windows[PLACE]
    assert tables.apply(PopRow(PLACE, 1, settled_from=17, settled=1), 17) is None, "of the generation before"
    assert (window.generation, window.commit, window.reserved) == (2, 17, 20)
    assert list(window.parked) == [11]
    assert tables.moved(PopPlace("other", "T", 0), 3, reset=False) == 3


def test_what_a_power_cut_took_away_is_cut_off() -> None:
    tables = _opened()
    parked = tuple((offset, Parked(99, 1, 4)) for offset in (12, 13, 18))
    tables.apply(PopRow(PLACE, 1, settled_from=12, settled=0b1, parked=parked), 10)
    tables.put_back(lambda _topic, _queue_id: 13)
    window = tables.windows[PLACE]
    assert (window.generation, window.commit, window.reserved, window.settled) == (2, 10, 13, 0b100)
    assert list(window.parked) == [12]


def test_a_batch_is_locked_until_all_of_it_is_settled() -> None:
    """P8."""
    tables = _opened()
    tables.apply(PopRow(PLACE, 1, fifo=LOCK._replace(first=10, last=11)), 10)
    tables.apply(PopRow(PLACE, 1, settled_from=11, settled=1), 10)
    assert tables.windows[PLACE].fifo is not None
    unlocked = tables.copy()
    unlocked.apply(PopRow(PLACE, 1, fifo=UNLOCKED), 10)
    assert unlocked.windows[PLACE].fifo is None
    tables.apply(PopRow(PLACE, 1, settled_from=10, settled=1), 10)
    assert tables.windows[PLACE].fifo is None


def test_the_rows_of_tables_make_them_again() -> None:
    tables = _opened()
    tables.apply(FULL._replace(place=PopPlace("group", "T", 0)), None)
    tables.apply(PopRow(PopPlace("other", "T", 0), 9, 4), None)
    again = PopTables()
    for row in tables.as_rows():
        again.apply(row, row.opens_at)
    assert again.windows == tables.windows


def test_bits() -> None:
    assert advanced(5, 0b1011) == (7, 0b10)
    assert advanced(5, 0) == (5, 0)
    assert list(zeros(0b1011, 5, 11)) == [7, 9, 10]
    assert not list(zeros(0, 5, 5))
    assert LeaseWindow(1, 5, 9, 0b110).is_settled(6)
    assert not LeaseWindow(1, 5, 9, 0b110).is_settled(5)
