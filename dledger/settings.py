"""Where a node's configuration comes from: flags, then the environment, then a ``.conf`` file, then the defaults.

The file is a Java properties file as RocketMQ brokers have it. A setting goes by our own name (every field of
``dledger.config``), by RocketMQ's (``dLegerPeers``) or by DLedger's (``peers``); the environment spells any of them as
``DLEDGER_<NAME>``. Everything that is wrong is reported at once, each with the place it came from, and nothing is
opened.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from dledger import properties
from dledger.config import (
    ElectionConfig,
    FlushMode,
    Member,
    ReplicationConfig,
    ServerConfig,
    StoreConfig,
    parse_members,
)
from dledger.errors import ConfigError
from dledger.java_names import ALIASES, UNUSED
from dledger.types import NodeId

ENVIRONMENT_PREFIX: Final = "DLEDGER_"


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked configuration, and the settings that were understood but change nothing in this package."""

    config: ServerConfig
    unused: tuple[str, ...] = ()


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, str]) -> Settings:
    """Read and check everything. Raises ``ConfigError`` with every problem of every source."""
    problems: list[str] = []
    reader = _Reader(problems)
    for layer in (_file_layer(file, problems), _environment_layer(environ, problems), _flag_layer(flags, problems)):
        reader.take(layer)
    config = _build(reader.chosen)
    if problems:  # Relations between values are judged only once each value is known to be what was meant.
        raise ConfigError(problems)
    problems += [_with_sources(problem, reader.chosen) for problem in config.problems()]
    if problems:
        raise ConfigError(problems)
    return Settings(config, tuple(reader.unused))


# --- values ----------------------------------------------------------------------------------------------------------

_BYTE_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_BYTE_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def parse_bytes(text: str) -> int:
    """A number of bytes: ``4096``, ``64k``, ``16MiB``, ``1g`` (powers of 1024). Raises ``ValueError``."""
    match = _BYTE_SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no size: write bytes or 64k, 16m, 1g")
    return int(match[1]) << _BYTE_UNITS[match[2].lower()]


def _integer(text: str) -> int:
    if re.fullmatch(r"[+-]?[0-9]+", text) is None:
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _number(text: str) -> float:
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)", text) is None:
        raise ValueError(f"{text!r} is no number")
    return float(text)


def _percentage(text: str) -> float:
    return _number(text) / 100


def _boolean(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _flush_mode(text: str) -> FlushMode:
    try:
        return FlushMode(text.lower().removesuffix("_flush"))
    except ValueError:
        raise ValueError(
            f"{text!r} is no flush mode: write sync or async (RocketMQ: SYNC_FLUSH, ASYNC_FLUSH)"
        ) from None


def _parts(text: str, separators: str) -> list[str]:
    return [part.strip() for part in re.split(f"[{separators}]", text) if part.strip()]


def _hours(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in _parts(text, ";,"))


def _paths(text: str) -> tuple[Path, ...]:
    return tuple(Path(part) for part in _parts(text, ","))


def _node_ids(text: str) -> tuple[NodeId, ...]:
    return tuple(NodeId(part) for part in _parts(text, ";,"))


def _members(text: str) -> tuple[Member, ...]:
    try:
        return parse_members(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error


_TYPE_PARSERS: Final[dict[object, Callable[[str], object]]] = {
    int: _integer,
    int | None: _integer,
    float: _number,
    bool: _boolean,
    str: str,
    NodeId: str,
    bytes: str.encode,
    Path: Path,
    FlushMode: _flush_mode,
    tuple[int, ...]: _hours,
    tuple[Path, ...]: _paths,
    tuple[NodeId, ...]: _node_ids,
    tuple[Member, ...]: _members,
}

_SECTIONS: Final[dict[str, type]] = {
    "election": ElectionConfig,
    "replication": ReplicationConfig,
    "store": StoreConfig,
}


@dataclass(frozen=True, slots=True)
class _Target:
    """What a known name sets, and how its text is read."""

    setting: str
    parse: Callable[[str], object]


def _own_targets() -> dict[str, _Target]:
    targets: dict[str, _Target] = {}
    for record in (ServerConfig, *_SECTIONS.values()):
        hints = get_type_hints(record)
        for field in fields(record):
            if field.name not in _SECTIONS:
                in_bytes = hints[field.name] is int and field.name.endswith(("_bytes", "_bytes_max"))
                targets[field.name] = _Target(field.name, parse_bytes if in_bytes else _TYPE_PARSERS[hints[field.name]])
    return targets


# --- names -----------------------------------------------------------------------------------------------------------

_OWN: Final = _own_targets()

_JAVA_TIMERS: Final = ("maxHeartBeatLeak", "minVoteIntervalMs", "maxVoteIntervalMs")
"""Together with ``heartBeatTimeIntervalMs`` they say what ``election_timeout_ms_min/max`` say here (``_election``)."""

_SWITCH: Final = "enableDLegerCommitLog"

_TARGETS: Final = {
    **_OWN,
    **{alias: _OWN[name] for alias, name in ALIASES.items()},
    **{name: _Target(name, _integer) for name in _JAVA_TIMERS},
    "diskMaxUsedSpaceRatio": _Target("disk_check_ratio", _percentage),
    _SWITCH: _Target(_SWITCH, _boolean),
}

_ALL_NAMES: Final = tuple(sorted({*_TARGETS, *UNUSED}))
_FOLDED: Final = {name.lower().replace("_", ""): name for name in (*UNUSED, *_TARGETS)}


def _nearest(name: str, candidates: Iterable[str] = _ALL_NAMES) -> str:
    """``did you mean …?``, or nothing when no known name comes close. Our own names win over the Java ones."""
    folded = {one.lower().replace("_", ""): one for one in candidates}
    close = difflib.get_close_matches(name.lower().replace("_", ""), folded, n=1, cutoff=0.6)
    return f": did you mean {folded[close[0]]}?" if close else ""


# --- sources ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Given:
    """One setting as some source has it: the canonical name, its text and where it stands."""

    name: str
    text: str
    source: str


@dataclass(frozen=True, slots=True)
class _Chosen:
    value: object
    given: _Given


def _file_layer(file: Path | None, problems: list[str]) -> list[_Given]:
    if file is None:
        return []
    try:
        text = properties.decode(file.read_bytes())
    except OSError as error:
        problems.append(f"{file}: cannot be read: {error.strerror}")
        return []
    try:
        found = properties.parse(text)
    except ConfigError as error:
        problems += [f"{file}: {problem}" for problem in error.problems]
        return []
    layer: list[_Given] = []
    for one in found:
        if one.key in _TARGETS or one.key in UNUSED:
            layer.append(_Given(one.key, one.value, f"{file}:{one.line}"))
        else:
            problems.append(f"{file}:{one.line}: unknown setting {one.key!r}{_nearest(one.key)}")
    return layer


_SERVICE_LINK = re.compile(r"(.*_)?SERVICE_(HOST|PORT(_\w+)?)|(.*_)?PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?")
"""What Kubernetes puts into every container for a service called ``dledger…``; not meant for us."""
_OTHERS_VARIABLES = frozenset({"DLEDGER_BOOTSTRAP", "DLEDGER_CONFIG", "DLEDGER_LOG_LEVEL"})
"""Read by the command line before it asks for settings."""


def _environment_layer(environ: Mapping[str, str], problems: list[str]) -> list[_Given]:
    layer: list[_Given] = []
    for variable in sorted(environ):
        short = variable.removeprefix(ENVIRONMENT_PREFIX)
        if short == variable or variable in _OTHERS_VARIABLES or not environ[variable]:
            continue
        name = short.lower() if short.lower() in _OWN else _FOLDED.get(short.lower().replace("_", ""))
        if name is not None:
            layer.append(_Given(name, environ[variable], f"environment variable {variable}"))
        elif not _SERVICE_LINK.fullmatch(short):
            hint = _nearest(short, _OWN)
            name_at = hint.rfind(" ") + 1
            hint = hint[:name_at] + ENVIRONMENT_PREFIX + hint[name_at:].upper() if hint else ""
            problems.append(f"environment variable {variable}: unknown setting{hint}")
    return layer


def _flag_layer(flags: Mapping[str, str], problems: list[str]) -> list[_Given]:
    layer: list[_Given] = []
    for name, text in flags.items():
        if name in _TARGETS or name in UNUSED:
            layer.append(_Given(name, text, f"flag {name}"))
        else:
            problems.append(f"flag {name}: unknown setting{_nearest(name)}")
    return layer


class _Reader:
    """Takes the layers from the weakest to the strongest and keeps, per setting, the last good value."""

    def __init__(self, problems: list[str]) -> None:
        self.chosen: dict[str, _Chosen] = {}
        self.unused: list[str] = []
        self._problems = problems

    def take(self, layer: Iterable[_Given]) -> None:
        here: dict[str, _Chosen] = {}
        for given in layer:
            target = _TARGETS.get(given.name)
            if target is None:
                self.unused.append(f"{given.name} ({given.source})")
                continue
            try:
                value = target.parse(given.text.strip())
            except ValueError as error:
                self._problems.append(f"{given.source}: {given.name}: {error}")
                continue
            self._judge(target.setting, value, given, here)
            here[target.setting] = _Chosen(value, given)
        self.chosen.update(here)

    def _judge(self, setting: str, value: object, given: _Given, here: Mapping[str, _Chosen]) -> None:
        if setting == _SWITCH and not value:
            self._problems.append(
                f"{given.source}: {_SWITCH}=false asks for RocketMQ's plain commit log, which this is not: "
                "set it to true or remove it"
            )
        before = here.get(setting)
        if before is not None and before.value != value:
            self._problems.append(
                f"{given.source}: {given.name}={given.text} contradicts {before.given.name}={before.given.text} "
                f"({before.given.source}): keep one of them"
            )


# --- the result ------------------------------------------------------------------------------------------------------


def _build(chosen: Mapping[str, _Chosen]) -> ServerConfig:
    values = {name: one.value for name, one in chosen.items()}
    values |= _election(chosen)

    def some(record: type) -> dict[str, Any]:  # Any: each value was read by the parser of its own field.
        return {field.name: values[field.name] for field in fields(record) if field.name in values}

    sections = {name: record(**some(record)) for name, record in _SECTIONS.items()}
    return ServerConfig(**some(ServerConfig), **sections)


def _election(chosen: Mapping[str, _Chosen]) -> dict[str, object]:
    """Election timeouts that mean what DLedger's timers mean, for those that are not given by our own names.

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


_SPOKEN_OF_AS = {
    "members": ("member",),
    "node_id": ("node id",),
    "preferred_leaders": ("preferred leader",),
    "maxHeartBeatLeak": ("election_timeout_ms_min",),
    "minVoteIntervalMs": ("election_timeout_ms_max",),
    "maxVoteIntervalMs": ("election_timeout_ms_max",),
}
"""How ``ServerConfig.problems`` mentions settings that it does not call by name."""


def _with_sources(problem: str, chosen: Mapping[str, _Chosen]) -> str:
    """The problem, and where the settings that it speaks of were given."""
    places = [
        f"{one.given.name} from {one.given.source}"
        for setting, one in sorted(chosen.items())
        if any(re.search(rf"\b{re.escape(word)}\b", problem) for word in (setting, *_SPOKEN_OF_AS.get(setting, ())))
    ]
    return f"{problem} [{', '.join(places)}]" if places else problem
