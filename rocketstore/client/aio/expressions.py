"""Which messages of a topic a consumer wants: tags, or an SQL condition on properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from dledger.errors import ConfigError, InvalidRequestError
from dledger.records import record
from rocketstore.message.properties import tags_code
from rocketstore.message.sql import SqlCondition
from rocketstore.remoting.bodies.clients import SubscriptionData

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
