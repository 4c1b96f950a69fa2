"""Every setting of a name server, its default and its limits; and loads them.

Flags precede the environment, that a conf file, and that the defaults. The file is RocketMQ's ``namesrv.conf``. A
setting is accepted under RocketMQ's name (``kvConfigPath``) and under ours (``kv_config_path``); in the environment as
``DLEDGER_<NAME>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Final

from dledger import setting_sources
from dledger import settings as dledger_settings
from dledger.access.addresses import AddressPattern, parse_patterns
from dledger.config import SecurityConfig
from dledger.errors import ConfigError
from dledger.java_names import UNUSED
from dledger.setting_sources import SettingTarget, Vocabulary, alarms_first, camel_case, notices, parsers_of, values_of
from dledger.types import TlsServerMode
from dledger.values import MIB, Port, Range, Unit, out_of_range
from rocketstore.nameserver.tables import TableLimits

_Count = Annotated[int, Range(1, 10_000_000)]


@dataclass(frozen=True, slots=True)
class NameServerConfig:
    """Everything one name server needs to run."""

    listen_port: Port = 9876
    """Port for brokers, clients and administrators; 0: any free one."""
    listen_host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: for all. Other machines need TLS or ``insecure``."""
    kv_config_path: Path = field(default_factory=lambda: Path("~/namesrv/kvConfig.json").expanduser())
    """File with the values set by administrators (``updateKvConfig``, ``updateOrderConf``); made with the first one."""
    order_message_enable: bool = False
    """Whether routes of ordered topics contain the queues set by ``updateOrderConf``."""
    allowed_brokers: str = ""
    """Addresses from which brokers may register, such as ``10.0.0.0/24,10.1.*.*``; empty: all."""
    allowed_admins: str = ""
    """Addresses from which values, permissions, topics and settings may be changed; empty: all."""
    brokers_max: _Count = 4096
    """Maximum broker names; a group has one."""
    addresses_max: _Count = 16_384
    """Maximum addresses of brokers."""
    topics_max: _Count = 131_072
    """Maximum topics."""
    places_max: _Count = 1_000_000
    """Maximum pairs of a topic and a broker's name."""
    host_share_percent: Annotated[int, Range(1, 100)] = 50
    """How much of each of these limits the brokers that register from one address may take (%)."""
    kv_entries_max: _Count = 10_000
    """Maximum values set by administrators."""
    kv_bytes_max: Annotated[int, Range(1024, 8 * MIB), Unit.BYTES] = 4 * MIB
    """Maximum size of the file with these values."""
    connections_max: Annotated[int, Range(1, 1_000_000)] = 16_384
    """Maximum connections; further ones are closed."""
    host_connections_max: Annotated[int, Range(1, 1_000_000)] = 4096
    """Maximum connections from one address; further ones are closed."""
    receive_bytes_max: Annotated[int, Range(32 * MIB, 1 << 40), Unit.BYTES] = 256 * MIB
    """Maximum bytes of incomplete and unanswered requests."""
    host_receive_bytes_max: Annotated[int, Range(32 * MIB, 1 << 40), Unit.BYTES] = 64 * MIB
    """The same for all connections from one address."""
    tls_server_mode: TlsServerMode | None = None
    """Whether clients use TLS if certificates are set: ``enforcing`` (required; the default), ``permissive``
    (optional), ``disabled`` (never).
    """
    metrics_port: Port = 0
    """Port that serves ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz``; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address to serve metrics at: read-only, unencrypted, and open to anyone who can connect."""
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def table_limits(self) -> TableLimits:
        """The limits for registrations."""
        return TableLimits(
            self.brokers_max, self.addresses_max, self.topics_max, self.places_max, self.host_share_percent
        )

    @property
    def brokers(self) -> tuple[AddressPattern, ...]:
        """The addresses from which brokers may register; empty: all."""
        return parse_patterns(self.allowed_brokers)

    @property
    def admins(self) -> tuple[AddressPattern, ...]:
        """The addresses from which changes are allowed; empty: all."""
        return parse_patterns(self.allowed_admins)

    def problems(self) -> list[str]:
        """All problems of this configuration, as sentences; empty if it is valid."""
        found = out_of_range(self) + self.security.problems([self.listen_host])
        if self.tls_server_mode is TlsServerMode.ENFORCING and not self.security.has_tls:
            found.append("tls_server_mode=enforcing requires a certificate: also set tls_cert_path and the others")
        for name in ("allowed_brokers", "allowed_admins"):
            try:
                parse_patterns(getattr(self, name))
            except ValueError as error:
                found.append(f"{name}: {error}")
        return found


OF_THE_IMAGE: Final = frozenset({"store_path_root_dir"})
"""Set in the container image, for brokers."""


_SECURITY: Final = frozenset(one.name for one in fields(SecurityConfig))


def _targets() -> dict[str, SettingTarget]:
    own = {name: SettingTarget(name, parse) for name, parse in parsers_of(NameServerConfig)}
    return {
        **own,
        **{camel_case(name): target for name, target in own.items()},
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

    config = NameServerConfig(
        **values_of(NameServerConfig, readings.chosen),
        security=SecurityConfig(**values_of(SecurityConfig, readings.chosen)),
    )
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
            yield camel_case(one.name), str(value).lower() if isinstance(value, bool) else str(value)
