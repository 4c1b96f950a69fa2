"""Where damaged files are kept when sound ones take their places: ``damaged-<n>``, the newest with the highest number.

What a repair of segments leaves is evidence, of what others hold: when there is too much of it, the oldest goes, with a
line in the log. A whole log that was set aside, or the end of one that a start cut off, may hold what nobody else has
any more: it is for people to remove, and beyond a number no other one is set aside.
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
"""How many directories of damaged segments are kept in one place."""
ASIDE_BYTES_MAX: Final = 16 << 30
"""What they take on the disk at most, the newest one not counted."""
ASIDE_LOGS_MAX: Final = 8
"""How many whole logs are kept in one place."""
_NAME: Final = re.compile(r"damaged-([1-9][0-9]*)")
_SEGMENTS: Final = "data"
_REASON: Final = "reason.txt"


class Aside:
    """Where one start, or one repair, keeps what it replaces: a directory on each disk, made when it is needed."""

    def __init__(self, fs: FileSystem, node: Path) -> None:
        """``node`` is the node's directory."""
        self._fs = fs
        self._node = node
        self._made: dict[Path, Path] = {}
        self._cut_off = ""

    @property
    def directories(self) -> tuple[Path, ...]:
        """Those that were made, in order."""
        return tuple(self._made.values())

    def target(self, path: Path) -> Path:
        """Where the file ``path`` is to be kept. Raises ``OSError``."""
        parent = _place_of(self._fs, self._node, path.parent)
        if parent not in self._made:
            made = make_aside_near(self._fs, self._node, path.parent)
            if self._cut_off:
                _mark_as_log(self._fs, made, self._cut_off)
            self._made[parent] = made
        return self._made[parent] / path.name

    def check_room_for_log(self, paths: Iterable[Path]) -> None:
        """Raise ``ConfigError`` if too many logs were set aside already in a place where one of ``paths`` would go."""
        for place in sorted({_place_of(self._fs, self._node, path.parent) for path in paths}):
            check_room_for_log(place)

    def mark_as_log(self, reason: str) -> None:
        """What is kept from here on is the end of a log, which nothing proves that others hold. Raises ``OSError``.

        Durable before anything of it is moved: whatever comes in between, it is not taken for segments alone.
        """
        self._cut_off = reason
        for made in self.directories:
            _mark_as_log(self._fs, made, reason)

    def sync(self) -> None:
        """Make what was moved there durable. Raises ``OSError``."""
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
    """The node's directory or, if that is on another disk, beside the segments."""
    return node if fs.device(data) == fs.device(node) else data


def _mark_as_log(fs: FileSystem, segments: Path, reason: str) -> None:
    text = f"{reason}\n".encode()
    create_durably(fs, segments.parent / _REASON, lambda fd: fs.write(fd, text, 0))


def next_aside(parent: Path) -> Path:
    """The name of the next one."""
    return parent / f"damaged-{max(_numbered(parent), default=0) + 1}"


def check_room_for_log(parent: Path) -> None:
    """Raise ``ConfigError`` if too many whole logs were set aside in ``parent`` and never removed."""
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
