"""The part of YAML that RocketMQ's ``plain_acl.yml`` is written in, read strictly: text in, values with lines out.

Block mappings, block lists, plain and quoted scalars, comments, ``[]``. Every scalar stays the text it is, so that the
key ``00123456`` keeps its zeros and ``no`` is a name. What else YAML has (anchors, tags, flow collections, texts of
several lines) is refused with its line. A library would be one more dependency that reads secrets, tell of one problem
at a time, and make numbers of keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from dledger.errors import ConfigError

DEPTH_MAX: Final = 8

_KEY = re.compile(r"([A-Za-z0-9_.-]+|\"[^\"\\]*\"|'[^']*')\s*:(?=\s|$)")
_COMMENT = re.compile(r"\s+#.*$")
_DOUBLE_QUOTED = re.compile(r'"((?:[^"\\]|\\["\\/])*)"\s*(#.*)?')
_SINGLE_QUOTED = re.compile(r"'((?:[^']|'')*)'\s*(#.*)?")
_SPECIAL = "&*!|>%@`{}[],?"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A text; empty for nothing."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """One key of a mapping, where it stands, and its value."""

    key: str
    line: int
    value: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys and values in the order of the text; no key twice."""

    entries: tuple[YamlEntry, ...]
    line: int


Node = Scalar | Sequence | Mapping


@dataclass(slots=True)
class _Line:
    indent: int
    text: str
    number: int


def parse(text: str) -> Node:
    """The text's one value, for an empty text an empty mapping. Raises ``ConfigError`` naming every wrong line."""
    parser = _Parser(text)
    node: Node = Mapping((), 1)
    if parser.lines:
        node = parser.block(parser.lines[0].indent, 0)
        while not parser.at_end:
            parser.complain("it has no parent: check its indentation")
    if parser.problems:
        raise ConfigError(sorted(parser.problems, key=_line_of))
    return node


def _line_of(problem: str) -> int:
    return int(problem.removeprefix("line ").partition(":")[0])


@dataclass
class _Parser:
    text: str
    lines: list[_Line] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        for number, raw in enumerate(re.split(r"\r\n|\n|\r", self.text), start=1):
            stripped = raw.strip()
            if not stripped or stripped.startswith("#") or (stripped == "---" and not self.lines):
                continue
            indent = len(raw) - len(raw.lstrip(" "))
            if raw[indent] == "\t":
                self.problems.append(f"line {number}: indent with spaces, not tabs")
                continue
            self.lines.append(_Line(indent, raw[indent:].rstrip(), number))

    @property
    def at_end(self) -> bool:
        return self.at >= len(self.lines)

    @property
    def line(self) -> _Line:
        return self.lines[self.at]

    def complain(self, problem: str) -> None:
        """Note what is wrong with the present line and leave it out."""
        self.problems.append(f"line {self.line.number}: {problem}")
        self.at += 1

    def block(self, indent: int, depth: int) -> Node:
        """What begins at the present line, whose indentation is ``indent``."""
        line = self.line
        if depth > DEPTH_MAX:
            self.complain("nested too deeply")
            return Scalar("", line.number)
        if _is_item(line.text):
            return self._sequence(indent, depth)
        if _KEY.match(line.text):
            return self._mapping(indent, depth)
        self.at += 1
        return self._scalar(line.text, line.number)

    def _sequence(self, indent: int, depth: int) -> Sequence:
        number = self.line.number
        items: list[Node] = []
        while not self.at_end and self.line.indent == indent and _is_item(self.line.text):
            line = self.line
            rest = line.text[1:].lstrip(" ")
            if not rest or rest.startswith("#"):
                self.at += 1
                items.append(self._nested(indent, depth, line.number))
            elif _is_item(rest) or _KEY.match(rest):
                line.indent, line.text = indent + len(line.text) - len(rest), rest
                items.append(self.block(line.indent, depth + 1))
            else:
                self.at += 1
                items.append(self._scalar(rest, line.number))
            self._refuse_deeper(indent)
        return Sequence(tuple(items), number)

    def _mapping(self, indent: int, depth: int) -> Mapping:
        number = self.line.number
        entries: dict[str, YamlEntry] = {}
        while not self.at_end and self.line.indent == indent and not _is_item(self.line.text):
            line = self.line
            match = _KEY.match(line.text)
            if match is None:
                self.complain(f"expected `key: value`, got {_shown(line.text)}")
                continue
            key = match[1].strip("\"'")
            rest = line.text[match.end() :].strip()
            if key in entries:
                self.problems.append(f"line {line.number}: {key} is given twice (first on line {entries[key].line})")
            self.at += 1
            value: Node
            if not rest or rest.startswith("#"):
                value = self._nested(indent, depth, line.number, items_too=True)
            else:
                value = self._scalar(rest, line.number)
            entries[key] = YamlEntry(key, line.number, value)
            self._refuse_deeper(indent)
        return Mapping(tuple(entries.values()), number)

    def _nested(self, indent: int, depth: int, number: int, *, items_too: bool = False) -> Node:
        """What stands below a key or a dash without anything behind it; the items of a key may not be indented."""
        if not self.at_end:
            line = self.line
            if line.indent > indent or (items_too and line.indent == indent and _is_item(line.text)):
                return self.block(line.indent, depth + 1)
        return Scalar("", number)

    def _refuse_deeper(self, indent: int) -> None:
        while not self.at_end and self.line.indent > indent:
            self.complain("unexpected indentation")

    def _scalar(self, text: str, number: int) -> Node:
        if text == "[]" or text.startswith("[] #"):
            return Sequence((), number)
        for quoted in (_DOUBLE_QUOTED, _SINGLE_QUOTED):
            if match := quoted.fullmatch(text):
                escaped = quoted is _DOUBLE_QUOTED
                return Scalar(re.sub(r"\\(.)", r"\1", match[1]) if escaped else match[1].replace("''", "'"), number)
        if text[0] in "\"'":
            self.problems.append(f"line {number}: unterminated quotes, or text after the closing quote")
        elif text[0] in _SPECIAL:
            self.problems.append(f"line {number}: text that starts with {text[0]} must be quoted")
        elif _KEY.search(text) or ": " in text:
            self.problems.append(f"line {number}: text that contains a colon followed by a space must be quoted")
        text = _COMMENT.sub("", text)
        return Scalar("" if text in ("~", "null") else text, number)


def _is_item(text: str) -> bool:
    return text == "-" or text.startswith("- ")


def _shown(text: str) -> str:
    """The beginning only: it may be a secret."""
    return repr(text[:4] + "…" if len(text) > 4 else text)
