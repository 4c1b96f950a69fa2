"""Escapes strangers' text, so that it does nothing to a terminal and begins no other line of a log.

Names, tags, addresses, reasons and errors come from anyone who can connect. They are escaped where they are shown, in
all outputs: lines of a log, tables, errors, JSON. Bodies that go to a pipe are data, and stay as they are.
"""

from __future__ import annotations

import re
from typing import Final

_HIDDEN: Final = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ud800-\\udfff\\ufeff"
    "\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)
"""Characters that move the cursor, change colours, end a line, hide or reorder text; but not line feeds and tabs."""


def escaped_lines(text: str) -> str:
    """``text`` with every such character as an escape; its lines stay lines."""
    return _HIDDEN.sub(lambda found: ascii(found[0])[1:-1], text)


def escaped(text: str) -> str:
    """The same as one line."""
    return escaped_lines(text).replace("\n", "\\n").replace("\t", "\\t")


def escaped_json(document: str) -> str:
    """A JSON document of one line, with such characters as JSON escapes: it means the same."""
    return _HIDDEN.sub(lambda found: _units(found[0]), document)


def _units(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
