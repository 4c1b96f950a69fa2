"""Where a stream stands in a group's log, and where it may begin: what Spark keeps in the checkpoint.

A group has one total order, so one number is the whole position: ``index`` is the next entry to read. ``initial`` is
where the stream began, carried along in every offset: Spark asks ``initialOffset`` again until the first batch is
committed, and an answer such as "latest" has moved by then. The first batch begins where its own end says that it does.
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
    """A position of one group's log, exclusive where it ends a batch. Entries are counted from 0."""

    cluster: str
    group: str
    index: int
    initial: int

    def to_dict(self) -> dict[str, str | int]:
        """What Spark writes down: numbers and texts only."""
        return {
            "v": VERSION,
            "cluster": self.cluster,
            "group": self.group,
            "index": self.index,
            "initial": self.initial,
        }

    def at(self, index: int) -> LogOffset:
        """Another place of the same stream."""
        return LogOffset(self.cluster, self.group, index, self.initial)


def parse_offset(raw: Mapping[str, object]) -> LogOffset:
    """Raises ``OffsetError`` for anything but exactly what ``to_dict`` makes."""
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
    """Raises ``OffsetError`` if the offset is of another log: its numbers mean nothing here."""
    if (offset.cluster, offset.group) != (cluster, group):
        raise OffsetError(
            f"the checkpoint belongs to group {offset.group!r} of cluster {offset.cluster!r}, but the servers "
            f"are group {group!r} of cluster {cluster!r}: use another checkpointLocation, or the right "
            "bootstrap.servers"
        )


def first_of_batch(start: LogOffset, end: LogOffset) -> int:
    """The first index of the batch from ``start`` to ``end``.

    A start that is where its stream began has read nothing yet: then it may be a later answer of ``initialOffset`` than
    the one that the batch was planned with, and the batch's own end knows better.
    """
    return end.initial if start.index == start.initial else start.index


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _INDEX_MAX
