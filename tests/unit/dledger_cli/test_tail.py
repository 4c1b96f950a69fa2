"""Where ``dledger tail`` begins."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger.types import Entry, LogIndex, Magic, Position, Term
from dledger_cli.commands.log import READ_PAGE, _start_of_last


def log(kinds: str) -> Callable[..., list[Entry]]:
    """Reads entries of applications ("a") and others (".")."""

    def read(index: LogIndex, *, count: int) -> list[Entry]:
        assert count <= READ_PAGE
        numbers = range(index, min(index + min(count, 300), len(kinds)))
        return [
            Entry(
                LogIndex(number),
                Term(1),
                Position(number * 100),
                b"",
                magic=Magic.NORMAL if kinds[number] == "a" else Magic.NOOP,
            )
            for number in numbers
        ]

    return read


@pytest.mark.parametrize(
    ("kinds", "lines", "start"),
    [
        (".aaa", 2, 2),
        (".aaa.", 2, 2),
        (".a.a..", 2, 1),
        ("a" + "." * 5000 + "a...", 2, 0),
        ("a" * 3000 + ".", 2500, 500),
        ("...", 2, 0),
        ("a.a.", 10, 0),
        ("aaa", 0, 3),
        ("", 10, 0),
    ],
)
def test_the_end_of_a_log_is_as_many_entries_of_applications_as_asked_for(kinds: str, lines: int, start: int) -> None:
    """What a term or a producer begins or ends with stands between them and counts for none, however much it is."""
    assert _start_of_last(log(kinds), 0, len(kinds), lines) == start


def test_nothing_before_the_begin_of_the_log_is_asked_for() -> None:
    """A log that has been trimmed begins later."""
    assert _start_of_last(log("aaaaaa"), 4, 6, 10) == 4


def test_the_way_back_over_entries_of_no_application_takes_few_reads() -> None:
    """Each makes the leader confirm that it leads."""
    count, asked = 20 * READ_PAGE, 0
    entries = log("." * count)

    def read(index: LogIndex, *, count: int) -> list[Entry]:
        nonlocal asked
        asked += 1
        return [
            entry
            for start in range(index, index + count, 300)
            for entry in entries(start, count=min(300, index + count - start))
        ]

    assert _start_of_last(read, 0, count, 10) == 0
    assert asked <= 30
