"""Builds a node's configuration: from flags, then the environment, then a ``.conf`` file, then the defaults.

The file is a Java properties file like that of RocketMQ brokers. A setting can be given by our own name (every field of
``dledger.config``), by RocketMQ's (``dLegerPeers``) or by DLedger's (``peers``); the environment spells any of them as
``DLEDGER_<NAME>``. All problems are reported at once, each with its source, and nothing is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from dledger import setting_sources
from dledger.config import (
    AccessConfig,
    BulkReadConfig,
    ClientAuth,
    ConnectionLimits,
    ElectionConfig,
    FlushMode,
    Member,
    ReplicationConfig,
    SecurityConfig,
    ServerConfig,
    SnapshotConfig,
    StoreConfig,
    parse_members,
)
from dledger.errors import ConfigError
from dledger.java_names import ALIASES, UNUSED
from dledger.setting_sources import Chosen, SettingTarget, Vocabulary, alarms_first, notices, parsers_of
from dledger.types import NodeId
from dledger.values import parse_boolean, parse_integer, parse_path, parse_percentage, split


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked configuration, and what people should know of settings that were corrected or change nothing."""

    config: ServerConfig
    warnings: tuple[str, ...] = ()


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Settings:
    """Read and check everything. Raises ``ConfigError`` with every problem of every source."""
    readings = setting_sources.read(_VOCABULARY, file, environ, flags)
    config = build(readings.chosen)
    if readings.problems:  # Relations between values are checked only once every value is valid.
        raise ConfigError(readings.problems)
    problems = [setting_sources.with_sources(one, readings.chosen, SPOKEN_OF_AS) for one in config.problems()]
    if problems:
        raise ConfigError(problems)
    warnings = [
        *notices(readings.unused),
        *readings.corrections,
        *_covered(readings.chosen),
        *_unforced(readings.chosen),
    ]
    return Settings(config, alarms_first(warnings))


# --- values ----------------------------------------------------------------------------------------------------------


def parse_flush_mode(text: str) -> FlushMode:
    """``sync`` or ``async``, also in RocketMQ's spelling. Raises ``ValueError``."""
    try:
        return FlushMode(text.lower().removesuffix("_flush"))
    except ValueError:
        raise ValueError(
            f"invalid flush mode {text!r}: use sync or async (RocketMQ: SYNC_FLUSH, ASYNC_FLUSH)"
        ) from None


def parse_client_auth(text: str) -> ClientAuth:
    """``require`` or ``none``, also in the spelling of RocketMQ's switch (true, false). Raises ``ValueError``."""
    switch = {"true": "require", "false": "none"}
    try:
        return ClientAuth(switch.get(text.lower(), text.lower()))
    except ValueError:
        raise ValueError(f"invalid client authentication {text!r}: use require or none") from None


def parse_hours(text: str) -> tuple[int, ...]:
    """Hours of the day, separated by ``;`` or ``,``. Raises ``ValueError``."""
    return tuple(parse_integer(part) for part in split(text, ";,"))


def parse_paths(text: str) -> tuple[Path, ...]:
    """Directories, separated by ``,``. Raises ``ValueError``."""
    return tuple(parse_path(part) for part in split(text, ","))


def _node_ids(text: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(part) for part in split(text, ";,"))


def _members(text: str) -> tuple[Member, ...]:
    try:
        return parse_members(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _plain_log_switch(text: str) -> bool:
    if not parse_boolean(text):
        raise ValueError(
            "false means RocketMQ's plain commit log, which this node does not use: set it to true or remove "
            "it, or start `dledger broker`"
        )
    return True


_TYPE_PARSERS: Final[dict[object, Callable[[str], object]]] = {
    NodeId: str,
    FlushMode: parse_flush_mode,
    ClientAuth: parse_client_auth,
    tuple[int, ...]: parse_hours,
    tuple[Path, ...]: parse_paths,
    tuple[NodeId, ...]: _node_ids,
    tuple[Member, ...]: _members,
}

_SECTIONS: Final[dict[str, type]] = {
    "election": ElectionConfig,
    "replication": ReplicationConfig,
    "store": StoreConfig,
    "access": AccessConfig,
    "limits": ConnectionLimits,
    "security": SecurityConfig,
    "bulk": BulkReadConfig,
    "snapshots": SnapshotConfig,
}


def _own_targets() -> dict[str, SettingTarget]:
    return {
        name: SettingTarget(name, parse)
        for record in (ServerConfig, *_SECTIONS.values())
        for name, parse in parsers_of(record, _TYPE_PARSERS)
    }


# --- names -----------------------------------------------------------------------------------------------------------

_OWN: Final = _own_targets()

_JAVA_TIMERS: Final = ("maxHeartBeatLeak", "minVoteIntervalMs", "maxVoteIntervalMs")
"""Together with ``heartBeatTimeIntervalMs`` they determine ``election_timeout_ms_min/max`` (``_election``)."""

TARGETS: Final = {
    **_OWN,
    **{alias: _OWN[name] for alias, name in ALIASES.items()},
    **{name: SettingTarget(name, parse_integer) for name in _JAVA_TIMERS},
    "diskMaxUsedSpaceRatio": SettingTarget("disk_check_ratio", parse_percentage),
    "enableDLegerCommitLog": SettingTarget("enableDLegerCommitLog", _plain_log_switch),
}
"""Every name of a setting of ``ServerConfig``: our own, RocketMQ's and DLedger's."""
OWN_NAMES: Final = frozenset(_OWN)
OTHERS_VARIABLES: Final = frozenset(
    {
        "DLEDGER_ACCESS_KEY",
        "DLEDGER_BOOTSTRAP",
        "DLEDGER_BROKER",
        "DLEDGER_CONFIG",
        "DLEDGER_LOG_FORMAT",
        "DLEDGER_LOG_LEVEL",
        "DLEDGER_NAMESRV",
        "DLEDGER_SECRET_KEY",
        "DLEDGER_SECRET_KEY_FILE",
        "DLEDGER_TLS_CA",
        "DLEDGER_TLS_CERT",
        "DLEDGER_TLS_KEY",
    }
)
"""Read by the command line before it reads settings."""

_VOCABULARY: Final = Vocabulary(TARGETS, UNUSED, OWN_NAMES, OTHERS_VARIABLES)


# --- the result ------------------------------------------------------------------------------------------------------


def build(chosen: Mapping[str, Chosen]) -> ServerConfig:
    """The configuration of the chosen values, not yet checked; values of other settings are ignored."""
    values = {name: one.value for name, one in chosen.items()}
    values |= _election(chosen)
    values |= _disk(chosen)

    def some(record: type) -> dict[str, Any]:  # Any: each value was read by the parser of its own field.
        return {field.name: values[field.name] for field in fields(record) if field.name in values}

    sections = {name: record(**some(record)) for name, record in _SECTIONS.items()}
    return ServerConfig(**some(ServerConfig), **sections)


def _disk(chosen: Mapping[str, Chosen]) -> dict[str, object]:
    """RocketMQ's check ratio may lie above the one for forced cleaning, which then replaces it."""
    return {"disk_check_ratio": _clean_ratio(chosen)} if _covered(chosen) else {}


def _covered(chosen: Mapping[str, Chosen]) -> list[str]:
    """A notice about a check ratio in RocketMQ's spelling that cleaning by force comes before."""
    check = chosen.get("disk_check_ratio")
    if check is None or check.given.name != "diskMaxUsedSpaceRatio" or not isinstance(check.value, float):
        return []
    clean = _clean_ratio(chosen)
    if check.value <= clean:
        return []
    given = check.given
    return [f"{given.name}={given.text} ({given.source}) counts as {clean:.0%}, the limit that disk_clean_ratio sets"]


def _unforced(chosen: Mapping[str, Chosen]) -> list[str]:
    """A notice about a ratio in DLedger's spelling above which DLedger, but not this node, removes unexpired files."""
    one = chosen.get("disk_clean_ratio")
    if one is None or one.given.name != "diskSpaceRatioToForceClean" or "force_clean" in chosen:
        return []
    given = one.given
    return [
        f"{given.name}={given.text} ({given.source}) removes nothing without enableDiskForceClean=true: only expired "
        "segments are removed, and a full disk refuses entries"
    ]


def _clean_ratio(chosen: Mapping[str, Chosen]) -> float:
    clean = chosen["disk_clean_ratio"].value if "disk_clean_ratio" in chosen else StoreConfig().disk_clean_ratio
    assert isinstance(clean, float)
    return clean


def _election(chosen: Mapping[str, Chosen]) -> dict[str, object]:
    """Election timeouts equivalent to DLedger's timers, unless given by our own names.

    A Java follower campaigns after ``maxHeartBeatLeak`` missed heartbeats plus a random part of the span between
    ``minVoteIntervalMs`` and ``maxVoteIntervalMs``.
    """
    defaults = ElectionConfig()

    def integer(name: str, default: int) -> int:
        value = chosen[name].value if name in chosen else default
        return value if isinstance(value, int) else default

    heartbeat = chosen.get("heartbeat_interval_ms")
    java_silence = "maxHeartBeatLeak" in chosen or (
        heartbeat is not None and heartbeat.given.name == "heartBeatTimeIntervalMs"
    )
    java_spread = java_silence or "minVoteIntervalMs" in chosen or "maxVoteIntervalMs" in chosen
    timeout_min = integer("election_timeout_ms_min", defaults.election_timeout_ms_min)
    if java_silence and "election_timeout_ms_min" not in chosen:
        beat = integer("heartbeat_interval_ms", defaults.heartbeat_interval_ms)
        timeout_min = beat * integer("maxHeartBeatLeak", 3)
    timeout_max = integer("election_timeout_ms_max", defaults.election_timeout_ms_max)
    if java_spread and "election_timeout_ms_max" not in chosen:
        timeout_max = timeout_min + integer("maxVoteIntervalMs", 1000) - integer("minVoteIntervalMs", 300)
    return {"election_timeout_ms_min": timeout_min, "election_timeout_ms_max": timeout_max}


SPOKEN_OF_AS = {
    "members": ("member",),
    "node_id": ("node id",),
    "preferred_leaders": ("preferred leader",),
    "maxHeartBeatLeak": ("election_timeout_ms_min",),
    "minVoteIntervalMs": ("election_timeout_ms_max",),
    "maxVoteIntervalMs": ("election_timeout_ms_max",),
}
"""How ``ServerConfig.problems`` mentions settings other than by their names."""
