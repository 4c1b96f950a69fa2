"""``docs/configuration.md``: every setting of a node and of a broker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final

import click

from dledger import settings as node_settings
from dledger.config import ServerConfig
from dledger.errors import ConfigError
from dledger.setting_sources import SettingTarget
from dledger.values import Unit, parse_percentage
from rocketstore import settings as broker_settings
from rocketstore.broker_config import BrokerConfig
from rocketstore.settings import DLEDGER_ONLY, PLAIN_ONLY, SERVE_ONLY
from tools.docs_reference import commands, name_server, rocketmq_names
from tools.docs_reference.records import Field, default_text, fields_of

_TABLE: Final = "| setting | default | limits | read by | meaning |\n|---|---|---|---|---|\n"
_HEAD: Final = """# Settings

<!-- generated from the code by `make docs`; do not edit -->

Every setting of `dledger serve` (one node of a replicated log) and of `dledger broker` (a message broker, plain or
replicated), with its default, limits and aliases.

**Sources**, in order of precedence: flags (`--set NAME=VALUE` accepts any name below, and the most common settings have
their own flag), environment variables (`DLEDGER_` and the first name in capitals, such as `DLEDGER_NODE_ID`), a
properties file (`-c FILE`; RocketMQ's `broker.conf` works unchanged), the default.

**Values.** A *size* is a number of bytes, or `64k`, `16MiB`, `1g` (powers of 1024). A time in ms is a number, or
`500ms`, `30s`, `5m`, `2h`, `1d`. A *switch* is `true` or `false` (or `yes`, `on`, `1`; `no`, `off`, `0`). Lists are
separated by `;` or `,` (members by `;`, directories by `,`).

**Errors** are reported all at once, before anything is opened: each with its file and line, variable or flag. The
command then exits with code 2. An unknown name is an error, with a hint if a known one is similar. A name that only
RocketMQ or DLedger uses is a warning: [which, and what that means](#names-that-change-nothing).

**RocketMQ's files** are Java properties (`=`, `:` or a blank between name and value, `#` or `!` before a comment, `\\`
at the end of a line that continues, `\\uXXXX`), in UTF-8 or ISO-8859-1; `<!-- … -->`, with which some of RocketMQ 5
begin, is a comment. Values that RocketMQ silently reinterprets are reinterpreted here too, with a warning: an empty
number counts as not set, the last of two lines with one name counts, `diskMaxUsedSpaceRatio` is limited to 10 to 95 and
by `diskSpaceCleanForciblyRatio`, which is limited by `diskSpaceWarningLevelRatio`, and `registerNameServerPeriod` is
limited to 10 to 60 s. Blanks at the end of a value are dropped, and `yes`, `on` and `1` are true; RocketMQ reads these
as false.

**Columns.** The first names a setting, then its other names; *percent* marks a name that takes its value in percent.
*Read by* says who reads it: `serve`, every `broker`, or only a *plain* or a *replicated* one.

"""


@dataclass(frozen=True, slots=True)
class _Group:
    """A section: the settings of ``records`` (any, if empty) whose names match, except those of earlier groups."""

    title: str
    words: str
    records: tuple[str, ...] = ()
    names: str = ".*"


_GROUPS: Final = (
    _Group("TLS", "Encryption, and proof of identity for members and clients.", (), r"tls_.*|.*_tls(_.*)?|insecure"),
    _Group(
        "Access", "Which clients may do what.", (), r"acl_.*|account_share_.*|access_(?!message).*|.*_acl.*|audit.*"
    ),
    _Group("Metrics and logs", "What a server reports about itself.", (), r"metrics?_.*|.*_metrics?_.*|log_.*|trac.*"),
    _Group(
        "The group and its addresses",
        "The members of the group and their addresses. A node listens on two ports: one for the other members, one "
        "for clients. All members begin with the same list; afterwards members are changed while the group runs "
        "([operating.md](operating.md#change-the-members)).",
        ("ServerConfig",),
    ),
    _Group(
        "Elections",
        "How fast a dead leader is replaced, and how long a slow one is tolerated. The timers should be the "
        "same on all members; [operating.md](operating.md#timers) says how to choose them.",
        ("ElectionConfig",),
    ),
    _Group(
        "Replication",
        "How much may be in flight, and how long to wait for it.",
        ("ReplicationConfig",),
    ),
    _Group(
        "Large reads",
        "How much of a node's capacity Spark jobs and audits may use, so that they do not disturb its appends.",
        ("BulkReadConfig",),
    ),
    _Group(
        "Retention and full disks",
        "When old segments are removed, and what happens when the disk is full. They apply to `dledger serve`, and to "
        "the log of a replicated broker, where they are derived from RocketMQ's settings.",
        ("StoreConfig",),
        r"retention.*|delete_.*|disk_.*|force_clean|clean_.*|follower_keep_bytes",
    ),
    _Group(
        "Durability and memory",
        "When an entry counts as stored, and how much is verified at startup.",
        ("StoreConfig",),
        r"flush_.*|checkpoint_.*|warm_.*|recovery_.*",
    ),
    _Group(
        "Files of the log",
        "Their location and sizes. Sizes cannot be changed for an existing log: a node with other sizes does not start "
        "on its directory, and the other members refuse it.",
        ("StoreConfig",),
    ),
    _Group(
        "Broker: identity and addresses",
        "A broker's name, where it listens, and the address it gives to clients.",
        ("BrokerConfig", "MessageStoreConfig"),
        r"cluster_name|broker_.*|listen_.*|(grpc|vip)_port|namesrv_addr|ha_listen_port|advertised.*"
        r"|enable_dledger.*",
    ),
    _Group(
        "Broker: topics, sending and pulling",
        "What clients may create implicitly, and limits on waiting requests.",
        ("BrokerConfig",),
    ),
    _Group(
        "Broker: retention and full disks",
        "As above, under RocketMQ's names: percent instead of ratios.",
        ("MessageStoreConfig",),
        r"delete_.*|file_reserved.*|disk_.*|clean_.*",
    ),
    _Group(
        "Broker: flushing",
        "When a message counts as stored. Most apply only to a plain broker; the log of a replicated one is flushed by "
        "its node, in groups, before acknowledging.",
        ("MessageStoreConfig",),
        r"flush_.*|commit_.*|sync_flush.*|slave_timeout|transient.*|fast_fail.*|os_page.*",
    ),
    _Group(
        "Broker: reading, queries, delay levels",
        "How much one response may contain, and what is indexed.",
        ("MessageStoreConfig",),
        r"message_.*|max_(?!message).*|default_query.*|access_.*|offset_check.*",
    ),
    _Group(
        "Broker: files of the message store",
        "Where messages, queues and the index are.",
        ("MessageStoreConfig",),
    ),
    _Group("More settings", "Everything else."),
)


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One setting as the reference shows it."""

    field: Field
    names: tuple[str, ...]
    """Its aliases, with notes."""
    readers: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its own name."""
        return self.field.name


def entries() -> list[SettingEntry]:
    """Every setting."""
    follows = _what_follows()
    node = fields_of(ServerConfig(), lambda one: one.problems())
    found = [_node_entry(one, follows) for one in node]
    plain = list(fields_of(BrokerConfig(), lambda one: one.problems(), without=frozenset({"dledger"})))
    replicated = fields_of(
        BrokerConfig(dledger=ServerConfig()), lambda one: one.problems(), without=frozenset({"dledger"})
    )
    of_both = {one.name for one in found}  # a plain broker has no node's record to keep these in
    for one, also in zip(plain, replicated, strict=True):
        if one.name in of_both:
            continue
        limits = tuple(dict.fromkeys((*one.limits, *also.limits)))
        found.append(_broker_entry(replace(one, limits=limits)))
    return found


def text() -> str:
    """The whole document."""
    left = entries()
    groups: list[tuple[_Group, list[SettingEntry]]] = []
    for group in _GROUPS:
        chosen = [one for one in left if _fits(group, one)]
        left = [one for one in left if one not in chosen]
        groups.append((group, chosen))
    # Settings common to nodes and brokers are matched first, but shown after the groups above.
    front = {"TLS", "Access", "Metrics and logs", "More settings"}
    groups = [one for one in groups if one[0].title not in front] + [one for one in groups if one[0].title in front]
    groups = [one for one in groups if one[1]]
    parts = [_HEAD]
    for group, chosen in groups:
        parts += [f"## {group.title}\n\n{group.words}\n\n{_TABLE}", *map(_row, chosen), "\n"]
    parts += [name_server.section(), _variables(), rocketmq_names.section()]
    return "".join(parts)


def _fits(group: _Group, one: SettingEntry) -> bool:
    in_record = not group.records or one.field.record in group.records
    return in_record and re.fullmatch(group.names, one.name) is not None


# --- one setting -----------------------------------------------------------------------------------------------------


def _node_entry(field: Field, follows: Mapping[str, list[str]]) -> SettingEntry:
    in_broker = broker_settings.TARGETS.get(field.name)
    readers = ["serve"]
    notes: list[str] = []
    if field.name in SERVE_ONLY:
        notes.append("A broker ignores it, with a warning: it serves its log at its own ports.")
    elif in_broker is not None and in_broker.setting == field.name:
        readers.append("replicated" if field.name in DLEDGER_ONLY else "broker")
    elif in_broker is not None:
        notes.append(f"For `broker` this name means `{in_broker.setting}`.")
    if field.name in follows and field.name not in SERVE_ONLY:
        origin = " and ".join(f"`{one}`" for one in follows[field.name])
        unless = ", unless set" if len(readers) > 1 else ""
        notes.append(f"In a replicated broker it is derived from {origin}{unless}.")
    return SettingEntry(field, _names(field, node_settings.TARGETS), tuple(readers), tuple(notes))


def _broker_entry(field: Field) -> SettingEntry:
    reader = "broker"
    notes: list[str] = []
    if field.name in PLAIN_ONLY:
        reader = "plain"
        notes.append("A replicated broker ignores it, with a warning.")
    return SettingEntry(field, _names(field, broker_settings.TARGETS), (reader,), tuple(notes))


def _names(field: Field, targets: Mapping[str, SettingTarget]) -> tuple[str, ...]:
    found = []
    for name, target in targets.items():
        if target.setting == field.name and name != field.name:
            notes = ["percent"] if target.parse is parse_percentage else []
            if targets is node_settings.TARGETS and broker_settings.TARGETS[name].setting != field.name:
                notes.append("`serve` only")
            found.append(f"`{name}`" + (f" ({', '.join(notes)})" if notes else ""))
    return tuple(found)


def _unit(field: Field) -> str:
    if field.kind == "bool":
        return "switch"
    return "size" if field.unit is Unit.BYTES else field.unit or ""


def _row(entry: SettingEntry) -> str:
    field = entry.field
    limits = [_limit(entry.name, one) for one in field.limits]
    if isinstance(field.default, Enum):
        limits.insert(0, " or ".join(f"`{one.value}`" for one in type(field.default)))
    cells = (
        " ".join((f"`{entry.name}`", *entry.names)),
        default_text(field, _unit(field)),
        "; ".join(limits),
        ", ".join(entry.readers),
        " ".join((field.meaning.replace("``", "`"), *entry.notes)),
    )
    return f"| {' | '.join(one.replace('|', chr(92) + '|') for one in cells)} |\n"


def _limit(name: str, sentence: str) -> str:
    return sentence.removeprefix(name).removeprefix(":").strip()


# --- what a replicated broker's node takes from the broker's settings ------------------------------------------------

_GROUP_FLAGS: Final = {
    "enableDLegerCommitLog": "true",
    "dLegerGroup": "g",
    "dLegerSelfId": "n0",
    "dLegerPeers": "n0-127.0.0.1:20911;n1-127.0.0.1:20912;n2-127.0.0.1:20913",
}


def _what_follows() -> dict[str, list[str]]:
    """Maps each node setting to the broker settings that change it, found by changing those one at a time."""
    base = _node_of({})
    found: dict[str, list[str]] = {}
    for field in fields_of(BrokerConfig(), lambda one: one.problems(), without=frozenset({"dledger"})):
        if field.name in node_settings.TARGETS or field.name == "enable_dledger_commit_log":
            continue
        for value in _other_values(field):
            try:
                changed = _node_of({field.name: value})
            except ConfigError:
                continue
            for name in _differences(base, changed):
                if field.name not in found.setdefault(name, []):
                    found[name].append(field.name)
    return found


def _node_of(flags: Mapping[str, str]) -> ServerConfig:
    config, _ = broker_settings.load_broker_settings(None, {}, {**_GROUP_FLAGS, **flags})
    if config.dledger is None:
        raise ConfigError(["not replicated"])
    return config.dledger


def _other_values(field: Field) -> tuple[str, ...]:
    value = field.default
    if isinstance(value, bool):
        return (str(not value).lower(),)
    if isinstance(value, int):
        return (str(value + 1),)
    if isinstance(value, Enum):
        return tuple(str(one.value) for one in type(value))
    if isinstance(value, Path):
        return ("/other",)
    return ("05",) if isinstance(value, str) else ()


def _differences(one: object, other: object) -> Iterator[str]:
    if not is_dataclass(one):
        return
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if is_dataclass(mine):
            yield from _differences(mine, theirs)
        elif mine != theirs:
            yield field.name


# --- the rest --------------------------------------------------------------------------------------------------------


def _without_variable(words: str) -> str:
    return re.sub(r" \(also DLEDGER_\w+\)", "", re.sub(r"\(also DLEDGER_\w+; ", "(", words))


def _variables() -> str:
    words: dict[str, str] = {}
    for command, _ in commands.walk():
        for parameter in command.params:
            if isinstance(parameter, click.Option) and isinstance(parameter.envvar, str) and not parameter.hidden:
                words.setdefault(
                    parameter.envvar, f"`{parameter.opts[-1]}` | {_without_variable(parameter.help or '')}"
                )
    rows = "".join(f"| `{name}` | {words[name]} |\n" for name in sorted(words))
    return (
        "\n## Variables of the command line\n\nThese stand for options of commands, and are not settings of a server:"
        f"\n\n| variable | option | meaning |\n|---|---|---|\n{rows}"
    )
