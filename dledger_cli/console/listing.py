"""Long lists, a page at a time: what a page of the browser wants to see, and what of it is looked up when.

A page's request to the console is read field by field.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Final, Generic, Protocol, TypeVar

OFFSET_MAX: Final = (1 << 63) - 1


class BadInputError(Exception):
    """Raised for an invalid request; the message says why, and ``field`` which field is wrong, if it is one."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Fields:
    """A JSON object with some of the ``known`` fields; null counts as missing. Everything raises ``BadInputError``."""

    def __init__(self, body: bytes, known: Collection[str]) -> None:
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            raise BadInputError("the body must be a JSON object") from None
        if not isinstance(given, dict):
            raise BadInputError("the body must be a JSON object")
        if unknown := sorted(given.keys() - set(known)):
            raise BadInputError(f"unknown field {unknown[0][:64]!r}: use {', '.join(known)}")
        self._given: dict[str, object] = {name: value for name, value in given.items() if value is not None}

    def text(self, name: str, *, longest: int, shortest: int = 1) -> str:
        """A text of at most ``longest`` characters, without control characters."""
        text = self.body(name, longest=longest, shortest=shortest)
        if not text.isprintable():
            raise BadInputError(f"{name} has control characters", name)
        return text

    def body(self, name: str, *, longest: int, shortest: int = 0) -> str:
        """A text of any characters."""
        found = self._given.get(name, "")
        if not isinstance(found, str):
            raise BadInputError(f"{name} must be a text", name)
        if len(found) < shortest:
            raise BadInputError(f"{name} is missing", name)
        if len(found) > longest:
            raise BadInputError(f"{name} has {len(found):,} characters: at most {longest:,} are allowed", name)
        try:
            found.encode()
        except UnicodeEncodeError:
            raise BadInputError(f"{name} has half a character (a lone surrogate)", name) from None
        return found

    def number(self, name: str, low: int, high: int) -> int:
        """A whole number."""
        found = self.optional_number(name, low, high)
        if found is None:
            raise BadInputError(f"{name} is missing: give a number from {low:,} to {high:,}", name)
        return found

    def optional_number(self, name: str, low: int, high: int) -> int | None:
        """A whole number, or None if there is none."""
        found = self._given.get(name)
        return None if found is None else _whole(found, name, low, high)

    def flag(self, name: str) -> bool:
        """True or false; false if missing."""
        found = self._given.get(name, False)
        if not isinstance(found, bool):
            raise BadInputError(f"{name} must be true or false", name)
        return found

    def choice(self, name: str, choices: Collection[str]) -> str:
        """One of several words."""
        found = self._given.get(name)
        if not isinstance(found, str) or found not in choices:
            raise BadInputError(f"{name} must be one of {', '.join(choices)}", name)
        return found

    def places(self, name: str, *, most: int) -> dict[int, int]:
        """An object with an offset for some queues, at least one."""
        found = self._given.get(name)
        if not isinstance(found, dict) or not 0 < len(found) <= most:
            raise BadInputError(f"{name} must have the offsets of 1 to {most:,} queues", name)
        return {
            _whole(_digits(queue), name, 0, 65_535): _whole(offset, name, 0, OFFSET_MAX)
            for queue, offset in found.items()
        }


def _digits(text: str) -> object:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else text


def _whole(found: object, name: str, low: int, high: int) -> int:
    if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
        raise BadInputError(f"{name} must be a whole number from {low:,} to {high:,}", name)
    return found


PAGE_ROWS: Final = 25
LIST_MAX: Final = 50_000
"""Names kept of one list; of more, the rest is counted only."""
SEARCH_CHARACTERS_MAX: Final = 255
PAGES_MAX: Final = LIST_MAX // PAGE_ROWS + 1
SORTED_MAX: Final = 8
"""Lists kept sorted, those asked for last."""
_YES_OR_NO: Final = {"": False, "false": False, "true": True}


class Row(Protocol):
    """A dataclass with a name. ``internal``: no application has to do with it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def internal(self) -> bool: ...


RowT = TypeVar("RowT", bound=Row)
SortedBy = Callable[[RowT], int | str | None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rows of a list, in which order, and which page of them (counted from 0)."""

    search: str = ""
    sort: str = "name"
    descending: bool = False
    page: int = 0
    internal: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str], sorts: Collection[str]) -> Wanted:
        """As a request has it. Raises ``BadInputError``."""
        search, sort, page = given.get("search", ""), given.get("sort", "name"), given.get("page", "0")
        if len(search) > SEARCH_CHARACTERS_MAX:
            raise BadInputError(f"search has {len(search):,} characters: at most {SEARCH_CHARACTERS_MAX} are allowed")
        if sort not in sorts:
            raise BadInputError(f"sort must be one of {', '.join(sorts)}")
        if not (page.isascii() and page.isdigit() and len(page) <= 9 and int(page) < PAGES_MAX):
            raise BadInputError(f"page must be a whole number from 0 to {PAGES_MAX - 1:,}")
        return cls(search, sort, _flag(given, "descending"), int(page), _flag(given, "internal"))


def _flag(given: Mapping[str, str], name: str) -> bool:
    found = _YES_OR_NO.get(given.get(name, ""))
    if found is None:
        raise BadInputError(f"{name} must be true or false")
    return found


@dataclass(frozen=True, slots=True)
class Listed:
    """A page of a list. ``total``: all rows; ``matching``: those that the search finds; ``page``: the one shown."""

    rows: tuple[Row, ...]
    page: int
    matching: int
    total: int

    def told(self) -> dict[str, object]:
        return {
            "rows": [asdict(one) for one in self.rows],
            "page": self.page,
            "pages": -(-self.matching // PAGE_ROWS),
            "page_rows": PAGE_ROWS,
            "matching": self.matching,
            "total": self.total,
        }


def list_page(rows: Iterable[RowT], wanted: Wanted, sorts: Mapping[str, SortedBy[RowT]]) -> Listed:
    """The page, or the last one if there are fewer. A search finds parts of names, in capitals or not.

    Unknown values come last in either direction; among equals, names decide.
    """
    return _page(_found(rows, wanted, sorts), wanted)


def _found(rows: Iterable[RowT], wanted: Wanted, sorts: Mapping[str, SortedBy[RowT]]) -> tuple[list[RowT], int]:
    """All rows that are wanted, in order, and how many there would be without a search."""
    there = [one for one in rows if wanted.internal or not one.internal]
    part = wanted.search.strip().casefold()
    found = [one for one in there if part in one.name.casefold()] if part else list(there)
    found.sort(key=lambda one: (one.name.casefold(), one.name), reverse=wanted.descending and wanted.sort == "name")
    if wanted.sort != "name":
        value = sorts[wanted.sort]
        known = [one for one in found if value(one) is not None]
        known.sort(key=lambda one: value(one), reverse=wanted.descending)  # type: ignore[arg-type,return-value]  # none is None
        found = [*known, *(one for one in found if value(one) is None)]
    return found, len(there)


def _page(listed: tuple[Sequence[RowT], int], wanted: Wanted) -> Listed:
    found, total = listed
    page = min(wanted.page, max(0, len(found) - 1) // PAGE_ROWS)
    return Listed(tuple(found[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]), page, len(found), total)


class SortedLists(Generic[RowT]):
    """Lists of one version as pages wanted them last, so that very many pages cost little more than one."""

    def __init__(self, sorts: Mapping[str, SortedBy[RowT]]) -> None:
        self._sorts = sorts
        self._lock = threading.Lock()  # guards the fields below
        self._version = -1
        self._lists: dict[Wanted, tuple[list[RowT], int]] = {}

    def page(self, version: int, rows: Iterable[RowT], wanted: Wanted) -> Listed:
        """Like ``list_page``; ``rows`` are those of this version or a little newer."""
        key = replace(wanted, page=0)
        with self._lock:
            if version != self._version:
                self._version, self._lists = version, {}
            listed = self._lists.pop(key, None) or _found(rows, wanted, self._sorts)
            self._lists[key] = listed
            if len(self._lists) > SORTED_MAX:
                del self._lists[next(iter(self._lists))]
        return _page(listed, wanted)


class LookOrder:
    """Which names to look at next: those that pages show first, then those not looked at for longest."""

    def __init__(self, cost: Callable[[str], int] = lambda _: 1) -> None:
        """``cost`` of looking at a name that is there."""
        self._cost = cost
        self._waiting: deque[str] = deque()
        self._there: set[str] = set()

    def renew(self, names: Iterable[str]) -> None:
        """These are there now; new ones come next."""
        now = set(names)
        if now != self._there:
            fresh = sorted(now - self._there)
            self._waiting = deque([*fresh, *(one for one in self._waiting if one in now)])
            self._there = now

    def take(self, shown: Sequence[str], budget: int) -> list[str]:
        """Some names, each once. Those ``shown`` may take half of the ``budget``.

        At least one of each kind is taken, whatever it costs, so that none keeps the others waiting for ever.
        """
        taken: dict[str, None] = {}
        left = self._fill(taken, (one for one in shown if one in self._there), budget // 2)
        self._fill(taken, self._waiting, left + budget - budget // 2)
        if taken:
            self._waiting = deque([*(one for one in self._waiting if one not in taken), *taken])
        return list(taken)

    def _fill(self, taken: dict[str, None], names: Iterable[str], budget: int) -> int:
        before = len(taken)
        for name in names:
            if name in taken:
                continue
            cost = self._cost(name)
            if cost > budget and len(taken) > before:
                break
            taken[name] = None
            budget -= cost
        return budget
