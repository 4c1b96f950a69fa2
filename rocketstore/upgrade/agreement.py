"""Finds differences of a group's future members besides their logs: in settings, and in topics, groups and offsets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from dledger.errors import InvalidRequestError
from dledger.store.fs import read_whole
from rocketstore.broker_config import BrokerConfig
from rocketstore.state.changes import Change, CommitOffsets, PutGroup, PutTopic, SetDelayOffsets
from rocketstore.state.rocketmq_files import CONSUMER_OFFSETS, DELAY_OFFSETS, GROUPS, TOPICS, changes_in
from rocketstore.upgrade.members import OldMember

STATE_FILES: Final = (TOPICS, GROUPS, CONSUMER_OFFSETS, DELAY_OFFSETS)
_NAMED_MAX: Final = 3

_Entries = Mapping[str, object]

_MUST_AGREE: Final[Mapping[str, Callable[[BrokerConfig], object]]] = {
    "mappedFileSizeCommitLog": lambda one: one.store.mapped_file_size_commit_log,
    "messageDelayLevel": lambda one: " ".join(one.store.message_delay_level.split()),
    "brokerClusterName": lambda one: one.cluster_name,
    "brokerName": lambda one: one.name,
    "enableDLegerCommitLog": lambda one: one.dledger is not None,
    "dLegerGroup": lambda one: None if one.dledger is None else one.dledger.group,
    "dLegerPeers": lambda one: (
        None if one.dledger is None else ";".join(sorted(f"{m.node_id}-{m.address}" for m in one.dledger.members))
    ),
}


def setting_problems(members: Sequence[OldMember]) -> list[str]:
    """Where the conf files of a group's members contradict each other, or their own log files."""
    with_conf = [(one, one.config) for one in members if one.config is not None]
    found = []
    for setting, read in _MUST_AGREE.items():
        values = [(member, read(config)) for member, config in with_conf]
        if len({value for _, value in values}) > 1:
            said = ", ".join(f"{member.conf_file} has {_text(value)}" for member, value in values)
            found.append(f"{setting} must be the same on all members: {said}")
    ids = [(member, config.dledger.node_id) for member, config in with_conf if config.dledger is not None]
    for number, (member, node_id) in enumerate(ids):
        found += [
            f"{member.conf_file} and {other.conf_file} both have dLegerSelfId={node_id}"
            for other, other_id in ids[:number]
            if node_id == other_id
        ]
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def state_differences(member: OldMember, reference: OldMember) -> list[str]:
    """Differences of ``member``'s topics, groups and offsets from ``reference``'s, in both directions.

    One sentence for each file. Raises ``OSError``.
    """
    found = []
    for name in STATE_FILES:
        try:
            ours, theirs = (_entries(one.config_dir, name) for one in (member, reference))
        except InvalidRequestError as error:
            found.append(f"{member.name} or {reference.name}: {error}")
            continue
        if said := _apart(ours, theirs, reference.name):
            found.append(f"{member.name}: config/{name} {said}")
    return found


def _entries(config_dir: Path, name: str) -> _Entries:
    """A file's contents by what they are about; empty without one. Raises ``InvalidRequestError``, ``OSError``."""
    for path in (config_dir / name, config_dir / f"{name}.bak"):
        try:
            body = read_whole(path)
        except FileNotFoundError:
            continue
        return {key: value for one in changes_in(name, body).changes for key, value in _of_change(one)}
    return {}


def _of_change(change: Change) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    match change:
        case PutTopic(topic):
            found = [(topic.name, topic)]
        case PutGroup(group):
            found = [(f"{group.name} (settings)", group)]
        case CommitOffsets(name, offsets):
            found = [(f"group {name}, {one.topic}-{one.queue_id}", one.offset) for one in offsets]
            found = found or [(f"group {name}", None)]
        case SetDelayOffsets(levels):
            found = [(f"level {level}", offset) for level, offset in levels]
    return found


def _apart(ours: _Entries, theirs: _Entries, reference: str) -> str:
    """The difference of two files; empty if there is none."""
    behind: list[str] = []
    ahead: list[str] = []
    other: list[str] = []
    for key in sorted(ours.keys() & theirs.keys()):
        one, two = ours[key], theirs[key]
        if one == two:
            continue
        if isinstance(one, int) and isinstance(two, int):
            (behind if one < two else ahead).append(key)
        else:
            other.append(key)
    parts = [
        f"{what} {_some(keys)}"
        for what, keys in (
            ("lacks", sorted(theirs.keys() - ours.keys())),
            ("has more:", sorted(ours.keys() - theirs.keys())),
            ("is behind for", behind),
            ("is ahead for", ahead),
            ("differs for", other),
        )
        if keys
    ]
    return f"is not as on {reference}: it {'; '.join(parts)}" if parts else ""


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - _NAMED_MAX
    return ", ".join(keys[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
