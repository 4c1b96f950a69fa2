"""Recognizes a store that was made with files of another size, before anything in it is opened or changed.

Only the names and sizes of the files say how large they should be, and every reader relies on that: with another size,
files would be overlooked, padded, or taken for damaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dledger.errors import ConfigError, CorruptLogError, DiskError
from dledger.store.format import parse_segment_name
from dledger.store.fs import non_zero_end
from dledger.store.mmap_file_list import FoundFile


def check_sizes(directories: Iterable[Path], file_bytes: int, setting: str) -> None:
    """Refuse files that do not have ``file_bytes``, the value of ``setting``, if a wrong value explains them.

    Raises ``ConfigError`` if the value is wrong now, or may be; ``CorruptLogError`` if an earlier start with a wrong
    one has padded a file; ``DiskError``. Other files of a wrong size are for those who open them.
    """
    try:
        files = _files(directories)
        stride = _stride(files)
        if stride is not None and stride != file_bytes:
            raise ConfigError(
                [
                    f"{setting} is {file_bytes}, but the files in {files[0].path.parent} have {stride} bytes: set it "
                    f"to {stride}. The size cannot change during a store's life. Nothing was changed"
                ]
            )
        if len(files) == 1 and files[0].size != file_bytes and not _is_blank(files[0], 0):
            raise ConfigError([_of_the_only_file(files[0], file_bytes, setting)])
        for one in files if stride is not None else ():
            if one.size > file_bytes and _is_blank(one, file_bytes):
                reason = f"a start with {setting}={one.size} has padded this file of {file_bytes} bytes with zeros"
                raise CorruptLogError(one.path, file_bytes, reason, _cut(one, file_bytes))
    except OSError as error:
        raise DiskError(f"looking at the size of a file failed: {error}") from error


def _files(directories: Iterable[Path]) -> list[FoundFile]:
    found: dict[int, FoundFile] = {}
    for directory in dict.fromkeys(directories):
        for path in sorted(directory.iterdir()) if directory.is_dir() else ():
            base = parse_segment_name(path.name)
            if base is not None and path.is_file():
                found.setdefault(base, FoundFile(path, base, path.stat().st_size))
    return [found[base] for base in sorted(found)]


def _stride(files: list[FoundFile]) -> int | None:
    """The size that the second file's name and length both say; None if they do not agree: it may be anything."""
    if len(files) < 2:
        return None
    distance = files[1].base - files[0].base
    return distance if distance == files[1].size else None


def _of_the_only_file(one: FoundFile, file_bytes: int, setting: str) -> str:
    told = f"{setting} is {file_bytes}, but {one.path} has {one.size} bytes. Nothing was changed. "
    made = f"the store was made with {setting}={one.size}, set it to that"
    if one.size < file_bytes:
        return f"{told}If {made}; if the file was cut short, lengthen it: truncate -s {file_bytes} {one.path}"
    if _is_blank(one, file_bytes):
        return f"{told}If {made}; if a start with that value has padded the file with zeros: {_cut(one, file_bytes)}"
    return f"{told}It has contents behind {file_bytes} bytes, so {made}"


def _cut(one: FoundFile, file_bytes: int) -> str:
    return f"cut them off: truncate -s {file_bytes} {one.path}"


def _is_blank(one: FoundFile, start: int) -> bool:
    """Whether it contains only zeros from ``start`` on."""
    fd = os.open(one.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return non_zero_end(fd, start, one.size) == start
    finally:
        os.close(fd)
