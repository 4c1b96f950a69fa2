"""Accounts and their permissions, in the format of RocketMQ's ``plain_acl.yml``, and the file that holds them.

Reading is strict, because a mistake here opens or closes something: unknown names, unknown permissions and weak keys
are problems, all of which are reported at once, with their lines. It differs from RocketMQ on purpose in two points:
RocketMQ takes an invalid permission for DENY; and an account's ``whiteRemoteAddress`` here replaces the signature only,
not the permissions (there it allows everything).

PyYAML reads the YAML subset of ``plain_acl.yml``: text in, texts with their lines out. ``parse_yaml`` takes events and
builds no objects, so that the key ``00123456`` keeps its zeros, ``no`` is a name and every value knows its line.
Features that could make a small file large (aliases) or hide meaning (tags) are refused, and depth and nodes are
limited; ``RulesFile`` limits the bytes.

The file is read safely, and reloaded when it changes. It holds secrets, so nobody else may have access: a file that
others may read, or that its group may write, is refused instead of only causing a warning, because a warning at a
server's start is read when it is too late. Its group may read it, which is how Kubernetes provides secrets
(``fsGroup``, ``defaultMode: 0440``).
"""

from __future__ import annotations

import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import yaml

from dledger.access.addresses import AddressPattern, parse_patterns
from dledger.access.audit import AuditLog
from dledger.errors import ConfigError, told

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
class YamlSequence:
    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """One key of a mapping, its line, and its value."""

    key: str
    line: int
    value: Node


@dataclass(frozen=True, slots=True)
class YamlMapping:
    """Keys and values in the order of the text, without duplicate keys."""

    entries: tuple[YamlEntry, ...]
    line: int


Node = Scalar | YamlSequence | YamlMapping


def parse_yaml(text: str) -> Node:
    """The text's single value, for an empty text an empty mapping. Raises ``ConfigError`` naming the bad lines."""
    if hidden := _HIDDEN_BREAK.search(text):
        line = len(_LINE_BREAK.findall(text, 0, hidden.start())) + 1
        what = f"U+{ord(hidden[0]):04X} is a line break in YAML but not in most editors: remove it"
        raise ConfigError([f"line {line}: {what}"])
    reader = _YamlReader(text)
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


class _YamlReader:
    """Builds nodes from events; ``problems`` are those that do not end reading."""

    def __init__(self, text: str) -> None:
        self.problems: list[str] = []
        self._events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
        self._nodes = 0

    def document(self) -> Node:
        node: Node = YamlMapping((), 1)
        documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _refused(event, "a second document is not supported")
            elif isinstance(event, yaml.NodeEvent):
                node = self._node(event, 0)
        if isinstance(node, Scalar) and not node.text:
            return YamlMapping((), 1)  # only comments
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
            return YamlSequence(tuple(self._node(one, depth + 1) for one in self._until(yaml.SequenceEndEvent)), line)
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(line, depth)
        if not isinstance(event, yaml.ScalarEvent):
            raise _refused(event, "invalid YAML")
        is_null = event.implicit[0] and event.value in ("~", "null")  # unquoted: 'null' in quotes is text
        return Scalar("" if is_null else event.value, line)

    def _mapping(self, line: int, depth: int) -> YamlMapping:
        entries: dict[str, YamlEntry] = {}
        for event in self._until(yaml.MappingEndEvent):
            key = self._node(event, depth) if isinstance(event, yaml.ScalarEvent) else None
            if not isinstance(key, Scalar):
                raise _refused(event, "a name must be text")
            if key.text in entries:
                first = entries[key.text].line
                self.problems.append(f"line {key.line}: {key.text} is given twice (first on line {first})")
            entries[key.text] = YamlEntry(key.text, key.line, self._node(next(self._events), depth + 1))
        return YamlMapping(tuple(entries.values()), line)

    def _until(self, end: type[yaml.Event]) -> Iterator[yaml.Event]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield event


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _refused(event: yaml.Event, why: str) -> _RefusedError:
    return _RefusedError(f"line {_line(event)}: {why}")


_SECRET_CHARS_MIN: Final = 8
_ACCOUNTS_MAX: Final = 10_000
_ACCESS_KEY: Final = re.compile(r"[A-Za-z0-9_.@:+/=-]{1,128}")
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]{1,255}")
_Value = TypeVar("_Value")
RETRY_PREFIX: Final = "%RETRY%"
"""RocketMQ's retry topic of a group; the group's permission applies to it."""
DEAD_PREFIX: Final = "%DLQ%"
"""RocketMQ's topic of a group's dead letters; the group's permission applies unless the topic is named itself."""


class Permission(IntFlag):
    """RocketMQ's terms; ``DENY`` is the absence of the others."""

    DENY = 0
    PUB = 1
    """To write: send, append."""
    SUB = 2
    """To read: pull, query, follow."""


BOTH: Final = Permission.PUB | Permission.SUB
_BY_TEXT: Final = {
    "DENY": Permission.DENY,
    "PUB": Permission.PUB,
    "SUB": Permission.SUB,
    "PUB|SUB": BOTH,
    "SUB|PUB": BOTH,
}


def parse_permission(text: str) -> Permission:
    """``DENY``, ``PUB``, ``SUB`` or ``PUB|SUB``. Raises ``ValueError``; RocketMQ takes anything else for DENY."""
    found = _BY_TEXT.get("".join(text.split()).upper())
    if found is None:
        raise ValueError(f"invalid permission {text!r}: use DENY, PUB, SUB or PUB|SUB")
    return found


def permission_text(permission: Permission) -> str:
    """The notation of a permission."""
    return "|".join(one.name or "" for one in (Permission.PUB, Permission.SUB) if one & permission) or "DENY"


@dataclass(frozen=True, slots=True)
class Account:
    """One access key, its secret and its permissions. An administrator may do everything."""

    access_key: str
    secret: bytes = field(repr=False)
    addresses: tuple[AddressPattern, ...] = ()
    """Addresses from which it need not sign."""
    admin: bool = False
    default_topic: Permission = Permission.DENY
    default_group: Permission = Permission.DENY
    topics: Mapping[str, Permission] = field(default_factory=dict)
    groups: Mapping[str, Permission] = field(default_factory=dict)

    def topic(self, name: str) -> Permission:
        """Its permission on a topic (or on the log of that name)."""
        if self.admin:
            return BOTH
        if name.startswith(RETRY_PREFIX):
            return self.group(name.removeprefix(RETRY_PREFIX))
        if name.startswith(DEAD_PREFIX) and name not in self.topics:
            return self.group(name.removeprefix(DEAD_PREFIX))
        return self.topics.get(name, self.default_topic)

    def group(self, name: str) -> Permission:
        """Its permission as a member of a consumer group."""
        return BOTH if self.admin else self.groups.get(name, self.default_group)


@dataclass(frozen=True, slots=True)
class AccessRules:
    """All accounts by access key, and the addresses from which everything is allowed without one."""

    accounts: Mapping[str, Account] = field(default_factory=dict)
    trusted: tuple[AddressPattern, ...] = ()


def parse_rules(text: str) -> AccessRules:
    """Raises ``ConfigError`` with all problems; none of them quotes a secret."""
    root = parse_yaml(text)
    reader = _Reader()
    rules = reader.rules(root)
    if reader.problems:
        raise ConfigError(reader.problems)
    return rules


class _Reader:
    def __init__(self) -> None:
        self.problems: list[str] = []

    def rules(self, root: Node) -> AccessRules:
        accounts: dict[str, Account] = {}
        trusted: list[AddressPattern] = []
        lines: dict[str, int] = {}
        for entry in self._entries(root, "the file", ("globalWhiteRemoteAddresses", "accounts", "dataVersion")):
            match entry.key:
                case "globalWhiteRemoteAddresses":
                    for item in self._items(entry):
                        trusted += self._read(item, entry.key, parse_patterns) or ()
                case "accounts":
                    for item in self._items(entry):
                        account = self._account(item)
                        if account is None:
                            continue
                        if account.access_key in accounts:
                            self._complain(
                                item.line,
                                f"the accessKey {account.access_key} is given twice (first on line "
                                f"{lines[account.access_key]})",
                            )
                        accounts[account.access_key] = account
                        lines[account.access_key] = item.line
                case _:  # RocketMQ counts its own changes of the file here
                    pass
        if not accounts and not trusted and not self.problems:
            self.problems.append("no account and no white address: nobody would have access")
        if len(accounts) > _ACCOUNTS_MAX:
            self.problems.append(f"{len(accounts)} accounts exceed the limit of {_ACCOUNTS_MAX}")
        return AccessRules(accounts, tuple(trusted))

    def _account(self, node: Node) -> Account | None:
        values: dict[str, YamlEntry] = {one.key: one for one in self._entries(node, "an account", _FIELDS)}
        before = len(self.problems)

        def read(name: str, parse: Callable[[str], _Value], default: _Value) -> _Value:
            entry = values.get(name)
            if entry is None or (isinstance(entry.value, Scalar) and not entry.value.text):
                return default
            found = self._read(entry.value, name, parse)
            return default if found is None else found

        access_key = read("accessKey", _access_key, "")
        if not access_key and len(self.problems) == before:
            self._complain(node.line, "an account requires an accessKey")
        nowhere: tuple[AddressPattern, ...] = ()
        addresses = read("whiteRemoteAddress", parse_patterns, nowhere)
        secret = read("secretKey", _secret, b"")
        if not secret and len(self.problems) == before and not addresses:
            self._complain(node.line, f"account {access_key} requires a secretKey (or a whiteRemoteAddress)")
        account = Account(
            access_key,
            secret,
            addresses,
            read("admin", _true_or_false, default=False),
            read("defaultTopicPerm", parse_permission, Permission.DENY),
            read("defaultGroupPerm", parse_permission, Permission.DENY),
            self._permissions(values.get("topicPerms")),
            self._permissions(values.get("groupPerms")),
        )
        return account if access_key else None

    def _permissions(self, entry: YamlEntry | None) -> dict[str, Permission]:
        found: dict[str, Permission] = {}
        for item in self._items(entry) if entry is not None else ():
            pair = self._read(item, entry.key if entry is not None else "", _assignment)
            if pair is None:
                continue
            name, permission = pair
            if found.setdefault(name, permission) is not permission:
                self._complain(item.line, f"{name} is given twice, with different permissions")
        return found

    # --- parts ------------------------------------------------------------------------------------------------------

    def _entries(self, node: Node, what: str, known: tuple[str, ...]) -> tuple[YamlEntry, ...]:
        if not isinstance(node, YamlMapping):
            self._complain(node.line, f"{what} must consist of `name: value` lines, for example `{known[0]}: …`")
            return ()
        for entry in node.entries:
            if entry.key not in known:
                self._complain(entry.line, f"unknown name {entry.key!r} in {what}: expected one of {', '.join(known)}")
        return node.entries

    def _items(self, entry: YamlEntry) -> tuple[Node, ...]:
        if isinstance(entry.value, YamlSequence):
            return entry.value.items
        if not (isinstance(entry.value, Scalar) and not entry.value.text):
            self._complain(entry.line, f"{entry.key} is a list: write each item on its own line, starting with `- `")
        return ()

    def _read(self, node: Node, name: str, parse: Callable[[str], _Value]) -> _Value | None:
        if not isinstance(node, Scalar):
            self._complain(node.line, f"{name}: expected a single value")
            return None
        try:
            return parse(node.text)
        except ValueError as error:
            self._complain(node.line, f"{name}: {error}")
            return None

    def _complain(self, line: int, problem: str) -> None:
        self.problems.append(f"line {line}: {problem}")


_FIELDS: Final = (
    "accessKey",
    "secretKey",
    "whiteRemoteAddress",
    "admin",
    "defaultTopicPerm",
    "defaultGroupPerm",
    "topicPerms",
    "groupPerms",
)


def _access_key(text: str) -> str:
    if _ACCESS_KEY.fullmatch(text) is None:
        raise ValueError("an access key must be 1 to 128 letters, digits or characters from _.@:+/=-")
    return text


def _secret(text: str) -> bytes:
    if len(text) < _SECRET_CHARS_MIN:
        raise ValueError(f"a secret key must have at least {_SECRET_CHARS_MIN} characters, this one has {len(text)}")
    return text.encode()


def _true_or_false(text: str) -> bool:
    """Without the synonyms of settings: a guess must not make anyone an administrator."""
    if text.lower() not in ("true", "false"):
        raise ValueError(f"invalid boolean {text!r}: use true or false")
    return text.lower() == "true"


def _assignment(text: str) -> tuple[str, Permission]:
    name, equals, permission = (part.strip() for part in text.partition("="))
    if not equals or _NAME.fullmatch(name) is None:
        raise ValueError(f"invalid permission {text!r}: use NAME=PUB|SUB")
    return name, parse_permission(permission)


_log = logging.getLogger("dledger.access")

FILE_BYTES_MAX: Final = 8 << 20
PROBLEMS_MAX: Final = 50
"""The limit of problems reported per file."""
INTERVAL_S: Final = 1.0
_FORBIDDEN: Final = stat.S_IRWXO | stat.S_IWGRP
_Stamp = tuple[int, int, int, int]
MakeThread = Callable[[str, Callable[[], None]], threading.Thread]
"""Creates a supervised thread of that name: without supervision, withdrawn rights could stay in force unnoticed."""


def load_rules(file: Path) -> AccessRules:
    """Raises ``ConfigError`` with all problems of the file."""
    return _load(file)[0]


def _load(file: Path) -> tuple[AccessRules, _Stamp]:
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            raw = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError([f"{file}: cannot read the access rules: {error.strerror}"]) from error
    problems = []
    if not stat.S_ISREG(status.st_mode):
        problems.append(f"{file}: not a regular file")
    if status.st_mode & _FORBIDDEN:
        mode = stat.S_IMODE(status.st_mode)
        problems.append(
            f"{file}: mode {mode:04o} exposes its secrets to others: run `chmod 600 {file}` (0640 and 0440 are "
            "also accepted)"
        )
    if len(raw) > FILE_BYTES_MAX:
        problems.append(f"{file}: more than {FILE_BYTES_MAX} bytes")
    if problems:
        raise ConfigError(problems)
    try:
        rules = parse_rules(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file}: not valid UTF-8: {error.reason} at byte {error.start}"]) from None
    except ConfigError as error:
        raise ConfigError(_bounded(file, error.problems)) from None
    return rules, _stamp(status)


def _bounded(file: Path, problems: Sequence[str]) -> list[str]:
    """Problems quote the file, and a large one may have a million of them."""
    shown = [f"{file}: {told(problem)}" for problem in problems[:PROBLEMS_MAX]]
    if len(problems) > PROBLEMS_MAX:
        shown.append(f"{file}: {len(problems) - PROBLEMS_MAX} more problems")
    return shown


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode


class RulesFile:
    """Reads the file on creation (raising ``ConfigError``); from ``start`` to ``close`` a thread reports new rules.

    Problems of new rules are logged, each once per change, and the old rules stay. The thread reads the file itself,
    because a disk may keep it waiting.
    """

    def __init__(self, file: Path, *, interval_s: float = INTERVAL_S) -> None:
        self.rules, self._loaded = _load(file)
        self._file = file
        self._interval_s = interval_s
        self._told: _Stamp | str = ""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, thread: MakeThread, name: str, changed: Callable[[AccessRules], None], audit: AuditLog) -> None:
        """Call ``changed`` on the thread for every good change from now on; has the audit log write its counts."""
        self._thread = thread(f"dledger-access-{name}", partial(self._run, changed, audit))
        self._thread.daemon = True
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, changed: Callable[[AccessRules], None], audit: AuditLog) -> None:
        while not self._stop.wait(self._interval_s):
            if self.look():
                changed(self.rules)
            audit.flush()
        audit.flush()

    def look(self) -> bool:
        """Read the file if it differs from the one in force; returns whether ``rules`` are new."""
        try:
            stamp = _stamp(self._file.stat())
            if stamp in (self._loaded, self._told):
                return False
            rules, loaded = _load(self._file)
        except (OSError, ConfigError) as error:
            self._complain(error)
            return False
        self.rules, self._loaded, self._told = rules, loaded, ""
        _log.info("%s: reloaded access rules: %d accounts", self._file, len(rules.accounts))
        return True

    def _complain(self, error: OSError | ConfigError) -> None:
        try:
            told: _Stamp | str = _stamp(self._file.stat())
        except OSError as missing:
            told = str(missing)
        if told == self._told:
            return
        self._told = told
        problems = error.problems if isinstance(error, ConfigError) else (f"{self._file}: {error.strerror}",)
        for problem in problems:
            _log.error("cannot reload access rules, keeping the old ones: %s", problem)
