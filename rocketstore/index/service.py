"""The key index: all index files of a store.

Records are indexed in log order, each exactly once: records at or before ``indexed_to`` are skipped, so a replay may
start anywhere before it. A record's keys are never split between two files (unless they exceed a file), so this also
holds for the last record of a full file.

The index is derived from the log. At startup, the first inconsistent file is removed together with all later ones, and
``load`` says from where to index again. A file found damaged later is rebuilt in place
(``rocketstore.store.scrub``); until then, queries that need it are refused. A failed ``append`` may be repeated
with the same records.

Threads: one appends, truncates and loads; one flushes; one deletes; one rebuilds; any number query. ``_files`` is
replaced as a whole, under ``_lock``; a removed file stays readable for threads that hold it.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dledger.clock import Clock
from dledger.errors import CorruptLogError, DiskError, DiskFullError, DLedgerError
from dledger.store.fs import TMP_SUFFIX, FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.index.file import ADVICE, IndexFile, IndexShape, NewEntry
from rocketstore.index.format import (
    SUMS_SUFFIX,
    IndexHeader,
    IndexSums,
    TopicHashes,
    decode_sums,
    hashes_of,
    key_hash,
    key_hashes,
)
from rocketstore.mapped.file import is_out_of_descriptors
from rocketstore.message.columns import RecordColumns
from rocketstore.types import RecordHead

_log = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[0-9]{17}")
_HITS_MAX: Final = 64
"""RocketMQ's ``maxMsgsNumBatch``."""
_CONTRADICTED_MAX: Final = 1024
_FEW: Final = 16
"""Up to this many records are indexed one by one: with arrays, one would cost eight times as much."""


class IndexHits(NamedTuple):
    """Physical offsets of records that may have the key, newest first; end of the index in milliseconds and offset."""

    offsets: list[int]
    last_update_ms: int
    last_offset: int


class IndexLoad(NamedTuple):
    """The result of ``load``.

    ``indexed_to`` is the last indexed record's offset or -1. ``replay_from`` is the offset of a record from which on
    records must be appended again (-1: from the log's beginning), or None if nothing is known to be missing.
    ``removed`` files were damaged, or newer than what is known to be durable.
    """

    indexed_to: int
    replay_from: int | None
    removed: tuple[Path, ...]


class IndexDamagedError(DLedgerError):
    """Raised when a query needs a damaged part of the index: it is being rebuilt from the log, so retry."""


def _come_again(path: Path) -> IndexDamagedError:
    return IndexDamagedError(f"{path} is damaged and being rebuilt from the log: retry later")


def _log_damage(error: CorruptLogError) -> None:
    _log.error("%s", error)


class IndexService:
    """The index files of one directory."""

    def __init__(
        self,
        directory: Path,
        slots: int,
        entries: int,
        fs: FileSystem | None = None,
        clock: Clock | None = None,
        hits_max: int = _HITS_MAX,
        on_damage: Callable[[CorruptLogError], None] = _log_damage,
    ) -> None:
        """``on_damage`` is called once per damaged file, on any thread."""
        self.directory = directory
        self.shape = IndexShape(slots, entries)
        self.fs: Final = fs or FileSystem()
        self._clock = clock or Clock()
        self._hits_max = hits_max
        self._lock = threading.Lock()
        self._files: tuple[IndexFile, ...] = ()
        self._indexed_to = -1
        self._topics = TopicHashes()
        self._failure = ""
        self._sums_dir = directory.with_name(directory.name + SUMS_SUFFIX)
        self._keeping = threading.Lock()  # held while sums are written or removed; acquired after _lock
        self._damaged: dict[Path, CorruptLogError] = {}
        self._contradicted: set[int] = set()
        self._scrubbed = (0, 0)  # the file and the block to verify next
        self._on_damage = on_damage

    @property
    def indexed_to(self) -> int:
        """Physical offset of the last indexed record; -1 if there is none. Records without keys do not count."""
        return self._indexed_to

    @property
    def last_entries(self) -> int:
        """The number of entries in the file that holds the last indexed record; 0 if there is none."""
        last = next((file for file in reversed(self._files) if not file.is_empty), None)
        return 0 if last is None else last.header.next_entry - 1

    @property
    def end_timestamp(self) -> int:
        """Store time of the newest indexed record, or 0."""
        files = self._files
        return files[-1].header.end_ms if files else 0

    @property
    def files(self) -> tuple[IndexFile, ...]:
        """All files, oldest first."""
        return self._files

    def load(
        self,
        *,
        clean_stop: bool,
        index_timestamp_ms: int,
        durable_end: int | None = None,
        durable_entries: int = -1,
    ) -> IndexLoad:
        """Open the files. After an unclean stop, everything newer than the last checkpoint is removed.

        ``durable_end`` is the last record whose indexing was durable then, -1 if there was none, ``durable_entries``
        (-1: unknown) the number of entries in its file then. None: unknown; then files with records newer than
        ``index_timestamp_ms`` are removed as a whole. Raises ``DiskError``.
        """
        try:
            make_dirs_durably(self.fs, self.directory)
            make_dirs_durably(self.fs, self._sums_dir)
            paths = self._list()
            if clean_stop:
                files = self._open(paths, None, ours=durable_end is not None)
                self._check_last(files)
            elif durable_end is None:
                files = self._open(paths, lambda file: file.header.end_ms > index_timestamp_ms, ours=False)
                self._recover_last(files, None, -1)
            else:
                files = self._open(paths, lambda file: file.is_empty or file.header.begin_offset > durable_end)
                self._recover_last(files, durable_end, durable_entries)
            removed = tuple(paths[len(files) :])
            for path in reversed(removed):
                self._unlink(path)
            if removed:
                self.fs.sync_dir(self.directory)
            for path in self._sums_dir.iterdir():
                if path.name not in {file.path.name for file in files}:
                    self.fs.unlink(path)
        except OSError as error:
            raise self._error("opening", error) from error
        self._files = tuple(files)
        self._indexed_to = self._end()
        if durable_end is not None and not clean_stop:
            missing = self._indexed_to < durable_end
        else:
            missing = bool(removed or (files and not clean_stop))
        return IndexLoad(self._indexed_to, self._indexed_to if missing else None, removed)

    def append(self, heads: Sequence[RecordHead]) -> None:
        """Index records, which are in log order; already indexed and rolled-back ones are skipped.

        After ``DiskFullError`` or ``DiskError``, a part may have been indexed.
        """
        if heads and heads[0].offset <= self._indexed_to:
            heads = [head for head in heads if head.offset > self._indexed_to]
        if len(heads) <= _FEW and self._append_few(heads):
            return
        keys, owners = key_hashes(heads, self._topics)
        if not len(keys):
            return
        offsets, store_ms = places_of(heads)
        offsets, store_ms = offsets[owners], store_ms[owners]
        with self._lock:  # delays truncation and removal of files
            try:
                self._put(keys, offsets, store_ms)
            except OSError as error:
                raise self._error("writing to", error) from error

    def _append_few(self, heads: Sequence[RecordHead]) -> bool:
        """``append`` for a few records, unless they may need another file."""
        entries = [NewEntry(key, head[2], head[5]) for head in heads for key in hashes_of(head, self._topics)]
        if not entries:
            return True
        with self._lock:
            file = self._files[-1] if self._files else None
            if file is None or file.room < len(entries):
                return False
            try:
                file.put_few(entries)
            except OSError as error:
                raise self._error("writing to", error) from error
            self._indexed_to = file.header.end_offset
        return True

    def query(self, topic: str, key: str, max_num: int, begin_ms: int, end_ms: int) -> IndexHits:
        """Records that may have this key and were stored in ``[begin_ms, end_ms]``, newest first.

        Different keys may share a hash, and times have a resolution of a second: check the records. Raises
        ``DiskError``, and ``IndexDamagedError`` if the result is unknown for now.
        """
        limit = min(max_num, self._hits_max)
        hash_ = key_hash(topic, key)
        files = self._files
        found: list[int] = []
        try:
            for file in reversed(files):
                if len(found) >= limit:
                    break
                if not file.is_empty and file.covers(begin_ms, end_ms):
                    if file.path in self._damaged:
                        raise _come_again(file.path)
                    found += file.select(hash_, limit - len(found), begin_ms, end_ms)
        except CorruptLogError as error:
            self._note(error)
            raise _come_again(error.path) from error
        except OSError as error:
            raise self._error("reading", error) from error
        return IndexHits(found, files[-1].header.end_ms if files else 0, max(self._indexed_to, 0))

    def truncate(self, physical: int) -> None:
        """Remove records at or after ``physical``, durably. Raises ``DiskError``."""
        with self._lock:
            try:
                files = list(self._files)
                while files and (files[-1].is_empty or files[-1].header.begin_offset >= physical):
                    self._unlink(files.pop().path)
                self._files = tuple(files)
                self.fs.sync_dir(self.directory)
                if files and files[-1].header.end_offset >= physical:
                    files[-1].truncate(physical)
            except OSError as error:
                raise self._error("truncating", error) from error
            self._indexed_to = self._end()

    def delete_expired(self, physical: int) -> int:
        """Remove the oldest files whose records all lie before ``physical``, never the last one; returns how many.

        Raises ``DiskError``.
        """
        count = 0
        with self._lock:
            while len(self._files) > 1 and self._files[0].header.end_offset < physical:
                try:
                    self._unlink(self._files[0].path)
                except OSError as error:
                    raise self._error("removing", error) from error
                self._files = self._files[1:]
                count += 1
        return count

    def flush(self) -> int:
        """Make everything indexed durable; returns the store time up to which it is (the checkpoint's index time).

        Once it has raised ``DiskError``, it always does: a failed disk may have lost what it reported as stored. Raises
        ``DiskFullError`` if there is no room for the sums.
        """
        if self._failure:
            raise DiskError(self._failure)
        files, end_ms = self._files, self.end_timestamp
        for file in files:
            sums = file.sums if file.dirty or not file.sums_kept else None  # not later: it may grow
            if file.dirty:
                try:
                    file.sync()
                except OSError as error:
                    self._failure = f"flushing {file.path} failed: {error}; the index must be rebuilt"
                    raise DiskError(self._failure) from error
            if sums is not None:
                self._keep(file, sums)
            if file is not self._files[-1]:
                file.seal()
        return end_ms

    # Damage

    @property
    def damaged(self) -> tuple[Path, ...]:
        """Files that must be rebuilt."""
        return tuple(self._damaged)

    def verify(self, bytes_max: int) -> tuple[int, bool]:
        """Verify the next bytes of an endless walk over all files; returns how many, and whether a round has ended.

        Damage is reported to ``on_damage``. Raises ``DiskError``.
        """
        done = 0
        number, block = self._scrubbed
        while done < bytes_max:
            files = self._files
            if number >= len(files):
                self._scrubbed = 0, 0
                return done, True
            try:
                size = 0 if files[number].path in self._damaged else files[number].verify(block)
            except CorruptLogError as error:
                self._note(error)
                size = 0
            except OSError as error:
                raise self._error("reading", error) from error
            done += size
            number, block = (number, block + 1) if size else (number + 1, 0)
        self._scrubbed = number, block
        return done, False

    def contradicted(self, offset: int) -> None:
        """An entry leads to the record at ``offset``, which does not have its key, so the file is damaged.

        Raises ``IndexDamagedError``, except for a repeated report about a record whose file was rebuilt from the log
        since.
        """
        if offset in self._contradicted:
            return
        for file in self._files:
            if not file.is_empty and file.header.begin_offset <= offset <= file.header.end_offset:
                if len(self._contradicted) >= _CONTRADICTED_MAX:
                    self._contradicted.clear()
                self._contradicted.add(offset)
                self._note(CorruptLogError(file.path, 0, f"an entry wrongly points to {offset} of the log", ADVICE))
                raise _come_again(file.path)

    def _note(self, error: CorruptLogError) -> None:
        if self._damaged.setdefault(error.path, error) is error:
            self._on_damage(error)

    def file_at(self, path: Path) -> IndexFile | None:
        """The file with that path, if it still exists."""
        return next((one for one in self._files if one.path == path), None)

    def forget(self, path: Path) -> None:
        """A damaged file is gone."""
        self._damaged.pop(path, None)

    def header_before(self, file: IndexFile) -> IndexHeader | None:
        """The header of the newest earlier file that has entries."""
        files = self._files
        earlier = files[: files.index(file)] if file in files else ()
        return next((one.header for one in reversed(earlier) if not one.is_empty), None)

    def end_of(self, file: IndexFile) -> int:
        """Records at or after this offset are indexed in later files."""
        files = self._files
        later = files[files.index(file) + 1 :] if file in files else ()
        return next((one.header.begin_offset for one in later if not one.is_empty), self._indexed_to + 1)

    def exchange(self, file: IndexFile, made: IndexFile, complete: Callable[[], None]) -> None:
        """Replace a damaged ``file`` by ``made``, once ``complete`` has added what it still lacks.

        Nothing is indexed meanwhile. Raises ``OSError``, and errors of ``complete``, without having changed anything.
        """
        path = file.path
        with self._lock, self._keeping:
            if file not in self._files:
                return  # it has expired
            complete()
            sums = made.sums
            made.sync()
            sums_path = self._sums_dir / path.name
            if sums_path.exists():
                self.fs.unlink(sums_path)
            self.fs.rename(made.path, path)
            self.fs.sync_dir(self.directory)
            made.path = path
            if sums is not None:
                replace_durably(self.fs, sums_path, sums.encode())
                made.sums_kept = True
            self._files = tuple(made if one is file else one for one in self._files)
            self._damaged.pop(path, None)
        if made is not self._files[-1]:
            made.seal()

    def _list(self) -> list[Path]:
        """Index files in order; leftovers are removed, other files are ignored."""
        found = []
        for path in sorted(self.directory.iterdir()):
            if _NAME.fullmatch(path.name) and path.is_file():
                found.append(path)
            elif path.name.endswith(TMP_SUFFIX):
                self.fs.unlink(path)
            else:
                _log.warning("ignoring %s: not an index file", path)
        return found

    def _open(
        self, paths: list[Path], is_newer: Callable[[IndexFile], bool] | None, *, ours: bool = True
    ) -> list[IndexFile]:
        """The files before the first one that is unusable or, after a crash, newer than what is durable.

        ``ours``: nobody else has written to them since their sums were stored. The last one may have grown before a
        crash.
        """
        files: list[IndexFile] = []
        for path in paths:
            if path.stat().st_size != self.shape.file_bytes:
                _log.warning("%s is not %d bytes long: removing it", path, self.shape.file_bytes)
                break
            with suppress(CorruptLogError):
                file = IndexFile(self.fs, path, self.shape, self._kept_sums(path))
                if is_newer is not None and is_newer(file):
                    _log.info("%s is newer than the checkpoint: rebuilding it", path)
                    break
                if self._follows(file, files):
                    files.append(file)
                    continue
            _log.warning("%s is damaged: rebuilding it", path)
            break
        same = files if is_newer is None else files[:-1]
        for number, file in enumerate(same if ours else ()):
            if file.differs:
                _log.warning("%s differs from what was flushed: rebuilding it", file.path)
                return files[:number]
        return files

    def _recover_last(self, files: list[IndexFile], durable_end: int | None, durable_entries: int) -> None:
        """Remove the newer part of the last file, or the file if it is damaged."""
        if not files:
            return
        if durable_end is not None and files[-1].header.end_offset < durable_end:
            durable_end, durable_entries = None, -1  # later files were damaged: this one was full, so it is complete
        if not files[-1].recover(durable_end, durable_entries, self._kept_sums(files[-1].path)):
            _log.warning("%s is damaged at its end: rebuilding it", files.pop().path)

    def _check_last(self, files: list[IndexFile]) -> None:
        """Remove the file to be written to unless it is sound."""
        if files:
            try:
                files[-1].open_for_writing()
            except CorruptLogError as error:
                _log.warning("%s: rebuilding it", error)
                files.pop()

    # Sums

    def _kept_sums(self, path: Path) -> IndexSums | None:
        try:
            return decode_sums(read_whole(self._sums_dir / path.name), self.shape.slots)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return None

    def _keep(self, file: IndexFile, sums: IndexSums) -> None:
        with self._keeping:
            if file not in self._files:
                return
            try:
                replace_durably(self.fs, self._sums_dir / file.path.name, sums.encode())
            except OSError as error:
                raise self._error("keeping sums of", error) from error
            file.sums_kept = True

    def _unlink(self, path: Path) -> None:
        """Remove a file and its sums. Raises ``OSError``."""
        with self._keeping:
            sums = self._sums_dir / path.name
            if sums.exists():  # first: another file of this name must not get them
                self.fs.unlink(sums)
            self.fs.unlink(path)

    def _follows(self, file: IndexFile, before: list[IndexFile]) -> bool:
        previous = next((one for one in reversed(before) if not one.is_empty), None)
        return file.is_empty or previous is None or file.header.begin_offset >= previous.header.end_offset

    def _end(self) -> int:
        return next((file.header.end_offset for file in reversed(self._files) if not file.is_empty), -1)

    def _put(self, keys: NDArray[np.int32], offsets: NDArray[np.int64], store_ms: NDArray[np.int64]) -> None:
        start = 0
        while start < len(keys):
            file = self._files[-1] if self._files else self._roll()
            end = start + file.room
            if end < len(keys):  # keep a record's keys together
                end = int(np.searchsorted(offsets, offsets[end]))
                if end <= start:
                    if not file.is_empty:
                        self._roll()
                        continue
                    end = start + file.room
            end = min(end, len(keys))
            file.put_all(keys[start:end], offsets[start:end], store_ms[start:end])
            self._indexed_to = file.header.end_offset
            start = end

    def _roll(self) -> IndexFile:
        """Start the next file, named by the time, but always after the last one."""
        name = int(datetime.fromtimestamp(self._clock.wall_ms() / 1000).strftime("%Y%m%d%H%M%S%f")[:17])  # noqa: DTZ006
        last = self._files[-1] if self._files else None
        if last is not None:
            name = max(name, int(last.path.name) + 1)
        path = self.directory / f"{name:017d}"
        file = IndexFile.create(self.fs, path, self.shape, last.header if last else None)
        self._files = (*self._files, file)
        return file

    def _error(self, what: str, error: OSError) -> DiskError | DiskFullError:
        if error.errno == errno.ENOSPC:
            return DiskFullError(f"{what} the index in {self.directory} failed: no space left on the device")
        if is_out_of_descriptors(error):
            return DiskFullError(f"{what} the index in {self.directory} failed: no file descriptor is left")
        return DiskError(f"{what} the index in {self.directory} failed: {error}")


def places_of(heads: Sequence[RecordHead]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Physical offsets and store times."""
    if isinstance(heads, RecordColumns):
        return heads.offsets, heads.store_timestamps
    return np.array([head[2] for head in heads], np.int64), np.array([head[5] for head in heads], np.int64)
