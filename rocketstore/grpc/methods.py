"""The service's methods: each one's messages, where it is carried out, and the permission it takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

from google.protobuf.message import Message

from rocketstore.broker.permissions import Need
from rocketstore.grpc.calls import NO_NEEDS, GatewayCall


class CallPlace(Enum):
    """Where a call is carried out."""

    HERE = auto()
    LEADER = auto()
    BOTH = auto()
    """Here, and the leader hears of it."""
    PASSED = auto()
    """Here; only other members call it."""


class Method(NamedTuple):
    """One method of the service, besides its stream of commands. ``Any``: each has messages of its own."""

    request: type[Message]
    answer: type[Message]
    """Of which an error is the field ``status``."""
    handle: Callable[[GatewayCall, Any], Awaitable[Any]]
    """Returns an answer; with ``streams`` a sequence of them. Raises ``codes.ANSWERED``."""
    place: CallPlace = CallPlace.LEADER
    needs: Callable[[Any], Sequence[Need]] = lambda _: NO_NEEDS
    streams: bool = False
