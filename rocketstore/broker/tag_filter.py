"""Tag expressions: ``*`` or nothing for all, ``TagA || TagB`` for some.

A consume queue knows tags by a hash only. It rules most messages out without reading them; what is left is compared
with the tag in the record, because two tags may have one hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from dledger.errors import InvalidRequestError
from rocketstore.message.message import PROPERTY_TAGS
from rocketstore.message.properties import find_property_bytes
from rocketstore.message.record import MESSAGE_MAGIC_V2, SYS_FLAG_AT, body_at
from rocketstore.message.tags import tags_code

TAGS_MAX: Final = 1024
_TAGS: Final = PROPERTY_TAGS.encode() + b"\x01"
_V2: Final = (MESSAGE_MAGIC_V2 & 0xFFFFFFFF).to_bytes(4, "big")


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Which tags are wanted; made with ``parse``."""

    codes: frozenset[int]
    tags: frozenset[bytes]

    @classmethod
    def parse(cls, expression: str) -> Self | None:
        """None: all messages. Raises ``InvalidRequestError``."""
        words = [word.strip() for word in expression.split("||")]
        if words in ([""], ["*"]):
            return None
        if "" in words or "*" in words:
            raise InvalidRequestError(f"the tag expression {expression!r} must look like * or TagA || TagB")
        if len(words) > TAGS_MAX:
            raise InvalidRequestError(f"the tag expression has {len(words)} tags; at most {TAGS_MAX} are allowed")
        return cls(frozenset(map(tags_code, words)), frozenset(word.encode(errors="replace") for word in words))

    def matches_code(self, code: int) -> bool:
        """Whether a message with this tags code may be wanted."""
        return code in self.codes

    def matches_record(self, record: bytes) -> bool:
        """Whether a stored record is wanted."""
        return find_property_bytes(properties_of(record), _TAGS) in self.tags


def properties_of(record: bytes) -> bytes:
    """A whole record's encoded properties, without decoding anything else."""
    at = body_at(int.from_bytes(record[SYS_FLAG_AT : SYS_FLAG_AT + 4], "big"))
    topic_at = at + int.from_bytes(record[at - 4 : at], "big")
    if record[4:8] == _V2:
        topic_end = topic_at + 2 + int.from_bytes(record[topic_at : topic_at + 2], "big")
    else:
        topic_end = topic_at + 1 + record[topic_at]
    return record[topic_end + 2 :]
