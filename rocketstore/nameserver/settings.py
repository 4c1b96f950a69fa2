"""Loads a name server's configuration: flags, then the environment, then a conf file, then the defaults.

The file is RocketMQ's ``namesrv.conf``. A setting is accepted under RocketMQ's name (``kvConfigPath``) and under ours
(``kv_config_path``); in the environment as ``DLEDGER_<NAME>``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from dledger import setting_sources
from dledger import settings as dledger_settings
from dledger.config import SecurityConfig
from dledger.errors import ConfigError
from dledger.java_names import UNUSED
from dledger.setting_sources import SettingTarget, Vocabulary, alarms_first, notices
from dledger.types import TlsServerMode
from dledger.values import parse_boolean, parse_integer
from rocketstore.nameserver.config import NameServerConfig

OF_THE_IMAGE: Final = frozenset({"store_path_root_dir"})
"""Set in the container image, for brokers."""


def _tls_server_mode(text: str) -> TlsServerMode:
    try:
        return TlsServerMode(text.lower())
    except ValueError:
        raise ValueError(f"invalid value {text!r}: use one of {', '.join(TlsServerMode)}") from None


_PARSERS: Final[dict[object, Callable[[str], object]]] = {
    int: parse_integer,
    bool: parse_boolean,
    str: str,
    Path: Path,
    TlsServerMode | None: _tls_server_mode,
}
_SECURITY: Final = frozenset(one.name for one in fields(SecurityConfig))


def camel(name: str) -> str:
    """A setting's name in RocketMQ's spelling."""
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _targets() -> dict[str, SettingTarget]:
    own = {name: SettingTarget(name, parse) for name, parse in dledger_settings.parsers_of(NameServerConfig, _PARSERS)}
    return {
        **own,
        **{camel(name): target for name, target in own.items()},
        "bindAddress": own["listen_host"],
        "bind_host": own["listen_host"],
        "tls.server.mode": own["tls_server_mode"],
        **{name: one for name, one in dledger_settings.TARGETS.items() if one.setting in _SECURITY},
    }


TARGETS: Final = _targets()
_VOCABULARY: Final = Vocabulary(
    TARGETS,
    (UNUSED | {one for one in dledger_settings.TARGETS if not one.islower()} | OF_THE_IMAGE) - set(TARGETS),
    {name for name in TARGETS if name.islower() and "." not in name},
    dledger_settings.OTHERS_VARIABLES,
)


def load_name_server_settings(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> tuple[NameServerConfig, tuple[str, ...]]:
    """Read and check everything; returns the configuration and warnings for people.

    Raises ``ConfigError`` with every problem of every source.
    """
    readings = setting_sources.read(_VOCABULARY, file, environ, flags)
    if readings.problems:
        raise ConfigError(readings.problems)

    def some(record: type) -> dict[str, Any]:  # Any: each value was read by the parser of its own field
        return {one.name: readings.chosen[one.name].value for one in fields(record) if one.name in readings.chosen}

    config = NameServerConfig(**some(NameServerConfig), security=SecurityConfig(**some(SecurityConfig)))
    config = replace(config, kv_config_path=config.kv_config_path.expanduser())
    problems = [setting_sources.with_sources(one, readings.chosen, {}) for one in config.problems()]
    if problems:
        raise ConfigError(problems)
    unused = [one for one in readings.unused if one.name not in OF_THE_IMAGE]
    return config, alarms_first([*notices(unused), *readings.corrections])


def shown(config: NameServerConfig) -> Iterator[tuple[str, str]]:
    """The settings that administrators may see, under RocketMQ's names."""
    for one in fields(NameServerConfig):
        if one.name != "security":
            value = getattr(config, one.name)
            yield camel(one.name), str(value).lower() if isinstance(value, bool) else str(value)
