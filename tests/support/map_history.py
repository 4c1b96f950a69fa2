"""What clients of the map of ``dledger_cli.kv`` asked and were told, and whether one order of it all explains that.

Every answer names its place: a change the entry that made it (its revision), a read the last entry that it saw (its
index). So no search is needed: the order is given, and each rule is a comparison.

- Order: what began after another operation had ended comes after it. For changes and linearizable reads of all keys
  together.
- Changes: no two have one place, a key's former value is what the change before it put, and a swap happened at the
  revision that it was asked for, or found another one.
- Reads: the value and revision are those of the key's last change up to the read's index.
- Each value is put by one operation. One of unknown outcome may have happened, also later than its client knows; one
  that was refused is never seen.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

COMPLAINTS_MAX = 20


class Told(StrEnum):
    """What a client was told of its change."""

    DONE = "done"
    OTHER_REVISION = "other revision"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Change:
    """One put of a key: ``value`` is its own; ``if_revision`` None if it was no swap.

    ``revision`` and ``former``: of the change, if it is done; of what there was, if that was another revision.
    """

    key: str
    value: str
    began: float
    ended: float
    told: Told
    if_revision: int | None = None
    revision: int = -1
    former: str | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """One linearizable read: ``revision`` 0 and ``value`` None if the key was not there.

    ``index``: the last entry that was applied before it; it may have seen later ones.
    """

    key: str
    value: str | None
    revision: int
    index: int
    began: float
    ended: float

    @property
    def place(self) -> int:
        """The last entry that it is known to have seen."""
        return max(self.index, self.revision)


@dataclass(slots=True)
class MapHistory:
    """Operations as they finish; threads may record at the same time."""

    changes: list[Change] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    done: int = 0
    """The number of operations that succeeded."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def record(self, one: Change | Look) -> None:
        """One operation has ended."""
        with self._changed:
            if isinstance(one, Change):
                self.changes.append(one)
                self.done += one.told in (Told.DONE, Told.OTHER_REVISION)
            else:
                self.looks.append(one)
                self.done += 1
            self._changed.notify_all()

    def wait_for_more(self, count: int, timeout_s: float) -> None:
        """Return after ``count`` more have succeeded. Raises ``TimeoutError``."""
        with self._changed:
            wanted = self.done + count
            if not self._changed.wait_for(lambda: self.done >= wanted, timeout_s):
                raise TimeoutError(f"{self.done} operations succeeded, {wanted} were wanted, in {timeout_s} s")


def check(changes: Sequence[Change], looks: Sequence[Look]) -> list[str]:
    """All that no order explains, at most ``COMPLAINTS_MAX``."""
    return [*_misplaced(changes, looks), *_misread(changes, looks)][:COMPLAINTS_MAX]


def _misplaced(changes: Sequence[Change], looks: Sequence[Look]) -> Iterable[str]:
    """What comes before something that had ended when it began."""
    placed: list[tuple[float, float, int, Change | Look]] = [
        *((one.began, one.ended, one.revision, one) for one in changes if one.told is Told.DONE),
        *((one.began, one.ended, one.place, one) for one in looks),
    ]
    ends = sorted(placed, key=lambda one: one[1])
    newest, ended = -1, 0
    for began, _, place, one in sorted(placed, key=lambda one: one[0]):
        while ended < len(ends) and ends[ended][1] < began:
            newest, ended = max(newest, ends[ended][2]), ended + 1
        if place < newest or (place == newest and isinstance(one, Change)):
            yield f"order: entry {newest} was answered before this began: {one}"


def _misread(changes: Sequence[Change], looks: Sequence[Look]) -> Iterable[str]:
    versions: dict[str, dict[int, Change]] = defaultdict(dict)
    places: dict[int, Change] = {}
    by_value = {one.value: one for one in changes}
    unplaced = {one.value for one in changes if one.told is Told.UNKNOWN}
    for one in changes:
        if one.told is Told.DONE:
            if one.revision in places:
                yield f"two changes at entry {one.revision}: {places[one.revision]} and {one}"
            places[one.revision] = versions[one.key][one.revision] = one
    yield from _unexplained(changes, looks, versions, by_value, unplaced)
    order = {key: sorted(found) for key, found in versions.items()}
    for one in changes:
        if one.told is Told.DONE:
            yield from _wrong_former(one, versions[one.key], order[one.key], by_value, unplaced)
        elif one.told is Told.OTHER_REVISION and one.if_revision == one.revision:
            yield f"refused at the revision that was asked for: {one}"
    for look in looks:
        revisions = order.get(look.key, [])
        at = bisect_right(revisions, look.place)
        wanted = revisions[at - 1] if at else 0
        if look.revision != wanted:
            yield f"the key's last change up to entry {look.place} is at {wanted}: {look}"


def _unexplained(
    changes: Sequence[Change],
    looks: Sequence[Look],
    versions: dict[str, dict[int, Change]],
    by_value: dict[str, Change],
    unplaced: set[str],
) -> Iterable[str]:
    """What was seen and not put. Gives those of unknown outcome that were seen their place in ``versions``."""
    seen: list[tuple[str, int, str | None, Change | Look]] = [
        *((one.key, one.revision, one.value, one) for one in looks if one.revision),
        *(
            (one.key, one.revision, one.former, one)
            for one in changes
            if one.told is Told.OTHER_REVISION
            if one.revision
        ),
    ]
    for key, revision, value, told in seen:
        source = by_value.get(value or "")
        known = versions[key].get(revision)
        if source is None or source.key != key or source.told in (Told.REFUSED, Told.OTHER_REVISION):
            yield f"a value that nobody put: {told}"
        elif source.began > told.ended:
            yield f"a value before its put began: {told}"
        elif known is None and value in unplaced:
            versions[key][revision] = source
            unplaced.discard(source.value)
        elif known is not source:
            yield f"another value than {known} put: {told}"


def _wrong_former(
    one: Change, versions: dict[int, Change], order: list[int], by_value: dict[str, Change], unplaced: set[str]
) -> Iterable[str]:
    at = bisect_right(order, one.revision - 1)
    before = order[at - 1] if at else 0
    value = versions[before].value if at else None
    if one.former == value:
        if one.if_revision not in (None, before):
            yield f"a swap at another revision, {before}: {one}"
        return
    source = by_value.get(one.former or "")
    if source is None or source.value not in unplaced or source.key != one.key or source.began > one.ended:
        yield f"the value before was {value!r}: {one}"
    else:
        unplaced.discard(source.value)  # it happened in between, and nobody saw its revision
        if one.if_revision is not None and not before < one.if_revision < one.revision:
            yield f"a swap at a revision outside ({before}, {one.revision}): {one}"
