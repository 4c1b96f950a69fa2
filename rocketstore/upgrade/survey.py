"""The content of a stopped broker's directory, and how much of it will be there once it is opened here.

The directory may be RocketMQ's or ours, of a plain broker or of a group's member. Everything is read, nothing changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dledger.errors import ConfigError, CorruptLogError, InvalidRequestError
from dledger.store.fs import non_zero_end, read_whole
from dledger.store.identity import read_identity
from dledger.store.inspect import ProblemItem
from dledger.store.java_files import was_used_by_java
from dledger.store.mmap_file import list_segments
from rocketstore.commit_log.base_log import (
    FileEnding,
    PlainFileReader,
    find_plain_files,
    group_has_begun,
    written_segments,
)
from rocketstore.config import DEFAULT_DELAY_LEVELS
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import CorruptRecordError, decode_record
from rocketstore.settings import load_broker_settings
from rocketstore.state.changes import Change, CommitOffsets, PutGroup, SetDelayOffsets
from rocketstore.state.files import SYS_FLAG_INNER_BATCH, TIMER_TOPIC, topics_of_batches, unserved
from rocketstore.state.rocketmq_files import TOPICS, changes_in, impossible_topics
from rocketstore.types import HALF_TOPIC, HIDDEN_TOPICS, OP_TOPIC, SCHEDULE_TOPIC, RecordHead
from rocketstore.upgrade.compare import COMMIT_LOG, STATE_FILES
from rocketstore.upgrade.directories import read_log
from rocketstore.verification.verify import LogPart

RETRY_PREFIX: Final = "%RETRY%"
DEAD_PREFIX: Final = "%DLQ%"
_FILTERS: Final = "consumerFilter.json"
_OP_BYTES_MAX: Final = 64 * 1024
_UNKNOWN_PARTS: Final = {
    "consumequeue_ext": "bit maps for SQL92 filters, which need none here",
    "consumequeue_r": "queues in RocksDB (RocketMQ 5): they are built anew from the log",
    "config/topicQueueMapping.json": "static topics (RocketMQ 5)",
    "config/consumerOrderInfo.json": "which ordered messages were popped (RocketMQ 5)",
}
"""Parts of a directory that nothing here reads, besides those with messages."""


@dataclass(slots=True)
class TopicSurvey:
    """The messages of one topic in the log. Times in ms since 1970."""

    name: str
    messages: int = 0
    bytes: int = 0
    queues: set[int] = field(default_factory=set)
    first_ms: int = 0
    last_ms: int = 0

    def add(self, head: RecordHead) -> None:
        """Count a record."""
        self.messages += 1
        self.bytes += head.size
        self.queues.add(head.queue_id)
        self.first_ms = self.first_ms or head.store_timestamp
        self.last_ms = max(self.last_ms, head.store_timestamp)


@dataclass(slots=True)
class Survey:
    """The result. ``comes``, ``stays`` and ``todo`` are sentences: what will be there, what not, what to do."""

    root: Path
    is_member: bool = False
    is_foreign: bool = False
    """Whether RocketMQ wrote to it last, as far as can be told."""
    begin: int = 0
    end: int = 0
    topics: dict[str, TopicSurvey] = field(default_factory=dict)
    delayed: dict[int, int] = field(default_factory=dict)
    """How many messages wait, by delay level."""
    open_halves: int = 0
    groups: set[str] = field(default_factory=set)
    offsets: int = 0
    comes: list[str] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)
    damaged: list[ProblemItem] = field(default_factory=list)
    batches: set[str] = field(default_factory=set)
    """Topics whose records hold several messages each."""
    timer_end: int = 0
    """The next offset of RocketMQ 5's topic of messages with a time of their own."""
    sql_groups: list[str] = field(default_factory=list)
    """Groups with SQL92 filters."""
    has_sql: bool = True
    """Whether the conf file lets a broker here filter by them."""
    settings: list[str] = field(default_factory=list)
    """Settings of the conf file that have no effect here."""
    refused: list[str] = field(default_factory=list)
    """Settings of the conf file that keep a broker from starting here."""

    @property
    def messages(self) -> int:
        """All messages that come along but those about the broker itself."""
        without = HIDDEN_TOPICS | self.batches | {TIMER_TOPIC}
        return sum(one.messages for name, one in self.topics.items() if name not in without)


def survey(directory: Path, conf_file: Path | None = None) -> Survey:
    """Read everything below a broker's root, or a member's directory. Raises ``ConfigError``, ``OSError``."""
    is_node = (directory / "data").is_dir() and not (directory / COMMIT_LOG).is_dir()
    root = directory.absolute().parent if is_node else directory
    nodes = [directory] if is_node else sorted(path for path in root.glob("dledger-*") if _is_written(path / "data"))
    plain_dirs = [root / COMMIT_LOG]
    found = Survey(directory)
    if conf_file is not None:
        plain_dirs = _read_conf(conf_file, root, found) or plain_dirs
    plain_dirs = [path for path in plain_dirs if path.is_dir()]
    if len(nodes) > 1:
        raise ConfigError([f"{root} holds {len(nodes)} members' logs: name one of them, such as {nodes[0]}"])
    if not nodes and not plain_dirs:
        raise ConfigError([f"{directory} is not a broker's directory: it has neither {COMMIT_LOG}/ nor a dledger-…/"])
    changes = _read_state(root / "config", found)
    counts = _Counts(found, changes)
    if plain_dirs and (not nodes or not is_node):
        _read_plain(plain_dirs, counts, found, has_more=bool(nodes))
    for node in nodes:
        _read_member(node, counts, found)
    counts.finish()
    _say(found, root, nodes)
    return found


def _is_written(data: Path) -> bool:
    return any(True for _ in written_segments(data))


# -- the log -----------------------------------------------------------------------------------------------------------


class _Counts:
    """Gathers the content of the records, in log order."""

    def __init__(self, found: Survey, changes: Sequence[Change]) -> None:
        self._found = found
        self._delayed_from = {
            level: offset for one in changes if isinstance(one, SetDelayOffsets) for level, offset in one.offsets
        }
        self._halves: set[int] = set()

    def take(self, heads: Iterable[RecordHead], data: bytes, offset: int) -> None:
        """Count records whose bytes are in ``data``, which begins at ``offset``."""
        topics = self._found.topics
        for head in heads:
            topic = topics.get(head.topic)
            if topic is None:
                topic = topics[head.topic] = TopicSurvey(head.topic)
            topic.add(head)
            if head.sys_flag & SYS_FLAG_INNER_BATCH:
                self._found.batches.add(head.topic)
            if head.topic == TIMER_TOPIC:
                self._found.timer_end = max(self._found.timer_end, head.queue_offset + 1)
            elif head.topic == SCHEDULE_TOPIC:
                level = head.queue_id + 1
                if head.queue_offset >= self._delayed_from.get(level, 0):
                    self._found.delayed[level] = self._found.delayed.get(level, 0) + 1
            elif head.topic == HALF_TOPIC:
                self._halves.add(head.queue_offset)
            elif head.topic == OP_TOPIC and head.size <= _OP_BYTES_MAX:
                at = head.offset - offset
                self._halves.difference_update(_ended(data[at : at + head.size]))

    def finish(self) -> None:
        """Note what waits."""
        self._found.open_halves = len(self._halves)


def _ended(record: bytes) -> list[int]:
    """The queue offsets of the halves that an op message ends: one, or several with commas (RocketMQ 5)."""
    try:
        body = decode_record(record).body
        return [int(one) for one in body.split(b",") if one.strip()]
    except (CorruptRecordError, ValueError):
        return []


def _read_plain(directories: list[Path], counts: _Counts, found: Survey, *, has_more: bool) -> None:
    files = find_plain_files(directories)
    found.damaged += files.problems
    found.begin = found.end = files.min_offset
    endings: list[tuple[Path, int, PlainFileReader]] = []
    for base, path in sorted(files.paths.items()):
        reader = PlainFileReader(path, base, files.segment_bytes)
        for piece in reader:
            counts.take(piece.heads, piece.data, piece.offset)
        if reader.end > base:
            found.end = reader.end
            endings.append((path, base, reader))
        elif reader.ending is FileEnding.OTHER:
            endings.append((path, base, reader))
    for number, (path, base, reader) in enumerate(endings):
        is_last = number == len(endings) - 1
        if reader.ending is FileEnding.FULL or (is_last and reader.ending is FileEnding.ZEROS):
            continue
        if is_last and not has_more:
            found.todo.append(f"{path}: offset {reader.end - base}: {reader.reason}: the first start cuts what follows")
        else:
            found.damaged.append(ProblemItem(path, reader.end - base, reader.reason or "the records end too early"))


def _read_member(node: Path, counts: _Counts, found: Survey) -> None:
    data = node / "data"
    sizes = [path.stat().st_size for path in data.iterdir() if path.is_file() and path.name.isdecimal()]
    size = max(sizes, default=1) or 1
    segments = {one.base: one.path for one in list_segments([data], size).segments if one.size == size}
    begin = min(segments, default=0)
    part = LogPart(segments, size, begin, max(segments, default=begin - size) + size)
    found.is_member = True
    found.begin, found.end = (found.begin, found.end) if found.topics else (begin, begin)
    try:
        for piece in read_log(part, entries=True, levels=DelayLevels.parse(DEFAULT_DELAY_LEVELS)):
            counts.take(piece.outcome.heads, piece.data, piece.position)
            found.end = piece.position + piece.outcome.consumed
    except CorruptLogError as error:
        if not found.topics and not (node.absolute().parent / "consumequeue").is_dir():
            raise ConfigError([f"{node} does not begin with a broker's message: {error.reason}"]) from error
        if not _is_end(error, segments):
            found.damaged.append(ProblemItem(error.path, error.offset, error.reason))
    found.is_foreign = read_identity(node) is None or was_used_by_java(node, node / "checkpoint")
    if found.is_foreign:
        found.todo.append(
            "set import_unchecked=true in the conf files of all members for their first start here, and start all of "
            "them: RocketMQ writes no checksums of entries, and an imported member forgets what it promised"
        )


def _is_end(error: CorruptLogError, segments: dict[int, Path]) -> bool:
    """Whether there are only zeros from where reading ended."""
    later = [path for path in sorted(segments.values()) if path.name > error.path.name]
    for path, at in ((error.path, error.offset), *((path, 0) for path in later)):
        with path.open("rb") as file:
            if non_zero_end(file.fileno(), at, path.stat().st_size) > at:
                return False
    return True


# -- state and settings ------------------------------------------------------------------------------------------------


def _read_state(config_dir: Path, found: Survey) -> list[Change]:
    """The changes in RocketMQ's files; counts groups and offsets."""
    changes: list[Change] = []
    for name in STATE_FILES:
        for path in (config_dir / name, config_dir / f"{name}.bak"):
            try:
                said = changes_in(name, read_whole(path))
                changes += said.changes
                if said.skipped and name != TOPICS:
                    found.stays.append(f"config/{name}: {said.skipped}")
                break
            except FileNotFoundError:
                continue
            except InvalidRequestError as error:
                found.damaged.append(ProblemItem(path, 0, str(error)))
    for one in changes:
        match one:
            case CommitOffsets(group, offsets):
                found.groups.add(group)
                found.offsets += len(offsets)
            case PutGroup(settings):
                found.groups.add(settings.name)
    skipped = impossible_topics(config_dir)
    if skipped:
        found.stays.append(f"topics that are not possible here: {_named(skipped)}; topics.json keeps them")
    found.sql_groups = _sql_groups(config_dir / _FILTERS)
    return changes


def _sql_groups(path: Path) -> list[str]:
    """Groups with an SQL92 filter in use, according to ``consumerFilter.json``."""
    try:
        topics = json.loads(read_whole(path))["filterDataByTopic"].values()
        return sorted(
            {
                group
                for topic in topics
                for group, one in topic["groupFilterData"].items()
                if one.get("expressionType") != "TAG" and not one.get("deadTime")
            }
        )
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return [f"unknown, because {path.name} is unreadable"]


def _read_conf(conf_file: Path, root: Path, found: Survey) -> list[Path]:
    """The plain log's directories according to a conf file; its settings become sentences."""
    try:
        config, warnings = load_broker_settings(conf_file, {}, {})
    except ConfigError as error:
        found.refused += error.problems
        return []
    found.settings += warnings
    found.has_sql = config.enable_property_filter
    store = config.store
    own = store.store_path_root_dir
    return [
        root / path.relative_to(own) if path.is_relative_to(own) else path
        for path in (*store.commit_log_dirs, *store.read_only_commit_log_dirs)
    ]


def _say(found: Survey, root: Path, nodes: Sequence[Path]) -> None:
    """Add the warnings that hold for any such directory."""
    found.batches |= topics_of_batches(root)
    unknown = unserved(root, found.timer_end, found.batches)
    without = HIDDEN_TOPICS | found.batches | {TIMER_TOPIC}
    topics = [name for name in found.topics if name not in without]
    all_of, but = ("", "; NOT those named below") if unknown else ("all ", "")
    found.comes.append(
        f"{all_of}messages ({found.messages:,}) of {all_of}topics ({len(topics):,}), with their queue offsets{but}"
    )
    if found.groups:
        found.comes.append(f"consumer groups ({len(found.groups):,}) with their offsets ({found.offsets:,})")
    for prefix, what in ((RETRY_PREFIX, "to be tried again"), (DEAD_PREFIX, "that were given up (dead letters)")):
        count = sum(one.messages for name, one in found.topics.items() if name.startswith(prefix))
        if count:
            found.comes.append(f"messages {what}: {count:,}")
    if found.delayed:
        found.comes.append(f"delayed messages that still wait: {sum(found.delayed.values()):,}")
    if found.open_halves:
        found.comes.append(
            f"transactions neither committed nor rolled back, about which producers are asked: {found.open_halves:,}"
        )
    if found.sql_groups and found.has_sql:
        found.comes.append(
            f"SQL92 filters of groups ({_named(found.sql_groups)}), which their consumers tell in their heartbeats"
        )
    elif found.sql_groups:
        found.stays.append(
            f"SQL92 filters of groups ({_named(found.sql_groups)}): their consumers are refused, because of "
            "enablePropertyFilter=false"
        )
    found.stays += unknown
    found.stays += [f"{path}: {what}" for path, what in _UNKNOWN_PARTS.items() if _has_something(root / path)]
    for node in nodes:
        if not group_has_begun(node) and (root / COMMIT_LOG).is_dir():
            found.todo.append(
                f"{root / COMMIT_LOG}: the log of a plain broker beside {node}, which it does not continue"
            )


def _has_something(path: Path) -> bool:
    """Whether it is there, and no file of tables that are all empty, which RocketMQ 5 always writes."""
    if path.suffix != ".json" or not path.is_file():
        return path.exists()
    try:
        content = json.loads(read_whole(path))
    except (ValueError, OSError):
        return True
    if not isinstance(content, dict):
        return True
    return any(one for name, one in content.items() if name != "dataVersion" and isinstance(one, dict | list))


def _named(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def by_size(found: Survey) -> Iterator[TopicSurvey]:
    """The topics, those with most messages first; without those about the broker itself."""
    shown = (one for name, one in found.topics.items() if name not in HIDDEN_TOPICS)
    return iter(sorted(shown, key=lambda one: (-one.messages, one.name)))
