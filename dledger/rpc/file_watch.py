"""Notices that files have changed, by their inodes, times and sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

_Stamp = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Detects whether files have changed since they were last read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: _Stamp = ()

    def changed(self) -> bool:
        """Whether they have since the last call, which the first call affirms."""
        before, self._seen = self._seen, tuple(map(_stamp, self._paths))
        return before != self._seen

    def again(self) -> None:
        """Report them as changed next time, too."""
        self._seen = ()

    @property
    def age_s(self) -> float:
        """How long ago the youngest file was written, by the wall clock."""
        written = [one[1] for one in self._seen if one is not None]
        return abs(time.time() - max(written) / 1e9) if written else 0.0


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
