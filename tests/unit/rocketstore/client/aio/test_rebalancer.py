"""The queues of each member, against RocketMQ's rule written as it is there."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rocketstore.client.aio.rebalancer import allocate, in_java_order_of_queues
from rocketstore.remoting.topics import MessageQueue


def queues_of(count: int) -> list[MessageQueue]:
    return [MessageQueue("T", "b", number) for number in range(count)]


def share(count: int, members: list[str], me: str) -> list[int]:
    """The numbers of a member's queues."""
    return [one.queue_id for one in allocate(queues_of(count), members, me)]


def rocketmqs_rule(queues: int, members: int, index: int) -> list[int]:
    """``AllocateMessageQueueAveragely``, with its own names of things."""
    mod = queues % members
    larger = mod > 0 and index < mod
    average_size = 1 if queues <= members else queues // members + larger
    start_index = index * average_size if larger else index * average_size + mod
    length = min(average_size, queues - start_index)
    return [(start_index + one) % queues for one in range(length)]


@given(st.integers(1, 64), st.integers(1, 80))
def test_every_member_gets_what_rocketmq_gives_it(queues: int, members: int) -> None:
    """Also with more members than queues; together exactly all queues."""
    names = [f"c{number:03}" for number in range(members)]
    shares = [share(queues, names, name) for name in names]

    assert shares == [rocketmqs_rule(queues, members, index) for index in range(members)]
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(queues))


@given(st.permutations(["a", "b", "c", "d", "e"]), st.integers(1, 9))
def test_the_order_of_the_list_does_not_matter(names: list[str], queues: int) -> None:
    """Brokers list members as they joined, and one twice that has just connected anew."""
    for name in names:
        assert share(queues, [*names, "c"], name) == share(queues, list("abcde"), name)


def test_members_are_sorted_as_java_sorts_them() -> None:
    """By UTF-16 code units: a character beyond the first 65,536 comes before U+E000."""
    members = ["\ue000", "\U00010000", "b", "a"]
    assert [share(4, members, one) for one in ("a", "b", "\U00010000", "\ue000")] == [[0], [1], [2], [3]]


def test_queues_are_sorted_as_java_sorts_them() -> None:
    """RocketMQ's ``MessageQueue``: by topic, then by the name of the brokers, then by number."""
    java = [("a", "x", 1), ("a", "x", 10), ("a", "\U00010000", 0), ("a", "\ue000", 0), ("b", "a", 0)]
    queues = [MessageQueue(*one) for one in java]
    assert in_java_order_of_queues([*reversed(queues), queues[0]]) == queues


def test_who_is_no_member_gets_nothing() -> None:
    """It would take another one's queues."""
    assert share(4, ["a", "b"], "c") == share(4, [], "c") == []
