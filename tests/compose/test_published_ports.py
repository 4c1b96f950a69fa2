"""The ports that a project's compose files publish; without an engine."""

from __future__ import annotations

import re

import pytest
import yaml

from cluster.image import PROJECT
from tests.compose.project import published_ports


@pytest.mark.parametrize("file", ["compose.yaml", "compose.log.yaml"])
def test_every_published_port_is_a_free_one_of_its_own(file: str) -> None:
    """None is left at its default, and no two services are given the same."""
    chosen = published_ports(file)
    services = yaml.safe_load((PROJECT / file).read_text())["services"]
    published = [one for service in services.values() for one in service.get("ports", ())]

    names = [re.search(r":\$\{DLEDGER_(\w+)_PORT:-\d+\}:\d+$", one) for one in published]

    assert all(names), published
    assert sorted(one[1] for one in names if one) == sorted(chosen)
    assert len(set(chosen.values())) == len(published)
