"""All leases of one leader by the time when something is to be done about them, and by client."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator
from itertools import count
from typing import Final

from rocketstore.pop.queue import Lease, Queue
from rocketstore.pop.tables import LEASE_MS_MAX

RENEW_MS: Final = 20_000
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
    return min(end, end - LEASE_MS_MAX + RENEW_MS) if lease.renew_until_ms > end else end
