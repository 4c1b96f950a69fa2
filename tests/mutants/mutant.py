"""Planted bugs as rows of text: which expression becomes which other one, and who should notice.

Each file ``PACKAGE.toml`` here holds those of one package, a table each::

    [members-without-standing-count]
    harm = "a disk that lost its memory helps to elect a leader that lacks what it had acknowledged"
    tests = ["tests/unit/dledger/core/test_standing_counts.py", "tests/scenarios/test_standing.py"]
    seeds = 200
    file = "dledger/core/standing.py"
    old = "self.counts(voter)"
    new = "True"

``old`` occurs exactly once in ``file``. ``tests`` are files and directories, the cheapest first; all of them pass
without the bug. ``seeds`` is how many seeds the simulator is given to find it, too; without it, the simulator is not
asked. ``first`` is the first of these seeds, if it is not that from which everything but changes of members happens.
``worlds`` is the same for the broker simulator's worlds with pop and timed messages, from the first on.
``masked`` says why the simulator would find nothing: which other rule catches the bug first. A bug that takes
several replacements has the others in ``[[NAME.also]]``, each with ``old``, ``new`` and, if it differs, ``file``.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
_NAME: Final = re.compile(r"[a-z0-9_-]+")
_WANTED: Final = frozenset({"harm", "tests", "file", "old", "new"})
_OPTIONAL: Final = frozenset({"seeds", "first", "worlds", "masked", "also"})
FIRST_SEED: Final = 300_000


class MutantError(Exception):
    """Raised when a row is no planted bug, or does not fit the code; names the file and the row."""


@dataclass(frozen=True, slots=True)
class Change:
    """One replacement."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug; ``place`` is its row for people."""

    name: str
    place: str
    harm: str
    tests: tuple[str, ...]
    seeds: int
    changes: tuple[Change, ...]
    first: int = FIRST_SEED
    worlds: int = 0

    def spoilt(self, root: Path) -> dict[str, str]:
        """The changed files below ``root``, with the bug in them. Raises ``MutantError`` if they are no longer so."""
        texts: dict[str, str] = {}
        for change in self.changes:
            if change.file not in texts:
                try:
                    texts[change.file] = (root / change.file).read_text()
                except OSError as error:
                    raise MutantError(f"{self.place}: cannot read {change.file} ({error.strerror})") from error
            found = texts[change.file].count(change.old)
            if found != 1:
                raise MutantError(
                    f"{self.place}: {change.file} has {change.old!r} {found} times, not once: mend the row"
                )
            texts[change.file] = texts[change.file].replace(change.old, change.new)
        return texts


def read(path: Path) -> list[Mutant]:
    """The rows of one file. Raises ``MutantError``."""
    try:
        rows = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise MutantError(f"{path.name}: {error}") from error
    return [_mutant(f"{path.name}: [{name}]", name, row) for name, row in rows.items()]


def read_all(directory: Path = HERE) -> list[Mutant]:
    """Those of all files. Raises ``MutantError``."""
    found: dict[str, Mutant] = {}
    for path in sorted(directory.glob("*.toml")):
        for one in read(path):
            if one.name in found:
                raise MutantError(f"{one.place}: the name is taken by {found[one.name].place}")
            found[one.name] = one
    return list(found.values())


def _mutant(place: str, name: str, row: object) -> Mutant:
    if not _NAME.fullmatch(name) or not isinstance(row, dict):
        raise MutantError(f"{place}: a table is wanted, named in lower case with hyphens")
    if row.keys() - _WANTED - _OPTIONAL or _WANTED - row.keys():
        wrong = sorted((row.keys() - _WANTED - _OPTIONAL) | (_WANTED - row.keys()))
        raise MutantError(f"{place}: {', '.join(wrong)} missing or unknown")
    tests, seeds, also = row["tests"], row.get("seeds", 0), row.get("also", [])
    if not isinstance(row["harm"], str) or not isinstance(row.get("masked", ""), str):
        raise MutantError(f"{place}: harm and masked are text")
    if not isinstance(tests, list) or not tests or not all(isinstance(one, str) for one in tests):
        raise MutantError(f"{place}: tests is a list of paths")
    lost = [one for one in tests if not (ROOT / one).exists()]
    if lost:
        raise MutantError(f"{place}: there is no {', '.join(lost)}")
    first, worlds = row.get("first", FIRST_SEED), row.get("worlds", 0)
    if any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in (seeds, first, worlds)):
        raise MutantError(f"{place}: seeds, first and worlds are numbers")
    if not isinstance(also, list):
        raise MutantError(f"{place}: also is a list of tables")
    changes = (_change(place, row, ""), *(_change(place, one, row["file"]) for one in also))
    return Mutant(name, place, row["harm"], tuple(tests), seeds, changes, first, worlds)


def _change(place: str, row: object, file: str) -> Change:
    if not isinstance(row, dict):
        raise MutantError(f"{place}: also is a list of tables")
    texts = row.get("file", file), row.get("old"), row.get("new")
    name, old, new = texts
    if not (isinstance(name, str) and isinstance(old, str) and isinstance(new, str)) or not old or old == new:
        raise MutantError(f"{place}: file, old and new are texts, and old is another one than new")
    return Change(name, old, new)
