"""A store of small files over a plain log."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketstore.config import MessageStoreConfig
from tests.unit.rocketstore.bench import small_config


@pytest.fixture
def config(tmp_path: Path) -> MessageStoreConfig:
    return small_config(tmp_path / "store")
