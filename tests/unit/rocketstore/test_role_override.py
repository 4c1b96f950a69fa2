"""A promoted slave is a master, whatever its conf file says, until that is undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import ConfigError
from rocketstore.settings import (
    RoleOverride,
    load_broker_settings,
    override_path,
    properties_of,
    read_override,
    remove_override,
    write_override,
)
from rocketstore.types import BrokerRole


def settings(directory: Path, role: str = "SLAVE", broker_id: str = "2") -> dict[str, str]:
    """A slave's."""
    return {
        "storePathRootDir": str(directory),
        "brokerRole": role,
        "brokerId": broker_id,
        "haMasterAddress": "127.0.0.1:10912",
    }


def test_a_promotion_stands_above_the_settings_and_is_shown(tmp_path: Path) -> None:
    """Everything that reads settings sees the role that applies; and a sentence says why."""
    given, _ = load_broker_settings(None, {}, settings(tmp_path))
    override = RoleOverride(BrokerRole.SYNC_MASTER, 2, 1_700_000_000_000)
    write_override(given, override)
    assert read_override(given) == override
    config, warnings = load_broker_settings(None, {}, settings(tmp_path))
    assert (config.store.broker_role, config.broker_id) == (BrokerRole.SYNC_MASTER, 0)
    assert properties_of(config)["brokerRole"] == "SYNC_MASTER"
    assert any("was promoted at" in one and str(override_path(config)) in one for one in warnings)
    assert load_broker_settings(None, {}, settings(tmp_path), promoted=False)[0] == given

    assert remove_override(given)
    assert not remove_override(given)
    assert load_broker_settings(None, {}, settings(tmp_path)) == (given, ())


def test_it_does_not_concern_a_master(tmp_path: Path) -> None:
    """Once the conf file says what the broker is, that applies."""
    slave, _ = load_broker_settings(None, {}, settings(tmp_path))
    write_override(slave, RoleOverride(BrokerRole.SYNC_MASTER, 2, 1))
    config, warnings = load_broker_settings(None, {}, settings(tmp_path, "ASYNC_MASTER", "0"))
    assert config.store.broker_role is BrokerRole.ASYNC_MASTER
    assert warnings == ()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"role": "SLAVE", "broker_id": 1, "made_ms": 1}',
        '{"role": "KING", "broker_id": 1, "made_ms": 1}',
        '{"role": "SYNC_MASTER", "broker_id": "1", "made_ms": 1}',
    ],
)
def test_a_broker_does_not_guess_its_role(tmp_path: Path, content: str) -> None:
    """It does not start as one or the other if the file cannot be read."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "haRole.json").write_text(content)
    with pytest.raises(ConfigError, match=r"haRole\.json cannot be read"):
        load_broker_settings(None, {}, settings(tmp_path))
