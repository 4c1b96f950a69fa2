"""Tests that run on an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

from tests.support.waiting import PATIENCE_S

_P = ParamSpec("_P")
TEST_S_MAX = 300.0


def on_loop(test: Callable[_P, Awaitable[None]]) -> Callable[_P, None]:
    """The test on a loop of its own; when it ends, no task may be left."""

    @functools.wraps(test)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        async def main() -> None:
            async with asyncio.timeout(TEST_S_MAX):
                await test(*args, **kwargs)
            await until(lambda: len(asyncio.all_tasks()) == 1, f"only the test itself is left: {asyncio.all_tasks()}")

        asyncio.run(main())

    return run


async def until(condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Return once it holds; fail with ``what`` after ``timeout_s``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition():
        assert loop.time() < deadline, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)
