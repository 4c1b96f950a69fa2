"""Compares the future members of a group: their old logs, their settings, and their topics, groups and offsets.

In DLedger mode the members of a group continue the logs they had as plain brokers. Raft replicates new messages only,
and a new message must get the same offset everywhere; so the old logs must hold the same records. They are compared as
RocketMQ's guide does with ``md5sum``, but record by record. A log that ends earlier than another is *behind*; one that
holds something else *differs*, and no one but a person can say which is right. One that begins later lacks what others
still have, and would not serve it: a group does not start with that either. Messages that only one of two logs has are
not compared.

``find_members``: the directories of plain brokers, and what is known of each before its log is read.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from dledger.errors import ConfigError, InvalidRequestError
from dledger.store.format import parse_segment_name, segment_name
from dledger.store.fs import TMP_SUFFIX, read_whole
from dledger.store.identity import LOCK_FILE
from rocketstore.broker_config import BrokerConfig
from rocketstore.commit_log.base_log import (
    FileDigest,
    LogDigest,
    PlainFileReader,
    PlainFiles,
    group_has_begun,
    written_segments,
)
from rocketstore.config import MIB
from rocketstore.message.record import BLANK, BLANK_MAGIC, CorruptRecordError, decode_record
from rocketstore.settings import load_broker_settings
from rocketstore.state.changes import Change, CommitOffsets, PutGroup, PutTopic, SetDelayOffsets
from rocketstore.state.rocketmq_files import CONSUMER_OFFSETS, DELAY_OFFSETS, GROUPS, TOPICS, changes_in
from rocketstore.store.directory import ABORT_FILE, CHECKPOINT_FILE

COMMIT_LOG: Final = "commitlog"
BELONGING: Final = ("consumequeue", "index", "index-sums", "timers", "config", CHECKPOINT_FILE)
"""Files that belong to a log, besides its own."""
DISCARDED: Final = ".discarded-"
_MARKS: Final = (LOCK_FILE, ABORT_FILE)


@dataclass(frozen=True, slots=True)
class OldMember:
    """A future member: its root, where its plain log's files are, and its conf file's settings, if there is one."""

    name: str
    root: Path
    log_dirs: tuple[Path, ...]
    writable_dirs: tuple[Path, ...]
    """Those of them in which new files may be made."""
    conf_file: Path | None = None
    config: BrokerConfig | None = None

    @property
    def segment_bytes(self) -> int:
        """The configured size of a log file; 0 if unknown."""
        return 0 if self.config is None else self.config.store.mapped_file_size_commit_log

    @property
    def config_dir(self) -> Path:
        """Where the files with its topics, groups and offsets are."""
        return self.root / "config"

    @property
    def stopped_cleanly(self) -> bool:
        """Whether its last stop was clean."""
        return not (self.root / ABORT_FILE).exists()

    @property
    def group_log(self) -> Path | None:
        """The directory of a group's log that has entries; None if there is none. Raises ``OSError``."""
        return next((node for node in sorted(self.root.glob("dledger-*")) if _has_begun(node)), None)


def _has_begun(node: Path) -> bool:
    return group_has_begun(node) or any(True for _ in written_segments(node / "data"))


def find_members(roots: Sequence[Path], conf_files: Sequence[Path]) -> list[OldMember]:
    """The brokers below these roots, whose conf files are matched by ``storePathRootDir``, otherwise in order.

    Without roots, the conf files name them. Raises ``ConfigError`` for everything that is wrong with them.
    """
    problems: list[str] = []
    configs = [(path, one) for path in conf_files if (one := _loaded(path, problems)) is not None]
    if not roots:
        roots = [config.store.store_path_root_dir for _, config in configs]
    elif conf_files and len(conf_files) != len(roots):
        problems.append(f"{len(roots)} directories, but {len(conf_files)} conf files: give one for each, or none")
    problems += [f"{path} is not a directory" for path in roots if not path.is_dir()]
    if problems:
        raise ConfigError(problems)
    same = Counter(path.resolve() for path in roots)
    problems += [f"{path} is given {count} times" for path, count in same.items() if count > 1]
    names = _names(roots)
    members: list[OldMember] = []
    for number, root in enumerate(roots):
        found = next((one for one in configs if one[1].store.store_path_root_dir.resolve() == root.resolve()), None)
        conf_file, config = found or (configs[number] if configs else (None, None))
        writable, read_only = _log_dirs(root, config)
        every = tuple(dict.fromkeys((*writable, *read_only)))
        may_grow = tuple(path for path in writable if path not in read_only)
        member = OldMember(names[number], root, every, may_grow or writable, conf_file, config)
        problems += [
            f"{path} is where {other.name} and {member.name} both write their log: each member needs its own"
            for other in members
            for path in sorted(
                {one.resolve() for one in member.writable_dirs} & {one.resolve() for one in other.log_dirs}
            )
        ]
        members.append(member)
        problems += _not_a_broker(member)
    if problems:
        raise ConfigError(problems)
    return members


def _loaded(path: Path, problems: list[str]) -> BrokerConfig | None:
    try:
        return load_broker_settings(path, {}, {})[0]
    except ConfigError as error:
        problems += [one if str(path) in one else f"{path}: {one}" for one in error.problems]
        return None


def _names(roots: Sequence[Path]) -> list[str]:
    short = [path.resolve().name for path in roots]
    return short if len(set(short)) == len(short) else [str(path) for path in roots]


def _log_dirs(root: Path, config: BrokerConfig | None) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The log's directories, and those that are only read; those below the root are looked for where it is mounted."""
    if config is None:
        return (root / COMMIT_LOG,), ()
    own, store = config.store.store_path_root_dir, config.store

    def moved(paths: Sequence[Path]) -> tuple[Path, ...]:
        return tuple(root / path.relative_to(own) if path.is_relative_to(own) else path for path in paths)

    return moved(store.commit_log_dirs), moved(store.read_only_commit_log_dirs)


def _not_a_broker(member: OldMember) -> list[str]:
    """Why these are not a plain broker's files. An empty directory is that of a member to be."""
    root = member.root
    held = sorted({path.name.removesuffix(TMP_SUFFIX) for path in root.iterdir()} - {*_MARKS})
    if not held or any(path.is_dir() for path in member.log_dirs):
        return []
    if (root / "data").is_dir() and (root / "index").is_dir():
        return [f"{root} is a group member's log, not a plain broker's root: `dledger pipeline audit` compares those"]
    if member.group_log is not None:
        return [f"{root} holds a group member's log and no plain one: `dledger pipeline audit` compares those"]
    if parse_segment_name(held[0]) is not None:
        return [f"{root} holds log files itself: name the broker's root, which has them in {COMMIT_LOG}/"]
    if all(name in BELONGING or DISCARDED in name for name in held):
        return []  # a copy was interrupted
    missing = ", ".join(map(str, member.log_dirs))
    return [f"{root} is not a broker's directory: {missing} does not exist; an empty directory is a member to be"]


def in_use(root: Path) -> bool:
    """Whether a broker, ours or RocketMQ's, has the directory open."""
    try:
        fd = os.open(root / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
    except BlockingIOError:
        return True
    finally:
        with suppress(OSError):
            os.close(fd)
    return False


_CHUNK_BYTES: Final = 8 * MIB
_KEYS_SHOWN: Final = 60


class LogStanding(StrEnum):
    """How a member's log stands to the one it is compared with."""

    EQUAL = "equal"
    BEHIND = "behind"
    """It lacks the end."""
    AHEAD = "ahead"
    """It has more than the master that was named."""
    DIFFERS = "differs"
    DAMAGED = "damaged"
    UNKNOWN = "not compared"
    """The one to compare with is damaged."""


FITTING: Final = (LogStanding.EQUAL, LogStanding.BEHIND, LogStanding.AHEAD)
"""Of two such logs, one is a part of the other."""


@dataclass(frozen=True, slots=True)
class OldLog:
    """One member's log."""

    name: str
    files: PlainFiles
    digest: LogDigest


class RecordAt(NamedTuple):
    """A log's content at an offset: a message, or ``what`` else."""

    what: str
    topic: str = ""
    queue_id: int = -1
    queue_offset: int = -1
    keys: str = ""
    store_timestamp: int = 0
    body_crc: int = 0

    def sentence(self) -> str:
        """For people."""
        if not self.topic:
            return self.what
        keys = f", key {self.keys[:_KEYS_SHOWN]}" if self.keys else ""
        return f"{self.what} of queue {self.topic}-{self.queue_id}, offset {self.queue_offset}{keys}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where two logs differ: a physical offset, and what each of them has there."""

    offset: int
    file: Path
    other_file: Path
    found: RecordAt
    other_found: RecordAt
    byte: int = -1
    """The physical offset of the first byte that differs, if one does within the records of both."""

    @property
    def is_same_message(self) -> bool:
        """Whether both have the same message there, with other bytes: one of the two is damaged where no checksum
        tells, because RocketMQ's covers the body alone.
        """
        return bool(self.found.topic) and self.found == self.other_found


@dataclass(frozen=True, slots=True)
class Compared:
    """One member against the reference: how far it is behind or ahead, or where it diverges."""

    log: OldLog
    standing: LogStanding
    bytes_apart: int = 0
    """Bytes of records that it lacks, or has more; blanks do not count."""
    messages_apart: int = 0
    lacks_from: int | None = None
    """Where another log begins that has older messages, which this one lacks; None if there is none."""
    divergence: Divergence | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it holds what it should."""
        return self.standing is LogStanding.EQUAL and self.lacks_from is None


def reference_of(logs: Sequence[OldLog], master: str = "") -> OldLog:
    """The log to compare with: the master's, otherwise the longest sound one."""
    named = [one for one in logs if one.name == master]
    sound = [one for one in logs if not one.digest.problems]
    return named[0] if named else max(sound or logs, key=lambda one: (one.digest.end, -one.digest.min_offset))


def compare(logs: Sequence[OldLog], reference: OldLog) -> list[Compared]:
    """Compare each log with the reference. Raises ``OSError``."""
    found = [_compared(one, reference) for one in logs]
    fit = [one.log.digest for one in found if one.standing in FITTING and one.log.digest.files]
    earliest = min((one.min_offset for one in fit), default=0)
    return [
        replace(one, lacks_from=earliest) if one.log.digest in fit and one.log.digest.min_offset > earliest else one
        for one in found
    ]


def _compared(log: OldLog, reference: OldLog) -> Compared:
    if log.digest.problems:
        return Compared(log, LogStanding.DAMAGED)
    if log is not reference and reference.digest.problems:
        return Compared(log, LogStanding.UNKNOWN)
    if log is reference or not log.digest.difference(reference.digest):
        return Compared(log, LogStanding.EQUAL)
    if log.digest.files and reference.digest.files and log.files.segment_bytes != reference.files.segment_bytes:
        return Compared(log, LogStanding.DIFFERS)
    ahead = log.digest.end > reference.digest.end
    shorter, longer = (reference, log) if ahead else (log, reference)
    found = _diverges(shorter, longer)
    if found is not None:
        return Compared(log, LogStanding.DIFFERS, divergence=_turned(found) if ahead else found)
    missing = _missing(shorter.digest, longer.digest, lambda one: one.length)
    messages = _missing(shorter.digest, longer.digest, lambda one: one.records)
    return Compared(log, LogStanding.AHEAD if ahead else LogStanding.BEHIND, missing, messages)


def _turned(found: Divergence) -> Divergence:
    return Divergence(found.offset, found.other_file, found.file, found.other_found, found.found, found.byte)


def _diverges(shorter: OldLog, longer: OldLog) -> Divergence | None:
    """The first difference; None if one log is the begin of the other."""
    begin = max(shorter.digest.min_offset, longer.digest.min_offset)
    ours, theirs = ({one.base: one for one in log.digest.files} for log in (shorter, longer))
    for base in sorted(base for base in ours if base >= begin):
        one, other = ours[base], theirs.get(base)
        if other is None:
            return _divergence(shorter, longer, base)
        if (one.length, one.crc32c) == (other.length, other.crc32c):
            continue
        common = min(one.length, other.length)
        at = _first_difference(shorter.files.paths[base], longer.files.paths[base], common)
        if at < common:
            return _divergence(shorter, longer, _record_start(longer.files, base, base + at), base + at)
        if base != shorter.digest.files[-1].base or one.length > other.length:
            return _divergence(shorter, longer, base + common)
        break  # it ends here
    return None


def _first_difference(path: Path, other: Path, length: int) -> int:
    """The first place below ``length`` where two files differ; ``length`` if there is none."""
    with path.open("rb") as one, other.open("rb") as two:
        for start in range(0, length, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, length - start)
            a, b = os.pread(one.fileno(), size, start), os.pread(two.fileno(), size, start)
            if a != b:
                return start + int(np.argmax(np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8)))
    return length


def _record_start(files: PlainFiles, base: int, offset: int) -> int:
    """The start of the record that contains ``offset``."""
    start = base
    for piece in PlainFileReader(files.paths[base], base, files.segment_bytes):
        for head in piece.heads:
            if head.offset > offset:
                return start
            start = head.offset
    return start


def _divergence(shorter: OldLog, longer: OldLog, offset: int, byte: int = -1) -> Divergence:
    one, other = (_file_of(log, offset) for log in (shorter, longer))
    return Divergence(offset, one, other, record_at(shorter.files, offset), record_at(longer.files, offset), byte)


def _file_of(log: OldLog, offset: int) -> Path:
    base = offset - offset % log.files.segment_bytes
    return log.files.paths.get(base, Path(segment_name(base)))


def record_at(files: PlainFiles, offset: int) -> RecordAt:
    """A log's content at ``offset``. Raises ``OSError``."""
    base = offset - offset % files.segment_bytes
    path = files.paths.get(base)
    if path is None:
        return RecordAt("nothing")
    with path.open("rb") as file:
        head = os.pread(file.fileno(), BLANK.size, offset - base)
        size, magic = BLANK.unpack(head) if len(head) == BLANK.size else (0, 0)
        if magic == BLANK_MAGIC:
            return RecordAt("the end of the file")
        if not size and not magic:
            return RecordAt("the end of the log")
        record = os.pread(file.fileno(), max(0, min(size, files.segment_bytes - (offset - base))), offset - base)
    try:
        message = decode_record(record)
    except CorruptRecordError:
        return RecordAt("no sound record")
    keys = message.properties.get("KEYS", "")
    return RecordAt(
        "a message",
        message.topic,
        message.queue_id,
        message.queue_offset,
        keys,
        message.store_timestamp,
        message.body_crc,
    )


def _missing(shorter: LogDigest, longer: LogDigest, count: Callable[[FileDigest], int]) -> int:
    """The part of the longer log behind the end of the shorter one, file by file."""
    last = shorter.files[-1] if shorter.files else None
    begin = shorter.min_offset if last is None else last.base
    there = sum(count(one) for one in longer.files if one.base >= begin)
    return there - (count(last) if last is not None and last.base >= longer.min_offset else 0)


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
