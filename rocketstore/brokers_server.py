"""Several brokers in one process: a member of each of several groups, at ports of its own.

RocketMQ's clients address a broker, and their requests name no group, so a port belongs to one broker. The brokers
share what ``dledger.host`` holds: the members' port, event loops, certificates, access rules, and the threads of what
is due by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Final, TypeVar

from dledger.clock import Clock
from dledger.config import ServerConfig
from dledger.errors import ConfigError
from dledger.host import Host
from dledger.hosted_groups import HostedGroups, problems_together
from dledger.instruments import SILENT, Instruments
from rocketstore.broker_config import BrokerConfig
from rocketstore.server import BrokerServer

Named = Sequence[tuple[str, BrokerConfig]]
"""Brokers' configurations, each with the name of its file."""

_EVERYWHERE: Final = {"", "0.0.0.0", "::"}
_Key = TypeVar("_Key", int, Path)


class BrokersServer(HostedGroups[BrokerServer]):
    """The constructor opens every broker's directory, and raises what ``BrokerServer`` does, before a port is open."""

    def __init__(
        self,
        named: Named,
        *,
        repair: bool = False,
        clock: Clock | None = None,
        instruments: Callable[[str], Instruments] = lambda _group: SILENT,
    ) -> None:
        """``instruments``: of a group's member."""
        nodes = check_brokers_together(named)
        clock = clock or Clock()

        def make(number: int, host: Host) -> BrokerServer:
            _, config = named[number]
            told = instruments(nodes[number].group)
            return BrokerServer(config, repair=repair, clock=clock, instruments=told, host=host)

        super().__init__(nodes, make, clock, client_ports=False)


def check_brokers_together(named: Named) -> list[ServerConfig]:
    """Check the settings of the brokers of one process; returns those of their nodes.

    Raises ``ConfigError`` with everything that is wrong.
    """
    nodes = [(name, config.dledger) for name, config in named if config.dledger is not None]
    problems = [
        f"{name} is of a plain broker: start it in a process of its own, or set enableDLegerCommitLog=true"
        for name, config in named
        if config.dledger is None
    ]
    problems += [problem for _, config in named for problem in config.problems()]
    if problems:
        raise ConfigError(problems)
    problems += problems_together(nodes, client_ports=False)
    for (one_name, one), (other_name, other) in combinations(named, 2):
        if one.name == other.name:
            problems.append(
                f"{one_name} and {other_name} both have brokerName={one.name}: name servers tell groups apart by it"
            )
        problems += [
            f"{path} is {ours} in {one_name} and {theirs} in {other_name}: each broker needs directories of its own"
            for path, ours, theirs in _common(_directories(one), _directories(other))
        ]
        problems += [
            f"port {port} is {ours} in {one_name} and {theirs} in {other_name}: change one of them; each broker of a "
            "process has ports of its own for clients, by default listenPort, listenPort - 2 (vipPort) and "
            "listenPort + 2 (grpcServerPort)"
            for port, ours, theirs in _common(_ports(one), _ports(other))
            if _may_clash(one.bind_host, other.bind_host)
        ]
    if problems:
        raise ConfigError(problems)
    return [config for _, config in nodes]


def _common(one: Mapping[_Key, str], other: Mapping[_Key, str]) -> Iterator[tuple[_Key, str, str]]:
    for key in sorted(one.keys() & other.keys()):
        yield key, one[key], other[key]


def _ports(config: BrokerConfig) -> dict[int, str]:
    ports = {config.vip_bind_port: "vipPort", config.grpc_bind_port or 0: "grpcServerPort"}
    ports |= {config.listen_port: "listenPort"}
    ports.pop(0, None)
    return ports


def _directories(config: BrokerConfig) -> dict[Path, str]:
    logs = dict.fromkeys((path.absolute() for path in config.store.commit_log_dirs), "storePathCommitLog")
    return {**logs, config.store.store_path_root_dir.absolute(): "storePathRootDir"}


def _may_clash(one: str, other: str) -> bool:
    return one == other or bool({one, other} & _EVERYWHERE)
