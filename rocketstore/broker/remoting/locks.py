"""Locks that give a client of a group exclusive use of a queue, for ordered consumption. In memory, on masters.

A new master knows no locks, as in RocketMQ: clients keep theirs for 30 s without a renewal, so during that time two of
them may receive messages of one queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from rocketstore.remoting.bodies.queues import MessageQueue
from rocketstore.remoting.codes import AnswerCode
from rocketstore.remoting.errors import RequestError

LOCK_S: Final = 60.0
"""RocketMQ's: a lock not renewed for this long is free."""
LOCKS_MAX: Final = 500_000
NAME_CHARS_MAX: Final = 1024
"""They stay until there are too many locks."""


class _Lock(NamedTuple):
    client_id: str
    renewed_at: float


class QueueLocks:
    """On the loop. ``now`` in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._locks: dict[tuple[str, MessageQueue], _Lock] = {}

    def lock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
        """Lock or renew; returns the queues that the client now has locked. Raises ``RequestError`` if there are too
        many.
        """
        queues = tuple(queues)
        names = {group, client_id, *(one.topic for one in queues), *(one.broker_name for one in queues)}
        if max(map(len, names)) > NAME_CHARS_MAX:
            raise RequestError(f"a name has more than {NAME_CHARS_MAX} characters")
        now, got = self._now(), []
        for queue in queues:
            held = self._locks.get((group, queue))
            if held is None and len(self._locks) >= LOCKS_MAX:
                self._forget_expired(now)
                if len(self._locks) >= LOCKS_MAX:
                    raise RequestError(f"{LOCKS_MAX} queues are locked, the most there may be", AnswerCode.SYSTEM_BUSY)
            if held is None or held.client_id == client_id or now - held.renewed_at > LOCK_S:
                self._locks[group, queue] = _Lock(client_id, now)
                got.append(queue)
        return tuple(got)

    def unlock(self, group: str, client_id: str, queues: Iterable[MessageQueue]) -> None:
        """Unlock the client's queues."""
        for queue in queues:
            held = self._locks.get((group, queue))
            if held is not None and held.client_id == client_id:
                del self._locks[group, queue]

    def _forget_expired(self, now: float) -> None:
        self._locks = {key: one for key, one in self._locks.items() if now - one.renewed_at <= LOCK_S}
