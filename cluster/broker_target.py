"""How commands find brokers (``-b HOST:PORT,…`` or ``DLEDGER_BROKER``) and parse times."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

import click

from cluster.security_options import NO_SECURITY, CommandSecurity, security_options
from dledger import flag_values
from dledger.values import parse_duration_ms

if TYPE_CHECKING:
    from rocketstore.client import Admin, Consumer, ConsumerOptions, GroupConsumer, GroupOptions, Producer

DEFAULT_BROKER = "127.0.0.1:10911"
"""Where a broker with default settings listens."""


@dataclass(frozen=True, slots=True)
class BrokerTarget:
    """The brokers that a command talks to."""

    addresses: tuple[str, ...]
    timeout_s: float
    security: CommandSecurity = NO_SECURITY

    # Imported in the methods, so that --help does not load gRPC.

    def admin(self) -> Admin:
        """An admin client; the caller closes it, like the other clients."""
        from rocketstore.client import Admin

        return Admin(list(self.addresses), timeout_s=self.timeout_s, security=self.security.for_client())

    def producer(self) -> Producer:
        """A producer that never sends anything twice."""
        from rocketstore.client import Producer

        return Producer(list(self.addresses), timeout_s=self.timeout_s, security=self.security.for_client())

    def consumer(self, group: str, topic: str, options: ConsumerOptions) -> Consumer:
        """A consumer of a group, or of none if the name is empty."""
        from rocketstore.client import Consumer

        security = self.security.for_client()
        return Consumer(list(self.addresses), group=group, topic=topic, options=options, security=security)

    def member(self, group: str, options: GroupOptions) -> GroupConsumer:
        """A member of a group, which shares its queues with the others."""
        from rocketstore.client import GroupConsumer

        return GroupConsumer(list(self.addresses), group=group, options=options, security=self.security.for_client())


def broker_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add ``--broker``, ``--timeout`` and the security options, passed to the command as one ``target``."""

    @security_options
    @functools.wraps(command)
    def with_target(broker: tuple[str, ...], timeout_s: float, security: CommandSecurity, **others: object) -> None:
        command(target=BrokerTarget(broker, timeout_s, security), **others)

    with_target = click.option(
        "--timeout",
        "timeout_s",
        type=flag_values.Seconds(min=0, min_open=True),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="How long one request may take, retries included.",
    )(with_target)
    return click.option(
        "-b",
        "--broker",
        envvar="DLEDGER_BROKER",
        default=DEFAULT_BROKER,
        show_default=True,
        metavar="HOST:PORT,…",
        callback=flag_values.addresses,
        help="Listen addresses of some or all brokers (also DLEDGER_BROKER).",
    )(with_target)


class Moment(click.ParamType[str | int]):
    """A time: milliseconds since 1970, ISO 8601 (local time unless it has an offset), or an age (``30m``).

    With ``ends``, also ``first`` and ``last``, which stay text.
    """

    name = "time"

    def __init__(self, *, ends: bool = False) -> None:
        self._ends = ends

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        """Milliseconds since 1970, or the word."""
        if isinstance(value, int):
            return value
        text = str(value).strip()
        if self._ends and text in ("first", "last"):
            return text
        if text.isascii() and text.isdigit():
            return int(text)
        try:
            return _moment_ms(text)
        except ValueError:
            words = "first, last, " if self._ends else ""
            self.fail(f"invalid time {text!r}: use {words}2026-01-31T12:00, 30m (ago) or milliseconds", param, ctx)


def _moment_ms(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (ago_ms := parse_duration_ms(text, unit="")) >= 0:
            return int(time.time() * 1000 - ago_ms)
    return int(datetime.fromisoformat(text).timestamp() * 1000)


def start_of(moment: str | int) -> Literal["first", "last"] | int:
    """Converts the value of ``Moment(ends=True)`` to a consumer's start."""
    if isinstance(moment, int):
        return moment
    return "last" if moment == "last" else "first"


def time_text(moment_ms: int) -> str:
    """Local time to the millisecond; empty for no time."""
    if moment_ms <= 0:
        return ""
    return datetime.fromtimestamp(moment_ms / 1000).astimezone().isoformat(" ", "milliseconds")[:23]
