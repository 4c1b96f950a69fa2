"""A planted bug as a file: what it is, who should catch it, and the patch itself.

A file ``NAME.patch`` begins with lines of the form ``Word: text``; an indented line goes on with the one before it.
Then comes a blank line, then the patch, as ``git diff`` writes it::

    Bug: a vote is answered before it is saved
    Harm: after a restart the member votes again in the same term: two leaders
    Tests: tests/unit/dledger/core/test_leader_elector.py tests/scenarios
    Seeds: 300

``Tests`` are files and directories, the cheapest first; all of them pass without the bug. ``Seeds`` is how many seeds
the simulator is given to find it, too; without it, the simulator is not asked. ``Masked`` says why it would find
nothing: which other rule catches the same first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[1]
_WORDS: Final = frozenset({"Bug", "Harm", "Tests", "Seeds", "Masked"})


class MutantError(Exception):
    """Raised when a file is no planted bug; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One planted bug."""

    name: str
    bug: str
    harm: str
    tests: tuple[str, ...]
    seeds: int
    patch: str

    @property
    def changed(self) -> tuple[str, ...]:
        """The files that the patch changes."""
        return tuple(line[6:] for line in self.patch.splitlines() if line.startswith("+++ b/"))


def read(path: Path) -> Mutant:
    """One file. Raises ``MutantError``."""
    head, blank, patch = path.read_text().partition("\n\n")
    if not blank or not patch.startswith("diff --git "):
        raise MutantError(f"{path.name}: a head, a blank line and the output of `git diff` are wanted")
    fields: dict[str, str] = {}
    word = ""
    for line in head.splitlines():
        if line.startswith(" ") and word:
            fields[word] += " " + line.strip()
            continue
        word, colon, text = line.partition(": ")
        if not colon or word not in _WORDS or word in fields:
            raise MutantError(f"{path.name}: {line!r} is none of {', '.join(sorted(_WORDS))}, or there twice")
        fields[word] = text.strip()
    missing = {"Bug", "Harm", "Tests"} - fields.keys()
    if missing:
        raise MutantError(f"{path.name}: {', '.join(sorted(missing))} missing")
    tests = tuple(fields["Tests"].split())
    lost = [one for one in tests if not (ROOT / one).exists()]
    if lost:
        raise MutantError(f"{path.name}: there is no {', '.join(lost)}")
    seeds = fields.get("Seeds", "0")
    if not seeds.isdigit():
        raise MutantError(f"{path.name}: Seeds: invalid number {seeds}")
    return Mutant(path.stem, fields["Bug"], fields["Harm"], tests, int(seeds), patch)


def read_all() -> list[Mutant]:
    """All files, by name. Raises ``MutantError``."""
    return [read(path) for path in sorted(HERE.glob("*.patch"))]
