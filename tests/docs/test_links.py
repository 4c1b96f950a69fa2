"""Links lead somewhere, files that are spoken of exist, quoted log lines are the code's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dledger.store.opening import RecoveryReport
from tests.docs.documents import ROOT, Line, documents, headings, lines, table_below

_LINK = re.compile(r"!?\[(?:[^]\[]|\[[^]]*\])*\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:dledger|rocketstore|cluster|proto|tests|docs)/[\w./*-]+)`")


def _links(path: Path) -> Iterator[tuple[Line, str]]:
    for line in lines(path):
        if line.fence is None:
            for target in _LINK.findall(line.text):
                yield line, target


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(path: Path) -> None:
    """A reader who follows a link arrives."""
    broken = []
    for line, target in _links(path):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in headings(file)):
            broken.append(f"{line.place}: {target}")

    assert broken == []


def test_every_document_is_reached_from_the_entry() -> None:
    """Nobody reads what nothing links to."""
    entry = ROOT / "docs" / "README.md"
    seen, waiting = set[Path](), [entry]
    while waiting:
        path = waiting.pop()
        if path in seen or path.suffix != ".md":
            continue
        seen.add(path)
        found = (
            (path.parent / target.partition("#")[0]).resolve() for _, target in _links(path) if "://" not in target
        )
        waiting += [one for one in found if one.is_file()]

    assert set(documents()) - seen == set()


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_every_source_file_that_is_spoken_of_exists(path: Path) -> None:
    """Sources move; what points at them must follow."""
    missing = [
        f"{line.place}: {name}"
        for line in lines(path)
        if line.fence is None
        for name in _PATH.findall(line.text)
        if not list(ROOT.glob(name.rstrip("/")))
    ]

    assert missing == []


def test_quoted_log_lines_are_those_of_the_code() -> None:
    """An operator searches for the words that really appear: each piece between two ``…`` stands in one literal."""
    literals = _literals()
    quoted = [
        line
        for row in table_below(ROOT / "docs" / "operating.md", "Log lines")
        for line in (row[0].strip("`"), *re.findall(r"later: `([^`]+)`", row[1]))
    ]

    unknown = [line for line in quoted if not any(_has_pieces(text, line) for text in literals)]

    assert len(quoted) > 10
    assert unknown == []


def _has_pieces(text: str, line: str) -> bool:
    pieces = [piece for piece in line.split("…") if piece.strip(" :,.;=()")]
    at = 0
    for piece in pieces:
        at = text.find(piece.strip(), at)
        if at < 0:
            return False
    return True


def _literals() -> set[str]:
    found = {str(RecoveryReport(clean_stop=True, last_index=0, verified_from=0, verified_entries=0))}
    for package in ("dledger", "rocketstore", "dledger_cli", "cluster"):
        for source in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found
