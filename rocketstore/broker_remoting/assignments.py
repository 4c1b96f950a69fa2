"""Which of a broker's queues a client gets that leaves the division to the broker, as RocketMQ 5 divides them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rocketstore.broker.pop_types import ANY_QUEUE
from rocketstore.state.attributes import TopicRequestMode
from rocketstore.types import RequestMode

AVERAGELY: Final = "AVG"
Rule = Callable[[Sequence[int], int, int], Sequence[int]]
"""The queues of one member: of all queues, its place among the members, and their number."""


def averagely(queues: Sequence[int], place: int, members: int) -> Sequence[int]:
    """RocketMQ's ``AllocateMessageQueueAveragely``: each member gets a run of queues, the first ones one more."""
    least, larger = divmod(len(queues), members)
    begin = place * least + min(place, larger)
    return queues[begin : begin + least + (place < larger)]


def by_circle(queues: Sequence[int], place: int, members: int) -> Sequence[int]:
    """RocketMQ's ``AllocateMessageQueueAveragelyByCircle``: each member gets one queue in turn."""
    return queues[place::members]


RULES: Final[dict[str, Rule]] = {AVERAGELY: averagely, "AVG_BY_CIRCLE": by_circle}
"""By the names that clients send."""


def shares(mode: TopicRequestMode, rule: Rule, queues: Sequence[int], ids: Sequence[str], me: str) -> list[int]:
    """The queues that client ``me`` shall pull or pop; ``ids``: of the group's clients, in order.

    Who pops from all queues gets ``ANY_QUEUE``, whether or not the broker knows it. With ``share_queues`` it also pops
    from the queues of so many clients behind it, in a circle; if there are more clients than queues, from its own only.
    """
    is_pop, count = mode.mode is RequestMode.POP, len(ids)
    if is_pop and not 0 < mode.share_queues < count - 1:
        return [ANY_QUEUE]
    if me not in ids:
        return []
    more = mode.share_queues if is_pop and count <= len(queues) else 0
    place = ids.index(me)
    found = [one for step in range(more + 1) for one in rule(queues, (place + step) % count, count)]
    return list(dict.fromkeys(found))
