"""The options of a consumer, and which messages of a topic it wants: tags, or an SQL condition on properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self, TypedDict

from dledger.errors import ConfigError, InvalidRequestError
from dledger.records import record
from dledger.values import MIB, AboveZero, Bytes, Positive, Range, out_of_range
from rocketstore.client.aio.offsets import Start
from rocketstore.message.properties import tags_code
from rocketstore.message.sql import SqlCondition
from rocketstore.remoting.groups import SubscriptionData


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How a consumer works; all members of a group should have the same. ``Consumer`` takes these as keyword arguments.

    ``start``: where a group begins in a topic that is new to it, in all queues at once: ``"last"``, ``"first"``, or a
    time in ms since 1970; a queue that is added later begins with its first message. ``ordered``: the messages of a
    queue one after the other; a failing one is tried again in place. ``broadcast``: this consumer gets all queues and
    keeps its offsets itself, in ``offsets_file`` (None: only until it ends). ``retries_max``: how often a message is
    delivered again before it goes to the group's dead letters; None: as the group's settings say (16), and in order
    without end. ``commit_s``: how often offsets are committed; None: only ``commit`` and ``close`` do.
    ``when_out_of_range``: if the next message is gone, ``"go_on"`` at the nearest that exists (logged, counted in
    ``skipped``), or raise ``OffsetOutOfRangeError``. ``pending_messages_max`` and ``pending_bytes_max`` limit what is
    in use of each queue, ``stock_bytes_max`` what is pulled ahead of it. ``pending_span_max``: how far a queue goes on
    behind a message that is not done, because all of that comes again if this consumer is killed.
    ``consume_timeout_s``: a message that a handler is not done with after this time is sent back as if it had failed,
    except in order. ``timeout_s``: for every request. ``trace``: write to RMQ_SYS_TRACE_TOPIC who consumed which
    message, when, and how long it took. ``spans``: record OpenTelemetry spans of deliveries (the extra ``otel``).
    """

    start: Start = "last"
    ordered: bool = False
    broadcast: bool = False
    offsets_file: Path | None = None
    retries_max: Annotated[int | None, Range(0)] = None
    commit_s: Annotated[float | None, Range(above=0)] = 5.0
    when_out_of_range: Literal["go_on", "error"] = "go_on"
    timeout_s: AboveZero = 5.0
    pending_messages_max: Positive = 1000
    pending_bytes_max: Bytes = 16 * MIB
    pending_span_max: Positive = 2000
    consume_timeout_s: AboveZero = 900.0
    pull_messages: Positive = 1024
    pull_wait_s: Annotated[float, Range(0, 60)] = 15.0
    stock_bytes_max: Bytes = 4 * MIB
    trace: bool = False
    spans: bool = False

    def __post_init__(self) -> None:
        problems = out_of_range(self)
        if self.offsets_file is not None and not self.broadcast:
            problems.append("offsets_file is for broadcast: otherwise the brokers keep the group's offsets")
        if isinstance(self.start, str) and self.start not in ("first", "last"):
            problems.append(f"start must be 'first', 'last' or a time in ms since 1970, not {self.start!r}")
        if problems:
            raise ConfigError(problems)


class ConsumerSettings(TypedDict, total=False):
    """The fields of ``ConsumerOptions``, for type checkers."""

    start: Start
    ordered: bool
    broadcast: bool
    offsets_file: Path | None
    retries_max: int | None
    commit_s: float | None
    when_out_of_range: Literal["go_on", "error"]
    timeout_s: float
    pending_messages_max: int
    pending_bytes_max: int
    pending_span_max: int
    consume_timeout_s: float
    pull_messages: int
    pull_wait_s: float
    stock_bytes_max: int
    trace: bool
    spans: bool


TAG: Final = "TAG"
SQL92: Final = "SQL92"


@dataclass(frozen=True, slots=True)
class Sql:
    """Messages whose properties fulfil a condition, instead of tags: ``Sql("amount > 10 AND region = 'EU'")``.

    Brokers evaluate it (Apache's if ``enablePropertyFilter`` is true there). Only TRUE delivers, and a comparison with
    an absent property is unknown; ``NOT`` binds more tightly than comparisons. Consumers raise ``ConfigError`` for a
    wrong one, with the place.
    """

    expression: str


Topics = Mapping[str, str | Sql] | Mapping[str, str] | Mapping[str, Sql] | Sequence[str] | str
"""A topic, several, or what is wanted of each."""


def wanted_of(topics: Topics) -> dict[str, str | Sql]:
    """The filter of each topic."""
    if isinstance(topics, str):
        return {topics: "*"}
    return dict(topics) if isinstance(topics, Mapping) else dict.fromkeys(topics, "*")


@record(frozen=True, slots=True)
class Expression:
    """A filter as brokers are told it; made by ``of``."""

    kind: str = TAG
    text: str = "*"
    tags: frozenset[str] | None = None
    """Those wanted; None: all, or what a condition says."""

    @classmethod
    def of(cls, given: str | Sql) -> Self:
        """Tags ``A || B``, ``*`` for all messages, or a condition. Raises ``ConfigError``."""
        if isinstance(given, Sql):
            try:
                SqlCondition(given.expression)
            except InvalidRequestError as error:
                raise ConfigError([str(error)]) from error
            return cls(SQL92, given.expression)
        tags = tags_of_expression(given)
        return cls(tags=tags) if tags is None else cls(TAG, " || ".join(sorted(tags)), tags)

    def takes(self, tags: str) -> bool:
        """Whether a message with these tags is wanted: brokers compare only hashes."""
        return self.tags is None or tags in self.tags

    def subscription(self, topic: str, version: int = 0) -> SubscriptionData:
        """As heartbeats say it, with Java's hashes of the tags."""
        tags = tuple(sorted(self.tags or ()))
        codes = tuple(tags_code(one) for one in tags)
        return SubscriptionData(topic, self.text, tags, codes, sub_version=version, expression_type=self.kind)


ALL: Final = Expression()
"""Every message."""


def tags_of_expression(expression: str) -> frozenset[str] | None:
    """The tags of ``TagA || TagB``; None for all messages. Empty parts are left out, as Java's clients do.

    Raises ``ConfigError`` for an expression without any tag.
    """
    if expression.strip() in ("", "*"):
        return None
    tags = frozenset(tag.strip() for tag in expression.split("||") if tag.strip())
    if not tags:
        raise ConfigError([f"tags: {expression!r} names no tag: use * for all messages, or TagA || TagB"])
    return tags
