"""Tests with real containers: they share one engine and one image, on one worker.

Without root or Docker they are skipped (see ``tests/support/lacking.py``).
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.containers.engine import EngineClient, engine, why_not
from cluster.containers.image import ensure_image
from tests.support.lacking import lacks

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[EngineClient]:
    """A working engine."""
    reason = why_not()
    if reason:
        lacks("Docker", reason)
    with engine() as client:
        yield client


@pytest.fixture(scope="session")
def image(docker_engine: EngineClient) -> str:
    """An image of the present sources.

    Its base, if it must be made, takes minutes of unpacking packages: no reason to dump every thread's stack.
    """
    faulthandler.cancel_dump_traceback_later()
    return ensure_image(docker_engine)
