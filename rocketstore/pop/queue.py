"""One window as its leader sees it: what is applied, and what is to become of it.

The *plan* is ahead of the applied window by what has happened since. ``row`` is the difference: it is computed from
scratch each time, so a row that was not stored, or nobody knows whether, needs no undoing.

Ordered groups (P8) get one batch of a queue at a time, and the same again until it is settled. Attempts are counted for
a batch as a whole. There are no copies: messages stay where they are, because those behind must not overtake them.

``LeaseBook`` has all leases of one leader by the time when something is to be done about them, and by client.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, takewhile
from typing import Final

from rocketstore.pop.operations import Leased, Pending, PopRead
from rocketstore.pop.tables import (
    AHEAD_MAX,
    AHEAD_MS,
    LEASE_MS_MAX,
    PARKED_MAX,
    UNLOCKED,
    WINDOW_MAX,
    FifoLock,
    LeaseWindow,
    Parked,
    PopPlace,
    PopRow,
    advanced,
    zeros,
)

SKEW_MS: Final = 1000
"""How much longer than noted a new leader takes a lease to last: clocks of members differ (P3)."""
INVISIBLE_MS_MAX: Final = 12 * 3_600_000
_NUMBERS_AHEAD: Final = 1 << 20
"""Numbers of handles that one row permits."""
UNKNOWN: Final = -1
"""Of a lease's attempts: the record tells."""


class Lease:
    """A message that was given out and is not settled."""

    __slots__ = (
        "answers",
        "attempt",
        "client_id",
        "copying",
        "guard_ms",
        "number",
        "owner",
        "parked",
        "renew_until_ms",
        "visible_at_ms",
    )

    def __init__(self, visible_at_ms: int, attempt: int, number: int, *, parked: bool = False) -> None:
        self.visible_at_ms = visible_at_ms
        self.attempt = attempt
        """Deliveries so far that count, with this one; ``UNKNOWN`` if an earlier leader gave it out."""
        self.number = number
        """Of its newest handle; 0 if only an earlier leader knew."""
        self.parked = parked
        self.answers = 1
        """Receives whose answer has it: more than one if an attempt was repeated."""
        self.guard_ms = 0
        """How much earlier its end is noted in the window, which is what its consumer may be told."""
        self.owner = ""
        """Whose share of all leases it counts for."""
        self.client_id = ""
        self.renew_until_ms = 0
        """Until when the leader prolongs it; 0: it does not."""
        self.copying = False
        """Its copy is being stored: from then on the original is as good as settled."""


class Queue:
    """The plan for one window. ``window`` None: it is being made, beginning at ``start``."""

    def __init__(self, place: PopPlace, generation: int, start: int, window: LeaseWindow | None = None) -> None:
        self.place: Final = place
        self.generation: Final = generation
        self.window = window
        self.is_void = False
        """Whether another one is in its place."""
        self._empty = LeaseWindow(generation, start, start)
        known = window or self._empty
        self.base = known.commit
        """The planned ``Window.commit``."""
        self.done = known.settled
        """The planned ``Window.settled``."""
        self.cursor = known.reserved
        """The next message to give out; the planned ``Window.reserved``."""
        self.ahead = known.ahead
        """The planned ``Window.ahead``."""
        self.runs_ahead_ms: int | None = None
        """Of the leases that are wanted while all messages of the queue are out: one that waits gets the next one
        at once, if a row permits that before. None: it may not.
        """
        self.leased_until_ms = known.leased_until_ms
        self.numbers = known.numbers
        self._next_number = max(known.numbers, 1)
        self.lock = known.fifo
        """Of ordered groups: the newest batch, until all of it is settled in the plan."""
        self.is_ordered = False
        """Whether the group was so when it was last looked at."""
        self.leases: Final[dict[int, Lease]] = {}
        """By offset."""
        self.parked = 0
        """Those of them that are parked."""
        self.parks: Final[dict[int, Parked | None]] = {}
        """Offsets to be parked, or (None) no longer, not yet applied."""
        self.acked: Final[dict[int, int]] = {}
        """Settled in the plan by consumers, and not yet applied: offset to the number of the handle."""
        self.copied: Final[set[int]] = set()
        """Settled in the plan because their copies are stored, and not yet applied."""
        self.waiters: list[Pending] = []
        """Operations that wait for the next row."""
        self.reader: PopRead | None = None
        """The place that a receive is reading."""
        self.passed_over = False
        """Whether another receive left it out because of ``reader``, or because the window was full."""

    @classmethod
    def inherited(cls, place: PopPlace, window: LeaseWindow, now_ms: int, *, ordered: bool, end: int) -> Queue:
        """A new leader's view of a window: all that may be out is leased for as long as it can be (P3).

        ``end``: no message from there on was ever given out. Times far ahead are those of a clock that was wrong.
        """
        queue = cls(place, window.generation, window.commit, window)
        queue.is_ordered = ordered
        noted_ms = min(window.leased_until_ms, now_ms + LEASE_MS_MAX + AHEAD_MS)
        until_ms = noted_ms + SKEW_MS
        lock = window.fifo
        for offset in queue.open_offsets():
            if lock is not None and lock.first <= offset <= lock.last:
                end_ms = min(lock.until_ms, now_ms + INVISIBLE_MS_MAX) + SKEW_MS
                queue.leases[offset] = Lease(end_ms, lock.attempt, lock.number)
            elif lock is None or not ordered:  # what is behind a batch was not given out with it
                queue.leases[offset] = Lease(until_ms, UNKNOWN, 0)
        for offset, parked in window.parked.items():
            end_ms = min(parked.visible_at_ms, now_ms + INVISIBLE_MS_MAX) + SKEW_MS
            queue.leases[offset] = Lease(end_ms, parked.attempt, parked.number, parked=True)
        is_over = ordered and until_ms <= now_ms  # the group was not ordered when this ran ahead
        for offset in range(window.reserved, 0 if is_over else min(window.ahead, end)):
            # Probably nobody got it, so that counts as no attempt; the row says so to leaders that follow, too.
            queue.leases[offset] = Lease(until_ms, 0, 0, parked=True)
            queue.park(offset, Parked(noted_ms, 0, 0))
            queue.cursor = offset + 1
        for lease in queue.leases.values():
            lease.guard_ms = SKEW_MS
        return queue

    @property
    def applied(self) -> LeaseWindow:
        """The window as far as it is applied."""
        return self.window or self._empty

    @property
    def room(self) -> int:
        """How many offsets from ``cursor`` on fit into the window."""
        return WINDOW_MAX - (self.cursor - self.base)

    def is_settled(self, offset: int) -> bool:
        """Whether a message is settled or parked in the plan."""
        return offset < self.base or bool(self.done >> (offset - self.base) & 1)

    def open_offsets(self) -> Iterator[int]:
        """Offsets given out, and neither settled nor parked in the plan, in order."""
        return zeros(self.done, self.base, self.cursor)

    def next_number(self) -> int:
        """A number for handles, higher than all before, which counts once a row permits it."""
        number = self._next_number
        self._next_number += 1
        if number >= self.numbers:
            self.numbers = number + _NUMBERS_AHEAD
        return number

    def settle(self, offset: int) -> None:
        """Note a message as settled in the plan."""
        if offset >= self.base:
            self.base, self.done = advanced(self.base, self.done | 1 << (offset - self.base))
        if self.lock is not None and self.lock.last < self.base:
            self.lock = None

    def settle_up_to(self, end: int) -> None:
        """Settle everything from ``cursor`` on, as far as the window reaches, and set ``cursor`` there.

        If nothing before is open, the window moves, so nothing limits it.
        """
        if self.base == self.cursor:
            self.base = self.cursor = max(end, self.cursor)
            return
        end = min(end, self.base + WINDOW_MAX)
        if end > self.cursor:
            self.done |= ((1 << (end - self.cursor)) - 1) << (self.cursor - self.base)
            self.cursor = end

    def skip_to(self, begin: int) -> list[int]:
        """Settle everything below ``begin``, because it has expired; returns the offsets of the leases that end so."""
        if begin <= self.base:
            return []
        gone = [offset for offset, lease in self.leases.items() if offset < begin and not lease.parked]
        self.base, self.done = advanced(begin, self.done >> (begin - self.base))
        self.cursor = max(self.cursor, self.base)
        if self.lock is not None and self.lock.last < self.base:
            self.lock = None
        return gone

    def park(self, offset: int, parked: Parked) -> None:
        """Note a message as invisible for long."""
        self.parks[offset] = parked
        self.settle(offset)

    def permits(self, messages: Iterable[Leased]) -> bool:
        """Whether all that a later leader has to know of these, which were just given out, is applied (P1)."""
        at = self.window
        return (
            not self.is_ordered
            and at is not None
            and all(
                one.offset < at.ahead
                and one.visible_at_ms <= at.leased_until_ms
                and one.number < at.numbers
                and one.offset not in self.parks
                for one in messages
            )
        )

    def run_ahead(self, now_ms: int) -> None:
        """Have the next row permit to give out some messages that come after it."""
        room = min(AHEAD_MAX, self.room)
        if self.is_ordered or self.runs_ahead_ms is None or room <= 0:
            return
        if len(self.applied.parked) + len(self.parks) + room > PARKED_MAX:
            return
        self.ahead = max(self.ahead, self.cursor + room)
        self.leased_until_ms = max(self.leased_until_ms, now_ms + self.runs_ahead_ms + AHEAD_MS)

    def row(self) -> PopRow | None:
        """The change to be written; None if the plan is applied."""
        at = self.applied
        fresh = self.done & ~(at.settled >> (self.base - at.commit))
        low = (fresh & -fresh).bit_length() - 1 if fresh else 0
        lock = self.lock if self.lock != at.fifo else None
        if self.lock is None and at.fifo is not None and at.fifo.last >= self.base:
            lock = UNLOCKED
        row = PopRow(
            self.place,
            self.generation,
            -1 if self.window is not None else at.commit,
            self.base if self.base > at.commit else 0,
            self.cursor if self.cursor > at.reserved else 0,
            self.ahead if self.ahead > at.ahead else 0,
            self.leased_until_ms if self.leased_until_ms > at.leased_until_ms else 0,
            self.numbers if self.numbers > at.numbers else 0,
            self.base + low if fresh else 0,
            fresh >> low,
            tuple((offset, parked) for offset, parked in self.parks.items() if parked is not None),
            tuple(offset for offset, parked in self.parks.items() if parked is None),
            lock,
        )
        return None if row == PopRow(self.place, self.generation) else row

    def refresh(self, window: LeaseWindow) -> list[int]:
        """Take over a newer applied window of the same generation; returns whose copies' originals are settled now."""
        self.window = window
        for offset, parked in list(self.parks.items()):
            if window.parked.get(offset) == parked:
                del self.parks[offset]
        for offset in [one for one in self.acked if self._is_applied(one)]:
            del self.acked[offset]
        settled = [one for one in self.copied if self._is_applied(one)] if self.copied else []
        self.copied.difference_update(settled)
        return settled

    def _is_applied(self, offset: int) -> bool:
        window = self.applied
        return window.is_settled(offset) and offset not in window.parked


def is_locked(queue: Queue, now_ms: int) -> bool:
    """Whether a message of the newest batch is still out, or its dead letter is being stored."""
    return any(
        (one.copying or one.visible_at_ms > now_ms) and not one.parked and not queue.is_settled(offset)
        for offset, one in queue.leases.items()
    )


def next_batch(queue: Queue, attempt_id: str, count_max: int, now_ms: int) -> Sequence[int] | None:
    """The offsets to give out before anything new; none if there are none. None: the queue is locked.

    To anyone who asks with the attempt id of the newest batch: what is out of it.
    """
    lock, leases = queue.lock, queue.leases
    if is_locked(queue, now_ms):
        if lock is None or not attempt_id or attempt_id != lock.attempt_id:
            return None
        out = [one for one in covered(queue) if one in leases and leases[one].visible_at_ms > now_ms]
        return out if out and not any(leases[one].copying for one in out) else None
    waiting = list(queue.open_offsets())
    if not waiting:
        return ()
    first = waiting[0]
    is_covered, attempts = covers(lock, first), attempts_so_far(queue, first)
    alike = takewhile(lambda one: covers(lock, one) == is_covered and attempts_so_far(queue, one) == attempts, waiting)
    return list(islice(alike, count_max))


def covered(queue: Queue) -> list[int]:
    """The messages of the newest batch that are not settled."""
    return [one for one in queue.open_offsets() if covers(queue.lock, one)]


def attempts_so_far(queue: Queue, offset: int) -> int:
    """Deliveries of a message that count; none if nobody can have been told of one."""
    if offset >= queue.applied.reserved:
        return 0
    lock, lease = queue.lock, queue.leases.get(offset)
    if lock is not None and covers(lock, offset):
        return lock.attempt
    return max(lease.attempt, 0) if lease is not None else 0


def relock(queue: Queue, *, suspended: bool = False) -> None:
    """Have the lock end with the last of its leases. ``suspended``: the newest delivery does not count."""
    lock = queue.lock
    if lock is None:
        return
    out: list[Lease] = [queue.leases[one] for one in covered(queue) if one in queue.leases]
    if not out:
        return
    attempt = lock.attempt
    if suspended and any(one.attempt == attempt for one in out):
        attempt = max(attempt - 1, 0)
    queue.lock = lock._replace(until_ms=max(one.visible_at_ms for one in out), attempt=attempt)


def covers(lock: FifoLock | None, offset: int) -> bool:
    """Whether a message is of the newest batch."""
    return lock is not None and lock.first <= offset <= lock.last


_RENEW_MS: Final = 20_000
"""A lease that is prolonged is so this long after it was last."""
_STALE_MIN: Final = 1024


class LeaseBook:
    """The leases are in their queues; each goes in and out through this."""

    def __init__(self) -> None:
        self.count = 0
        self.parked = 0
        self.owned: Final[Counter[str]] = Counter()
        """Leases by owner."""
        self.owned_parked: Final[Counter[str]] = Counter()
        """Those that are parked."""
        self._heap: list[tuple[int, int, Queue, int, Lease]] = []
        self._order = count()
        self._clients: dict[str, dict[tuple[Queue, int], Lease]] = {}
        self._left: Final[deque[dict[tuple[Queue, int], Lease]]] = deque()
        """Those of clients that are gone."""

    def add(self, queue: Queue, offset: int, lease: Lease) -> None:
        """A message is given out; an older lease of it ends."""
        self.drop(queue, offset)
        queue.leases[offset] = lease
        self.count += 1
        self._count(self.owned, lease, 1)
        if lease.parked:
            self._count_parked(queue, lease, 1)
        if lease.client_id:
            self._clients.setdefault(lease.client_id, {})[queue, offset] = lease
        self.moved(queue, offset, lease)

    def drop(self, queue: Queue, offset: int) -> None:
        """A lease ends, if there is one."""
        lease = queue.leases.pop(offset, None)
        if lease is None:
            return
        self.count -= 1
        self._count(self.owned, lease, -1)
        if lease.parked:
            self._count_parked(queue, lease, -1)
        theirs = self._clients.get(lease.client_id)
        if theirs is not None and theirs.get((queue, offset)) is lease:
            del theirs[queue, offset]
            if not theirs:
                del self._clients[lease.client_id]

    def drop_all(self, queue: Queue) -> None:
        """All leases of a queue end."""
        for offset in list(queue.leases):
            self.drop(queue, offset)

    def park(self, queue: Queue, lease: Lease) -> None:
        """It is noted singly from now on."""
        if not lease.parked:
            self._count_parked(queue, lease, 1)
        lease.parked = True

    def _count_parked(self, queue: Queue, lease: Lease, by: int) -> None:
        queue.parked += by
        self.parked += by
        self._count(self.owned_parked, lease, by)

    @staticmethod
    def _count(counter: Counter[str], lease: Lease, by: int) -> None:
        if lease.owner:
            counter[lease.owner] += by
            if not counter[lease.owner]:
                del counter[lease.owner]

    def moved(self, queue: Queue, offset: int, lease: Lease) -> None:
        """It ends at another time."""
        if len(self._heap) > 4 * self.count + _STALE_MIN:
            self._heap = [one for one in self._heap if one[2].leases.get(one[3]) is one[4]]
            heapq.heapify(self._heap)
        self.look_again(queue, offset, lease, _event_ms(lease))

    def look_again(self, queue: Queue, offset: int, lease: Lease, at_ms: int) -> None:
        """Have ``due`` tell it at that time, if it is due then."""
        heapq.heappush(self._heap, (at_ms, next(self._order), queue, offset, lease))

    def due_ms(self) -> int | None:
        """When ``left`` or ``due`` may have something."""
        if self._left:
            return 0
        return self._heap[0][0] if self._heap else None

    def due(self, now_ms: int) -> Iterator[tuple[Queue, int, Lease]]:
        """Leases that have ended, or are to be prolonged; each is told once unless it is ``moved``."""
        while self._heap and self._heap[0][0] <= now_ms:
            _, _, queue, offset, lease = heapq.heappop(self._heap)
            if queue.leases.get(offset) is lease and not lease.copying and _event_ms(lease) <= now_ms:
                yield queue, offset, lease

    def leave(self, client_id: str) -> None:
        """A client is gone; if it comes back, its new messages are kept apart from the old ones."""
        leases = self._clients.pop(client_id, None)
        if leases:
            self._left.append(leases)

    def left(self) -> Iterator[tuple[Queue, int, Lease]]:
        """The leases that are prolonged for clients that are gone; each is told once."""
        while self._left:
            leases = self._left[0]
            while leases:
                (queue, offset), lease = leases.popitem()
                if queue.leases.get(offset) is lease:
                    yield queue, offset, lease
            self._left.popleft()


def _event_ms(lease: Lease) -> int:
    end = lease.visible_at_ms
    return min(end, end - LEASE_MS_MAX + _RENEW_MS) if lease.renew_until_ms > end else end
