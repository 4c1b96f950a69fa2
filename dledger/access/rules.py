"""Accounts and their permissions, in the format of RocketMQ's ``plain_acl.yml``. Pure: text in, rules out.

Reading is strict, because a mistake here opens or closes something: unknown names, unknown permissions and weak keys
are problems, all of which are reported at once, with their lines. It differs from RocketMQ on purpose in two points:
RocketMQ takes an invalid permission for DENY; and an account's ``whiteRemoteAddress`` here replaces the signature only,
not the permissions (there it allows everything).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Final, TypeVar

from dledger.access import plain_yaml
from dledger.access.addresses import AddressPattern, parse_patterns
from dledger.access.plain_yaml import Node, Scalar, Sequence, YamlEntry
from dledger.errors import ConfigError

SECRET_CHARS_MIN: Final = 8
ACCOUNTS_MAX: Final = 10_000
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
    root = plain_yaml.parse(text)
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
        if len(accounts) > ACCOUNTS_MAX:
            self.problems.append(f"{len(accounts)} accounts exceed the limit of {ACCOUNTS_MAX}")
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
        if not isinstance(node, plain_yaml.Mapping):
            self._complain(node.line, f"{what} must consist of `name: value` lines, for example `{known[0]}: …`")
            return ()
        for entry in node.entries:
            if entry.key not in known:
                self._complain(entry.line, f"unknown name {entry.key!r} in {what}: expected one of {', '.join(known)}")
        return node.entries

    def _items(self, entry: YamlEntry) -> tuple[Node, ...]:
        if isinstance(entry.value, Sequence):
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
    if len(text) < SECRET_CHARS_MIN:
        raise ValueError(f"a secret key must have at least {SECRET_CHARS_MIN} characters, this one has {len(text)}")
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
