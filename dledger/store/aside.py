"""Keeps damaged files that were replaced: in ``damaged-<n>``, the newest with the highest number.

Segments replaced by a repair are evidence of what others hold: when there are too many, the oldest are removed, with a
line in the log. A whole log that was set aside, or the end of one that a start cut off, may hold entries that no other
member has: only people may remove those, and beyond a limit no further log is set aside.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dledger.errors import ConfigError
from dledger.store.fs import TMP_SUFFIX, FileSystem, create_durably, make_dirs_durably

_log = logging.getLogger("dledger")

ASIDE_MAX: Final = 16
"""The limit of directories of damaged segments in one place."""
ASIDE_BYTES_MAX: Final = 16 << 30
"""The limit of their disk space, not counting the newest one."""
ASIDE_LOGS_MAX: Final = 8
"""The limit of whole logs kept in one place."""
_NAME: Final = re.compile(r"damaged-([1-9][0-9]*)")
_SEGMENTS: Final = "data"
_REASON: Final = "reason.txt"


class Aside:
    """Keeps what one start, or one repair, replaces: in one directory per disk, made on demand."""

    def __init__(self, fs: FileSystem, node: Path) -> None:
        """``node`` is the node's directory."""
        self._fs = fs
        self._node = node
        self._made: dict[Path, Path] = {}
        self._cut_off = ""

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories made, in order."""
        return tuple(self._made.values())

    def target(self, path: Path) -> Path:
        """The path under which to keep the file ``path``. Raises ``OSError``."""
        parent = _place_of(self._fs, self._node, path.parent)
        if parent not in self._made:
            made = make_aside_near(self._fs, self._node, path.parent)
            if self._cut_off:
                _mark_as_log(self._fs, made, self._cut_off)
            self._made[parent] = made
        return self._made[parent] / path.name

    def check_room_for_log(self, paths: Iterable[Path]) -> None:
        """Raise ``ConfigError`` if too many logs are already set aside in a place where one of ``paths`` would go."""
        for place in sorted({_place_of(self._fs, self._node, path.parent) for path in paths}):
            check_room_for_log(place)

    def mark_as_log(self, reason: str) -> None:
        """Mark what follows as the end of a log, which others do not provably hold. Raises ``OSError``.

        Durable before any of it is moved: whatever happens in between, it is not taken for mere segments.
        """
        self._cut_off = reason
        for made in self.directories:
            _mark_as_log(self._fs, made, reason)

    def sync(self) -> None:
        """Make the moves durable. Raises ``OSError``."""
        for made in self.directories:
            self._fs.sync_dir(made)


def make_aside_near(fs: FileSystem, node: Path, data: Path) -> Path:
    """A new directory, durable, for damaged segments of the directory ``data``. Raises ``OSError``."""
    parent = _place_of(fs, node, data)
    _remove_oldest(fs, parent)
    path = next_aside(parent) / _SEGMENTS
    make_dirs_durably(fs, path)
    return path


def _place_of(fs: FileSystem, node: Path, data: Path) -> Path:
    """The node's directory or, if that is on another disk, the one beside the segments."""
    return node if fs.device(data) == fs.device(node) else data


def _mark_as_log(fs: FileSystem, segments: Path, reason: str) -> None:
    text = f"{reason}\n".encode()
    create_durably(fs, segments.parent / _REASON, lambda fd: fs.write(fd, text, 0))


def next_aside(parent: Path) -> Path:
    """The name of the next directory."""
    return parent / f"damaged-{max(_numbered(parent), default=0) + 1}"


def check_room_for_log(parent: Path) -> None:
    """Raise ``ConfigError`` if ``parent`` holds too many whole logs set aside."""
    logs = [path for path in _numbered(parent).values() if not _holds_segments_alone(path)]
    if len(logs) >= ASIDE_LOGS_MAX:
        names = ", ".join(path.name for path in logs)
        raise ConfigError(
            [f"{parent} holds {len(logs)} logs set aside earlier ({names}): remove those no longer needed"]
        )


def _numbered(parent: Path) -> dict[int, Path]:
    matches = ((_NAME.fullmatch(path.name), path) for path in parent.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match and path.is_dir()))


def _holds_segments_alone(path: Path) -> bool:
    names = {one.name for one in path.iterdir()} - {f"{_REASON}{TMP_SUFFIX}"}
    if names == {_SEGMENTS, _REASON}:  # of a start that failed before it moved anything
        return not any((path / _SEGMENTS).iterdir())
    return names <= {_SEGMENTS}


def _remove_oldest(fs: FileSystem, parent: Path) -> None:
    kept = [path for path in _numbered(parent).values() if _holds_segments_alone(path)]
    sizes = [_disk_bytes(path) for path in kept]
    while len(kept) >= ASIDE_MAX or (len(kept) > 1 and sum(sizes) > ASIDE_BYTES_MAX):
        oldest, size = kept.pop(0), sizes.pop(0)
        for path in sorted(oldest.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
            else:
                fs.unlink(path)
        oldest.rmdir()
        fs.sync_dir(parent)
        text = "removed %s (%d MiB), the oldest of the damaged segments kept there: the limit is %d directories, %d GiB"
        _log.warning(text, oldest, size >> 20, ASIDE_MAX, ASIDE_BYTES_MAX >> 30)


def _disk_bytes(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*"))
