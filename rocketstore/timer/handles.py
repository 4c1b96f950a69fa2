"""Recall handles, which name a timed message until it is due. In RocketMQ 5's form, because its clients read them.

Base64 (for URLs) of ``v1 topic broker due id origin``: ``due`` is the time of delivery (ms, Unix time), ``id`` the
message's unique key, and ``origin`` its first record's queue offset, which RocketMQ's handles lack.
"""

from __future__ import annotations

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Final, NamedTuple

VERSION: Final = "v1"
HANDLE_CHARS_MAX: Final = 1024
NO_ID: Final = "-"
"""The id of a message without one."""
_PARTS: Final = 6
_DIGITS_MAX: Final = 18


class WrongHandleError(ValueError):
    """Raised for a text that is no recall handle of ours."""


class RecallHandle(NamedTuple):
    """A timed message. ``due_ms``: as its producer asked for it."""

    topic: str
    broker: str
    due_ms: int
    message_id: str
    origin: int

    def encode(self) -> str:
        """The text."""
        fields = (VERSION, self.topic, self.broker, str(self.due_ms), self.message_id or NO_ID, str(self.origin))
        return urlsafe_b64encode(" ".join(fields).encode()).decode()


def decode_handle(text: str) -> RecallHandle:
    """Raises ``WrongHandleError``."""
    try:
        if not text.isascii() or len(text) > HANDLE_CHARS_MAX:
            raise WrongHandleError("the recall handle is not one that this broker gave")
        parts = urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode().split(" ")
    except (binascii.Error, UnicodeDecodeError) as error:
        raise WrongHandleError("the recall handle is not one that this broker gave") from error
    if len(parts) != _PARTS or parts[0] != VERSION or not (_is_number(parts[3]) and _is_number(parts[5])):
        raise WrongHandleError("the recall handle is not one that this broker gave")
    return RecallHandle(parts[1], parts[2], int(parts[3]), parts[4], int(parts[5]))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
