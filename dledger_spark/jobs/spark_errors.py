"""The reason in what Spark says when it gives a job up: a Python stack trace, wrapped into Java's, several times."""

from __future__ import annotations

import re
from typing import Final

_PYTHON_ERROR: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Interrupt)): (.+)$")
_JAVA_FRAME: Final = re.compile(r"^\s+at |^\s*\.\.\. \d+ more$|^\s+File \"")
_LINES_MAX: Final = 4


def reason(text: str) -> str:
    """The error that Python code raised last, as a sentence; or else the first lines, without the stack."""
    lines = text.splitlines()
    found = next(filter(None, map(_PYTHON_ERROR.match, lines)), None)
    if found is not None:
        kind, words = found[1], found[2].strip()
        return f"{kind}: {words}" if kind in _PLAIN else words
    kept = [line.strip() for line in lines if line.strip() and not _JAVA_FRAME.match(line)]
    return " ".join(kept[:_LINES_MAX]) or "Spark gave no reason"


_PLAIN: Final = frozenset(
    {"TypeError", "ValueError", "KeyError", "AttributeError", "RuntimeError", "OSError", "IndexError"}
)
"""Whose message does not say what it is about."""
