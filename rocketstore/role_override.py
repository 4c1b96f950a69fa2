"""The role of a promoted slave: a file in its store that stands above ``brokerRole`` and ``brokerId`` of the conf file.

Not in the conf file itself: that belongs to its author, and may be made anew by a program. The file is read when
settings are loaded, so that everything that reads them sees the role that applies; a broker with another role than
SLAVE in its conf file ignores it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from dledger.errors import ConfigError
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, replace_durably
from rocketstore.broker_config import BrokerConfig
from rocketstore.types import BrokerRole

OVERRIDE_FILE: Final = "haRole.json"
_FIELDS: Final = {"role": str, "broker_id": int, "made_ms": int}


@dataclass(frozen=True, slots=True)
class RoleOverride:
    """Since ``made_ms`` (Unix time), the broker is a master; it was a slave with the id ``broker_id``."""

    role: BrokerRole
    broker_id: int
    made_ms: int

    @property
    def made_text(self) -> str:
        """When, in local time."""
        return datetime.fromtimestamp(self.made_ms / 1000).astimezone().isoformat(" ", "seconds")


def override_path(config: BrokerConfig) -> Path:
    """Where the file is."""
    return config.store.config_dir / OVERRIDE_FILE


def read_override(config: BrokerConfig) -> RoleOverride | None:
    """None if there is none. Raises ``ConfigError``: it cannot be read."""
    path = override_path(config)
    try:
        return _decoded(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            [
                f"{path} cannot be read ({error}), and it says whether this broker is a promoted slave: remove it if "
                "this broker is to be the slave that its conf file makes it, or set brokerRole there to a master's"
            ]
        ) from error


def _decoded(content: bytes) -> RoleOverride:
    """Raises ``ValueError``, ``KeyError``, ``TypeError``."""
    found = json.loads(content)
    values = {name: found[name] for name in _FIELDS}
    if any(type(values[name]) is not kind for name, kind in _FIELDS.items()):
        raise ValueError("values of other types")
    role = BrokerRole(values["role"])
    if role is BrokerRole.SLAVE:
        raise ValueError("its role is SLAVE")
    return RoleOverride(role, values["broker_id"], values["made_ms"])


def write_override(config: BrokerConfig, override: RoleOverride) -> Path:
    """Make it stand from the next start on; returns the file. Raises ``OSError``."""
    path, fs = override_path(config), FileSystem()
    make_dirs_durably(fs, path.parent)
    keep_private(path.parent)
    replace_durably(fs, path, json.dumps(asdict(override)).encode())
    return path


def remove_override(config: BrokerConfig) -> bool:
    """From the next start on, the conf file applies again. False if there was none. Raises ``OSError``."""
    path, fs = override_path(config), FileSystem()
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    fs.sync_dir(path.parent)
    return True


def overridden(config: BrokerConfig) -> tuple[BrokerConfig, str]:
    """The configuration that applies, and a sentence about it if that is not the one given. Raises ``ConfigError``."""
    if config.dledger is not None or config.store.broker_role is not BrokerRole.SLAVE:
        return config, ""
    override = read_override(config)
    if override is None:
        return config, ""
    applies = replace(config, broker_id=0, store=replace(config.store, broker_role=override.role))
    return applies, (
        f"this broker was promoted at {override.made_text}: it is {override.role}, not SLAVE {config.broker_id} as its "
        f"settings say (see {override_path(config)}). Set brokerRole={override.role} and brokerId=0 in its conf file, "
        "or undo it with `dledger ha promote --undo`"
    )
