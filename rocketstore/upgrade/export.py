"""Exports the log of a stopped group member as the directory of a plain broker, ours or RocketMQ's.

Messages keep everything but their physical offsets: queue offsets, timestamps, hosts, properties. Records that only a
group or this project needs are left out (no-ops, records of broker state, of queue numbers and of checks of
transactions); the state goes to RocketMQ's files and into a snapshot.

1. The member's directory is verified and locked; a damaged one is refused.
2. The log is written to ``TARGET.partial``, beside the target: records one after the other, in files that end as
   RocketMQ's do. The old files of a mixed log are copied or linked as they are, so their offsets stay.
3. A store builds queues, index and checkpoint from that log, as at any start.
4. Everything is read back: records are compared with the source, queues and index with the log.
5. All is durable; the directory gets its name.

So whatever happens, there is no target or a whole one.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Final

from dledger.clock import Clock
from dledger.errors import ConfigError, CorruptLogError, DiskFullError
from dledger.store.format import segment_name
from dledger.store.fs import FileSystem, make_dirs_durably
from dledger.store.identity import DirectoryLock
from dledger.store.mmap_file import list_segments
from dledger.store.verify import VerifiedNode
from rocketstore.commit_log.base_log import read_base_log
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.config import MessageStoreConfig
from rocketstore.message.message import SYS_FLAG_TRANSACTION, DelayLevels
from rocketstore.message.record import HEAD, HOST_V6_FLAGS, PHYSICAL_OFFSET, PHYSICAL_OFFSET_AT
from rocketstore.state.applier import BrokerSnapshot, write_snapshot
from rocketstore.state.rocketmq_files import GROUPS, TOPICS, RocketmqFiles
from rocketstore.store.directory import ABORT_FILE, DELETED_FILE, StoreDirectory
from rocketstore.store.message_store import MessageStore
from rocketstore.types import (
    BROKER_STATE_TOPIC,
    HALF_TOPIC,
    HIDDEN_TOPICS,
    QUEUE_NUMBERS_TOPIC,
    TIMED_TOPIC,
    BrokerRole,
    QueueKey,
    RecordHead,
)
from rocketstore.upgrade.directories import (
    HalfPlaces,
    LogPiece,
    NextOffsets,
    PlainLogWriter,
    StateRecords,
    read_log,
    stored_ends,
    tables_of,
    without_messages,
    write_expired,
)
from rocketstore.verification.verify import LogPart, verify_broker

PARTIAL_SUFFIX: Final = ".partial"
_COMMITTED: Final = 0x8
_NOWHERE: Final = -1
"""As the prepared offset of a message whose half message has expired: 0 would be the log's first record."""
LEFT_OUT: Final = HIDDEN_TOPICS - {TIMED_TOPIC}
"""Topics of which nothing is exported. Timed messages wait on in the plain broker, if it is ours."""
_PREPARED_AT: Final = {flags: head.at("prepared_offset") for flags, head in HEAD.items()}
_KEPT: Final = (TOPICS, GROUPS, "consumerFilter.json", DELETED_FILE)
"""State files copied from the source: of the first two, what has no meaning here."""
_NEVER_HOURS: Final = 24 * 365 * 100
_PER_MESSAGE_BYTES: Final = 60
"""A unit of its queue and two keys in the index."""

Progress = Callable[[str, int, int], None]
"""Told of a step, and of how many of how many bytes are done."""


def _silent(_step: str, _done: int, _total: int) -> None: ...


@dataclass(slots=True)
class Exported:
    """The result of an export. Offsets are physical."""

    target: Path
    messages: int = 0
    copied: int = 0
    """Messages in the files of an old plain log that were taken over as they are."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Records for a group or for this project alone, by topic."""
    commits: int = 0
    """Messages of ended transactions that name where the export has their half message; without those whose half
    message is in an old plain log, where it stays.
    """
    begin: int = 0
    end: int = 0
    files: int = 0
    queues: int = 0
    expired_queues: int = 0
    """Queues without messages whose numbering goes on."""
    keys: int = 0
    last_index: int = -1
    """The last entry of the group's log that was exported."""
    tail: int = 0
    """Entries behind it that are not known to be committed, and how many messages are in them."""
    tail_messages: int = 0
    topics: int = 0
    groups: int = 0
    offsets: int = 0
    delay_levels: int = 0


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices that are a person's."""

    link: bool = False
    """Old plain files are linked instead of copied."""
    whole_log: bool = False
    """With what is not known to be committed."""
    committed_only: bool = False
    """Without it, even if it holds messages."""


def export_member(
    store: MessageStoreConfig,
    node: VerifiedNode,
    target: Path,
    choices: Choices | None = None,
    *,
    progress: Progress = _silent,
    fs: FileSystem | None = None,
) -> Exported:
    """Make ``target`` from a stopped member's directory; ``store``: its settings, ``node``: its verified log.

    Raises ``ConfigError`` for what must be changed or decided first, ``CorruptLogError``, ``DirectoryLockedError``,
    ``DiskFullError``, ``OSError``.
    """
    fs = fs or FileSystem()
    with ExitStack() as held:
        held.callback(StoreDirectory(store.store_path_root_dir, fs).release)
        held.callback(DirectoryLock(node.directory).release)
        export = _Export(store, node, target, choices or Choices(), fs, progress)
        export.check()
        with export.partial():
            export.write()
            export.build()
            export.write_state()
            export.verify()
            export.finish()
        return export.done


class _Export:
    def __init__(
        self,
        store: MessageStoreConfig,
        node: VerifiedNode,
        target: Path,
        choices: Choices,
        fs: FileSystem,
        progress: Progress,
    ) -> None:
        self._store = store
        self._node = node
        self._target = target
        self._fs = fs
        self._progress = progress
        self._choices = choices
        self._partial = target.with_name(target.name + PARTIAL_SUFFIX)
        self._levels = DelayLevels.parse(store.message_delay_level)
        self._entries = _part_of(node, node.end if choices.whole_log else node.committed_end)
        self._old = _old_part(store, node, self._entries)
        self._plain = _plain_config(store, self._partial, self._entries.segment_bytes)
        self._numbers = NextOffsets()
        self._state = StateRecords()
        self._with_messages: set[QueueKey] = set()
        self._state_end = 0
        """The state topic's next queue offset in the export: only old files hold some of it."""
        self.done = Exported(target)

    # -- before ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise ``ConfigError`` or ``DiskFullError`` for what stands in the way."""
        node, target = self._node, self._target
        problems = [f"{one.path}: offset {one.offset}: {one.reason}" for one in node.problems]
        if problems:
            raise ConfigError([*problems, "export another member, whose copy is sound"])
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError([f"{target} is not empty: name a directory that does not exist"])
        if self._partial.exists():
            raise ConfigError([f"an interrupted export left {self._partial}: remove it, then try again"])
        if target.resolve().is_relative_to(self._store.store_path_root_dir.resolve()):
            raise ConfigError([f"{target} is inside the directory that is exported: name one beside it"])
        self._check_tail()
        self._check_room()

    def _check_tail(self) -> None:
        node, done = self._node, self.done
        done.last_index = node.last_index if self._choices.whole_log else node.committed
        if self._choices.whole_log or node.end <= self._entries.end:
            return
        tail = replace(self._entries, begin=self._entries.end, end=node.end)
        heads = [head for one in read_log(tail, entries=True, levels=self._levels) for head in one.outcome.heads]
        done.tail = node.last_index - node.committed
        done.tail_messages = sum(head.topic not in LEFT_OUT for head in heads)
        if done.tail_messages and not self._choices.committed_only:
            raise ConfigError(
                [
                    f"entries {node.committed + 1} to {node.last_index} of {node.directory} hold {done.tail_messages} "
                    "messages that this member does not know to be committed: their senders may have been told that "
                    "they are stored. Start the group, wait until it has a leader, and stop it again; or decide: "
                    "--whole-log exports them (right on the member with the longest log), --committed-only does not"
                ]
            )

    def _check_room(self) -> None:
        size = self._entries.segment_bytes
        log = -(-(self._entries.end - self._entries.begin) // size) * size + size
        old = self._old.end - self._old.begin if self._old is not None else 0
        queues = sum(1 for one in self._store.consume_queue_dir.glob("*/*"))
        derived = self._node.entries * _PER_MESSAGE_BYTES + queues * self._store.consume_queue_file_bytes
        needed = log + derived + (0 if self._choices.link else old)
        parent = next(one for one in self._target.absolute().parents if one.exists())
        free = self._fs.usage(parent).available_bytes
        if free < needed:
            raise DiskFullError(
                f"{parent} has {free:,} bytes left, and the export needs about {needed:,}: choose another disk"
            )

    @contextmanager
    def partial(self) -> Iterator[None]:
        """The directory in which everything is made; removed if that fails."""
        try:
            make_dirs_durably(self._fs, self._partial)
            yield
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(self._partial)
            raise

    # -- the log ---------------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the commit log, and queue files for queues without messages."""
        (directory,) = self._plain.commit_log_dirs
        self._fs.make_dir(directory)
        entries, size = self._entries, self._entries.segment_bytes
        begin = max(size, entries.begin - entries.begin % size) if entries.begin else 0
        if self._old is not None:
            begin = self._old.end
            self._take_over(self._old, directory)
        self._state.add_part(entries)
        files = PlainLogWriter(self._fs, directory, size, begin)
        self.done.begin = self._old.begin if self._old is not None else begin
        try:
            with closing(HalfPlaces(self._fs, self._partial / "halves")) as halves:
                for one in read_log(entries, entries=True, levels=self._levels):
                    for head in one.outcome.heads:
                        self._copy(one, head, files, halves)
                    self._told("writing the log", one, entries)
            files.close()
        finally:
            files.abandon()
        self.done.end, self.done.files = files.end, self.done.files + files.count
        self._fs.sync_dir(self._partial)
        self._write_expired()

    def _take_over(self, old: LogPart, directory: Path) -> None:
        self._state.add_part(old)
        for one in read_log(old, entries=False, levels=self._levels):
            for head in one.outcome.heads:
                self._note(head, one)
            self.done.copied += len(one.outcome.heads)
            self._told("reading the old log", one, old)
        for base, path in sorted(old.segments.items()):
            copy = directory / segment_name(base)
            if self._choices.link:
                copy.hardlink_to(path)
            else:
                _copy_durably(self._fs, path, copy)
            self.done.files += 1

    def _copy(self, stretch: LogPiece, head: RecordHead, files: PlainLogWriter, halves: HalfPlaces) -> None:
        self._note(head, stretch)
        if head.topic in LEFT_OUT:
            self.done.left_out[head.topic] = self.done.left_out.get(head.topic, 0) + 1
            return
        record = bytearray(_bytes_of(stretch, head))
        offset = files.place(len(record))
        PHYSICAL_OFFSET.pack_into(record, PHYSICAL_OFFSET_AT, offset)
        if head.prepared_offset or head.sys_flag & SYS_FLAG_TRANSACTION == _COMMITTED:
            at = _PREPARED_AT[head.sys_flag & HOST_V6_FLAGS]
            PHYSICAL_OFFSET.pack_into(record, at, self._new_half(head.prepared_offset, halves))
        if head.topic == HALF_TOPIC:
            halves.add(head.offset, offset)
        files.append(record)
        self.done.messages += 1

    def _new_half(self, old: int, halves: HalfPlaces) -> int:
        """Where the half message is that a committed one names."""
        if self._old is not None and old < self._old.end:
            return old
        new = halves.find(old)
        self.done.commits += new is not None
        return _NOWHERE if new is None else new

    def _note(self, head: RecordHead, stretch: LogPiece) -> None:
        if head.topic == BROKER_STATE_TOPIC:
            self._state.add(head)
        elif head.topic == QUEUE_NUMBERS_TOPIC:
            self._numbers.take_set(_bytes_of(stretch, head))
        elif head.queue_offset >= 0 and head.topic not in LEFT_OUT:
            self._numbers.take(head)
            self._with_messages.add((head.topic, head.queue_id))

    def _write_expired(self) -> None:
        """Queue files for queues without messages. A log that begins at 0 holds every message there ever was."""
        store = self._store
        if self.done.begin == 0:
            return
        if not (store.store_path_root_dir / ABORT_FILE).exists():
            self._numbers.raise_to(stored_ends(store.consume_queue_dir))
        self._state.next_offset = max(self._state.next_offset, self._numbers.of.get((BROKER_STATE_TOPIC, 0), 0))
        shown = {key: end for key, end in self._numbers.of.items() if key[0] not in LEFT_OUT}
        expired = without_messages(shown, self._with_messages)
        write_expired(self._fs, self._plain.consume_queue_dir, self._plain.consume_queue_file_bytes, expired)
        self.done.expired_queues = len(expired)

    # -- what is derived, and the state ----------------------------------------------------------------------------

    def build(self) -> None:
        """Have a store build queues, index and checkpoint."""
        self._progress("building queues and index", 0, 1)
        with _opened(self._plain) as store:
            self.done.queues = len(store.queues())
            self._state_end = store.max_offset(BROKER_STATE_TOPIC, 0)

    def write_state(self) -> None:
        """RocketMQ's files, and a snapshot, which says more."""
        self._progress("writing the state", 0, 1)
        numbers = self._numbers.of
        tables = tables_of(self._store.config_dir, self._state, lambda topic, queue: numbers.get((topic, queue), 0))
        config_dir = self._plain.config_dir
        make_dirs_durably(self._fs, config_dir)
        for name in _KEPT:
            for path in (self._store.config_dir / name, self._store.config_dir / f"{name}.bak"):
                if path.exists():
                    _copy_durably(self._fs, path, config_dir / path.name)
        RocketmqFiles(self._fs, config_dir).write(tables, time.time_ns() // 1_000_000)
        write_snapshot(self._fs, config_dir, BrokerSnapshot(tuple(tables.as_changes()), self._state_end))
        done = self.done
        done.topics, done.groups, done.offsets = len(tables.topics), len(tables.groups), tables.offset_count
        done.delay_levels = len(tables.delay_offsets)

    # -- afterwards ------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Read everything back. Raises ``CorruptLogError``."""
        done = self.done
        part = _files_part(self._plain, done.begin, done.end)
        new = replace(part, begin=self._old.end) if self._old is not None else part
        if new.end > new.begin:
            self._compare(new)
        found = verify_broker(self._plain, None)
        for one in found.problems:
            raise CorruptLogError(one.path, one.offset, f"the export is wrong: {one.reason}", "")
        if found.messages != done.messages + done.copied:
            reason = f"the export holds {found.messages} messages instead of {done.messages + done.copied}"
            raise CorruptLogError(self._partial, 0, reason, "")
        done.keys = found.keys
        with _opened(self._plain) as store:
            for (topic, queue_id), end in self._numbers.of.items():
                known = store.max_offset(topic, queue_id)
                if topic not in LEFT_OUT and known != end:
                    reason = f"queue {queue_id} of {topic} goes on at {known} instead of {end}"
                    raise CorruptLogError(self._partial, 0, reason, "")

    def _compare(self, part: LogPart) -> None:
        """Every record is that of the source, but for what names physical offsets."""
        ours = _records(part, entries=False, levels=self._levels, told=lambda one: self._told("comparing", one, part))
        theirs = _records(self._entries, entries=True, levels=self._levels, told=lambda _one: None)
        wanted = ((head, record) for head, record in theirs if head.topic not in LEFT_OUT)
        for mine, source in zip_longest(ours, wanted):
            if mine is None or source is None:
                raise CorruptLogError(self._partial, 0, "the export has not as many records as the source", "")
            (head, copy), (original, record) = mine, source
            at = _PREPARED_AT[head.sys_flag & HOST_V6_FLAGS]
            is_same = (
                copy[:PHYSICAL_OFFSET_AT] == record[:PHYSICAL_OFFSET_AT]
                and copy[PHYSICAL_OFFSET_AT + 8 : at] == record[PHYSICAL_OFFSET_AT + 8 : at]
                and copy[at + 8 :] == record[at + 8 :]
            )
            if not is_same:
                reason = f"the export's record at {head.offset} differs from the source's at {original.offset}"
                raise CorruptLogError(self._partial, 0, reason, "")

    def finish(self) -> None:
        """Give the directory its name."""
        for directory, _, _ in os.walk(self._partial, topdown=False):
            self._fs.sync_dir(Path(directory))
        self._fs.rename(self._partial, self._target)
        self._fs.sync_dir(self._target.absolute().parent)

    def _told(self, step: str, stretch: LogPiece, part: LogPart) -> None:
        self._progress(step, stretch.position + stretch.outcome.consumed - part.begin, part.end - part.begin)


def _part_of(node: VerifiedNode, end: int) -> LogPart:
    if node.identity is None or node.checkpoint is None:
        raise ConfigError(
            [
                f"{node.directory} was never opened by this project: start the member once with "
                "import_unchecked=true, and stop it"
            ]
        )
    begin = node.checkpoint.begin.position
    return LogPart(_by_base(node.segments), node.identity.segment_bytes, begin, max(begin, end))


def _by_base(paths: list[Path]) -> Mapping[int, Path]:
    return {int(path.name): path for path in paths}


def _old_part(store: MessageStoreConfig, node: VerifiedNode, entries: LogPart) -> LogPart | None:
    """The plain files that the log continues; None if it continues none, or they have expired.

    Raises ``ConfigError`` if they are not whole.
    """
    record = read_base_log(node.directory)
    if record is None:
        return None
    there = [one for one in (*store.commit_log_dirs, *store.read_only_commit_log_dirs) if one.is_dir()]
    size = record.file_bytes
    found = {one.base: one for one in list_segments(there, size).segments if one.base < record.end}
    if not found:
        return None
    whole = {base for base, one in found.items() if one.size == size}
    if whole != set(range(min(found), record.end, size)) or entries.begin != record.end:
        raise ConfigError(
            [
                f"the plain files in {there[0]} do not reach to {entries.begin}, where the group's log begins: "
                "export another member, or restore them (dledger upgrade check --align)"
            ]
        )
    return LogPart({base: one.path for base, one in found.items()}, size, min(found), record.end)


def _files_part(store: MessageStoreConfig, begin: int, end: int) -> LogPart:
    size = store.mapped_file_size_commit_log
    found = list_segments(store.commit_log_dirs, size).segments
    return LogPart({one.base: one.path for one in found}, size, begin, end)


def _plain_config(store: MessageStoreConfig, root: Path, segment_bytes: int) -> MessageStoreConfig:
    """Settings under which nothing expires and nothing else is written."""
    return replace(
        store,
        store_path_root_dir=root,
        store_path_commit_log="",
        read_only_commit_log_store_paths="",
        mapped_file_size_commit_log=segment_bytes,
        enable_dledger_commit_log=False,
        broker_role=BrokerRole.ASYNC_MASTER,
        transient_store_pool_enable=False,
        delete_when="",
        file_reserved_time=_NEVER_HOURS,
        clean_file_forcibly_enable=False,
        disk_max_used_space_ratio=95,
        disk_space_warning_level_ratio=100,
        disk_space_clean_forcibly_ratio=100,
        derived_scrub_bytes_per_s=0,
    )


@contextmanager
def _opened(config: MessageStoreConfig) -> Iterator[MessageStore]:
    """A store that has dispatched everything, cleanly stopped at the end."""
    clock = Clock()
    store = MessageStore(config, PlainCommitLog(config, clock=clock), clock=clock)
    try:
        store.load()
        yield store
    finally:
        store.shutdown()


def _records(
    part: LogPart, *, entries: bool, levels: DelayLevels, told: Callable[[LogPiece], None]
) -> Iterator[tuple[RecordHead, bytes]]:
    for one in read_log(part, entries=entries, levels=levels):
        for head in one.outcome.heads:
            yield head, _bytes_of(one, head)
        told(one)


def _bytes_of(stretch: LogPiece, head: RecordHead) -> bytes:
    start = head.offset - stretch.position
    return stretch.data[start : start + head.size]


def _copy_durably(fs: FileSystem, source: Path, target: Path) -> None:
    """A private copy, with the source's time: files expire by it."""
    fs.close(fs.create(target))
    shutil.copyfile(source, target)
    status = source.stat()
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    fd = fs.open(target)
    try:
        fs.sync(fd)
    finally:
        fs.close(fd)
