"""Extracts the cause from Spark's error messages: a Python stack trace, wrapped in Java's, several times."""

from __future__ import annotations

import re
from typing import Final

_PYTHON_ERROR: Final = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Interrupt)): (.+)$")
_JAVA_FRAME: Final = re.compile(r"^\s+at |^\s*\.\.\. \d+ more$|^\s+File \"")
_LINES_MAX: Final = 4


def reason(text: str) -> str:
    """The last error raised by Python code, as a sentence; otherwise the first lines, without the stack."""
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
"""Exceptions whose message is unclear without their name."""
