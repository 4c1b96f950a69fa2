"""All of this directory is marked, so that only ``make soak`` runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Minutes each, one after the other."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.soak)
