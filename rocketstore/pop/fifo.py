"""Ordered groups (P8): one batch of a queue at a time, and the same again until it is settled.

Attempts are counted for a batch as a whole. There are no copies: messages stay where they are, because those behind
must not overtake them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

from rocketstore.pop.queue import Lease, Queue
from rocketstore.pop.tables import FifoLock


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
