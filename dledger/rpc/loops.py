"""The event loop of servers, and of clients that have none: uvloop's.

It runs the same code as asyncio's own loop for about a quarter less of a broker's processor time (docs/decisions.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

import uvloop

_T = TypeVar("_T")


def run(main: Coroutine[object, object, _T]) -> _T:
    """``asyncio.run`` on that loop; on any thread."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
