"""The table of RocketMQ's requests in ``docs/rocketmq.md``."""

from __future__ import annotations

from tools.docs_reference.sections import replaced
from tools.docs_reference.supported import CODES


def text() -> str:
    """The whole document. Raises ``ValueError`` if it has no place for the table."""
    return replaced("rocketmq.md", "requests", table())


def table() -> str:
    """One line for each request."""
    lines = ["| code | request | answered by | supported | notes |", "|---|---|---|---|---|"]
    lines += [
        f"| {int(code)} | {code.name} | {one.receiver} | {one.support} | {one.note} |"
        for code, one in sorted(CODES.items())
    ]
    return "".join(f"{line}\n" for line in lines)
