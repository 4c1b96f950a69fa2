"""A page cache for tests, whose files are on a file system that does not say what is in memory."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def _all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is in memory."""
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset, _flags: read(fd, buffers, offset))
