"""The record of the plain log that a group's log continues: what it held when the group took it over.

A file in the node's directory, written once, before the group's log has its first entry. While it exists, the plain
log's files are part of the broker's log, up to the record's end; nothing is appended to them any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from crc32c import crc32c

from dledger.base_log import DIGESTS_MAX, BaseLog
from dledger.errors import CorruptLogError
from dledger.store.checkpoint import read_checkpoint
from dledger.store.format import parse_segment_name
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from dledger.store.identity import CHECKPOINT_FILE
from dledger.store.inspect import ProblemItem
from dledger.types import NO_INDEX
from rocketstore.commit_log.digests import FileEnding, PlainFiles, digest_log

OLD_LOG_FILE: Final = "old-log"
EXPIRED_FILE: Final = "old-log-expired"
_HEAD_BYTES: Final = 8
_VERSION: Final = 1
_ADVICE: Final = (
    "Copy the file of this name from another member of the group: it is the same on all of them, if their old logs are"
)
_DAMAGE_ADVICE: Final = "Restore the file from a copy, or from another broker: dledger upgrade check --align"


def read_base_log(node_directory: Path) -> BaseLog | None:
    """The record; None if the group's log continues no other. Raises ``CorruptLogError``, ``OSError``."""
    path = node_directory / OLD_LOG_FILE
    if not path.exists():
        return None
    try:
        found = _decode(read_whole(path))
    except (ValueError, KeyError, TypeError, RecursionError):
        found = None
    if found is None:
        raise CorruptLogError(path, 0, "the record of the old log is unreadable", _ADVICE)
    return found


def base_log_now(node_directory: Path) -> BaseLog | None:
    """The record, and from where its files must still be there. Raises the same as ``read_base_log``."""
    found = read_base_log(node_directory)
    if found is None:
        return None
    return replace(found, kept_from=max(found.begin, ExpiredFiles(FileSystem(), node_directory).end()))


class ExpiredFiles:
    """How far a member's old files may have expired, in a file of its own: any other that is not there is missing.

    Its text is a position: files removed by hand are accepted once their end is written there. It is changed in place,
    in one sector, because old files must go most of all when the disk has no room for another file.
    """

    def __init__(self, fs: FileSystem, node_directory: Path) -> None:
        self._fs = fs
        self._path: Final = node_directory / EXPIRED_FILE

    def end(self) -> int:
        """The end of what may have expired; 0 if nothing has. Raises ``CorruptLogError``, ``OSError``."""
        try:
            return int(read_whole(self._path))
        except FileNotFoundError:
            return 0
        except ValueError:
            reason = "it holds no position in the old log"
            raise CorruptLogError(self._path, 0, reason, "Write the start of the first old file into it") from None

    def prepare(self) -> None:
        """Create the file, so that ``note`` needs no space. Raises ``OSError``."""
        if not self._path.exists():
            replace_durably(self._fs, self._path, _text_of(0))

    def note(self, end: int) -> None:
        """Durably, before the file that ends at ``end`` is removed. Raises ``OSError``."""
        fd = self._fs.open(self._path)
        try:
            self._fs.write(fd, _text_of(end), 0)
            self._fs.sync(fd)
        finally:
            self._fs.close(fd)


def _text_of(position: int) -> bytes:
    return b"%020d\n" % position


def group_has_begun(node_directory: Path) -> bool:
    """Whether the member's log in ``node_directory`` has entries that follow a plain log's. Raises ``OSError``."""
    written = [parse_segment_name(path.name) for path in written_segments(node_directory / "data")]
    if written and 0 not in written:
        return True
    if not (node_directory / OLD_LOG_FILE).exists():
        return False
    try:
        return read_checkpoint(node_directory / CHECKPOINT_FILE).flushed.index != NO_INDEX  # its data may be elsewhere
    except CorruptLogError:
        return True


def written_segments(directory: Path) -> Iterator[Path]:
    """The non-empty segments of a directory; none if there is no such directory. Raises ``OSError``."""
    if directory.is_dir():
        for path in directory.iterdir():
            if _is_written(path):
                yield path


def _is_written(path: Path) -> bool:
    if parse_segment_name(path.name) is None or not path.is_file():
        return False
    with path.open("rb") as file:
        return any(file.read(_HEAD_BYTES))


def _decode(text: bytes) -> BaseLog | None:
    """The record in a file; None, or what Python raises, if it is not one."""
    content = json.loads(text)
    record = content["record"]
    if content["version"] != _VERSION or crc32c(_text(record)) != content["crc32c"]:
        return None
    begin, end, file_bytes = (int(record[name]) for name in ("begin", "end", "file_bytes"))
    return BaseLog(begin, end, file_bytes, tuple(int(one) for one in record["digests"]), begin)


def write_base_log(fs: FileSystem, node_directory: Path, base_log: BaseLog) -> None:
    """Replace the record durably. Raises ``OSError``."""
    record = asdict(base_log)
    del record["kept_from"]
    make_dirs_durably(fs, node_directory)
    content = {"version": _VERSION, "crc32c": crc32c(_text(record)), "record": record}
    replace_durably(fs, node_directory / OLD_LOG_FILE, json.dumps(content, indent=2).encode() + b"\n")


def _text(record: object) -> bytes:
    return json.dumps(record, separators=(",", ":"), sort_keys=True).encode()


def describe(paths: Mapping[int, Path], file_bytes: int, end: int) -> BaseLog:
    """Read and verify the files of a sealed log that ends at ``end``. Raises ``CorruptLogError``, ``OSError``."""
    digest = digest_log(PlainFiles(file_bytes, paths))
    problems = list(digest.problems)
    if digest.torn is not None:
        problems.append(digest.torn)
    elif digest.files and (digest.divided != end or digest.files[-1].ending is not FileEnding.FULL):
        last = digest.files[-1]
        problems.append(ProblemItem(paths[last.base], last.length, "the log ends here, and no blank fills the file"))
    for problem in problems:
        raise CorruptLogError(problem.path, problem.offset, problem.reason, _DAMAGE_ADVICE)
    crcs = tuple(one.crc32c for one in digest.files)[-DIGESTS_MAX:]
    begin = min(paths, default=end)
    return BaseLog(begin, end, file_bytes, crcs, begin)
