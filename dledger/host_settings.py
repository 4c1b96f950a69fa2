"""Settings in which several groups of one process must agree, and those that must differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Final

from dledger.config import AccessConfig, ConnectionLimits, SecurityConfig, ServerConfig
from dledger.errors import ConfigError
from dledger.store.identity import layout_of

_OF_THE_PROCESS: Final[Mapping[str, Callable[[ServerConfig], object]]] = {
    "the peer address": lambda config: f"{config.bind_host or config.self_member.host}:{config.self_member.port}",
    "pending_entries_max": lambda config: config.replication.pending_entries_max,
    "pending_bytes_max": lambda config: config.replication.pending_bytes_max,
    "client_streams_max": lambda config: config.client_streams_max,
    "metrics_port": lambda config: config.metrics_port,
    "metrics_host": lambda config: config.metrics_host,
    "exit_with_any_group": lambda config: config.exit_with_any_group,
}
_OF_SHARED_CLIENT_PORTS: Final[Mapping[str, Callable[[ServerConfig], object]]] = {
    "the address for clients": lambda config: f"{config.client_bind_host}:{config.client_bind_port}",
    "the port of gRPC": lambda config: config.grpc_bind_port or "none",
    "advertised_client_address": lambda config: config.advertised_client_address or "unset",
}
_PARTS_OF_THE_PROCESS: Final = {"security": SecurityConfig, "access": AccessConfig, "limits": ConnectionLimits}


def check_together(named: Sequence[tuple[str, ServerConfig]]) -> None:
    """Check the settings of the groups of one process, each with the name of its file.

    Raises ``ConfigError`` with everything that is wrong.
    """
    problems = problems_together(named)
    for (one_name, one), (other_name, other) in combinations(named, 2):
        problems += [
            f"{path} is a directory of group {one.group!r} in {one_name} and of {other.group!r} in {other_name}: each "
            f"group needs its own, for example base_dir={one.store.base_dir / other.group} for {other.group!r}"
            for path in sorted(_directories(one) & _directories(other))
        ]
    if problems:
        raise ConfigError(problems)


def problems_together(named: Sequence[tuple[str, ServerConfig]], *, client_ports: bool = True) -> list[str]:
    """Problems other than directories, as sentences.

    ``client_ports`` False: each group has ports for clients of its own.
    """
    problems: list[str] = []
    shared = {**_OF_THE_PROCESS, **(_OF_SHARED_CLIENT_PORTS if client_ports else {})}
    first_name, first = named[0]
    for name, config in named[1:]:
        for what, ours, theirs in _differences(shared, first, config):
            problems.append(
                f"{what} is {ours} in {first_name} and {theirs} in {name}: it is the process's, so make them equal"
            )
    for (one_name, one), (other_name, other) in combinations(named, 2):
        if one.group == other.group:
            problems.append(f"{one_name} and {other_name} are both of group {one.group!r}: give one for each group")
    return problems


def _differences(
    shared: Mapping[str, Callable[[ServerConfig], object]], one: ServerConfig, other: ServerConfig
) -> Iterator[tuple[str, object, object]]:
    for what, of in shared.items():
        if of(one) != of(other):
            yield what, of(one), of(other)
    for part, kind in _PARTS_OF_THE_PROCESS.items():
        for field in fields(kind):
            ours, theirs = (getattr(getattr(config, part), field.name) for config in (one, other))
            if ours != theirs:
                yield field.name, ours, theirs


def _directories(config: ServerConfig) -> set[Path]:
    layout = layout_of(config.store, config.node_id)
    return {path.absolute() for path in (layout.directory, *layout.data)}
