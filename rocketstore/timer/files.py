"""The files of timed messages: one for each hour in which any is due, derived from the log like consume queues.

A file holds an entry for every record of ``TIMED_TOPIC`` that is due in its hour, in the log's order, so that it is the
same on every member and after every rebuild. ``hours`` says how many entries of each were durable last, and their
checksum. It is written before the store's checkpoint, so after a crash the files are cut at what the checkpoint knows,
and dispatch adds the rest again; if a file is missing or damaged at a start, everything is built again from the log.

A file that is found damaged later serves nothing until it is built again (``rocketstore.store.scrub``). Entries
for its hour are only counted meanwhile: the log has them.

Threads: dispatch appends, one flushes, any number read. A lock guards everything but the writing of ``hours``.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from zlib import crc32

import numpy as np

from dledger.errors import CorruptLogError, DiskError, DiskFullError, DLedgerError
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.timer.hours import (
    ADVICE,
    CHANGED,
    ENTRY,
    HOUR_MS,
    HOURS_FILE,
    NOTHING_DELIVERED,
    SECONDS,
    Entries,
    EntryKind,
    FirstDue,
    HourExtent,
    HourFile,
    HourMark,
    HourRepair,
    RecallIndex,
    TimedEntry,
    TimedProgress,
    Wanted,
    count_hour,
    decode_entries,
    decode_hours,
    encode_hours,
    entries_with,
    entry_of,
    first_due,
    hour_of,
    hour_path,
    length,
    read_rest,
    still_open,
    timed_heads,
)
from rocketstore.types import RecordHead

_T = TypeVar("_T")
MISSING: Final = "it is missing"
_DAMAGED: Final = frozenset({errno.ENOENT, errno.EIO, errno.EISDIR})
"""A file that cannot be read for these reasons is as good as damaged."""

TimedListener = Callable[[Sequence[TimedEntry]], None]

_log = logging.getLogger("rocketstore")


class FollowedHours(NamedTuple):
    """The entries of some hours, up to ``end_ms``."""

    entries: list[Entries]
    end_ms: int


class TimerFiles:
    """The hour files of one directory."""

    def __init__(
        self,
        directory: Path,
        fs: FileSystem | None = None,
        on_damage: Callable[[CorruptLogError], None] = lambda error: _log.error("%s", error),
    ) -> None:
        """``on_damage`` is called once for each file that is found damaged while it is used, on any thread."""
        self.directory: Final = directory
        self._on_damage = on_damage
        self._fs = fs or FileSystem()
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._searching = threading.Lock()  # one search of a whole file at a time
        self._hours: dict[int, HourFile] = {}
        self._recalls = RecallIndex()
        self._damaged: set[int] = set()
        self._repair: HourRepair | None = None
        self._marks: list[HourMark] | None = None
        self._listener: TimedListener | None = None
        self._listener_before = 0
        self._failure = ""
        self._settled = NOTHING_DELIVERED
        self.seen = 0
        """Every record of the topic before this queue offset has been looked at."""
        self.malformed = 0
        """Records of the topic that do not say when they are due."""

    # -- life ----------------------------------------------------------------------------------------------------------

    def load(self, cut: int, *, has_messages: bool) -> bool:
        """Open the files, without entries of records at ``cut`` or later; False if everything must be dispatched again.

        ``has_messages``: whether the log holds timed messages. Raises ``DiskError``.
        """
        try:
            make_dirs_durably(self._fs, self.directory)
            marks = self._read_marks()
            found = {} if marks is None else self._open(marks, cut)
            is_whole = found is not None and (marks is not None or not has_messages)
            self._hours = found or {}
            for path in self.directory.iterdir():
                hour = hour_of(path)
                if hour is not None and (not is_whole or hour not in self._hours or path.suffix):
                    self._fs.unlink(path)
            self._fs.sync_dir(self.directory)
        except OSError as error:
            raise self._error("opening", error) from error
        if not is_whole:
            _log.warning(
                "%s: files of timed messages are missing or damaged: building all from the log", self.directory
            )
            self._hours = {}
        self._marks = None
        self.seen = max((one.last + 1 for one in self._hours.values()), default=0)
        return is_whole

    def _read_marks(self) -> list[HourMark] | None:
        try:
            return decode_hours(read_whole(self.directory / HOURS_FILE))
        except FileNotFoundError:
            return None

    def _open(self, marks: Sequence[HourMark], cut: int) -> dict[int, HourFile] | None:
        """The files as they were, cut; None if one is damaged."""
        hours: dict[int, HourFile] = {}
        for hour, count, crc in marks:
            path = hour_path(self.directory, hour)
            try:
                with path.open("rb") as opened:
                    data, has_more = opened.read(count * ENTRY.size), bool(opened.read(1))
            except FileNotFoundError:
                return None
            if len(data) != count * ENTRY.size or crc32(data) != crc:
                return None
            entries = decode_entries(data)
            kept = int(np.searchsorted(entries["position"], cut))
            if not kept:
                continue
            if kept < count or has_more:
                data = data[: kept * ENTRY.size]
                replace_durably(self._fs, path, data)
            hours[hour] = self._taken_over(hour, path, entries[:kept], crc32(data))
        return hours

    def _taken_over(self, hour: int, path: Path, entries: Entries, crc: int) -> HourFile:
        file = HourFile(path)
        file.take_over(entries, crc)
        self._recalls.replace(hour, entries["origin"][entries["kind"] == EntryKind.RECALL].tolist())
        return file

    def append(self, heads: Sequence[RecordHead]) -> None:
        """Add the timed ones of these records, which are in the log's order; those that are there are skipped.

        After ``DiskFullError`` or ``DiskError``, a part may have been added.
        """
        found: list[TimedEntry] = []
        for head in timed_heads(heads):
            entry = entry_of(head)
            if entry is None:
                self.malformed += 1
                _log.error("the record at %d of the log does not say when it is due: it is not delivered", head.offset)
            else:
                found.append(entry)
        if found:
            with self._lock:
                self._add(found)
                self.seen = max(self.seen, found[-1].queue_offset + 1)

    def _add(self, found: Sequence[TimedEntry]) -> None:
        by_hour: dict[int, list[TimedEntry]] = {}
        for entry in found:
            by_hour.setdefault(entry.hour, []).append(entry)
        told = []
        for hour, entries in by_hour.items():
            file = self._hours.get(hour)
            new = [one for one in entries if file is None or one.queue_offset > file.last]
            if not new:
                continue
            try:
                file = file or self._create(hour)
                self._write(file, new)
            except OSError as error:
                raise self._error("writing to", error) from error
            if new[0].due_ms < self._listener_before:
                told += new
        if told and self._listener is not None:
            self._listener(sorted(told, key=lambda one: one.queue_offset))

    def _create(self, hour: int) -> HourFile:
        file = HourFile(hour_path(self.directory, hour))
        self._fs.close(self._fs.create(file.path))
        self._hours[hour] = file
        return file

    def _write(self, file: HourFile, entries: Sequence[TimedEntry]) -> None:
        encoded, hour = [one.encode() for one in entries], entries[0].hour
        if hour not in self._damaged:
            try:
                fd = self._fs.open(file.path)
            except FileNotFoundError:
                self._damage(hour, file, MISSING)
            else:
                try:
                    self._fs.write(fd, b"".join(encoded), file.entries * ENTRY.size)
                finally:
                    self._fs.close(fd)
        if self._repair is not None and self._repair.hour == hour:
            self._repair.added += entries
        self._note(file, entries, encoded)

    def _note(self, file: HourFile, entries: Sequence[TimedEntry], encoded: Sequence[bytes]) -> None:
        for entry, data in zip(entries, encoded, strict=True):
            file.note(entry, data)
            if entry.kind == EntryKind.RECALL:
                self._recalls.add(entry.hour, entry.origin)

    def flush(self) -> None:
        """Make everything that was added durable. Once it has raised ``DiskError``, it always does."""
        if self._failure:
            raise DiskError(self._failure)
        self._count_again()
        with self._flushing:
            with self._lock:
                dirty = [one for hour, one in self._hours.items() if one.is_dirty and hour not in self._damaged]
                marks = [HourMark(hour, one.entries, one.crc) for hour, one in sorted(self._hours.items())]
                for file in dirty:
                    file.is_dirty = False
            if marks == self._marks:
                return
            try:
                for file in dirty:
                    self._sync(file)
                if dirty:
                    self._fs.sync_dir(self.directory)
                replace_durably(self._fs, self.directory / HOURS_FILE, encode_hours(marks))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    self._failure = f"flushing {self.directory} failed: {error}; {ADVICE}"
                for file in dirty:
                    file.is_dirty = True
                raise self._error("flushing", error) from error
            self._marks = marks

    def _sync(self, file: HourFile) -> None:
        try:
            fd = self._fs.open(file.path)
        except FileNotFoundError:
            with self._lock:
                self._damage(int(file.path.name), file, MISSING)
            return  # until it is built again, a start finds that it is not what ``hours`` says
        try:
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)

    def delete_settled(self, progress: TimedProgress) -> int:
        """Remove the files of which every entry is settled; returns how many. Raises ``DiskError``.

        ``progress`` must be durable: after a crash, nothing says that these messages were there.
        """
        with self._flushing, self._lock:
            self._settled = progress
            gone = [hour for hour, file in self._hours.items() if self._is_settled(hour, file)]
            if not gone:
                return 0
            try:
                if self._marks is not None:  # ``hours`` may name them
                    self._marks = [one for one in self._marks if one.hour not in gone]
                    replace_durably(self._fs, self.directory / HOURS_FILE, encode_hours(self._marks))
                for hour in gone:
                    self._fs.unlink(self._hours.pop(hour).path)
                    self._recalls.forget(hour)
            except OSError as error:
                raise self._error("removing", error) from error
            return len(gone)

    def _is_settled(self, hour: int, file: HourFile) -> bool:
        return (hour + 1) * HOUR_MS <= self._settled.due_ms and file.last < self._settled.offset

    # -- reading -------------------------------------------------------------------------------------------------------

    def hours(self) -> list[int]:
        """The hours that have files, in order."""
        with self._lock:
            return sorted(self._hours)

    def entries(self, hour: int) -> Entries:
        """All entries of an hour, verified. Raises ``CorruptLogError``, ``DiskError``."""
        return decode_entries(self._read(hour, read_rest) or b"")  # others append meanwhile

    def first_due(self, hour: int, wanted: Wanted, count: int) -> FirstDue:
        """The first ``count`` wanted entries of an hour, as ``reading.first_due``. Raises what ``entries`` does."""
        with self._searching:
            return self._read(hour, lambda extent: first_due(extent, wanted, count)) or FirstDue(decode_entries(b""))

    def find(self, hour: int, origin: int) -> TimedEntry | None:
        """A message's newest record in an hour, if it is there and not recalled. Raises what ``entries`` does.

        The whole file is read, piece by piece: for as long as that takes, nobody should wait for the caller.
        """
        with self._searching:
            found = self._read(hour, lambda extent: entries_with(extent, origin))
        rest = still_open(decode_entries(b"") if found is None else found)
        return TimedEntry(*map(int, rest[0])) if len(rest) else None

    def is_recalled(self, hour: int, origin: int) -> bool | None:
        """Whether a message of an hour is; None: only ``find`` knows. Reads nothing."""
        with self._lock:
            return self._recalls.is_recalled(hour, origin)

    def follow(self, begin_ms: int, end_ms: int, listener: TimedListener) -> FollowedHours:
        """The entries of the hours from ``begin_ms`` up to ``end_ms`` (whole hours), or to the first damaged one.

        From then on, ``listener`` gets each one that is due before that, and before ``begin_ms``; unless the first hour
        is damaged, which changes nothing. It is called on the thread that appends, under a lock. Raises ``DiskError``.
        """
        read: dict[int, tuple[HourExtent, bytes]] = {}
        for hour in self.hours():
            if begin_ms <= hour * HOUR_MS < end_ms:
                try:
                    found = self._read(hour, lambda extent: (extent, read_rest(extent)))  # others append meanwhile
                except CorruptLogError:
                    end_ms = hour * HOUR_MS
                    break
                read |= {hour: found} if found is not None else {}
        with self._lock:
            entries = []
            for hour, file in sorted(self._hours.items()):
                if begin_ms <= hour * HOUR_MS < end_ms:
                    known, data = read.get(hour, (HourExtent(file.path, 0, 0), b""))
                    rest = self._read_rest(hour, file, known)
                    if rest is None:
                        end_ms = hour * HOUR_MS
                        break
                    entries.append(decode_entries(data + rest))
            if end_ms > begin_ms:
                self._listener, self._listener_before = listener, end_ms
            return FollowedHours(entries, end_ms)

    def seen_with(self, take: Callable[[], None]) -> int:
        """Call ``take`` while nothing is added; returns ``seen``."""
        with self._lock:
            take()
            return self.seen

    def unfollow(self) -> None:
        """Call the listener no more."""
        with self._lock:
            self._listener, self._listener_before = None, 0

    def _read(self, hour: int, read: Callable[[HourExtent], _T]) -> _T | None:
        """The result of ``read`` on an hour's file, None if there is none. Raises what ``entries`` does."""
        while True:
            with self._lock:
                file = self._hours.get(hour)
                if file is None:
                    return None
                if hour in self._damaged:
                    raise CorruptLogError(file.path, 0, CHANGED, ADVICE)
                extent = file.extent
            try:
                return read(extent)
            except (OSError, CorruptLogError) as error:
                with self._lock:
                    if self._hours.get(hour) is file:
                        raise self._problem(hour, file, error) from error
                # it was removed or built again meanwhile

    def _read_rest(self, hour: int, file: HourFile, known: HourExtent) -> bytes | None:
        """None if it is damaged. Under the lock."""
        try:
            return None if hour in self._damaged else read_rest(file.extent, known.size, known.crc)
        except (OSError, CorruptLogError) as error:
            problem = self._problem(hour, file, error)
            if isinstance(problem, CorruptLogError):
                return None
            raise problem from error

    def _problem(self, hour: int, file: HourFile, error: OSError | CorruptLogError) -> DLedgerError:
        """A file cannot be read: what to raise. Notes damage. Under the lock."""
        if isinstance(error, CorruptLogError):
            return self._damage(hour, file, error.reason)
        if error.errno in _DAMAGED:
            return self._damage(hour, file, MISSING if error.errno == errno.ENOENT else f"it cannot be read: {error}")
        return self._error("reading", error)

    def _damage(self, hour: int, file: HourFile, reason: str) -> CorruptLogError:
        found = CorruptLogError(file.path, 0, reason, ADVICE)
        if hour not in self._damaged:
            self._damaged.add(hour)
            self._on_damage(found)
        return found

    # -- damage --------------------------------------------------------------------------------------------------------

    def damaged(self) -> list[int]:
        """The hours whose files must be built again."""
        with self._lock:
            return sorted(self._damaged)

    def path(self, hour: int) -> Path:
        return hour_path(self.directory, hour)

    def verify(self, hour: int) -> int:
        """Read an hour's file; returns its bytes. Raises what ``entries`` does."""
        return self._read(hour, length) or 0

    def begin_repair(self, hour: int) -> HourRepair | None:
        """Begin to build an hour's file again, which ends any other repair; None if it is there no more."""
        with self._lock:
            file = self._hours.get(hour)
            if file is None:
                self._damaged.discard(hour)
                return None
            self._repair = HourRepair(hour, max(self.seen, file.last + 1))
            return self._repair

    def end_repair(self, repair: HourRepair) -> None:
        """Replace a damaged file by the one that was built. Raises ``DiskError``, ``DiskFullError``."""
        known = decode_entries(repair.known)
        made = HourFile(self.path(repair.hour))
        made.take_over(known, crc32(repair.known))
        with self._flushing, self._lock:
            if self._repair is not repair:
                return
            if repair.hour in self._hours:
                added = [one.encode() for one in repair.added]
                try:
                    replace_durably(self._fs, made.path, bytes(repair.known) + b"".join(added))
                except OSError as error:
                    raise self._error("repairing", error) from error
                self._hours[repair.hour] = made
                self._recalls.replace(repair.hour, known["origin"][known["kind"] == EntryKind.RECALL].tolist())
                self._note(made, repair.added, added)
            self._damaged.discard(repair.hour)
            self._repair = None

    # -- numbers -------------------------------------------------------------------------------------------------------

    def needed_from(self, end: int) -> int:
        """The position from which the log is needed for messages that are not settled; at most ``end``."""
        with self._lock:
            needed = [file.oldest for hour, file in self._hours.items() if not self._is_settled(hour, file)]
        return min([end, *needed])

    def _count_again(self) -> None:
        """Bring the numbers of hours with copies and recalls up to date: records are needed no more."""
        with self._lock:
            inexact = [hour for hour, file in self._hours.items() if file.is_inexact]
        for hour in inexact:
            try:
                entries = self.entries(hour)
            except CorruptLogError:
                continue  # it is counted when it is built again
            except DiskError as error:  # who needs the file for more than that will fail
                _log.error("%s", error)
                continue
            counted = count_hour(entries)
            with self._lock:
                file = self._hours.get(hour)
                if file is not None:
                    file.set_counts(counted, len(entries))

    def old_hours(self, before_ms: int, after_ms: int) -> list[int]:
        """The hours from ``after_ms`` on with records that were stored before ``before_ms``."""
        with self._lock:
            return sorted(
                hour for hour, file in self._hours.items() if hour * HOUR_MS >= after_ms and file.oldest_ms < before_ms
            )

    def due_in(self, due_ms: int) -> int:
        """How many messages are due in the second of ``due_ms``."""
        file = self._hours.get(due_ms // HOUR_MS)
        return 0 if file is None else int(file.at_second[due_ms // 1000 % SECONDS])

    def open_count(self, after_ms: int) -> tuple[int, int]:
        """Messages due after the second of ``after_ms``, and their bytes in the log."""
        with self._lock:
            hour, second = divmod(after_ms // 1000, SECONDS)
            found = [(int(file.at_second.sum()), file.bytes_open) for at, file in self._hours.items() if at > hour]
            now = self._hours.get(hour)
            if now is not None:
                count, everything = int(now.at_second[second + 1 :].sum()), int(now.at_second.sum())
                found.append((count, now.bytes_open * count // max(everything, 1)))
        return sum(count for count, _ in found), sum(size for _, size in found)

    def next_due_ms(self, after_ms: int) -> int | None:
        """The second (ms) in which the next message after the second of ``after_ms`` is due; None without any."""
        hour, second = divmod(after_ms // 1000, SECONDS)
        with self._lock:
            for at in sorted(one for one in self._hours if one >= hour):
                begin = second + 1 if at == hour else 0
                found = np.flatnonzero(self._hours[at].at_second[begin:] > 0)
                if len(found):
                    return (at * SECONDS + begin + int(found[0])) * 1000
        return None

    def _error(self, what: str, error: OSError) -> DiskError | DiskFullError:
        if error.errno == errno.ENOSPC:
            return DiskFullError(f"{what} {self.directory} failed: no space left on the device")
        return DiskError(f"{what} {self.directory} failed: {error}")
