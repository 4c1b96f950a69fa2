"""What the checkers raise."""

from __future__ import annotations


class Violation(Exception):  # noqa: N818 - what it is called everywhere
    """Raised when the group broke a promise."""


def require(condition: object, message: str, *facts: object) -> None:
    """Raise ``Violation`` unless ``condition`` holds."""
    if not condition:
        raise Violation(f"{message}: {', '.join(map(str, facts))}" if facts else message)
