"""For directories whose tests make blocking clients: no module leaves a thread behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

END_S = 120.0
"""For threads that have been told to end."""
OF_THE_PROCESS = "(_poll_wrapper)"
"""gRPC's, which begins with its first asyncio server or channel and serves all later ones."""
_first_seen: dict[threading.Thread, str] = {}
"""After which test."""


@pytest.fixture(autouse=True)
def who_starts_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Remember it for the error below."""
    yield
    for one in threading.enumerate():
        _first_seen.setdefault(one, request.node.nodeid)


@pytest.fixture(autouse=True, scope="module")
def no_thread_is_left() -> Iterator[None]:
    """Every blocking client, server and pool has threads: one that is left open would disturb some later test.

    Not looked at after each test: servers of a module start the threads of their pools as they need them.
    """
    before = set(threading.enumerate())
    yield
    until = time.monotonic() + END_S
    new = [one for one in threading.enumerate() if one not in before and not one.name.endswith(OF_THE_PROCESS)]
    for one in new:
        one.join(max(until - time.monotonic(), 0.0))
    left = [f"{one.name} (since {_first_seen.get(one, 'the end')})" for one in new if one.is_alive()]
    _first_seen.clear()
    assert not left, f"left open in this module: {', '.join(left)}"
