"""The YAML subset of ``plain_acl.yml``, read with PyYAML: text in, texts with their lines out.

It reads events and builds no objects, so that the key ``00123456`` keeps its zeros, ``no`` is a name and every value
knows its line. Features that could make a small file large (aliases) or hide meaning (tags) are refused, and depth and
nodes are limited; ``rules_file`` limits the bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import yaml

from dledger.errors import ConfigError

DEPTH_MAX: Final = 8
NODES_MAX: Final = 1_000_000

_LOADER: Final = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # ten times as fast, where libyaml is installed
_UNPRINTABLE: Final = yaml.reader.Reader.NON_PRINTABLE
_QUOTED = re.compile(r"'(?!<)[^']{2,}'")
_LINE_BREAK = re.compile(r"\r\n?|\n")
_NO_CHARACTER = re.compile(r"\\U(?!000|0010)[0-9A-Fa-f]{8}")
_HIDDEN_BREAK = re.compile(r"[\x85\u2028\u2029]")
"""Line breaks in YAML, but in few editors: text after one may look like the rest of a comment."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A text; empty for null."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """One key of a mapping, its line, and its value."""

    key: str
    line: int
    value: Node


@dataclass(frozen=True, slots=True)
class Mapping:
    """Keys and values in the order of the text, without duplicate keys."""

    entries: tuple[YamlEntry, ...]
    line: int


Node = Scalar | Sequence | Mapping


def parse(text: str) -> Node:
    """The text's single value, for an empty text an empty mapping. Raises ``ConfigError`` naming the bad lines."""
    if hidden := _HIDDEN_BREAK.search(text):
        line = len(_LINE_BREAK.findall(text, 0, hidden.start())) + 1
        what = f"U+{ord(hidden[0]):04X} is a line break in YAML but not in most editors: remove it"
        raise ConfigError([f"line {line}: {what}"])
    reader = _Reader(text)
    try:
        node = reader.document()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        reader.problems.append(f"line {line}: {_QUOTED.sub('…', error.problem or 'invalid YAML')}")
    except yaml.reader.ReaderError:  # its position is in characters or, with libyaml, in bytes
        printable = _UNPRINTABLE.split(text, maxsplit=1)[0]
        reader.problems.append(f"line {len(_LINE_BREAK.findall(printable)) + 1}: unprintable character")
    except (ValueError, OverflowError):  # from the loader without libyaml, which does not check escapes
        before = _NO_CHARACTER.split(text, maxsplit=1)[0]
        reader.problems.append(f"line {len(_LINE_BREAK.findall(before)) + 1}: invalid Unicode escape")
    except _RefusedError as error:
        reader.problems.append(str(error))
    if reader.problems:
        raise ConfigError(reader.problems)
    return node


class _RefusedError(Exception):
    """Raised for valid YAML that is not supported."""


class _Reader:
    """Builds nodes from events; ``problems`` are those that do not end reading."""

    def __init__(self, text: str) -> None:
        self.problems: list[str] = []
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
        self._nodes = 0

    def document(self) -> Node:
        node: Node = Mapping((), 1)
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _refused(event, "a second document is not supported")
            elif isinstance(event, yaml.NodeEvent):
                node = self._node(event, 0)
        if isinstance(node, Scalar) and not node.text:
            return Mapping((), 1)  # only comments
        return node

    def _node(self, event: yaml.Event, depth: int) -> Node:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refused(event, "anchors and aliases are not supported: quote text that starts with & or *")
        if getattr(event, "tag", None) is not None:
            raise _refused(event, "tags are not supported: quote text that starts with !")
        self._nodes += 1
        if self._nodes > NODES_MAX:
            raise _refused(event, f"more than {NODES_MAX} values")
        if depth > DEPTH_MAX:
            raise _refused(event, "nested too deeply")
        line = _line(event)
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(tuple(self._node(one, depth + 1) for one in self._until(yaml.SequenceEndEvent)), line)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(line, depth)
        if not isinstance(event, yaml.ScalarEvent):
            raise _refused(event, "invalid YAML")
        is_null = event.implicit[0] and event.value in ("~", "null")  # unquoted: 'null' in quotes is text
        return Scalar("" if is_null else event.value, line)

    def _mapping(self, line: int, depth: int) -> Mapping:
        entries: dict[str, YamlEntry] = {}
        for event in self._until(yaml.MappingEndEvent):
            key = self._node(event, depth) if isinstance(event, yaml.ScalarEvent) else None
            if not isinstance(key, Scalar):
                raise _refused(event, "a name must be text")
            if key.text in entries:
                first = entries[key.text].line
                self.problems.append(f"line {key.line}: {key.text} is given twice (first on line {first})")
            entries[key.text] = YamlEntry(key.text, key.line, self._node(next(self._events), depth + 1))
        return Mapping(tuple(entries.values()), line)

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _refused(event: yaml.Event, why: str) -> _RefusedError:
    return _RefusedError(f"line {_line(event)}: {why}")
