"""Snapshots on disk: ``<node>/snapshots/<index>``, a directory of files and of what verifies them.

    snapshots/00000000000000004711/
      state        what the state machine wrote
      producers    the table of producers and their results (``duplicates``)
      meta.json    a CRC32C in hex, a newline, and JSON: see ``SnapshotMeta``

``meta.json`` comes last, by a rename, once every other file and the directory are durable: a directory without it is
unfinished, whatever happened, and is removed at the next start. A removal takes it away first. So a crash at any write
leaves whole snapshots only. The newest two are kept; one that turns out to be damaged moves to ``damaged-<index>``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from crc32c import crc32c

from dledger import __version__
from dledger.errors import DamagedSnapshotError, SnapshotBusyError, SnapshotFormatError, invariant
from dledger.records import record
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from dledger.store.identity import SNAPSHOTS_DIRECTORY, configuration_from_json, configuration_to_json
from dledger.types import NO_INDEX, Boundary, Configuration, LogIndex, Position, Term
from dledger.values import MIB

META_FILE: Final = "meta.json"
STATE_FILE: Final = "state"
PRODUCERS_FILE: Final = "producers"
_SNAPSHOTS_KEPT: Final = 2
_DAMAGED_KEPT: Final = 2
PIECE_BYTES: Final = MIB
_META_BYTES_MAX: Final = MIB
META_FORMAT: Final = 1
"""Of ``meta.json`` and of the directory; that of the state is the machine's own."""
_SYNC_BYTES: Final = 16 * MIB
"""Written data is made durable in such steps, and is on its way to the disk at once: a sync of the log waits for what
other files have in memory (ext4 writes it before it commits their sizes), 20 ms at the 99th percentile for 16 MiB.
"""
_NAME: Final = re.compile(r"[0-9]{20}")
_DAMAGED: Final = re.compile(r"damaged-[0-9]{20}")
_FILES: Final = frozenset({STATE_FILE, PRODUCERS_FILE})
_log = logging.getLogger("dledger")


@record(frozen=True, slots=True)
class SnapshotFile:
    """One file of a snapshot: its bytes, and their CRC32C."""

    length: int
    crc32c: int


@record(frozen=True, slots=True)
class SnapshotMeta:
    """The content of a snapshot, and the sizes and checksums of its files.

    ``boundary`` is that of a log which begins after the snapshot's last entry: its index, term and chain CRC, and where
    the next entry goes. ``configuration``: the newest one up to that entry; None while the configured members are.
    ``time_ms``: the log's time there (``Applied.time_ms``). ``format``: the state machine's. ``program``: the version
    that wrote it.
    """

    boundary: Boundary
    configuration: Configuration | None
    time_ms: int
    format: int
    files: Mapping[str, SnapshotFile]
    program: str = __version__

    @property
    def index(self) -> LogIndex:
        """The last entry that is part of it."""
        return self.boundary.index

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(one.length for one in self.files.values())


class SnapshotStore:
    """The snapshots of one node. Thread-safe; every method but the properties may wait for the disk."""

    def __init__(self, fs: FileSystem, node_directory: Path) -> None:
        """Find what is there, and remove what is unfinished. Raises ``OSError``, ``SnapshotFormatError``."""
        self._fs = fs
        self.directory: Final = node_directory / SNAPSHOTS_DIRECTORY
        self._lock = threading.Lock()  # guards _snapshots and _pins
        self._snapshots: tuple[SnapshotMeta, ...] = ()
        self._pins: list[LogIndex] = []
        self._building: LogIndex = NO_INDEX
        if self.directory.exists():
            self._find()

    def _find(self) -> None:
        found: list[SnapshotMeta] = []
        for path in sorted(self.directory.iterdir(), reverse=True):
            if not (_NAME.fullmatch(path.name) and path.is_dir()):
                continue
            if not (path / META_FILE).exists():
                self._remove_files(path)
                continue
            try:
                meta = read_meta(path)
            except DamagedSnapshotError as damage:
                self._move_aside(LogIndex(int(path.name)), str(damage))
            else:
                self._fs.sync_dir(path)  # it may have been killed before it did, and the log before it may go
                found.append(meta)
        self._snapshots = tuple(found)

    # -- what there is -------------------------------------------------------------------------------------------

    @property
    def snapshots(self) -> tuple[SnapshotMeta, ...]:
        """All that are durable, newest first; their files need not be intact."""
        return self._snapshots

    @property
    def newest(self) -> SnapshotMeta | None:
        """The newest of them."""
        return self._snapshots[0] if self._snapshots else None

    @property
    def newest_index(self) -> LogIndex:
        """The newest one's index; ``NO_INDEX`` if there is none."""
        return self._snapshots[0].index if self._snapshots else NO_INDEX

    @property
    def needed_from(self) -> LogIndex:
        """Entries after this index must stay in the log (S7): the newest one's index, or that of an older pinned one.

        A member that receives the pinned one needs them to go on from it. ``NO_INDEX``: all must stay.
        """
        with self._lock:
            return min((self.newest_index, *self._pins))

    @contextmanager
    def pinned(self, index: LogIndex | None = None) -> Iterator[SnapshotMeta]:
        """Keep a snapshot (None: the newest) while it is read. Raises ``DamagedSnapshotError`` if there is none."""
        with self._lock:
            meta = next((one for one in self._snapshots if index in (None, one.index)), None)
            if meta is None:
                which = "a snapshot" if index is None else f"the snapshot of entry {index}"
                raise DamagedSnapshotError(f"{self.directory} does not hold {which} (any more): take the newest one")
            self._pins.append(meta.index)
        try:
            yield meta
        finally:
            with self._lock:
                self._pins.remove(meta.index)

    # -- reading -------------------------------------------------------------------------------------------------

    def verify(self, meta: SnapshotMeta) -> None:
        verify_files(self._path(meta.index), meta)

    def reader(self, meta: SnapshotMeta, name: str = STATE_FILE) -> _SnapshotFileReader:
        """Reads one file from its beginning. Raises ``DamagedSnapshotError``, also at the end of the file.

        So verify the snapshot first, unless what is read is not used before the end.
        """
        return _SnapshotFileReader(self._path(meta.index), name, meta)

    def piece(self, meta: SnapshotMeta, name: str, offset: int, bytes_max: int = PIECE_BYTES) -> bytes:
        """Bytes of one file from ``offset`` on, for a snapshot verified before. Raises ``DamagedSnapshotError``."""
        file = meta.files.get(name)
        if file is None or not 0 <= offset <= file.length:
            raise DamagedSnapshotError(f"the snapshot of entry {meta.index} has no byte {offset} of {name!r}")
        try:
            with (self._path(meta.index) / name).open("rb") as source:
                data = os.pread(source.fileno(), min(bytes_max, file.length - offset), offset)
        except OSError as error:
            raise DamagedSnapshotError(f"cannot read {self._path(meta.index) / name}: {error}") from error
        if not data and offset < file.length:
            raise DamagedSnapshotError(f"{self._path(meta.index) / name} is shorter than {file.length} bytes")
        return data

    # -- writing -------------------------------------------------------------------------------------------------

    def build(self, index: LogIndex) -> SnapshotBuilder:
        """Begin a snapshot of entry ``index``, own or fetched: one at a time, newer than all.

        Raises ``SnapshotBusyError``, ``OSError``.
        """
        with self._lock:
            if self._building != NO_INDEX:
                raise SnapshotBusyError(f"the snapshot of entry {self._building} is being written: retry later")
            if index <= self.newest_index:
                raise SnapshotBusyError(f"there is a snapshot of entry {self.newest_index} already")
            self._building = index
        try:
            path = self._path(index)
            make_dirs_durably(self._fs, self.directory)
            self._remove_files(path)
            self._fs.make_dir(path)
            self._fs.sync_dir(self.directory)
        except BaseException:
            self._building = NO_INDEX
            raise
        return SnapshotBuilder(self._fs, path, self._built)

    def _built(self, meta: SnapshotMeta | None) -> None:
        """A build has ended, with a durable snapshot or without."""
        try:
            if meta is None:
                self._remove_files(self._path(self._building))
        finally:
            with self._lock:
                if meta is not None:
                    self._snapshots = (meta, *self._snapshots)
                self._building = NO_INDEX

    def prune(self) -> None:
        """Remove all but the newest two, unless they are being read. Raises ``OSError``."""
        with self._lock:
            old = [one for one in self._snapshots[_SNAPSHOTS_KEPT:] if one.index not in self._pins]
            self._snapshots = tuple(one for one in self._snapshots if one not in old)
        for one in old:
            self._remove_files(self._path(one.index))

    def set_aside(self, meta: SnapshotMeta, reason: str) -> None:
        """A snapshot is damaged: it does not count any more, but people may look at it. Raises ``OSError``."""
        with self._lock:
            self._snapshots = tuple(one for one in self._snapshots if one.index != meta.index)
        self._move_aside(meta.index, reason)

    def _move_aside(self, index: LogIndex, reason: str) -> None:
        source, target = self._path(index), self.directory / f"damaged-{index:020d}"
        for old in sorted(one for one in self.directory.iterdir() if _DAMAGED.fullmatch(one.name))[
            : -_DAMAGED_KEPT + 1
        ]:
            self._remove_files(old)
        self._remove_files(target)
        self._fs.make_dir(target)
        self._fs.sync_dir(self.directory)
        for path in sorted(
            source.iterdir(), key=lambda one: one.name != META_FILE
        ):  # that one first: it counts no more
            self._fs.rename(path, target / path.name)
        self._fs.sync_dir(target)
        self._fs.sync_dir(source)
        source.rmdir()
        _log.warning("the snapshot of entry %d is damaged, and was moved to %s: %s", index, target, reason)

    def _remove_files(self, directory: Path) -> None:
        if not directory.exists():
            return
        meta = directory / META_FILE
        if meta.exists():
            self._fs.unlink(meta)
            self._fs.sync_dir(directory)
        for path in sorted(directory.iterdir()):
            self._fs.unlink(path)
        directory.rmdir()
        self._fs.sync_dir(directory.parent)

    def _path(self, index: LogIndex) -> Path:
        return self.directory / f"{index:020d}"


class SnapshotBuilder:
    """A snapshot that is being written, or fetched. For one thread at a time.

    A context manager, which gives it up (``abort``) unless ``commit`` has ended it.
    """

    def __init__(self, fs: FileSystem, path: Path, built: Callable[[SnapshotMeta | None], None]) -> None:
        self._fs = fs
        self._path = path
        self._built = built
        self._open: dict[str, int] = {}
        self._files: dict[str, SnapshotFile] = {}
        self._synced: dict[str, int] = {}
        self._ended = False

    def __enter__(self) -> SnapshotBuilder:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def length(self, name: str) -> int:
        """The bytes of a file so far: where a broken transfer goes on."""
        return self._files[name].length if name in self._files else 0

    def write(self, name: str, data: bytes) -> None:
        """Append to a file. Raises ``OSError``."""
        invariant(name in _FILES, "a snapshot's file has a known name", name=name)
        if name not in self._open:
            self._open[name] = self._fs.create(self._path / name)
            self._files[name], self._synced[name] = SnapshotFile(0, 0), 0
        file = self._files[name]
        self._fs.write(self._open[name], data, file.length)
        self._fs.begin_sync(self._open[name], file.length, len(data))
        self._files[name] = file = SnapshotFile(file.length + len(data), crc32c(data, file.crc32c))
        if file.length - self._synced[name] >= _SYNC_BYTES:
            self._fs.sync(self._open[name])
            self._synced[name] = file.length

    def files(self) -> Mapping[str, SnapshotFile]:
        """The files written so far, for the meta of an own snapshot."""
        return dict(self._files)

    def commit(self, meta: SnapshotMeta) -> None:
        """Make it durable, after which it counts.

        Raises ``DamagedSnapshotError`` if what was written is not what ``meta`` says, and ``OSError``; nothing counts
        then, and the builder has ended.
        """
        if dict(meta.files) != self._files:
            self.abort()
            raise DamagedSnapshotError(f"the snapshot of entry {meta.index} differs from its checksums")
        try:
            for fd in self._open.values():
                self._fs.sync(fd)
            self._close()
            self._fs.sync_dir(self._path)
            text = encode_meta(meta)
            replace_durably(self._fs, self._path / META_FILE, text)
        except BaseException:
            self.abort()
            raise
        self._ended = True
        self._built(meta)

    def abort(self) -> None:
        """Give it up; does nothing once it has ended."""
        if not self._ended:
            self._ended = True
            self._close()
            with suppress(OSError):  # what is left is removed at the next start
                self._built(None)

    def _close(self) -> None:
        for fd in self._open.values():
            self._fs.close(fd)
        self._open = {}


class _SnapshotFileReader:
    """Reads one file of a snapshot in order, and checks it at its end. A context manager.

    Every read raises ``DamagedSnapshotError`` if the file is not what the meta says, as soon as that is known.
    """

    def __init__(self, directory: Path, name: str, meta: SnapshotMeta) -> None:
        self._name = directory / name
        self._expected = meta.files.get(name)
        self._format = meta.format
        self._length = self._crc = 0
        try:
            self._file = self._name.open("rb")
        except OSError as error:
            raise DamagedSnapshotError(f"cannot read {self._name}: {error}") from error

    def __enter__(self) -> _SnapshotFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def format(self) -> int:
        return self._format

    def read(self, bytes_max: int) -> bytes:
        try:
            data = self._file.read(bytes_max)
        except OSError as error:
            raise DamagedSnapshotError(f"cannot read {self._name}: {error}") from error
        self._length += len(data)
        self._crc = crc32c(data, self._crc)
        expected = self._expected
        ended = len(data) < bytes_max
        if expected is None or self._length > expected.length or (ended and self._length < expected.length):
            raise DamagedSnapshotError(f"{self._name} has {self._length} bytes, not {expected and expected.length}")
        if self._length == expected.length and self._crc != expected.crc32c:
            raise DamagedSnapshotError(f"{self._name} is damaged: its CRC32C is {self._crc:#010x}")
        return data

    def read_all(self) -> bytes:
        """The rest of a small file."""
        return b"".join(iter(lambda: self.read(PIECE_BYTES), b""))

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()


def snapshot_directories(node_directory: Path) -> list[Path]:
    """The directories of finished snapshots, newest first. Raises ``OSError``."""
    parent = node_directory / SNAPSHOTS_DIRECTORY
    found = sorted(parent.iterdir(), reverse=True) if parent.exists() else []
    return [one for one in found if _NAME.fullmatch(one.name) and (one / META_FILE).exists()]


def verify_files(directory: Path, meta: SnapshotMeta) -> None:
    """Read all files of a snapshot. Raises ``DamagedSnapshotError``; an ``OSError`` of a read is one, too."""
    for name in sorted(meta.files):
        with _SnapshotFileReader(directory, name, meta) as reader:
            while reader.read(PIECE_BYTES):
                pass


def encode_meta(meta: SnapshotMeta) -> bytes:
    """The bytes of ``meta.json``, and of a snapshot's description on the wire."""
    text = json.dumps(_to_json(meta), sort_keys=True).encode() + b"\n"
    return b"%08x\n" % crc32c(text) + text


def decode_meta(content: bytes) -> SnapshotMeta:
    """The inverse. Raises ``DamagedSnapshotError``, and ``SnapshotFormatError`` for a later version's."""
    crc, _, text = content.partition(b"\n")
    if len(content) > _META_BYTES_MAX or crc != b"%08x" % crc32c(text):
        raise DamagedSnapshotError("the description of a snapshot is damaged")
    try:
        return _from_json(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DamagedSnapshotError(f"the description of a snapshot is malformed: {error}") from error


def read_meta(directory: Path) -> SnapshotMeta:
    """The description of the snapshot in ``directory``, whose name must be its index. Raises as ``decode_meta``."""
    try:
        meta = decode_meta(read_whole(directory / META_FILE, _META_BYTES_MAX))
    except OSError as error:
        raise DamagedSnapshotError(f"cannot read {directory / META_FILE}: {error}") from error
    if directory.name != f"{meta.index:020d}":
        raise DamagedSnapshotError(f"{directory} holds the snapshot of entry {meta.index}")
    return meta


def _to_json(meta: SnapshotMeta) -> dict[str, object]:
    boundary = meta.boundary
    return {
        "version": META_FORMAT,
        "program": meta.program,
        "index": boundary.index,
        "term": boundary.term,
        "position": boundary.position,
        "chain_crc": boundary.chain_crc,
        "configuration": None if meta.configuration is None else configuration_to_json(meta.configuration),
        "time_ms": meta.time_ms,
        "format": meta.format,
        "files": {name: {"length": one.length, "crc32c": one.crc32c} for name, one in meta.files.items()},
    }


def _from_json(found: dict[str, Any]) -> SnapshotMeta:  # Any: whatever the JSON holds, which fails below
    if (version := int(found["version"])) > META_FORMAT:
        raise SnapshotFormatError(
            f"a snapshot of version {version}, written by program version {found['program']}, is later than this "
            f"program ({__version__}) reads: run that version"
        )
    index, term, position = LogIndex(int(found["index"])), Term(int(found["term"])), Position(int(found["position"]))
    known = found["configuration"]
    files = {str(name): SnapshotFile(int(one["length"]), int(one["crc32c"])) for name, one in found["files"].items()}
    if index < 0 or term < 0 or position < 0 or set(files) != _FILES or any(one.length < 0 for one in files.values()):
        raise ValueError("values out of range")
    return SnapshotMeta(
        boundary=Boundary(index, term, position, int(found["chain_crc"])),
        configuration=None if known is None else configuration_from_json(known),
        time_ms=int(found["time_ms"]),
        format=int(found["format"]),
        files=files,
        program=str(found["program"]),
    )
