"""Long lists, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from dledger_cli.console import listing
from dledger_cli.console.listing import (
    PAGES_MAX,
    SEARCH_CHARACTERS_MAX,
    SORTED_MAX,
    BadInputError,
    LookOrder,
    SortedLists,
    Wanted,
    list_page,
)

SORTS = {"name": lambda row: row.name, "size": lambda row: row.size}


@dataclass(frozen=True)
class File:
    """A row."""

    name: str
    size: int | None = None
    internal: bool = False


FILES = some.lists(
    some.builds(File, some.text("abAB%_-é", max_size=5), some.none() | some.integers(-2, 2), some.booleans()),
    max_size=10,
    unique_by=lambda one: one.name,
)
WANTED = some.builds(
    Wanted,
    search=some.text("abAé ", max_size=2),
    sort=some.sampled_from(["name", "size"]),
    descending=some.booleans(),
    internal=some.booleans(),
)


def names(rows: list[File], **wanted: object) -> list[str]:
    return [one.name for one in list_page(rows, Wanted(**wanted), SORTS).rows]  # type: ignore[arg-type]  # by name


@pytest.fixture(autouse=True, scope="module")
def few_rows() -> Iterator[None]:
    """Pages of three rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "PAGE_ROWS", 3)
        yield


# --- pages -----------------------------------------------------------------------------------------------------------


@given(FILES, WANTED)
def test_the_pages_together_are_what_was_wanted_each_once(rows: list[File], wanted: Wanted) -> None:
    """No page has more rows than one page; none of the rows is missing, or there twice."""
    pages = []
    for number in range(-(-len(rows) // 3) or 1):
        one = list_page(rows, Wanted(wanted.search, wanted.sort, wanted.descending, number, wanted.internal), SORTS)
        if one.page == number:
            pages.append(one)

    found = [row for page in pages for row in page.rows]
    there = [one for one in rows if wanted.internal or not one.internal]
    matching = {one.name for one in there if wanted.search.strip().casefold() in one.name.casefold()}
    assert all(len(page.rows) <= 3 for page in pages)
    assert len(found) == len(matching) == pages[0].matching
    assert {row.name for row in found} == matching
    assert pages[0].total == len(there)


@given(FILES, some.booleans())
def test_what_is_unknown_comes_last_whichever_way(rows: list[File], descending: bool) -> None:
    """Names decide among equals, always from A to Z."""
    wanted = Wanted(sort="size", descending=descending, internal=True)
    found: list[File] = []
    for page in range(-(-len(rows) // 3)):
        found += list_page(rows, Wanted("", "size", descending, page, True), SORTS).rows  # type: ignore[arg-type]

    known = [one for one in found if one.size is not None]
    sign = -1 if wanted.descending else 1
    assert found == known + [one for one in found if one.size is None]
    assert known == sorted(known, key=lambda one: (sign * (one.size or 0), one.name.casefold(), one.name))


def test_names_sort_as_people_read_them() -> None:
    """Capitals do not come first."""
    rows = [File("b"), File("B"), File("a"), File("C")]

    assert names(rows) == ["a", "B", "b"]
    assert names(rows, page=1) == ["C"]
    assert names(rows, descending=True) == ["C", "b", "B"]


def test_a_page_beyond_the_end_is_the_last_one() -> None:
    """The list became shorter meanwhile; the answer says which page it is."""
    rows = [File(f"{number}") for number in range(4)]

    beyond = list_page(rows, Wanted(page=7), SORTS)
    assert (beyond.page, [one.name for one in beyond.rows]) == (1, ["3"])
    assert list_page(rows[:3], Wanted(page=1), SORTS).page == 0
    assert list_page([], Wanted(page=1), SORTS).told() == {
        "rows": [],
        "page": 0,
        "pages": 0,
        "page_rows": 3,
        "matching": 0,
        "total": 0,
    }


def test_internal_ones_are_neither_shown_nor_counted_unless_wanted() -> None:
    """Nor found."""
    rows = [File("orders"), File("%RETRY%orders", internal=True)]

    assert names(rows, search="ORD") == ["orders"]
    assert names(rows, search=" ord ", internal=True) == ["%RETRY%orders", "orders"]
    assert list_page(rows, Wanted(), SORTS).total == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"sort": "size_"}, "sort must be one of name, size"),
        ({"sort": ""}, "sort must be one of name, size"),
        ({"page": "-1"}, f"page must be a whole number from 0 to {PAGES_MAX - 1:,}"),
        ({"page": str(PAGES_MAX)}, "page must be"),
        ({"page": "1e3"}, "page must be"),
        ({"page": "٣"}, "page must be"),
        ({"page": "9" * 5000}, "page must be"),
        ({"descending": "yes"}, "descending must be true or false"),
        ({"internal": "1"}, "internal must be true or false"),
        ({"search": "x" * (SEARCH_CHARACTERS_MAX + 1)}, "search has 256 characters: at most 255 are allowed"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(asked: dict[str, str], words: str) -> None:
    """With what it may be."""
    with pytest.raises(BadInputError, match=words):
        Wanted.of(asked, SORTS)


def test_a_request_may_leave_everything_out() -> None:
    """The first page by name."""
    assert Wanted.of({}, SORTS) == Wanted()
    asked = {"search": "x" * SEARCH_CHARACTERS_MAX, "sort": "size", "descending": "true", "page": str(PAGES_MAX - 1)}
    assert Wanted.of(asked, SORTS) == Wanted("x" * SEARCH_CHARACTERS_MAX, "size", True, PAGES_MAX - 1)


# --- many pages ------------------------------------------------------------------------------------------------------


def sizes_asked(asked: list[str]) -> SortedLists[File]:
    """Lists that note in ``asked`` of whom they ask the size."""

    def size(row: File) -> int | None:
        asked.append(row.name)
        return row.size

    return SortedLists({"size": size})


@given(FILES, some.lists(some.tuples(some.integers(1, 2), WANTED, some.integers(0, 4))))
def test_lists_that_are_kept_sorted_show_what_others_show(
    rows: list[File], asked: list[tuple[int, Wanted, int]]
) -> None:
    """Whatever was asked for before, and whichever version is asked for."""
    versions = {1: rows, 2: rows[1:]}
    lists = SortedLists(SORTS)
    for version, some_list, number in asked:
        wanted = replace(some_list, page=number)
        assert lists.page(version, versions[version], wanted) == list_page(versions[version], wanted, SORTS)


def test_many_pages_cost_what_one_costs() -> None:
    """Until the list changes; a search of its own is sorted anew, and so is what nobody has asked for lately."""
    rows = [File(str(number), number) for number in range(10)]
    asked: list[str] = []
    lists = sizes_asked(asked)

    lists.page(1, rows, Wanted(sort="size"))
    once = len(asked)
    for number in range(100):
        lists.page(1, rows, Wanted(sort="size", page=number % 3))
    assert len(asked) == once > 0
    lists.page(2, rows, Wanted(sort="size"))
    assert len(asked) == 2 * once
    for number in range(SORTED_MAX):
        lists.page(2, rows, Wanted(f"nobody{number}", sort="size"))
    lists.page(2, rows, Wanted(sort="size"))
    assert len(asked) == 3 * once


# --- turns -----------------------------------------------------------------------------------------------------------


@given(
    some.dictionaries(some.text("abcdef", min_size=1, max_size=3), some.integers(1, 9), min_size=1, max_size=30),
    some.lists(some.text("abcdef", min_size=1, max_size=3), max_size=12, unique=True),
    some.integers(1, 12),
)
def test_everybody_has_a_turn_however_much_is_shown(costs: dict[str, int], shown: list[str], budget: int) -> None:
    """Within as many rounds as there are names; a round takes none twice, and at most one of each kind too many."""
    turns = LookOrder(costs.__getitem__)
    turns.renew(costs)
    seen: set[str] = set()
    for _ in costs:
        taken = turns.take(shown, budget)
        assert len(set(taken)) == len(taken)
        assert sum(costs[one] for one in taken) <= budget + 2 * max(costs.values())
        seen.update(taken)

    assert seen == costs.keys()


def test_what_is_shown_comes_first_and_the_others_still_come() -> None:
    """Half of the budget for each, and what one leaves is the other's."""
    turns = LookOrder()
    turns.renew(f"{number}" for number in range(8))

    assert turns.take(["7", "6", "5", "gone"], 4) == ["7", "6", "0", "1"]
    assert turns.take(["7"], 4) == ["7", "2", "3", "4"]
    assert turns.take([], 4) == ["5", "6", "0", "1"]


def test_new_names_come_next_and_gone_ones_never() -> None:
    """A topic that was just created has its figures with the next round."""
    turns = LookOrder()
    turns.renew(["a", "b", "c"])
    assert turns.take([], 1) == ["a"]

    turns.renew(["b", "c", "d", "a"])
    assert turns.take([], 2) == ["d", "b"]
    turns.renew([])
    assert turns.take(["a"], 5) == []
