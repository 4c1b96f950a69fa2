"""The project's documents, and what is in them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
_FENCE: Final = re.compile(r"^( *)```(\w*)$")


def documents() -> list[Path]:
    """Every Markdown file that people read."""
    top = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    return [*top, *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and whether it stands in a fenced block (``fence`` is the block's language, or ``text``)."""

    path: Path
    number: int
    text: str
    fence: str | None

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.path.relative_to(ROOT)}:{self.number}"


def lines(path: Path) -> Iterator[Line]:
    """The lines of a document, without those that open or close a block."""
    fence: str | None = None
    for number, text in enumerate(path.read_text().splitlines(), start=1):
        opening = _FENCE.match(text)
        if opening:
            fence = (opening[2] or "text") if fence is None else None
            continue
        yield Line(path, number, text, fence)
    assert fence is None, f"{path}: a block is not closed"


def headings(path: Path) -> list[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    found: list[str] = []
    for line in lines(path):
        if line.fence is None and (heading := re.match(r"#+ (.*)", line.text)):
            title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).replace("`", "")
            found.append(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    return found


def table_below(path: Path, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its head."""
    rows: list[list[str]] = []
    below = False
    for line in lines(path):
        if re.match(r"#+ ", line.text) and line.fence is None:
            if rows:
                break
            below = line.text.lstrip("# ") == heading
        elif below and line.fence is None and line.text.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.text)[1:-1]])
        elif rows:
            break
    assert len(rows) > 2, f"{path}: no table below {heading!r}"
    return rows[2:]


def svg_lines(path: Path) -> list[str]:
    """The lines of a terminal that rich has drawn."""
    lines: dict[int, str] = {}
    for number, text in re.findall(
        r'clip-path="url\(#\w+-line-(\d+)\)">([^<]*)</text>', path.read_text(encoding="utf-8")
    ):
        lines[int(number)] = lines.get(int(number), "") + html.unescape(text)
    return [line.replace("\xa0", " ").rstrip() for _, line in sorted(lines.items())]
