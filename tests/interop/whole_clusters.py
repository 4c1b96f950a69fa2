"""Two clusters of the same shape, ours and RocketMQ's: two groups of three brokers behind a name server each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import free_ports
from tests.interop import rocketmq
from tests.support import known
from tests.support.waiting import wait_until
from tests.unit.rocketstore.nameserver.wire import config_in, running

CLUSTER: Final = "Interop"
GROUPS: Final = ("interop-a", "interop-b")
NODES: Final = ("n0", "n1", "n2")
START_TIMEOUT_S: Final = 300
SETTINGS: Final = {
    "brokerClusterName": CLUSTER,
    "preferredLeaderId": NODES[0],
    "transactionCheckInterval": "1000",
    "mappedFileSizeCommitLog": str(64 << 20),
    "flushDiskType": "SYNC_FLUSH",
    "diskMaxUsedSpaceRatio": "80",
}
"""Of both."""
PATIENT: Final = {"election_timeout_ms_min": "5s", "election_timeout_ms_max": "6s"}
"""For ours, which else may change its leader while the machine is busy."""


@dataclass(frozen=True)
class WholeCluster:
    """One of them, once all its brokers have registered. In each group the first node is the master."""

    name: str
    directory: Path
    name_server: str
    brokers: dict[str, dict[int, str]]
    """Addresses, by the group's name and the broker's id; the master's id is 0."""

    def master(self, group: str) -> str:
        """The address."""
        return self.brokers[group][0]


@contextmanager
def ours(directory: Path) -> Iterator[WholeCluster]:
    """Ours meanwhile."""
    with ExitStack() as stack:
        server = stack.enter_context(running(config_in(directory, order_message_enable=True)))
        settings = {**SETTINGS, **PATIENT, "namesrvAddr": server.address}
        for name in GROUPS:
            stack.enter_context(LocalBrokers(directory / name, name=name, settings=settings))
        yield WholeCluster("ours", directory, server.address, _registered(server.address))


@contextmanager
def rocketmqs(directory: Path) -> Iterator[WholeCluster]:
    """RocketMQ's meanwhile, in DLedger mode."""
    with ExitStack() as stack:
        address = stack.enter_context(rocketmq.name_server(directory / "namesrv"))
        for group in GROUPS:
            peers = zip(NODES, free_ports(len(NODES)), strict=True)
            settings = {
                **SETTINGS,
                "brokerName": group,
                "namesrvAddr": address,
                "enableDLegerCommitLog": "true",
                "dLegerGroup": group,
                "dLegerPeers": ";".join(f"{name}-127.0.0.1:{port}" for name, port in peers),
            }
            for node in NODES:
                own = {"dLegerSelfId": node, "listenPort": str(rocketmq.broker_port())}
                stack.enter_context(rocketmq.broker(directory / group / node, settings | own))
        yield WholeCluster("RocketMQ's", directory, address, _registered(address))


def _registered(name_server: str) -> dict[str, dict[int, str]]:
    """The brokers, once the name server knows all, and the preferred ones lead."""
    found: dict[str, dict[int, str]] = {}

    def all_are() -> bool:
        found.update(known.brokers(name_server))
        return all(sorted(found.get(name, {})) == [0, 2, 3] for name in GROUPS)

    wait_until(all_are, f"all brokers have registered with {name_server}", START_TIMEOUT_S, poll_s=0.5)
    return found
