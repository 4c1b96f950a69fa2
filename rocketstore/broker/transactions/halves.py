"""Which transactions are open. Pure: it is told what the log says, in the log's order, and what is being done.

The log decides: a half is open until the log holds its commit or its op. This table remembers what the log says, and
which ends are on their way into it, so that none is sent there twice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import Final

from rocketstore.broker.transactions.messages import PROPERTY_CHECK_IMMUNITY
from rocketstore.message.message import PROPERTY_CHECK_TIMES, PROPERTY_PRODUCER_GROUP
from rocketstore.message.properties import decode_properties

IMMUNITY_S_MAX: Final = 30 * 24 * 3600
_DIGITS_MAX: Final = 9


class Phase(Enum):
    """How far the end of a transaction has come."""

    OPEN = auto()
    ENDING = auto()
    """Its end was given to the log, which has not shown it yet."""
    COMMITTED = auto()
    """The log has its commit, and not yet its op."""


class Half:
    """One open transaction."""

    __slots__ = (
        "asked", "checked_before", "commit_offset", "group", "immunity_ms", "offset", "op_due_ms", "phase",
        "queue_offset", "rounds", "stored_ms",
    )  # fmt: skip

    def __init__(  # what a record says
        self,
        queue_offset: int,
        offset: int,
        stored_ms: int,
        group: str,
        immunity_ms: int | None = None,
        checked_before: int = 0,
    ) -> None:
        self.queue_offset = queue_offset
        self.offset = offset
        """Physical, of its record."""
        self.stored_ms = stored_ms
        self.group = group
        self.immunity_ms = immunity_ms
        """For how long its producer wants not to be asked; None: the broker's setting."""
        self.checked_before = checked_before
        """How often RocketMQ's broker had its producer asked, before it stored it again."""
        self.asked = 0
        """How often this master had its producer asked."""
        self.rounds = 0
        """In how many of this master's rounds it was due, whether or not there was anybody to ask."""
        self.phase = Phase.OPEN
        self.commit_offset = 0
        """Where its commit is, if it is committed."""
        self.op_due_ms = 0
        """When (monotonic) to write its op if the log does not show one."""


def half_of(queue_offset: int, offset: int, stored_ms: int, properties: bytes) -> Half:
    """From what a record of the half topic says."""
    found = decode_properties(properties)
    seconds = _number(found.get(PROPERTY_CHECK_IMMUNITY, ""))
    immunity_ms = None if seconds < 0 else min(seconds, IMMUNITY_S_MAX) * 1000
    checked = max(_number(found.get(PROPERTY_CHECK_TIMES, "")), 0)
    return Half(queue_offset, offset, stored_ms, found.get(PROPERTY_PRODUCER_GROUP, ""), immunity_ms, checked)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else -1


class OpenHalves:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._halves: OrderedDict[int, Half] = OrderedDict()  # by queue offset, in that order
        self._early: dict[int, Half] = {}  # ended before the log's order came to them
        self._by_offset: dict[int, Half] = {}
        self._groups: Counter[str] = Counter()
        self._unfinished: dict[int, Half] = {}
        self.next_offset = 0
        """The first queue offset that the log's order has not come to."""

    def __len__(self) -> int:
        return len(self._halves)

    def __iter__(self) -> Iterator[Half]:
        return iter(self._halves.values())

    def of_group(self, group: str) -> int:
        """How many a producer group has open."""
        return self._groups[group]

    @property
    def oldest(self) -> int:
        """All before this queue offset have ended."""
        return next(iter(self._halves), self.next_offset)

    @property
    def oldest_commit(self) -> int | None:
        """The position of the first commit that has no op yet, if there is one."""
        return min((one.commit_offset for one in self._unfinished.values()), default=None)

    @property
    def unfinished(self) -> Iterable[Half]:
        """Those with a commit and without an op."""
        return self._unfinished.values()

    def find(self, queue_offset: int) -> Half | None:
        """The open transaction whose half message is there."""
        return self._halves.get(queue_offset) or self._early.get(queue_offset)

    def at(self, offset: int) -> Half | None:
        """The open transaction whose half message's record is there."""
        return self._by_offset.get(offset)

    def add_early(self, half: Half) -> Half:
        """One that the log holds and whose turn has not come; the same one if it is known already."""
        known = self.find(half.queue_offset)
        if known is None:
            known = self._early[half.queue_offset] = half
        return known

    def add(self, half: Half) -> None:
        """The log's order has come to a half."""
        if half.queue_offset < self.next_offset:
            return  # seen before
        self.next_offset = half.queue_offset + 1
        half = self._early.pop(half.queue_offset, half)  # with its mark
        self._halves[half.queue_offset] = half
        self._by_offset[half.offset] = half
        self._groups[half.group] += 1

    def committed(self, prepared_offset: int, commit_offset: int, op_due_ms: int = 0) -> None:
        """The log's order has come to a commit, whose op should follow before ``op_due_ms``."""
        half = self._by_offset.get(prepared_offset)
        if half is not None and half.phase is not Phase.COMMITTED:
            half.phase = Phase.COMMITTED
            half.commit_offset = commit_offset
            half.op_due_ms = op_due_ms
            self._unfinished[half.queue_offset] = half

    def ended(self, queue_offset: int) -> None:
        """The log's order has come to an op."""
        half = self._halves.pop(queue_offset, None)
        if half is not None:
            del self._by_offset[half.offset]
            self._unfinished.pop(queue_offset, None)
            self._groups[half.group] -= 1
            if not self._groups[half.group]:
                del self._groups[half.group]
