"""Tag expressions: ``*`` or empty for all, ``TagA || TagB`` for some. As RocketMQ reads them: empty parts are left out,
and ``*`` among others is a tag of that name.

A consume queue stores only a hash of the tags. It excludes most messages without reading them; for the others, the tag
in the record is compared, because two tags may have the same hash.
"""

from __future__ import annotations

from collections import OrderedDict
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
FILTERS_MAX: Final = 1024
FILTERS_CHARS_MAX: Final = 1 << 20
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

    def matches_code(self, code: int) -> bool:
        """Whether a message with this tags code may match."""
        return code in self.codes

    def matches_record(self, record: bytes) -> bool:
        """Whether a stored record matches."""
        return find_property_bytes(properties_of(record), _TAGS) in self.tags


class TagFilters:
    """Caches the most recently used filters, because consumers send them with every pull. Limited by count and
    characters.
    """

    def __init__(self) -> None:
        self._filters: OrderedDict[str, TagFilter | None] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._filters)

    def of(self, expression: str) -> TagFilter | None:
        """Like ``TagFilter.parse``."""
        if expression in self._filters:
            self._filters.move_to_end(expression)
            return self._filters[expression]
        made = TagFilter.parse(expression)
        self._filters[expression] = made
        self._chars += len(expression)
        while len(self._filters) > FILTERS_MAX or self._chars > FILTERS_CHARS_MAX:
            self._chars -= len(self._filters.popitem(last=False)[0])
        return made
