"""Reads and writes the files in which RocketMQ's brokers keep their state, as they do.

They carry a store directory from RocketMQ to here and back. Here the log is authoritative: the files are read when a
directory is new, and again when RocketMQ has written them since (``newer_changes``); they are written every few seconds
and at a stop, so that RocketMQ finds current topics, consumer offsets and delay progress.

Each has a ``.bak`` with its previous contents: RocketMQ falls back on it if the file is missing or unreadable, and so
do we. Our files contain a mark that RocketMQ ignores and never writes, and a checksum; we never read our own files
back, unless somebody has edited them, which the checksum shows: a plain broker takes that over. A file without the mark
is RocketMQ's. Both are news unless they have the very contents that were taken over already (``sums``). The times of
the files say nothing: a copy of a store has new ones. A backup whose file is missing is no news either if it was there
when the file was taken over, or is what was taken over: then somebody has deleted the file, and the log counts.

RocketMQ's brokers store what clients tell them, such as an offset of -1. A value that cannot be taken over is left out
by itself, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from dledger.errors import InvalidRequestError
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.state.attributes import (
    MESSAGE_TYPE,
    RESERVE_TIME,
    RETENTION,
    TopicAttributes,
    policy_of_rocketmq,
    rocketmq_policy,
)
from rocketstore.state.changes import (
    OFFSETS_MAX,
    Change,
    CommitOffsets,
    DeleteTopic,
    GroupConfig,
    PopRows,
    PutGroup,
    PutTopic,
    QueueOffset,
    SetDelayOffsets,
    TopicConfig,
)
from rocketstore.state.tables import Tables
from rocketstore.types import HIDDEN_TOPICS

TOPICS: Final = "topics.json"
GROUPS: Final = "subscriptionGroup.json"
CONSUMER_OFFSETS: Final = "consumerOffset.json"
DELAY_OFFSETS: Final = "delayOffset.json"
_MARK: Final = "writtenBy"
_OURS: Final = "dledger"
_SUM: Final = "checksum"
_NEW_TOPIC: Final[Mapping[str, object]] = {"order": False, "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0}
_NEW_GROUP: Final[Mapping[str, object]] = {
    "brokerId": 0,
    "consumeBroadcastEnable": True,
    "consumeEnable": True,
    "consumeFromMinEnable": True,
    "consumeMessageOrderly": False,
    "notifyConsumerIdsChangedEnable": True,
    "retryMaxTimes": 16,
    "retryQueueNums": 1,
    "whichBrokerWhenConsumeSlowly": 1,
}
_POLICY: Final = "groupRetryPolicy"
_Content = Mapping[str, Any]  # Any: values of any shape, whose use raises what the reader catches

_BARE_KEY: Final = re.compile(r"([{,]\s*)(-?\d+)(\s*:)")
_NONE: Final = -1
"""RocketMQ's "no offset"."""
_SKIPPED_TOLD_MAX: Final = 3
_UNUSABLE: Final = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, InvalidRequestError)
_log = logging.getLogger("rocketstore")


class FileChanges(NamedTuple):
    """The content of one file."""

    changes: tuple[Change, ...]
    skipped: str = ""
    """The part that cannot be taken over, for people; empty if everything can."""


class Imported(NamedTuple):
    """The content of several files."""

    changes: tuple[Change, ...] = ()
    sums: Mapping[str, str] = {}
    """SHA-256 of the contents of each of RocketMQ's files, by name, and of those of their backups that there were."""

    @property
    def names(self) -> list[str]:
        return [name for name in self.sums if name in _READERS]


class _Found(NamedTuple):
    """The contents of a file, their SHA-256, and whether it is the backup of one that cannot be read."""

    content: _Content
    sum: str
    is_backup: bool


class _Skipped:
    """Values that are left out."""

    def __init__(self) -> None:
        self._count = 0
        self._told: list[str] = []

    def add(self, what: str) -> None:
        """One of them, and why."""
        self._count += 1
        if len(self._told) < _SKIPPED_TOLD_MAX:
            self._told.append(what)

    @property
    def text(self) -> str:
        """For people; empty if nothing is left out."""
        more = self._count - len(self._told)
        return "; ".join(self._told) + (f"; and {more:,} more" if more else "")


_Skip = Callable[[str], None]


def read_rocketmq_files(directory: Path) -> Imported:
    """The changes that create the tables in these files. A file with foreign contents is logged and skipped."""
    found = {name: one for name in _READERS if (one := _news(directory / name, {})) is not None}
    return _joined((), found)


def newer_changes(
    directory: Path, taken: Mapping[str, str], known: tuple[Change, ...], *, edits: bool = False
) -> Imported | None:
    """``known`` plus what RocketMQ has written since, or, with ``edits``, somebody by hand; None if there is nothing.

    ``taken`` are the sums of those of its files that ``known`` already contains. A file written by RocketMQ replaces
    everything known about its subject: topics missing in it were deleted there.
    """
    found = {name: one for name in _READERS if (one := _news(directory / name, taken, edits=edits)) is not None}
    if not found:
        return None
    replaced = tuple(kind for name, kinds in _REPLACED.items() if name in found for kind in kinds)
    kept = [change for change in known if isinstance(change, DeleteTopic) or not isinstance(change, replaced)]
    if CONSUMER_OFFSETS in found:  # which says nothing of groups without offsets
        kept += [CommitOffsets(one.group, ()) for one in known if isinstance(one, CommitOffsets)]
    return _joined(kept, found, taken)


def written_by_rocketmq(directory: Path) -> list[str]:
    """The names of the files here that RocketMQ wrote last."""
    return [name for name in _READERS if _foreign(directory / name) is not None]


def edited_by_hand(directory: Path) -> list[str]:
    """The names of the files here that were changed after this broker had written them."""
    contents = {name: _content(directory / name) for name in _READERS}
    return [name for name, found in contents.items() if found is not None and _is_edited(found.content)]


def changes_in(name: str, body: bytes) -> FileChanges:
    """The changes that create what one of these files says, also as a master of RocketMQ answers it to its slaves.

    Raises ``InvalidRequestError`` for other contents.
    """
    try:
        return _read(name, _parse(body.decode()))
    except _UNUSABLE as error:
        raise InvalidRequestError(f"{name}: unusable contents: {error!r}") from error


def impossible_topics(directory: Path) -> list[str]:
    """Topics of ``topics.json`` that cannot be created here, such as those without queues."""
    found = _content(directory / TOPICS)
    topics = None if found is None else found.content.get("topicConfigTable")
    if not isinstance(topics, dict):
        return []
    return sorted(name for name, one in topics.items() if name not in HIDDEN_TOPICS and not _is_possible(name, one))


def batch_topics(directory: Path) -> set[str]:
    """Topics of ``topics.json`` with queues of batches, also once they were taken over."""
    found = _content(directory / TOPICS)
    topics = None if found is None else found.content.get("topicConfigTable")
    return {name for name, one in topics.items() if _is_of_batches(one)} if isinstance(topics, dict) else set()


def _joined(known: Sequence[Change], found: Mapping[str, Imported], taken: Mapping[str, str] | None = None) -> Imported:
    changes = (*known, *(change for one in found.values() for change in one.changes))
    sums = dict(taken or {})
    for one in found.values():
        sums |= one.sums
    return Imported(changes, sums)


def once_replaced(taken: Mapping[str, str]) -> dict[str, str]:
    """The rest of ``taken`` once our files have replaced those: their backups."""
    backups = {_backup_of(name): one for name, one in taken.items() if name in _READERS}
    return {name: one for name, one in taken.items() if name not in _READERS} | backups


def _foreign(path: Path) -> _Found | None:
    """The contents that RocketMQ wrote: our files have the mark."""
    found = _content(path)
    return None if found is None or found.content.get(_MARK) == _OURS else found


def _is_edited(content: _Content) -> bool:
    """Earlier versions wrote no checksum: nobody knows."""
    return content.get(_MARK) == _OURS and _SUM in content and content[_SUM] != _sum_of(content)


def _sum_of(content: _Content) -> str:
    """Of the contents, however they are laid out."""
    rest = {name: value for name, value in content.items() if name not in (_MARK, _SUM)}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _news(path: Path, taken: Mapping[str, str], *, edits: bool = False) -> Imported | None:
    found = _content(path)
    if found is None or (found.content.get(_MARK) == _OURS and not (edits and _is_edited(found.content))):
        return None
    name, backup = path.name, _backup_of(path.name)
    if found.sum == taken.get(name) or (found.is_backup and found.sum == taken.get(backup)):
        return None
    try:
        changes, skipped = _read(name, found.content)
    except _UNUSABLE as error:
        _log.error("%s: not imported: %s", path, error)
        return None
    if skipped:
        _log.warning("%s: taken over, except: %s", path, skipped)
    else:
        _log.info("%s: taken over", path)
    beside = _at(_backup(path), is_backup=True)
    return Imported(changes, {name: found.sum} | ({} if beside is None else {backup: beside.sum}))


def _read(name: str, content: _Content) -> FileChanges:
    skipped = _Skipped()
    changes = tuple(_READERS[name](content, skipped.add))
    return FileChanges(changes, skipped.text)


def _content(path: Path) -> _Found | None:
    """The contents of the file, or of its backup if it is unreadable; None if both are unreadable."""
    return _at(path, is_backup=False) or _at(_backup(path), is_backup=True)


def _at(path: Path, *, is_backup: bool) -> _Found | None:
    try:
        body = read_whole(path)
        return _Found(_parse(body.decode()), hashlib.sha256(body).hexdigest(), is_backup)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, InvalidRequestError) as error:
        _log.error("%s: cannot be read: %s", path, error)
        return None


def _backup(path: Path) -> Path:
    return path.with_name(_backup_of(path.name))


def _backup_of(name: str) -> str:
    return f"{name}.bak"


def _parse(text: str) -> _Content:
    """Parse JSON as written by Java: numeric keys have no quotes."""
    value = json.loads(_quote_keys(text))
    if not isinstance(value, dict):
        raise InvalidRequestError("not an object")
    return value


def _quote_keys(text: str) -> str:
    parts = re.split(r'("(?:[^"\\]|\\.)*")', text)  # strings are at odd indexes
    parts[::2] = [_BARE_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
    return "".join(parts)


def _topics(content: _Content, skip: _Skip) -> Iterator[Change]:
    for name, topic in content["topicConfigTable"].items():
        if name in HIDDEN_TOPICS:
            continue
        try:
            yield PutTopic(_topic(name, topic))
        except _UNUSABLE as error:
            skip(_why(f"topic {name}", error))
        else:
            if _is_of_batches(topic):
                skip(f"messages of topic {name}: its queues are of batches (BatchCQ), so nobody can read or write it")


def _topic(name: str, topic: _Content) -> TopicConfig:
    order, sys_flag = bool(topic.get("order", False)), topic.get("topicSysFlag", 0)
    permission = 0 if _is_of_batches(topic) else topic["perm"]
    kept = TopicAttributes.of_texts(_attributes_of(topic))
    return TopicConfig(name, topic["readQueueNums"], topic["writeQueueNums"], permission, order, sys_flag, *kept)


def _attributes_of(topic: object) -> _Content:
    attributes = topic.get("attributes") if isinstance(topic, dict) else None
    return attributes if isinstance(attributes, dict) else {}


def _is_of_batches(topic: object) -> bool:
    """Whether RocketMQ 5 stores many messages of this topic in one record, which nothing here takes apart."""
    return _attributes_of(topic).get("queue.type") == "BatchCQ"


def _is_possible(name: str, topic: _Content) -> bool:
    try:
        _topic(name, topic)
    except _UNUSABLE:
        return False
    return True


def _groups(content: _Content, skip: _Skip) -> Iterator[Change]:
    for name, found in content["subscriptionGroupTable"].items():
        try:
            yield CommitOffsets(name, ())
            group = _group_of_rocketmq(name, found)
        except _UNUSABLE as error:
            skip(_why(f"settings of group {name}", error))
            continue
        if not group.is_default:
            yield PutGroup(group)


def _group_of_rocketmq(name: str, found: _Content) -> GroupConfig:
    """A group's settings from RocketMQ's JSON; missing ones have their defaults."""
    values = {**_NEW_GROUP, **found}
    return GroupConfig(
        name,
        values["consumeEnable"],
        values["consumeFromMinEnable"],
        values["consumeBroadcastEnable"],
        values["retryQueueNums"],
        values["retryMaxTimes"],
        values["brokerId"],
        values["whichBrokerWhenConsumeSlowly"],
        values["notifyConsumerIdsChangedEnable"],
        values["consumeMessageOrderly"],
        policy_of_rocketmq(values.get(_POLICY)),
    )


def _rocketmq_of_group(group: GroupConfig) -> dict[str, object]:
    """The same as RocketMQ's JSON has it."""
    found = {
        "brokerId": group.broker_id,
        "consumeBroadcastEnable": group.consume_broadcast_enable,
        "consumeEnable": group.consume_enable,
        "consumeFromMinEnable": group.consume_from_min_enable,
        "consumeMessageOrderly": group.ordered,
        "groupName": group.name,
        "notifyConsumerIdsChangedEnable": group.notify_changes,
        "retryMaxTimes": group.retry_times_max,
        "retryQueueNums": group.retry_queues,
        "whichBrokerWhenConsumeSlowly": group.broker_id_when_slow,
    }
    return found if group.retry_policy is None else found | {_POLICY: rocketmq_policy(group.retry_policy)}


def _consumer_offsets(content: _Content, skip: _Skip) -> Iterator[Change]:
    for key, queues in content["offsetTable"].items():
        topic, _, group = key.partition("@")
        try:
            noted = list(queues.items())
        except AttributeError:
            skip(f"{key}: {queues!r} instead of offsets by queue")
            continue
        offsets: list[QueueOffset] = []
        for queue_id, offset in noted:
            try:
                offsets.append(QueueOffset(topic, int(queue_id), _whole(offset)))
            except _UNUSABLE as error:
                skip(_why(f"offset of group {group} in {topic}, queue {queue_id}", error))
        for start in range(0, len(offsets), OFFSETS_MAX):
            yield from _committed(group, offsets[start : start + OFFSETS_MAX], skip)


def _committed(group: str, offsets: Sequence[QueueOffset], skip: _Skip) -> Iterator[Change]:
    """Those of these offsets that can be committed."""
    try:
        change = CommitOffsets(group, tuple(offsets))
    except InvalidRequestError as error:
        if len(offsets) > 1:
            for one in offsets:
                yield from _committed(group, (one,), skip)
            return
        topic, queue_id, offset = offsets[0]
        what = f"offset of group {group} in {topic}, queue {queue_id}"
        skip(f"{what}: {offset}, which is none" if offset == _NONE else _why(what, error))
    else:
        yield change


def _delay_offsets(content: _Content, skip: _Skip) -> Iterator[Change]:
    found: list[tuple[int, int]] = []
    for level, offset in content["offsetTable"].items():
        try:
            one = (int(level), _whole(offset))
            SetDelayOffsets((one,))
        except _UNUSABLE as error:
            skip(_why(f"progress of delay level {level}", error))
        else:
            found.append(one)
    yield SetDelayOffsets(tuple(found))


def _whole(value: object) -> int:
    if type(value) is not int:
        raise InvalidRequestError(f"{value!r} is not a whole number")
    return value


def _why(what: str, error: Exception) -> str:
    return f"{what}: {error if isinstance(error, InvalidRequestError) else repr(error)}"


_READERS: Final[Mapping[str, Callable[[_Content, _Skip], Iterator[Change]]]] = {
    TOPICS: _topics,
    GROUPS: _groups,
    CONSUMER_OFFSETS: _consumer_offsets,
    DELAY_OFFSETS: _delay_offsets,
}
_REPLACED: Final[Mapping[str, tuple[type[Change], ...]]] = {
    TOPICS: (PutTopic,),
    CONSUMER_OFFSETS: (CommitOffsets, PopRows),
    DELAY_OFFSETS: (SetDelayOffsets,),
}
"""The kinds of changes that each RocketMQ file replaces completely."""


class RocketmqFiles:
    """Writes the files. Fields of topics and groups that have no meaning here (retries, flags) are preserved."""

    def __init__(self, fs: FileSystem, directory: Path) -> None:
        self._fs = fs
        self._directory = directory
        self._written: dict[str, bytes] = {}
        self._known: dict[str, _Content] = {}
        self._version = 0

    def write(self, tables: Tables, now_ms: int) -> None:
        """Replace the files whose contents have changed. Raises ``OSError``."""
        self._version += 1
        version = {"counter": self._version, "timestamp": now_ms}
        for name, content in (
            (TOPICS, self._topics(tables)),
            (GROUPS, self._groups(tables)),
            (CONSUMER_OFFSETS, {"offsetTable": _offsets(tables)}),
            (DELAY_OFFSETS, {"offsetTable": {str(level): at for level, at in sorted(tables.delay_offsets.items())}}),
        ):
            text = json.dumps(content, indent="\t").encode()
            if self._written.get(name) == text:
                continue
            versioned = {"dataVersion": version, **content} if name in (TOPICS, GROUPS) else content
            marked = {_MARK: _OURS, _SUM: _sum_of(versioned), **versioned}
            self._replace(name, json.dumps(marked, indent="\t").encode())
            self._written[name] = text

    def _replace(self, name: str, text: bytes) -> None:
        path = self._directory / name
        if not self._directory.exists():
            make_dirs_durably(self._fs, self._directory)
        if path.exists():
            self._fs.rename(path, _backup(path))
        replace_durably(self._fs, path, text)

    def _topics(self, tables: Tables) -> _Content:
        """A topic that was skipped because it is not possible here is preserved."""
        known = self._known_of(TOPICS, "topicConfigTable")
        found = {
            topic.name: {
                **_NEW_TOPIC,
                **_entry(known, topic.name),
                "order": topic.order,
                "perm": topic.permission,
                "readQueueNums": topic.read_queues,
                "topicName": topic.name,
                "topicSysFlag": topic.sys_flag,
                "writeQueueNums": topic.write_queues,
                **_attributes_member(topic, known),
            }
            for topic in tables.topics.values()
        }
        kept = {name: one for name, one in known.items() if name not in found and not _is_possible(name, one)}
        kept_as_they_are = {
            topic.name: known[topic.name]
            for topic in tables.topics.values()
            if not topic.permission and _is_of_batches(known.get(topic.name))
        }
        found |= kept_as_they_are  # nobody here has changed what nobody here can use
        return {"topicConfigTable": dict(sorted((kept | found).items()))}

    def _groups(self, tables: Tables) -> _Content:
        known = self._known_of(GROUPS, "subscriptionGroupTable")
        found = {
            name: {**_NEW_GROUP, **_kept_of(tables, name, known), "groupName": name, **_settings_of(tables, name)}
            for name in tables.groups
        }
        return {"subscriptionGroupTable": dict(sorted(found.items()))}

    def _known_of(self, name: str, table: str) -> _Content:
        """The file's contents when it was first read: later writes are our own."""
        known = self._known.get(name)
        if known is None:
            read = _content(self._directory / name)
            found = None if read is None else read.content.get(table)
            known = self._known[name] = found if isinstance(found, dict) else {}
        return known


def _attributes_member(topic: TopicConfig, known: _Content) -> Mapping[str, object]:
    """A topic's attributes for the file, which RocketMQ 4 does not know; those without meaning here are preserved."""
    before = _attributes_of(known.get(topic.name))
    ours = (MESSAGE_TYPE, RETENTION, RESERVE_TIME)
    found = {name: one for name, one in before.items() if name not in ours} | topic.attributes.texts()
    return {"attributes": found} if found or before else {}


def _kept_of(tables: Tables, group: str, known: _Content) -> Mapping[str, object]:
    """The file's fields of a group, except those that its settings have replaced."""
    found = _entry(known, group)
    return {name: one for name, one in found.items() if name != _POLICY} if group in tables.group_configs else found


def _settings_of(tables: Tables, group: str) -> Mapping[str, object]:
    config = tables.group_configs.get(group)
    return {} if config is None else _rocketmq_of_group(config)


def _entry(known: _Content, name: str) -> Mapping[str, object]:
    found = known.get(name)
    return found if isinstance(found, dict) else {}


def _offsets(tables: Tables) -> dict[str, dict[str, int]]:
    """``topic@group`` to queue id to offset."""
    found: dict[str, dict[str, int]] = {}
    for group, noted in sorted(tables.groups.items()):
        for (topic, queue_id), offset in sorted(noted.items()):
            found.setdefault(f"{topic}@{group}", {})[str(queue_id)] = offset
    return found
