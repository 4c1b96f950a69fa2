"""Prepares disk space ahead of appends: one bounded step at a time, without the node's lock.

A cold page costs an append three times as much as a warm one, and a new segment milliseconds. So a window ahead of the
end is filled with zeros, and the next segment is created once half of the current one is used.

Zeros are written where data will be, so everything is written twice; that trades throughput for latency. While appends
arrive faster than ``BUSY_BYTES`` per step, only segments are prepared: copying and flushing zeros would then cost the
appends more than it gains them (measured: a fifth of the leader's processor time, a third of a follower's).
"""

from __future__ import annotations

from collections.abc import Callable

from dledger.layout import INDEX_UNIT_BYTES
from dledger.store.log_files import LogFiles
from dledger.store.log_state import LogState
from dledger.store.mmap_file_list import MappedFileList

BUSY_BYTES = 128 * 1024
INDEX_SHARE = 16
"""The index window is this many times smaller than the data window."""


def step(files: LogFiles, state: LogState, warm_bytes: int, appended_bytes: int) -> bool:
    """Prepare or warm a little; returns whether there is more to do. Raises ``OSError``.

    ``appended_bytes``: how much was appended since the previous step.
    """
    if appended_bytes > BUSY_BYTES:
        warm_bytes = 0
    more = _step_list(files.data, lambda: state.end, warm_bytes)
    return _step_list(files.index, lambda: (state.last.index + 1) * INDEX_UNIT_BYTES, warm_bytes // INDEX_SHARE) or more


def _step_list(files: MappedFileList, end: Callable[[], int], warm_bytes: int) -> bool:
    position = end()
    file = files.find(position)
    if file is None:
        return files.prepare(position, lambda: files.base_of(end()) == files.base_of(position))
    offset = position - file.base
    if file.warm(offset, min(offset + warm_bytes, file.size)):
        return True
    if offset < file.size // 2:
        return False
    following = file.base + file.size
    if files.prepare(following, lambda: files.base_of(end()) == file.base):
        return True
    next_file = files.find(following)
    target = min(warm_bytes - (file.size - offset), file.size)
    return next_file is not None and next_file.warm(0, target)
