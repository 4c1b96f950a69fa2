"""The blocking clients and the asyncio ones: the same public methods, with the same parameters."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from rocketstore import client
from rocketstore.client import Message, aio

PARTS = {
    "Producer": {"carried", "prepared", "has_room", "wait_for_room", "add", "add_all"},
    "NumberedProducer": {"prepared", "add_all"},
    "Consumer": {"take_singly", "return_unused", "finish"},
}
"""What the asyncio ones offer to the blocking ones, which take such steps on two threads."""
WITH = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__"}
NOWHERE = "127.0.0.1:1"
READS: Any = {"group": "g", "topics": "T"}  # Any: arguments of several types
INTERNAL_PARAMETERS = {("Consumer", "commit"): {"done"}}
"""Likewise: what an iteration has completed."""


def members(one: object) -> set[str]:
    """What applications use of an object, those of ``with`` and ``for`` under the names of the asyncio ones."""
    return {WITH.get(name, name) for name in dir(one) if not name.startswith("_") or name in {*WITH, *WITH.values()}}


def methods(kind: type) -> dict[str, object]:
    """Those with a name."""
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_") and callable(member)}


def parameters(member: object) -> list[tuple[str, str, object]]:
    """Names, kinds and defaults."""
    assert callable(member)
    return [(one.name, one.kind.name, one.default) for one in inspect.signature(member).parameters.values()]


async def asynchronous() -> list[object]:
    """One of each; none of them asks a broker for anything."""
    async with aio.Producer(NOWHERE) as producer, aio.Admin(NOWHERE) as admin:
        transaction, numbered = producer.transaction(Message("T", b"")), producer.numbered("n")
        consumers = [aio.Consumer(NOWHERE, **READS), aio.SimpleConsumer(NOWHERE, **READS)]
        return [producer, transaction, numbered, admin, *consumers]


def blocking() -> list[object]:
    """Likewise."""
    with client.Producer(NOWHERE) as producer, client.Admin(NOWHERE) as admin:
        consumer, simple = client.Consumer(NOWHERE, **READS), client.SimpleConsumer(NOWHERE, **READS)
        consumer.close()
        simple.close()
        transaction, numbered = producer.transaction(Message("T", b"")), producer.numbered("n")
        return [producer, transaction, numbered, admin, consumer, simple]


def test_both_kinds_have_the_same_members() -> None:
    """Whoever knows one knows the other: nothing is missing, and nothing is there besides. Attributes included."""
    for one, other in zip(blocking(), asyncio.run(asynchronous()), strict=True):
        name = type(one).__name__
        assert name == type(other).__name__
        assert members(one) == members(other) - PARTS.get(name, set()), name


@pytest.mark.parametrize("name", ["Admin", "Consumer", "NumberedProducer", "Producer", "SimpleConsumer"])
def test_both_kinds_take_the_same_arguments(name: str) -> None:
    """Names, order, which are keywords, and defaults, of the constructors too."""
    one, other = getattr(client, name), getattr(aio, name)
    if name != "NumberedProducer":  # which producers make
        assert parameters(one) == parameters(other)
    assert len(methods(one)) >= 4
    for method, member in methods(one).items():
        extra = INTERNAL_PARAMETERS.get((name, method), set())
        expected = [part for part in parameters(getattr(other, method)) if part[0] not in extra]
        assert parameters(member) == expected, method


def test_both_kinds_have_all_the_classes_of_asyncio() -> None:
    """The others are the same objects for both, and are imported from one place."""
    assert set(aio.__all__) <= set(client.__all__)
    assert len(client.__all__) <= 55
