"""Permissions of an account on a topic or a group, and their notation."""

from __future__ import annotations

from enum import IntFlag
from typing import Final

RETRY_PREFIX: Final = "%RETRY%"
"""RocketMQ's retry topic of a group; the group's permission applies to it."""
DEAD_PREFIX: Final = "%DLQ%"
"""RocketMQ's topic of a group's dead letters; the group's permission applies unless the topic is named itself."""


class Permission(IntFlag):
    """RocketMQ's terms; ``DENY`` is the absence of the others."""

    DENY = 0
    PUB = 1
    """To write: send, append."""
    SUB = 2
    """To read: pull, query, follow."""


BOTH: Final = Permission.PUB | Permission.SUB
_BY_TEXT: Final = {
    "DENY": Permission.DENY,
    "PUB": Permission.PUB,
    "SUB": Permission.SUB,
    "PUB|SUB": BOTH,
    "SUB|PUB": BOTH,
}


def parse_permission(text: str) -> Permission:
    """``DENY``, ``PUB``, ``SUB`` or ``PUB|SUB``. Raises ``ValueError``; RocketMQ takes anything else for DENY."""
    found = _BY_TEXT.get("".join(text.split()).upper())
    if found is None:
        raise ValueError(f"invalid permission {text!r}: use DENY, PUB, SUB or PUB|SUB")
    return found


def permission_text(permission: Permission) -> str:
    """The notation of a permission."""
    return "|".join(one.name or "" for one in (Permission.PUB, Permission.SUB) if one & permission) or "DENY"
