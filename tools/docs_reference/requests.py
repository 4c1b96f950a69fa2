"""The table of RocketMQ's requests in ``docs/rocketmq.md``, whose other text is written by people."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.docs_reference.supported import CODES

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "rocketmq.md"
BEGIN: Final = "<!-- requests: generated from tools/docs_reference/supported.py by `make docs` -->\n"
END: Final = "<!-- end of the requests -->\n"


def text() -> str:
    """The document with the table as it should be. Raises ``ValueError`` if the document has no place for it."""
    before, begin, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{DOCUMENT} must contain the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def table() -> str:
    """One line for each request."""
    lines = ["| code | request | answered by | supported | notes |", "|---|---|---|---|---|"]
    lines += [
        f"| {int(code)} | {code.name} | {one.receiver} | {one.support} | {one.note} |"
        for code, one in sorted(CODES.items())
    ]
    return "".join(f"{line}\n" for line in lines)
