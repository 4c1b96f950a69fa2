"""Locks that give a client of a group exclusive use of a queue, for ordered consumption. In memory, on masters.

A new master knows no locks, as in RocketMQ: clients keep theirs for 30 s without a renewal, so during that time two of
them may receive messages of one queue. A master that is cut off from its group grants locks until it steps down, after
an election timeout without a quorum, like sends that it takes and cannot store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final, NamedTuple

from rocketstore.broker.refusal import Refusal, RefusalKind
from rocketstore.types import QueueKey

LOCK_S: Final = 60.0
"""RocketMQ's: a lock not renewed for this long is free."""
LOCKS_MAX: Final = 500_000
FORGOTTEN: Final = 2
"""Expired locks that go for each one that is asked for, of the same owner and of all: faster than new ones come."""
NAME_CHARS_MAX: Final = 1024


class _Lock(NamedTuple):
    client_id: str
    renewed_at: float
    owner: str
    """Whose share of the locks it takes up: an account, or an address."""


_Key = tuple[str, str, int]
"""Group, topic and queue."""


class QueueLocks:
    """On the loop. ``now`` in seconds; ``share_percent``: of all locks, what one owner may have."""

    def __init__(self, now: Callable[[], float], share_percent: int = 100) -> None:
        self._now = now
        self._share_max = max(1, LOCKS_MAX * share_percent // 100)
        self._locks: OrderedDict[_Key, _Lock] = OrderedDict()  # the one renewed last is the last
        self._owned: dict[str, OrderedDict[_Key, None]] = {}  # in the same order

    def lock(self, group: str, client_id: str, queues: Iterable[QueueKey], owner: str = "") -> tuple[QueueKey, ...]:
        """Lock or renew; returns what the client has locked now. Raises ``Refusal`` if there are too many."""
        queues = tuple(queues)
        names = {group, client_id, *(topic for topic, _ in queues)}
        if max(map(len, names)) > NAME_CHARS_MAX:
            raise Refusal(RefusalKind.INVALID, f"a name has more than {NAME_CHARS_MAX} characters")
        now, got = self._now(), []
        for queue in queues:
            self._forget(now, self._locks)
            self._forget(now, self._owned.get(owner, ()))
            key = group, *queue
            held = self._locks.get(key)
            if held is not None and held.client_id != client_id and now - held.renewed_at <= LOCK_S:
                continue
            if held is None or held.owner != owner:
                self._check_room(owner)
            self._put(key, _Lock(client_id, now, owner))
            got.append(queue)
        return tuple(got)

    def unlock(self, group: str, client_id: str, queues: Iterable[QueueKey]) -> None:
        """Unlock the client's queues."""
        for queue in queues:
            key = group, *queue
            held = self._locks.get(key)
            if held is not None and held.client_id == client_id:
                self._drop(key)

    def _check_room(self, owner: str) -> None:
        """Raises ``Refusal``."""
        if len(self._locks) >= LOCKS_MAX:
            raise Refusal(RefusalKind.TOO_MANY, f"{LOCKS_MAX} queues are locked, the most there may be")
        if len(self._owned.get(owner, ())) >= self._share_max:
            reason = f"{self._share_max} queues are locked by this client's account or address, the most it may"
            raise Refusal(RefusalKind.TOO_MANY, f"{reason} (account_share_percent)")

    def _forget(self, now: float, oldest: Iterable[_Key]) -> None:
        for key in tuple(islice(oldest, FORGOTTEN)):
            if now - self._locks[key].renewed_at <= LOCK_S:
                return
            self._drop(key)

    def _put(self, key: _Key, lock: _Lock) -> None:
        if key in self._locks:
            self._drop(key)
        self._locks[key] = lock
        self._owned.setdefault(lock.owner, OrderedDict())[key] = None

    def _drop(self, key: _Key) -> None:
        owner = self._locks.pop(key).owner
        owned = self._owned[owner]
        del owned[key]
        if not owned:
            del self._owned[owner]
