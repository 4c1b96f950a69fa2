"""The checker finds every violation that is planted, and nothing in a history that is right."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.history import AppendOp, History, Outcome, ReadOp, check


def acked(value: str, index: int, began: float, ended: float) -> AppendOp:
    return AppendOp(value.encode(), began, ended, Outcome.ACKED, index)


def log_of(*values: str | None) -> dict[int, bytes | None]:
    return {index: None if value is None else value.encode() for index, value in enumerate(values)}


A, B, C = acked("a", 1, 0, 2), acked("b", 2, 1, 4), acked("c", 3, 5, 6)
LOG = log_of(None, "a", "b", "c")
READ = ReadOp(1, (b"a", b"b"), 4.5, 5.5, complete=True)


def test_a_right_history_passes() -> None:
    """Overlapping appends in either order, a read in between, an unknown append that made it and one that did not."""
    unknown_in = AppendOp(b"u", 0, 9, Outcome.UNKNOWN)
    unknown_out = AppendOp(b"v", 0, 9, Outcome.UNKNOWN)
    refused = AppendOp(b"r", 0, 1, Outcome.NOT_APPLIED)

    complaints = check([A, B, C, unknown_in, unknown_out, refused], [READ], LOG | {4: b"u"})

    assert complaints == []


def test_an_empty_history_passes() -> None:
    """Nothing asked, nothing to explain."""
    assert check([], [], {}) == []


@pytest.mark.parametrize(
    ("appends", "reads", "log", "word"),
    [
        ([A, B, C], [], log_of(None, "a", "b"), "lost"),
        ([A, B, C], [], log_of(None, "a", "c", "b"), "lost"),
        ([A, B, replace(C, index=None)], [], log_of(None, "a", "b"), "lost"),
        ([A, B, C], [], log_of(None, "a", "b", "c", "a"), "duplicate"),
        ([A, B, C], [], log_of(None, "a", "b", "c", "x"), "phantom"),
        ([A, B, C], [], {0: None, 1: b"a", 2: b"b", 4: b"c"}, "gaps"),
        ([A, replace(B, index=1), C], [], LOG, "was acknowledged to"),
        ([A, B, C, AppendOp(b"r", 0, 1, Outcome.NOT_APPLIED)], [], LOG | {4: b"r"}, "refused"),
        ([A, B, acked("c", 3, 5, 6), acked("d", 4, 0, 1)], [], LOG | {4: b"d"}, "order"),
        ([A, B, C, AppendOp(b"u", 8, 9, Outcome.UNKNOWN)], [], log_of("u", "a", "b", "c"), "order"),
        ([A, B, C], [replace(READ, values=(b"a", b"x"))], LOG, "read saw"),
        ([A, B, C], [replace(READ, values=(b"a", b"b", b"c", b"d"))], LOG, "read saw"),
        ([A, B, C], [replace(READ, values=(b"a",))], LOG, "stale"),
        ([A, B, C], [replace(READ, values=())], LOG, "stale"),
        ([A, B, C], [replace(READ, values=(b"a", b"b", b"c"), ended=4.8)], LOG, "order"),
        ([A, B], [replace(READ, values=(b"a", b"b", None), ended=4.8), replace(READ, began=4.9)],
         log_of(None, "a", "b", None), "stale"),
    ],
    ids=["lost", "moved", "lost-without-a-place", "twice", "phantom", "gap", "one-index-two-acks", "refused-but-there",
         "reordered", "unknown-before-its-call", "other-value", "beyond-the-log", "stale-read", "empty-stale-read",
         "read-from-the-future", "tail-moves-back"],
)  # fmt: skip
def test_a_planted_violation_is_found(
    appends: list[AppendOp], reads: list[ReadOp], log: dict[int, bytes | None], word: str
) -> None:
    """A checker that cannot fail proves nothing: each rule of L5, broken once."""
    complaints = check(appends, reads, log)

    assert any(word in complaint for complaint in complaints), complaints


def test_a_limited_read_need_not_see_the_end() -> None:
    """A read that was cut by its page size is only held against the prefix it gave."""
    limited = replace(READ, values=(b"a",), complete=False)

    assert check([A, B, C], [limited], LOG) == []


def test_random_histories_of_a_correct_log_pass_and_a_swap_is_found() -> None:
    """A log that takes effect somewhere inside each call is never accused; two swapped acks always are."""
    chance = random.Random(7)
    for _ in range(50):
        effects = sorted(chance.uniform(0, 100) for _ in range(40))
        appends = [
            acked(f"v{n}", n, at - chance.uniform(0, 10), at + chance.uniform(0, 10)) for n, at in enumerate(effects)
        ]
        log = {n: f"v{n}".encode() for n in range(40)}
        first, second = appends[3], appends[30]
        swapped = [replace(first, index=second.index), replace(second, index=first.index)]

        assert check(appends, [], log) == []
        assert check([*appends[:3], *swapped, *appends[4:30], *appends[31:]], [], log)


def test_the_history_is_kept_as_json_lines(tmp_path: Path) -> None:
    """An outsider can check a stored history again."""
    history = History()
    history.record(A)
    history.record(ReadOp(0, (None, b"a"), 3, 4, complete=True))

    history.dump(tmp_path / "history.jsonl")

    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["op"] for row in rows] == ["append", "read"]
    assert rows[1]["values"] == [None, "a"]


def test_waiting_for_acks_fails_with_the_last_errors() -> None:
    """A service that does not come back is named by what its clients were told."""
    history = History()
    history.record(AppendOp(b"a", 0, 1, Outcome.UNKNOWN, error="no quorum"))

    with pytest.raises(AssertionError, match="no quorum"):
        history.wait_for_acks(1, timeout_s=0.01)
