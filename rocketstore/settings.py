"""A broker's configuration and where it comes from: flags, then the environment, then a conf file, then the defaults.

The file is RocketMQ's ``broker.conf``. A setting goes by RocketMQ's name (``storePathRootDir``), by ours
(``store_path_root_dir``), and in a DLedger broker by any name that ``dledger serve`` knows; the environment spells any
of them as ``DLEDGER_<NAME>``. Names that RocketMQ knows and this broker does not need are warnings, names that nobody
knows are errors. Everything that is wrong is reported at once, and nothing is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

from dledger import setting_sources
from dledger import settings as dledger_settings
from dledger.config import CLIENT_PORT_OFFSET, ServerConfig
from dledger.errors import ConfigError
from dledger.java_names import UNUSED
from dledger.setting_sources import (
    Chosen,
    Target,
    Vocabulary,
    parse_boolean,
    parse_bytes,
    parse_integer,
)
from rocketstore.config import KIB, MIB, MessageStoreConfig
from rocketstore.types import BrokerRole, FlushDiskType

PERMISSION_READ: Final = 4
PERMISSION_WRITE: Final = 2
_ENTRY_OVERHEAD_BYTES: Final = 128 * KIB
"""Topic (127 bytes), properties (32 KiB) and fixed fields of a record, and an entry's header: generously."""
_PENDING_ENTRIES_MAX: Final = 60_000
"""For a broker's log: more than ``send_pending_messages_max``, which holds producers back before they are refused."""


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """Everything one broker needs to run. ``dledger`` is None for a plain broker: one process, one directory."""

    store: MessageStoreConfig = field(default_factory=MessageStoreConfig)
    dledger: ServerConfig | None = None
    cluster_name: str = "DefaultCluster"
    broker_name: str = ""
    """Empty: the DLedger group's name, or ``broker-a``."""
    broker_id: int = 0
    """Of a plain broker. In a DLedger broker the role decides: 0 leads, n0 to n2 follow as 1 to 3."""
    listen_port: int = 10911
    """0: any free port (plain broker only)."""
    listen_host: str = ""
    """Empty: the member's host in a DLedger broker; else every address if ``broker_ip1`` is given, or loopback."""
    broker_ip1: str = ""
    """The host that clients and the other brokers shall connect to; empty: the one listened on."""
    namesrv_addr: str = ""
    broker_permission: int = PERMISSION_READ | PERMISSION_WRITE
    auto_create_topic_enable: bool = True
    auto_create_subscription_group: bool = True
    default_topic_queue_nums: int = 8
    long_polling_enable: bool = True
    short_polling_time_mills: int = 1000
    """Longest wait of a pull while ``long_polling_enable`` is false."""
    pull_wait_ms_max: int = 60_000
    pull_bytes_max: int = 4 * MIB
    """Records in one answer, except that a single larger one is always given."""
    pulls_waiting_max: int = 20_000
    streams_max: int = 1024
    send_pending_messages_max: int = 40_000
    """Messages of all producers that may wait to be stored; beyond it streams are not read, single sends refused."""
    send_pending_bytes_max: int = 48 * MIB
    read_threads: int = 4

    @property
    def name(self) -> str:
        """The broker's name; all members of a DLedger group have the same."""
        return self.broker_name or (self.dledger.group if self.dledger is not None else "broker-a")

    @property
    def node_id(self) -> str:
        """Which of the brokers of that name this is."""
        return str(self.dledger.node_id) if self.dledger is not None else str(self.broker_id)

    @property
    def bind_host(self) -> str:
        """The host to listen on."""
        if self.listen_host:
            return self.listen_host
        if self.dledger is not None:
            return self.dledger.self_member.host
        return "0.0.0.0" if self.broker_ip1 else "127.0.0.1"

    def address(self, port: int) -> str:
        """What clients connect to, given the port that is listened on."""
        host = self.broker_ip1 or (self.dledger.self_member.host if self.dledger is not None else self.bind_host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def problems(self) -> list[str]:
        """Everything wrong with this configuration, as sentences; empty when it is sound."""
        found = _store_problems(self.store)
        found += [
            f"{name}={getattr(self, name)} must be positive"
            for name in (*_POSITIVE, "default_topic_queue_nums")
            if getattr(self, name) <= 0
        ]
        if not 0 <= self.listen_port <= 65535:
            found.append(f"listen_port={self.listen_port} must be between 0 and 65535")
        if not 0 <= self.broker_permission <= 7:
            found.append(f"broker_permission={self.broker_permission} must be a sum of 4 (read) and 2 (write)")
        if self.dledger is None:
            if self.store.broker_role is BrokerRole.SLAVE:
                found.append(
                    "broker_role=SLAVE needs classic master-slave replication, which this broker does not have: "
                    "use enableDLegerCommitLog=true for a replicated broker"
                )
        else:
            found += self.dledger.problems()
            found += self._port_problems(self.dledger)
        return found

    def _port_problems(self, dledger: ServerConfig) -> list[str]:
        if dledger.node_id not in [member.node_id for member in dledger.members]:
            return []  # told already
        if self.listen_port == 0:
            return ["listen_port=0 is for plain brokers: the members of a group tell each other their addresses"]
        peer_port = dledger.self_member.port
        client_port = dledger.client_port if dledger.client_port is not None else peer_port + CLIENT_PORT_OFFSET
        if self.listen_port == peer_port:
            return [f"listen_port={self.listen_port} is also the peer port of {dledger.node_id}: change one of them"]
        if self.listen_port == client_port:
            return [
                f"listen_port={self.listen_port} is also dledger's client port (client_port, or the peer port + "
                f"{CLIENT_PORT_OFFSET}): change one of them"
            ]
        return []


_POSITIVE: Final = (
    "short_polling_time_mills",
    "pull_wait_ms_max",
    "pull_bytes_max",
    "pulls_waiting_max",
    "streams_max",
    "send_pending_messages_max",
    "send_pending_bytes_max",
    "read_threads",
)
_STORE_POSITIVE: Final = (
    "mapped_file_size_commit_log",
    "mapped_file_size_consume_queue",
    "flush_interval_commit_log",
    "commit_interval_commit_log",
    "flush_interval_consume_queue",
    "sync_flush_timeout",
    "slave_timeout",
    "max_message_size",
    "transient_store_pool_size",
    "clean_resource_interval",
    "max_hash_slot_num",
    "max_index_num",
    "default_query_max_num",
    "max_transfer_bytes_on_message_in_memory",
    "max_transfer_count_on_message_in_memory",
    "max_transfer_bytes_on_message_in_disk",
    "max_transfer_count_on_message_in_disk",
    "flush_delay_offset_interval",
)
_RATIOS: Final = (
    "disk_max_used_space_ratio",
    "disk_space_clean_forcibly_ratio",
    "disk_space_warning_level_ratio",
    "access_message_in_memory_max_ratio",
)
_DELAY_LEVEL = re.compile(r"[0-9]+[smhd]")


def _store_problems(store: MessageStoreConfig) -> list[str]:
    found = [f"{name}={getattr(store, name)} must be positive" for name in _STORE_POSITIVE if getattr(store, name) <= 0]
    found += [
        f"{name}={getattr(store, name)} must be a percentage from 1 to 100"
        for name in _RATIOS
        if not 1 <= getattr(store, name) <= 100
    ]
    if store.file_reserved_time < 0:
        found.append(f"file_reserved_time={store.file_reserved_time} must not be negative")
    found += [
        f"message_delay_level: {level!r} is no time: write 30s, 5m, 2h or 1d"
        for level in store.message_delay_level.split()
        if not _DELAY_LEVEL.fullmatch(level)
    ]
    return found


def load_broker_settings(
    file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]
) -> tuple[BrokerConfig, tuple[str, ...]]:
    """Read and check everything; gives the configuration and warnings for people.

    ``flags`` are settings by name. Raises ``ConfigError`` with every problem of every source.
    """
    readings = setting_sources.read(_VOCABULARY, file, environ, flags)
    problems, chosen = readings.problems, readings.chosen
    replicated = _is_replicated(chosen, problems)
    config = _build(chosen, replicated=replicated)
    if problems:  # Relations between values are judged only once each value is known to be what was meant.
        raise ConfigError(problems)
    problems = [setting_sources.with_sources(one, chosen, _SPOKEN_OF_AS) for one in config.problems()]
    if problems:
        raise ConfigError(problems)
    return config, _warnings(chosen, readings.unused, replicated=replicated)


# --- names -----------------------------------------------------------------------------------------------------------

_SWITCH: Final = "enable_dledger_commit_log"
_IRREGULAR_NAMES: Final = {
    "check_crc_on_recover": "checkCRCOnRecover",
    "enable_dledger_commit_log": "enableDLegerCommitLog",
    "os_page_cache_busy_timeout_mills": "osPageCacheBusyTimeOutMills",
    "cluster_name": "brokerClusterName",
    "broker_ip1": "brokerIP1",
    "warm_mapped_file_enable": "warmMapedFileEnable",
}
_SIZES: Final = re.compile(r".*(_size|_bytes_max)|mapped_file_size_.*|max_transfer_bytes_.*")


_Word = TypeVar("_Word", bound=StrEnum)


def _role(text: str) -> BrokerRole:
    return _one_of(BrokerRole, text)


def _flush_type(text: str) -> FlushDiskType:
    short = {"SYNC": "SYNC_FLUSH", "ASYNC": "ASYNC_FLUSH"}  # as `dledger serve` has them
    return _one_of(FlushDiskType, short.get(text.upper(), text))


def _one_of(kind: type[_Word], text: str) -> _Word:
    try:
        return kind(text.upper())
    except ValueError:
        raise ValueError(f"{text!r} is none of {', '.join(kind)}") from None


def _hours_text(text: str) -> str:
    if any(not 0 <= hour <= 23 for hour in dledger_settings.parse_hours(text)):
        raise ValueError(f"{text!r} must hold hours from 0 to 23, separated by ;")
    return text


_PARSERS: Final[dict[object, Callable[[str], object]]] = {
    int: parse_integer,
    bool: parse_boolean,
    str: str,
    Path: lambda text: Path(text).expanduser(),
    BrokerRole: _role,
    FlushDiskType: _flush_type,
}


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.capitalize() for part in rest)


def _targets_of(record: type) -> dict[str, Target]:
    targets: dict[str, Target] = {}
    hints = get_type_hints(record)
    for one in fields(record):
        if hints[one.name] in _PARSERS:
            parse = _PARSERS[hints[one.name]]
            if hints[one.name] is int and _SIZES.fullmatch(one.name):
                parse = parse_bytes
            target = Target(one.name, _hours_text if one.name == "delete_when" else parse)
            targets[one.name] = target
            targets[_IRREGULAR_NAMES.get(one.name, _camel(one.name))] = target
    return targets


_OWN: Final = {**_targets_of(MessageStoreConfig), **_targets_of(BrokerConfig)}
_SAME_AS: Final = {
    "base_dir": "store_path_root_dir",
    "storeBaseDir": "store_path_root_dir",
    "segment_bytes": "mapped_file_size_commit_log",
    "mappedFileSizeForEntryData": "mapped_file_size_commit_log",
}
"""Names of ``dledger``'s for what the message store has a setting of its own."""

_TARGETS: Final = {
    **dledger_settings.TARGETS,
    **_OWN,
    **{name: _OWN[setting] for name, setting in _SAME_AS.items()},
}
_UNUSED: Final = UNUSED - set(_TARGETS)
_VOCABULARY: Final = Vocabulary(
    _TARGETS,
    _UNUSED,
    {name for name in _TARGETS if name.islower()},
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

# Read, and without an effect so far: the name server and classic replication are not here.
_WITHOUT_EFFECT: Final = frozenset(
    {"namesrv_addr", "ha_listen_port", "slave_timeout", "auto_create_subscription_group"}
)
_PLAIN_ONLY: Final = frozenset(
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
        "transient_store_pool_enable",
        "transient_store_pool_size",
        "fast_fail_if_no_buffer_in_store_pool",
        "warm_mapped_file_enable",
        "delete_commit_log_files_interval",
    }
)
"""Settings of the plain commit log, which a DLedger broker does not have."""
_DLEDGER_ONLY: Final = {target.setting for target in dledger_settings.TARGETS.values()} - {
    target.setting for target in _OWN.values()
}


# --- the result ------------------------------------------------------------------------------------------------------


def _is_replicated(chosen: Mapping[str, Chosen], problems: list[str]) -> bool:
    """Whether it is a DLedger broker. RocketMQ would silently run unreplicated if only the members are given."""
    switch = chosen.get(_SWITCH)
    members = chosen.get("members")
    if switch is None and members is not None:
        problems.append(
            f"{members.given.source}: {members.given.name} is given but not enableDLegerCommitLog: set it to true for "
            "a replicated broker, or to false for a plain one"
        )
    if switch is not None and switch.value is True:
        for setting, java in (("members", "dLegerPeers"), ("node_id", "dLegerSelfId"), ("group", "dLegerGroup")):
            if setting not in chosen:
                problems.append(f"{switch.given.source}: enableDLegerCommitLog=true needs {java}")
        return True
    return False


def _build(chosen: Mapping[str, Chosen], *, replicated: bool) -> BrokerConfig:
    def some(record: type) -> dict[str, Any]:  # Any: each value was read by the parser of its own field.
        return {one.name: chosen[one.name].value for one in fields(record) if one.name in chosen}

    store = MessageStoreConfig(**some(MessageStoreConfig))
    config = BrokerConfig(**some(BrokerConfig) | {"store": store})
    return replace(config, dledger=_dledger(config, chosen)) if replicated else config


def _dledger(config: BrokerConfig, chosen: Mapping[str, Chosen]) -> ServerConfig:
    """The node's configuration: what its own names say, and for the rest what the message store's settings mean."""
    store = config.store
    given = {target.setting for target in dledger_settings.TARGETS.values() if target.setting in chosen}
    server = dledger_settings.build(chosen)
    meant: dict[str, Any] = {
        "base_dir": store.store_path_root_dir,
        "read_only_data_dirs": store.read_only_commit_log_dirs,
        "segment_bytes": store.mapped_file_size_commit_log,
        "max_entry_bytes": store.max_message_size + _ENTRY_OVERHEAD_BYTES,
        "delete_hour": dledger_settings.parse_hours(store.delete_when),
        "retention_hours": store.file_reserved_time,
        "force_clean": store.clean_file_forcibly_enable,
        "disk_check_ratio": store.disk_max_used_space_ratio / 100,
        "disk_clean_ratio": store.disk_space_clean_forcibly_ratio / 100,
        "disk_full_ratio": store.disk_space_warning_level_ratio / 100,
    }
    if "flush_disk_type" in chosen:  # else dledger's own default holds: an acknowledged message survives a power cut
        meant["flush_mode"] = dledger_settings.parse_flush_mode(store.flush_disk_type)
    server = replace(
        server,
        client_appends=False,
        store=replace(server.store, **{name: value for name, value in meant.items() if name not in given}),
    )
    if "pending_entries_max" not in given:
        replication = replace(server.replication, pending_entries_max=_PENDING_ENTRIES_MAX)
        server = replace(server, replication=replication)
    if not server.advertised_client_address and server.node_id in [one.node_id for one in server.members]:
        # What the nodes tell each other about clients is where the broker is: so each knows the master's address.
        address = replace(config, dledger=server).address(config.listen_port)
        server = replace(server, advertised_client_address=address)
    return server


def _warnings(chosen: Mapping[str, Chosen], unused: Iterable[str], *, replicated: bool) -> tuple[str, ...]:
    idle = [*unused]
    idle += [f"{one.given.name} ({one.given.source})" for name, one in chosen.items() if name in _WITHOUT_EFFECT]
    found = []
    if idle:
        found.append(f"settings that change nothing here: {', '.join(idle)}")
    of_other_mode = [
        f"{one.given.name} ({one.given.source})"
        for name, one in chosen.items()
        if name in (_PLAIN_ONLY if replicated else _DLEDGER_ONLY)
    ]
    if of_other_mode:
        why = "with enableDLegerCommitLog=true" if replicated else "without enableDLegerCommitLog=true"
        found.append(f"settings that change nothing {why}: {', '.join(of_other_mode)}")
    role = chosen.get("broker_role")
    if role is not None and role.value is BrokerRole.SYNC_MASTER and not replicated:
        found.append("brokerRole=SYNC_MASTER waits for slaves in RocketMQ; this broker has none and does not wait")
    return tuple(found)
