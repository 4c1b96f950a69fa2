"""Loads a broker's configuration: flags, then the environment, then a conf file, then the defaults.

The file is RocketMQ's ``broker.conf``. A setting is accepted under RocketMQ's name (``storePathRootDir``), under ours
(``store_path_root_dir``), and in a DLedger broker under any name of ``dledger serve``; in the environment as
``DLEDGER_<NAME>``. RocketMQ's names without effect here are warnings (``dledger.java_names``), and so are values
that are not taken as they are written; unknown names are errors. All problems are reported at once.

The role of a promoted slave stands in a file of its store (``RoleOverride``), above ``brokerRole`` and ``brokerId`` of
the conf file: that belongs to its author, and may be made anew by a program. It is read here, and nothing else is
opened, so that everything that reads settings sees the role that applies; a broker with another role than SLAVE in its
conf file ignores it. A few settings can change while a broker runs, until its next start (``LiveConfig``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from dledger import setting_sources
from dledger import settings as dledger_settings
from dledger.config import AccessConfig, ConnectionLimits, SecurityConfig, ServerConfig, StoreConfig
from dledger.errors import ConfigError, InvalidRequestError
from dledger.java_names import SWITCHED_OFF, UNUSED, Risk
from dledger.setting_sources import (
    Chosen,
    Given,
    SettingTarget,
    Vocabulary,
    alarms_first,
    camel_case,
    notices,
    parse_word,
    parsers_of,
    places,
    values_of,
)
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, replace_durably
from dledger.values import limits_of
from rocketstore.broker_config import GET_LIMITS, BrokerConfig
from rocketstore.config import KIB, MessageStoreConfig
from rocketstore.types import BrokerRole, FlushDiskType

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


_ENTRY_OVERHEAD_BYTES: Final = 128 * KIB
"""Topic (127 bytes), properties (32 KiB) and fixed fields of a record, and an entry's header, rounded up."""
_MESSAGE_BYTES_LEAST: Final = MessageStoreConfig().max_message_size
_NAME_SERVERS_VARIABLE: Final = "NAMESRV_ADDR"
"""RocketMQ's, with which its own conf files start, that name no name server; a setting precedes it."""
_PENDING_ENTRIES_MAX: Final = 60_000
"""For a broker's log: more than ``send_pending_messages_max``, which slows producers down before they are refused."""


def load_broker_settings(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str], *, promoted: bool = True
) -> tuple[BrokerConfig, tuple[str, ...]]:
    """Read and check everything; returns the configuration and warnings for people.

    ``flags`` are settings by name; ``promoted``: a slave's promotion, in its store, stands above all of them. Raises
    ``ConfigError`` with every problem of every source.
    """
    readings = setting_sources.read(_VOCABULARY, file, environ, flags)
    problems, chosen = readings.problems, readings.chosen
    replicated = _is_replicated(chosen, problems)
    if not replicated:
        problems += _refusals(readings.unused)
    corrections = [*readings.corrections, *_correct(chosen)]
    config = _build(chosen, replicated=replicated)
    if "namesrv_addr" not in chosen:
        config = replace(config, namesrv_addr=environ.get(_NAME_SERVERS_VARIABLE, ""))
    if problems:  # Relations between values are checked only once each value is valid.
        raise ConfigError(problems)
    warnings = alarms_first(
        [*_warnings(config, chosen, replicated=replicated), *notices(readings.unused), *corrections]
    )
    if promoted:
        config, said = overridden(config)
        warnings += (said,) if said else ()
    problems = [setting_sources.with_sources(one, chosen, _SPOKEN_OF_AS) for one in config.problems()]
    if problems:
        raise ConfigError(problems)
    return config, warnings


# --- names -----------------------------------------------------------------------------------------------------------

_SWITCH: Final = "enable_dledger_commit_log"
_IRREGULAR_NAMES: Final = {
    "check_crc_on_recover": "checkCRCOnRecover",
    "enable_dledger_commit_log": "enableDLegerCommitLog",
    "os_page_cache_busy_timeout_mills": "osPageCacheBusyTimeOutMills",
    "cluster_name": "brokerClusterName",
    "broker_ip1": "brokerIP1",
    "metrics_port": "metricsPromExporterPort",
    "metrics_host": "metricsPromExporterHost",
    "tls_server_mode": "tls.server.mode",
    "namesrv_tls": "tls.enable",
    "namesrv_tls_trust_cert_path": "tls.client.trustCertPath",
    "namesrv_tls_cert_path": "tls.client.certPath",
    "namesrv_tls_key_path": "tls.client.keyPath",
}


def _flush_type(text: str) -> FlushDiskType:
    short = {"SYNC": "SYNC_FLUSH", "ASYNC": "ASYNC_FLUSH"}  # as in `dledger serve`
    return parse_word(FlushDiskType, short.get(text.upper(), text))


def _hours_text(text: str) -> str:
    if problem := limits_of(StoreConfig)["delete_hour"].complaint(dledger_settings.parse_hours(text)):
        raise ValueError(problem)
    return text


def _paths_text(text: str) -> str:
    return ",".join(map(str, dledger_settings.parse_paths(text)))


_TEXTS: Final = {
    "delete_when": _hours_text,
    "store_path_commit_log": _paths_text,
    "read_only_commit_log_store_paths": _paths_text,
}
"""Parsers of settings that stay texts, as RocketMQ has them."""


def _targets_of(record: type) -> dict[str, SettingTarget]:
    targets: dict[str, SettingTarget] = {}
    for name, parse in parsers_of(record, {FlushDiskType: _flush_type}):
        target = SettingTarget(name, _TEXTS.get(name, parse))
        targets[name] = target
        targets[_IRREGULAR_NAMES.get(name, camel_case(name))] = target
    return targets


_SHARED: Final = {one.name for record in (AccessConfig, ConnectionLimits, SecurityConfig) for one in fields(record)}
"""Settings shared by nodes and plain brokers, under the same names."""
_OWN: Final = {
    **_targets_of(MessageStoreConfig),
    **_targets_of(BrokerConfig),
    **{name: one for name, one in dledger_settings.TARGETS.items() if one.setting in _SHARED},
}
_SAME_AS: Final = {
    "base_dir": "store_path_root_dir",
    "storeBaseDir": "store_path_root_dir",
    "segment_bytes": "mapped_file_size_commit_log",
    "mappedFileSizeForEntryData": "mapped_file_size_commit_log",
    "bindAddress": "listen_host",
    "haMaxGapNotInSync": "ha_slave_fallbehind_max",
}
"""Names of ``dledger``'s settings for which the message store has its own, and names that only RocketMQ 5 has."""

TARGETS: Final = {
    **dledger_settings.TARGETS,
    **_OWN,
    **{name: _OWN[setting] for name, setting in _SAME_AS.items()},
}
BROKER_UNUSED: Final = UNUSED - set(TARGETS)
_VOCABULARY: Final = Vocabulary(
    TARGETS,
    BROKER_UNUSED,
    {name for name in TARGETS if name.islower() and "." not in name},
    dledger_settings.OTHERS_VARIABLES,
)

_SPOKEN_OF_AS: Final = {
    **dledger_settings.SPOKEN_OF_AS,
    "store_path_root_dir": ("base_dir",),
    "mapped_file_size_commit_log": ("segment_bytes",),
    "delete_when": ("delete_hour",),
    "file_reserved_time": ("retention_hours",),
    "disk_max_used_space_ratio": ("disk_check_ratio",),
    "disk_space_clean_forcibly_ratio": ("disk_clean_ratio",),
    "disk_space_warning_level_ratio": ("disk_full_ratio",),
    "listen_port": ("listen port",),
}

PLAIN_ONLY: Final = frozenset(
    {
        "store_path_commit_log",
        "broker_role",
        "broker_id",
        "flush_interval_commit_log",
        "flush_commit_log_least_pages",
        "flush_commit_log_thorough_interval",
        "flush_commit_log_timed",
        "commit_interval_commit_log",
        "commit_commit_log_least_pages",
        "commit_commit_log_thorough_interval",
        "sync_flush_timeout",
        "check_crc_on_recover",
        "transient_store_pool_enable",
        "transient_store_pool_size",
        "fast_fail_if_no_buffer_in_store_pool",
        "delete_commit_log_files_interval",
    }
)
"""Settings of the plain commit log, which a DLedger broker lacks."""
SERVE_ONLY: Final = frozenset({"client_port", "client_host"})
"""Settings of ``dledger serve``: at a broker, the clients of its log come to the broker's own ports."""
DLEDGER_ONLY: Final = {target.setting for target in dledger_settings.TARGETS.values()} - {
    target.setting for target in _OWN.values()
}


def properties_of(config: BrokerConfig) -> dict[str, str]:
    """A configuration as a conf file has it, under RocketMQ's names; without what is unset."""
    found: dict[str, str] = {}
    parts: list[Any] = [config.store, config, config.access, config.limits]  # Any: a record's fields are looked at
    if config.dledger is not None:
        node = config.dledger
        members = ";".join(f"{one.node_id}-{one.host}:{one.port}" for one in node.members)
        found = {"dLegerGroup": node.group, "dLegerSelfId": str(node.node_id), "dLegerPeers": members}
    for part in parts:
        for one in fields(part):
            value = getattr(part, one.name)
            if isinstance(value, bool):
                value = str(value).lower()
            if isinstance(value, str | int | Path):
                found[_IRREGULAR_NAMES.get(one.name, camel_case(one.name))] = str(value)
    return dict(sorted(found.items()))


# --- the result ------------------------------------------------------------------------------------------------------


def _is_replicated(chosen: Mapping[str, Chosen], problems: list[str]) -> bool:
    """Whether it is a DLedger broker. RocketMQ would silently run unreplicated if only the members are given."""
    switch = chosen.get(_SWITCH)
    members = chosen.get("members")
    if switch is None and members is not None:
        problems.append(
            f"{members.given.source}: {members.given.name} is set, but enableDLegerCommitLog is not: set it to "
            "true for a replicated broker, or to false for a plain one"
        )
    if switch is not None and switch.value is True:
        for setting, java in (("members", "dLegerPeers"), ("node_id", "dLegerSelfId"), ("group", "dLegerGroup")):
            if setting not in chosen:
                problems.append(f"{switch.given.source}: enableDLegerCommitLog=true requires {java}")
        return True
    return False


def _build(chosen: Mapping[str, Chosen], *, replicated: bool) -> BrokerConfig:
    store = MessageStoreConfig(**GET_LIMITS | values_of(MessageStoreConfig, chosen))
    config = BrokerConfig(
        **values_of(BrokerConfig, chosen)
        | {
            "store": store,
            "access": AccessConfig(**values_of(AccessConfig, chosen)),
            "security": SecurityConfig(**values_of(SecurityConfig, chosen)),
            "limits": ConnectionLimits(**values_of(ConnectionLimits, chosen)),
        }
    )
    if replicated:
        return replace(config, dledger=_dledger(config, chosen))
    return replace(config, broker_id=0) if _is_numbered_master(config) else config


def _is_numbered_master(config: BrokerConfig) -> bool:
    """Whether it has a slave's number, which RocketMQ would set to 0."""
    return config.store.broker_role is not BrokerRole.SLAVE and config.broker_id != 0


def _dledger(config: BrokerConfig, chosen: Mapping[str, Chosen]) -> ServerConfig:
    """The node's configuration: its own settings, and for the others those derived from the message store's."""
    store = config.store
    given = {target.setting for target in dledger_settings.TARGETS.values() if target.setting in chosen}
    server = dledger_settings.build(chosen)
    meant: dict[str, Any] = {
        "base_dir": store.store_path_root_dir,
        "read_only_data_dirs": store.read_only_commit_log_dirs,
        "segment_bytes": store.mapped_file_size_commit_log,
        # not less than by default: what waits to be delivered when maxMessageSize is lowered must fit, too
        "max_entry_bytes": max(store.max_message_size, _MESSAGE_BYTES_LEAST) + _ENTRY_OVERHEAD_BYTES,
        "delete_hour": dledger_settings.parse_hours(store.delete_when),
        "retention_hours": store.file_reserved_time,
        "force_clean": store.clean_file_forcibly_enable,
        # RocketMQ accepts any value: above the other ratio it cleans in any case, so a higher one here has no effect.
        "disk_check_ratio": min(store.disk_max_used_space_ratio, store.disk_space_clean_forcibly_ratio) / 100,
        "disk_clean_ratio": store.disk_space_clean_forcibly_ratio / 100,
        "disk_full_ratio": store.disk_space_warning_level_ratio / 100,
    }
    if "flush_disk_type" in chosen:  # otherwise dledger's durable default applies
        meant["flush_mode"] = dledger_settings.parse_flush_mode(store.flush_disk_type)
    server = replace(
        server,
        client_appends=False,
        client_port=config.listen_port,  # at which the broker serves the clients of its log, too
        client_host="",
        grpc_server_port=0,  # the broker's own has the same name
        store=replace(server.store, **{name: value for name, value in meant.items() if name not in given}),
    )
    if "pending_entries_max" not in given:
        replication = replace(server.replication, pending_entries_max=_PENDING_ENTRIES_MAX)
        server = replace(server, replication=replication)
    if not server.advertised_client_address and server.node_id in [one.node_id for one in server.members]:
        # The client address that nodes tell each other is the broker's, so each one knows the master's address.
        address = replace(config, dledger=server).address(config.listen_port)
        server = replace(server, advertised_client_address=address)
    return server


def _warnings(config: BrokerConfig, chosen: Mapping[str, Chosen], *, replicated: bool) -> tuple[str, ...]:
    def given(names: Iterable[str]) -> list[Given]:
        return [one.given for setting, one in chosen.items() if setting in names]

    found = []
    if not replicated and (members := given(("members",))):
        found.append(
            f"{Risk.DURABILITY.upper()}: {members[0].name} ({members[0].source}) changes nothing: this broker is not "
            "replicated, because enableDLegerCommitLog is false"
        )
    if of_other_mode := given(PLAIN_ONLY if replicated else DLEDGER_ONLY - {"members"} - SERVE_ONLY):
        mode = "with" if replicated else "without"
        names = ", ".join(one.name for one in of_other_mode)
        found.append(
            f"settings that change nothing {mode} enableDLegerCommitLog=true: {names} ({places(of_other_mode)})"
        )
    if of_nodes := given(SERVE_ONLY):
        names = ", ".join(one.name for one in of_nodes)
        found.append(f"settings of `dledger serve` that change nothing in a broker: {names} ({places(of_nodes)})")
    number = chosen.get("broker_id")
    if number is not None and number.value != config.broker_id:
        found.append(f"{number.given.name} ({number.given.source}): a master has 0; set brokerRole=SLAVE for a slave")
    return tuple(found)


# --- corrections: as RocketMQ makes them, but aloud ------------------------------------------------------------------

_CHECK: Final = "disk_max_used_space_ratio"
_CLEAN: Final = "disk_space_clean_forcibly_ratio"
_FULL: Final = "disk_space_warning_level_ratio"
_FORCED: Final = "clean_file_forcibly_enable"

_LIMITED: Final = {
    _CHECK: (10, 95, 10, 95),
    _CLEAN: (1, 100, 30, 85),
    _FULL: (1, 100, 35, 90),
    "register_name_server_period": (10_000, 60_000, 10_000, 60_000),
}
"""Lowest and highest value here, and RocketMQ's, which replace what lies outside."""

_REFUSED: Final = {
    "enableControllerMode": (
        "RocketMQ 5's controller, which chooses between master and slave, is not supported. For automatic failover "
        "remove it with controllerAddr, brokerId and brokerRole, and set enableDLegerCommitLog=true, dLegerGroup, "
        "dLegerPeers and dLegerSelfId; for a fixed role remove it and set brokerRole and brokerId"
    ),
    "brokerConfigPaths": (
        "the file describes a container of brokers, which are not supported: run `dledger broker -c FILE` for each file"
    ),
}
"""Settings of plain brokers without which a broker would be another one than its file describes."""


def _refusals(unused: Iterable[Given]) -> list[str]:
    """Problems with settings that a broker cannot start without."""
    return [
        f"{one.source}: {one.name}={one.text.strip()}: {_REFUSED[one.name]}"
        for one in unused
        if one.name in _REFUSED and one.text.strip().lower() not in SWITCHED_OFF
    ]


def _correct(chosen: dict[str, Chosen]) -> list[str]:
    """Replace values that RocketMQ replaces as well; returns a sentence about each."""
    told: list[str] = []
    for setting, (low, high, to_low, to_high) in _LIMITED.items():
        one = chosen.get(setting)
        if one is not None and isinstance(one.value, int) and not low <= one.value <= high:
            told.append(_replace(chosen, setting, one, to_low if one.value < low else to_high, "RocketMQ's limit"))
    if _CLEAN in chosen and _FORCED not in chosen:
        given = chosen[_CLEAN].given
        told.append(
            f"{given.name}={given.text} ({given.source}) removes nothing without cleanFileForciblyEnable=true: only "
            "expired files are removed, and a full disk refuses messages"
        )
    defaults = MessageStoreConfig()
    check, clean, full = (_number(chosen, setting, getattr(defaults, setting)) for setting in (_CHECK, _CLEAN, _FULL))
    if clean > full:
        one = chosen.get(_CLEAN) or chosen[_FULL]
        told.append(_replace(chosen, _CLEAN, one, full, "above which messages are refused"))
        clean = full
    if _CHECK in chosen and check > clean:
        told.append(_replace(chosen, _CHECK, chosen[_CHECK], clean, "the limit that diskSpaceCleanForciblyRatio sets"))
    return told


def _number(chosen: Mapping[str, Chosen], setting: str, default: int) -> int:
    value = chosen[setting].value if setting in chosen else default
    return value if isinstance(value, int) else default


def _replace(chosen: dict[str, Chosen], setting: str, one: Chosen, value: int, why: str) -> str:
    given = one.given
    subject = "" if chosen.get(setting) is one else f": {setting}"
    chosen[setting] = replace(one, value=value)
    return f"{given.name}={given.text} ({given.source}){subject} counts as {value}, {why}"


_CHANGEABLE: Final = frozenset(
    {
        "auto_create_subscription_group",
        "auto_create_topic_enable",
        "broker_permission",
        "default_topic_queue_nums",
        "enable_property_filter",
        "pull_bytes_max",
        "reject_transaction_message",
        "slave_read_enable",
    }
)
"""Settings that can change; everything else is read at the start, by something."""


class FixedSettingError(InvalidRequestError):
    """Raised for a setting that cannot change while the broker runs."""


class LiveConfig:
    """``now`` may be read on any thread, and at each use: it changes. ``change`` is for the loop's."""

    def __init__(self, config: BrokerConfig) -> None:
        self.now = config
        self.changes = 0
        """How often it has changed."""

    def change(self, given: Mapping[str, str]) -> dict[str, str]:
        """Change all of these settings, by any of their names, or none; returns what was changed, for people.

        Raises ``InvalidRequestError``.
        """
        wanted: dict[str, Any] = {}  # Any: each value has the type of its own setting
        problems: list[str] = []
        for name, text in given.items():
            target = TARGETS.get(name)
            if target is None:
                problems.append(f"there is no setting {name[:64]!r}")
            elif target.setting in _CHANGEABLE:
                try:
                    wanted[target.setting] = target.parse(text)
                except ValueError as error:
                    problems.append(f"{name}: {error}")
        if problems:
            raise InvalidRequestError("; ".join(problems))
        fixed = sorted(name for name in given if TARGETS[name].setting not in _CHANGEABLE)
        if fixed:
            can = ", ".join(sorted(_CHANGEABLE))
            raise FixedSettingError(
                f"{', '.join(fixed)} can only be changed in the conf file, for the next start; while a broker runs, "
                f"these can change: {can}"
            )
        changed = {name: value for name, value in wanted.items() if getattr(self.now, name) != value}
        if changed:
            self._adopt(replace(self.now, **changed))
        return {name: str(value) for name, value in changed.items()}

    def _adopt(self, config: BrokerConfig) -> None:
        if problems := config.problems():
            raise InvalidRequestError("; ".join(problems))
        self.now = config
        self.changes += 1
