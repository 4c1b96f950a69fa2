"""Tag expressions: ``*`` or empty for all, ``TagA || TagB`` for some. As RocketMQ reads them: empty parts are left out,
and ``*`` among others is a tag of that name.

A consume queue stores only a hash of the tags. It excludes most messages without reading them; for the others, the tag
in the record is compared, because two tags may have the same hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from dledger.errors import InvalidRequestError
from rocketstore.message.many_hashes import java_hashes
from rocketstore.message.message import PROPERTY_TAGS
from rocketstore.message.properties import find_property_bytes
from rocketstore.message.record import properties_of

TAGS_MAX: Final = 1024
EXPRESSION_CHARS_MAX: Final = 16 * 1024
"""Parsing an expression of this length takes about a millisecond."""
_SHOWN_CHARS: Final = 64
_TAGS: Final = PROPERTY_TAGS.encode() + b"\x01"


@dataclass(frozen=True, slots=True)
class TagFilter:
    """The wanted tags; created by ``parse``."""

    codes: frozenset[int]
    tags: frozenset[bytes]

    @classmethod
    def parse(cls, expression: str) -> Self | None:
        """None: all messages. Raises ``InvalidRequestError``."""
        if len(expression) > EXPRESSION_CHARS_MAX:
            raise InvalidRequestError(
                f"the tag expression has {len(expression)} characters; at most {EXPRESSION_CHARS_MAX} are allowed"
            )
        if expression.strip() in ("", "*"):
            return None
        words = [stripped for word in expression.split("||") if (stripped := word.strip())]
        if not words:
            shown = expression if len(expression) <= _SHOWN_CHARS else f"{expression[:_SHOWN_CHARS]}..."
            raise InvalidRequestError(f"the tag expression {shown!r} names no tag: use * or TagA || TagB")
        if len(words) > TAGS_MAX:
            raise InvalidRequestError(f"the tag expression has {len(words)} tags; at most {TAGS_MAX} are allowed")
        return cls(frozenset(java_hashes(words)), frozenset(word.encode(errors="replace") for word in words))

    def matches_record(self, record: bytes) -> bool:
        """Whether a stored record matches."""
        return find_property_bytes(properties_of(record), _TAGS) in self.tags
