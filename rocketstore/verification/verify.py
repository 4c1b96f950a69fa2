"""Verifies a stopped broker's directory: its log (if it is plain), and everything derived from the log.

Consume queues and keys are derived again into a temporary directory, at 20 bytes per message and key, and compared with
the existing files (``compare`` defines expected differences). Nothing below the broker's root is changed.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
from crc32c import crc32c

from dledger.errors import ConfigError, CorruptLogError, DLedgerError
from dledger.store.format import segment_name
from dledger.store.fs import FileSystem, non_zero_end, read_whole
from dledger.store.inspect import ProblemItem
from dledger.types import BaseLog
from rocketstore.commit_log.base_log import find_plain_files
from rocketstore.config import MIB, MessageStoreConfig
from rocketstore.consume_queue.files import UNIT_BYTES
from rocketstore.consume_queue.table import ConsumeQueueTable
from rocketstore.index.file import IndexShape
from rocketstore.index.format import ENTRIES, KEY, TopicHashes, key_hashes
from rocketstore.message.message import DelayLevels
from rocketstore.message.record import CRC, CRC_AT
from rocketstore.message.scan import RecordScanOutcome, scan_entries, scan_records
from rocketstore.settings import load_broker_settings
from rocketstore.state.applier import SNAPSHOT_FILE, decode_snapshot
from rocketstore.state.changes import MalformedStateError, SetTimedProgress
from rocketstore.store.directory import (
    ABORT_FILE,
    CHECKPOINT_FILE,
    DELETED_FILE,
    DeletedQueues,
    StoreCheckpointFile,
    is_intact,
    read_checkpoint_file,
)
from rocketstore.store.dispatch import RECORD_BYTES_MAX
from rocketstore.timer.files import TimerFiles
from rocketstore.timer.hours import NOTHING_DELIVERED, TimedProgress
from rocketstore.types import RecordHead
from rocketstore.verification.compare import (
    Bounds,
    Difference,
    compare_index,
    compare_queues,
    compare_timers,
    dispatched_to,
    read_deleted,
    read_keys,
)

_CHUNK_BYTES: Final = 8 * MIB
_SMALLEST: Final = 8
"""Less space than this is left in a plain file only after its last record."""


@dataclass(frozen=True, slots=True)
class LogPart:
    """The part of a replicated log known to be committed and sound: its segments by base, and its bounds."""

    segments: Mapping[int, Path]
    segment_bytes: int
    begin: int
    end: int


@dataclass(slots=True)
class VerifiedBroker:
    """The results. ``end``: how far the log was read; derived files were compared up to there."""

    root: Path
    replicated: bool
    messages: int = 0
    keys: int = 0
    begin: int = 0
    end: int = 0
    torn: ProblemItem | None = None
    """The torn tail that an unclean stop left in a plain log."""
    problems: list[ProblemItem] = field(default_factory=list)

    def add(self, path: Path, offset: int, reason: str) -> None:
        self.problems.append(ProblemItem(path, offset, reason))


def settings_for(root: Path, conf: Path | None) -> MessageStoreConfig:
    """The store's settings: those of the conf file, otherwise RocketMQ's defaults, with the size of the existing queue
    files.

    Raises ``ConfigError``.
    """
    flags = {"storePathRootDir": str(root)}
    if conf is not None:
        return load_broker_settings(conf, {}, flags)[0].store
    config = MessageStoreConfig(store_path_root_dir=root)
    sizes = {one.stat().st_size for one in root.glob("consumequeue/*/*/*") if one.is_file()}
    if sizes and sizes != {config.consume_queue_file_bytes}:
        raise ConfigError(
            [f"queue files in {root} have {max(sizes):,} bytes: pass the broker's conf file with --conf-file"]
        )
    shape = IndexShape(config.max_hash_slot_num, config.max_index_num)
    others = {one.stat().st_size for one in root.glob("index/*") if one.is_file()} - {shape.file_bytes}
    if others:
        raise ConfigError(
            [f"index files in {root} have {max(others):,} bytes: pass the broker's conf file with --conf-file"]
        )
    return config


def verify_broker(
    store: MessageStoreConfig, log: LogPart | None, *, old: BaseLog | None = None, derived: bool = True
) -> VerifiedBroker:
    """Verify everything below a broker's root; ``log`` is a node's, None for a plain broker, whose own log is read.

    ``old``: the plain log that the node's log continues, which is read, too. Without ``derived``, only the broker's own
    files of the log are verified. Raises ``OSError`` if the temporary directory has no room.
    """
    found = VerifiedBroker(store.store_path_root_dir, log is not None)
    plain = _plain_part(store, found, old) if log is None or old is not None else None
    parts = [part for part in (plain, log if derived else None) if part is not None and part.begin < part.end]
    found.begin = found.end = min((part.begin for part in parts), default=0 if log is None else log.begin)
    if not derived:
        for outcome in _outcomes(parts, log, old, store, found):
            found.messages += len(outcome.heads)
        return found
    bounds = _bounds(store, found)
    with tempfile.TemporaryDirectory(prefix="dledger-verify-") as made:
        files = _Derived(Path(made), store)
        for outcome in _outcomes(parts, log, old, store, found):
            try:
                files.take(outcome.heads)
            except DLedgerError as error:
                found.add(store.consume_queue_dir, 0, f"cannot build a queue from the log: {error}")
                break
        files.close()
        found.messages, found.keys = files.messages, files.keys
        _compare(store, files, replace(bounds, begin=found.begin, end=found.end), found)
    _check_snapshot(store, parts, found)
    return found


# --- the log ----------------------------------------------------------------------------------------------------------


def _plain_part(store: MessageStoreConfig, found: VerifiedBroker, old: BaseLog | None) -> LogPart:
    """The plain log; up to the end of ``old``, if a group's log continues it, whose files may all have expired."""
    divided = None if old is None else old.end
    directories = [*store.commit_log_dirs, *store.read_only_commit_log_dirs]
    if divided is not None:
        directories = [path for path in directories if path.is_dir()]
    files = find_plain_files(directories, store.mapped_file_size_commit_log)
    found.problems += files.problems
    paths = {base: path for base, path in files.paths.items() if divided is None or base < divided}
    begin = min(paths, default=files.min_offset if divided is None else divided)
    end = max(paths, default=begin - files.segment_bytes) + files.segment_bytes
    if old is not None and begin > old.kept_from:
        found.add(store.commit_log_dirs[0] / segment_name(old.kept_from), 0, "the file is missing")
    if divided is not None and end < divided:
        found.add(directories[0], 0, f"the old log ends at {end}, and the group's log begins at {divided}")
    return LogPart(paths, files.segment_bytes, begin, max(begin, end))


def _outcomes(
    parts: Sequence[LogPart],
    replicated: LogPart | None,
    old: BaseLog | None,
    store: MessageStoreConfig,
    found: VerifiedBroker,
) -> Iterator[RecordScanOutcome]:
    """The log's records in order, up to its end or to damage, which is reported.

    The files of an ``old`` log must hold the same as when the group took them over.
    """
    levels = DelayLevels.parse(store.message_delay_level)
    crcs: Counter[int] = Counter()
    for part in parts:
        scan = scan_entries if part is replicated else scan_records
        position, wanted = part.begin, _CHUNK_BYTES
        while position < part.end:
            base = position - position % part.segment_bytes
            path = part.segments.get(base)
            if path is None:
                return  # already reported
            room = min(base + part.segment_bytes, part.end) - position
            asked = min(wanted, room)
            data = _read(path, position - base, asked)
            outcome = scan(data, position, check_crc=True, delay_levels=levels)
            if old is not None and part is not replicated:
                crcs[base] = crc32c(data[: outcome.consumed], crcs[base])
            position += outcome.consumed
            found.end = position
            yield outcome
            if outcome.end == "blank" and outcome.needed == base + part.segment_bytes - position:
                position, wanted = base + part.segment_bytes, _CHUNK_BYTES
            elif outcome.end == "more" and outcome.consumed:
                wanted = max(_CHUNK_BYTES, outcome.needed)
            elif outcome.end == "more" and asked < min(max(outcome.needed, RECORD_BYTES_MAX), room):
                wanted = max(outcome.needed, RECORD_BYTES_MAX)
            elif outcome.end == "more" and room < _SMALLEST:  # a plain file that was filled to the last byte
                position = base + part.segment_bytes
            else:
                _stopped(part, path, position, outcome.reason, found)
                return
    for base, crc in crcs.items():
        if old is not None and base >= old.digests_from and crc != old.digest_at(base):
            found.add(parts[0].segments[base], 0, "its messages are not those that the group took over")


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)


def _stopped(part: LogPart, path: Path, position: int, reason: str, found: VerifiedBroker) -> None:
    """Report the end of a plain log, a torn end, or damage."""
    offset = position % part.segment_bytes
    later = [one for base, one in sorted(part.segments.items()) if base > position]
    in_use = [one for one in later if not _is_zero(one, 0)]
    if not found.replicated and not in_use and _is_zero(path, offset):
        return
    unclean = (found.root / ABORT_FILE).exists()
    known = StoreCheckpointFile(FileSystem(), found.root / CHECKPOINT_FILE).read().replay_from
    if not found.replicated and unclean and not in_use and position >= known:
        found.torn = ProblemItem(path, offset, reason)
        return
    found.add(path, offset, reason)


def _is_zero(path: Path, offset: int) -> bool:
    with path.open("rb") as file:
        return non_zero_end(file.fileno(), offset, os.fstat(file.fileno()).st_size) <= offset


# --- what is derived --------------------------------------------------------------------------------------------------


class _Derived:
    """Queues and keys, derived from the log as dispatch does."""

    def __init__(self, directory: Path, store: MessageStoreConfig) -> None:
        self.queues_dir, self.keys_path = directory / "consumequeue", directory / "keys"
        self.queues_dir.mkdir()
        self.timers_dir = directory / "timers"
        self._timers = TimerFiles(self.timers_dir)
        self._timers.load(0, has_messages=False)
        self.messages = self.keys = 0
        self._queues = ConsumeQueueTable(self.queues_dir, store.consume_queue_file_bytes)
        self._with_keys = store.message_index_enable
        self._topics = TopicHashes()
        self._file: BinaryIO = self.keys_path.open("wb")

    def take(self, heads: Sequence[RecordHead]) -> None:
        """Add the next records. Raises ``DLedgerError`` if dispatch could not process them."""
        if not heads:
            return
        self._queues.append(heads)
        self._timers.append(heads)
        self.messages += len(heads)
        if not self._with_keys:
            return
        hashes, owners = key_hashes(heads, self._topics)
        if len(hashes):
            keys = np.empty(len(hashes), KEY)
            keys["hash"] = hashes
            keys["offset"] = np.fromiter([head.offset for head in heads], np.int64, len(heads))[owners]
            keys["store_ms"] = np.fromiter([head.store_timestamp for head in heads], np.int64, len(heads))[owners]
            self._file.write(keys.tobytes())
            self.keys += len(keys)

    def close(self) -> None:
        """Finish."""
        self._file.close()


def _bounds(store: MessageStoreConfig, found: VerifiedBroker) -> Bounds:
    """How far the broker has dispatched according to its files. Verifies its small files."""
    root = found.root
    checkpoint = root / CHECKPOINT_FILE
    if checkpoint.exists() and not is_intact(read_checkpoint_file(checkpoint)):
        found.add(checkpoint, 0, "the checkpoint is invalid: the next start will rebuild queues and index")
    deleted_path = store.config_dir / DELETED_FILE
    deleted: dict[tuple[str, int], int] = {}
    try:
        DeletedQueues(FileSystem(), deleted_path).load()
        deleted = read_deleted(deleted_path)
    except CorruptLogError as error:
        found.add(error.path, error.offset, error.reason)
    return Bounds(0, 0, dispatched_to(root, is_member=found.replicated), deleted)


def _compare(store: MessageStoreConfig, derived: _Derived, bounds: Bounds, found: VerifiedBroker) -> None:
    queues = compare_queues(derived.queues_dir, store.consume_queue_dir, store.consume_queue_file_bytes, bounds)
    for one in queues.differences:
        found.add(Path(one.file), one.number % (store.consume_queue_file_bytes // UNIT_BYTES) * UNIT_BYTES, _told(one))
    timers = compare_timers(derived.timers_dir, store.timers_dir, bounds, _timed_progress(store))
    for path, offset, reason in timers:
        found.add(path, offset, reason)
    if store.message_index_enable:
        shape = IndexShape(store.max_hash_slot_num, store.max_index_num)
        index = compare_index(read_keys(derived.keys_path), store.index_dir, shape, bounds)
        for one in index.differences:
            found.add(Path(one.file), shape.entries_at + one.number * ENTRIES.itemsize if one.number else 0, _told(one))


def _timed_progress(store: MessageStoreConfig) -> TimedProgress:
    """How far timed messages have been delivered for good; nothing is settled without a sound snapshot."""
    try:
        changes = decode_snapshot(read_whole(store.config_dir / SNAPSHOT_FILE)).changes
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MalformedStateError):
        return NOTHING_DELIVERED  # that it is unusable is reported where it is verified
    return next((one.progress for one in changes if isinstance(one, SetTimedProgress)), NOTHING_DELIVERED)


def _told(difference: Difference) -> str:
    return f"number {difference.number} is {difference.found}; the log says {difference.expected}"


def _check_snapshot(store: MessageStoreConfig, parts: Sequence[LogPart], found: VerifiedBroker) -> None:
    """Verify the state's snapshot, and that the record it ends with is where it says."""
    path = store.config_dir / SNAPSHOT_FILE
    try:
        snapshot = decode_snapshot(read_whole(path))
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError, MalformedStateError) as error:
        found.add(path, 0, f"the snapshot of the broker's state is unusable: {error}")
        return
    if snapshot.last_record is None or not found.begin <= snapshot.last_record[0] < found.end:
        return
    offset, crc = snapshot.last_record
    part = next(one for one in parts if offset < one.end)
    base = offset - offset % part.segment_bytes
    stored = _read(part.segments[base], offset - base + CRC_AT, CRC.size)
    if len(stored) < CRC.size or CRC.unpack(stored)[0] != crc:
        found.add(path, 0, f"the record at {offset}, named as its last, differs from the one in the log")
