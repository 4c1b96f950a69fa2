"""A stream's position in a group's log, and its start, as kept in Spark's checkpoint.

A group has one total order, so one number is the whole position: ``index`` is the next entry to read. ``initial`` is
where the stream started, repeated in every offset: Spark calls ``initialOffset`` again until the first batch is
committed, and an answer such as "latest" has moved by then. The first batch starts at the ``initial`` of its own end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeGuard

from dledger_spark.errors import PipelineError

VERSION: Final = 1
_NUMBERS: Final = ("v", "index", "initial")
_TEXTS: Final = ("cluster", "group")
_FIELDS: Final = frozenset((*_NUMBERS, *_TEXTS))
_INDEX_MAX: Final = 2**63 - 1


class OffsetError(PipelineError):
    """Raised when a checkpoint's offset cannot be used: damaged, of a newer version, or of another log."""


@dataclass(frozen=True, slots=True)
class LogOffset:
    """A position in one group's log, exclusive if it ends a batch. Entries are counted from 0."""

    cluster: str
    group: str
    index: int
    initial: int

    def to_dict(self) -> dict[str, str | int]:
        """The form stored by Spark: only numbers and texts."""
        return {
            "v": VERSION,
            "cluster": self.cluster,
            "group": self.group,
            "index": self.index,
            "initial": self.initial,
        }

    def at(self, index: int) -> LogOffset:
        """Another position of the same stream."""
        return LogOffset(self.cluster, self.group, index, self.initial)


def parse_offset(raw: Mapping[str, object]) -> LogOffset:
    """Raises ``OffsetError`` for anything that ``to_dict`` does not produce."""
    version = raw.get("v")
    if _is_index(version) and version > VERSION:
        raise OffsetError(f"the checkpoint was written by a newer version ({version}, this one knows {VERSION}): {raw}")
    if raw.keys() != _FIELDS or not _is_index(version) or version != VERSION:
        raise OffsetError(f"the checkpoint does not contain an offset of a dledger stream: {raw}")
    cluster, group = (raw[name] for name in _TEXTS)
    index, initial = raw["index"], raw["initial"]
    if not (isinstance(cluster, str) and isinstance(group, str) and _is_index(index) and _is_index(initial)):
        raise OffsetError(f"the checkpoint's offset is damaged: {raw}")
    return LogOffset(cluster, group, index, initial)


def check_same_log(offset: LogOffset, cluster: str, group: str) -> None:
    """Raises ``OffsetError`` if the offset is of another log, where its numbers are meaningless."""
    if (offset.cluster, offset.group) != (cluster, group):
        raise OffsetError(
            f"the checkpoint belongs to group {offset.group!r} of cluster {offset.cluster!r}, but the servers "
            f"are group {group!r} of cluster {cluster!r}: use another checkpointLocation, or the right "
            "bootstrap.servers"
        )


def first_of_batch(start: LogOffset, end: LogOffset) -> int:
    """The first index of the batch from ``start`` to ``end``.

    A start equal to its stream's initial position has read nothing yet. It may then be a later answer of
    ``initialOffset`` than the one used for planning the batch, so the batch's own end takes precedence.
    """
    return end.initial if start.index == start.initial else start.index


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INDEX_MAX
