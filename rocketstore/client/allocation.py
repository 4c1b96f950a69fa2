"""Which queues each member of a group consumes. Pure; every member computes its own share, all by the same rule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from rocketstore.client.shares import QueueName

_T = TypeVar("_T")
_H = TypeVar("_H", bound=Hashable)


def in_java_order(client_ids: Iterable[str]) -> list[str]:
    """Sorted as Java sorts strings, by UTF-16 code units: RocketMQ's clients must see the same order."""
    return sorted(set(client_ids), key=_java_text)


def queues_in_java_order(queues: Iterable[QueueName]) -> list[QueueName]:
    """Sorted as Java sorts a ``MessageQueue``: by topic, broker name, number."""
    return sorted(set(queues), key=lambda one: (_java_text(one.topic), _java_text(one.broker_name), one.queue_id))


def _java_text(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


def allocate(queues: Sequence[_T], client_ids: Iterable[str], me: str) -> Sequence[_T]:
    """RocketMQ's ``AllocateMessageQueueAveragely``: each member gets a run of queues, the first ones one more.

    ``queues`` must be in the same order for all members. A client that is no member gets none.
    """
    members = in_java_order(client_ids)
    return _run(queues, members.index(me), members) if me in members else []


def owners(queues: Sequence[_H], client_ids: Iterable[str]) -> dict[_H, str]:
    """Every queue's member by the same rule; empty without members."""
    members = in_java_order(client_ids)
    return {one: member for place, member in enumerate(members) for one in _run(queues, place, members)}


def _run(queues: Sequence[_T], place: int, members: Sequence[str]) -> Sequence[_T]:
    least, larger = divmod(len(queues), len(members))
    begin = place * least + min(place, larger)
    return queues[begin : begin + least + (place < larger)]
