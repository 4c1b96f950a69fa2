"""Which queues each member of a group consumes. Pure; every member computes its own part, all by the same rule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rocketstore.remoting.bodies.queues import MessageQueue


def in_java_order_of_queues(queues: Iterable[MessageQueue]) -> list[MessageQueue]:
    """Sorted as Java sorts a ``MessageQueue``: by topic, broker name, number."""
    return sorted(set(queues), key=lambda one: (_java_text(one.topic), _java_text(one.broker_name), one.queue_id))


def allocate(queues: Sequence[MessageQueue], client_ids: Iterable[str], me: str) -> Sequence[MessageQueue]:
    """RocketMQ's ``AllocateMessageQueueAveragely``: each member gets a run of queues, the first ones one more.

    ``queues`` must be in the same order for all members. A client that is no member gets none.
    """
    members = sorted(set(client_ids), key=_java_text)
    return _run(queues, members.index(me), len(members)) if me in members else []


def owners(queues: Sequence[MessageQueue], client_ids: Iterable[str]) -> dict[MessageQueue, str]:
    """Every queue's member by the same rule; empty without members."""
    members = sorted(set(client_ids), key=_java_text)
    return {one: member for place, member in enumerate(members) for one in _run(queues, place, len(members))}


def _run(queues: Sequence[MessageQueue], place: int, members: int) -> Sequence[MessageQueue]:
    least, larger = divmod(len(queues), members)
    begin = place * least + min(place, larger)
    return queues[begin : begin + least + (place < larger)]


def _java_text(text: str) -> bytes:
    """Java compares strings by UTF-16 code units: RocketMQ's clients must see the same order."""
    return text.encode("utf-16-be", "surrogatepass")
