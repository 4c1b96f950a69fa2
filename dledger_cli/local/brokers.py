"""Real ``dledger broker -c FILE`` processes on loopback: one broker, or a group with a master.

For benchmarks and integration tests. The conf files use RocketMQ's names, as in its three-node example; everything else
is as in ``dledger_cli.local.group``.

With ``-c A -c B``, each process is a member of several groups of brokers.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dledger.errors import DLedgerError
from dledger.types import NodeId
from dledger_cli.local.group import HOST, LEADER_TIMEOUT_S, LocalGroup, free_ports, wait_until

if TYPE_CHECKING:
    from typing import Unpack

    from rocketstore.client.aio.admin_requests import BrokerStatus
    from rocketstore.client.aio.consumer_options import ConsumerSettings
    from rocketstore.client.blocking import Admin, Producer
    from rocketstore.client.blocking_consumer import Consumer

ASK_TIMEOUT_S: Final = 1.0
_FLUSH: Final = {"sync": "SYNC_FLUSH", "async": "ASYNC_FLUSH"}


class LocalBrokers(LocalGroup):
    """Starts all brokers on entry and stops them on exit. A node's ``client_port`` is its ``listenPort``.

    ``settings`` are additional lines for every conf file. ``plain``: one broker without DLedger; ``LocalGroup``'s
    methods for the log (``statuses``, ``leader``, ``client``) are then not available.
    """

    def __init__(  # noqa: PLR0913  # each says what kind of group it is, and has a default
        self,
        directory: Path,
        *,
        size: int = 3,
        plain: bool = False,
        flush: str = "sync",
        name: str = "RaftNode00",
        settings: Mapping[str, str] | None = None,
        detached: bool = False,
        tls: bool = False,
    ) -> None:
        if plain and size != 1:
            raise ValueError(f"a plain broker runs alone, not as one of {size}")
        lines = {"flushDiskType": _FLUSH[flush], **(settings or {})}
        super().__init__(directory, size=size, name=name, settings=lines, detached=detached, tls=tls)
        self.plain = plain
        self._settings = lines  # without the options of ``serve``

    # --- who is the master -------------------------------------------------------------------------------------------

    def master(self, timeout_s: float = LEADER_TIMEOUT_S, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a broker accepts messages, and return it; of several, the one of the highest term."""
        found: list[NodeId] = []

        def someone_is() -> bool:
            masters = {
                node: status.runtime
                for node, status in self.broker_statuses().items()
                if status.runtime.is_master and node != other_than
            }
            found[:] = sorted(masters, key=lambda node: masters[node].term)[-1:]
            return bool(found)

        wait_until(someone_is, timeout_s, "no broker became master")
        return found[0]

    def broker_statuses(self) -> dict[NodeId, BrokerStatus]:
        """The statuses of the running brokers; those that do not respond are left out."""
        answers: dict[NodeId, BrokerStatus] = {}
        with self.admin(ASK_TIMEOUT_S) as admin:
            for node in self.nodes.values():
                if self.is_running(node.node_id):
                    try:
                        answers[node.node_id] = admin.status(node.client_address)
                    except DLedgerError:
                        continue
        return answers

    # --- clients, to be closed by the caller -------------------------------------------------------------------------

    def producer(self, timeout_s: float = 30.0, *, allow_duplicates: bool = False) -> Producer:
        """A producer that knows all brokers."""
        from rocketstore.client.aio.producer import ProducerOptions
        from rocketstore.client.blocking import Producer

        options = ProducerOptions(allow_duplicates=allow_duplicates)
        return Producer(self.addresses, timeout_s=timeout_s, security=self.security, options=options)

    def consumer(self, group: str, topic: str, **options: Unpack[ConsumerSettings]) -> Consumer:
        """A consumer that knows all brokers. ``options`` are ``ConsumerOptions``'s; without ``start``: from the first
        message on.
        """
        from rocketstore.client.blocking_consumer import Consumer

        options.setdefault("start", "first")
        return Consumer(self.addresses, group=group, topics=topic, security=self.security, **options)

    def admin(self, timeout_s: float = 30.0) -> Admin:
        """An admin client that knows all brokers."""
        from rocketstore.client.blocking import Admin

        return Admin(self.addresses, timeout_s=timeout_s, security=self.security)

    # --- files -------------------------------------------------------------------------------------------------------

    def root_dir(self, node: NodeId) -> Path:
        """The broker's ``storePathRootDir``: consume queues, index, and the small files."""
        return self.directory / node

    def store_dir(self, node: NodeId) -> Path:
        """The log's directory, in a group; see ``LocalGroup.store_dir``."""
        return self.root_dir(node) / f"dledger-{node}"

    def conf_file(self, node: NodeId) -> Path:
        """The broker's conf file, rewritten before every start."""
        return self.directory / f"broker-{node}.conf"

    def conf_lines(self, node: NodeId) -> dict[str, str]:
        """The settings in the conf file."""
        root = self.root_dir(node)
        lines = {
            "brokerClusterName": "RaftCluster",
            "brokerName": self.name,
            "listenPort": str(self.nodes[node].client_port),
            "vipPort": "0",
            "storePathRootDir": str(root),
            "storePathCommitLog": str(root / "commitlog"),
        }
        if not self.plain:
            lines |= {
                "enableDLegerCommitLog": "true",
                "dLegerGroup": self.name,
                "dLegerPeers": self.members_of(node),
                "dLegerSelfId": node,
            }
        extra = {**self._metrics_lines(node), **self.tls_settings(node)}
        return {**lines, "sendMessageThreadPoolNums": "16", **self._settings, **extra}

    def command(self, node: NodeId) -> list[str]:
        """Write a broker's conf file, and return its command line."""
        file = self.conf_file(node)
        file.write_text("".join(f"{name}={text}\n" for name, text in self.conf_lines(node).items()))
        return self._ending_with_us([sys.executable, "-m", "dledger_cli.entry", "broker", "-c", str(file)])


class SeveralBrokers(LocalBrokers):
    """Each node is a process with a broker of every group. ``LocalBrokers``' own methods concern the first group.

    ``lines``: of every conf file, and of one group's, by its name; both may be changed before a start.
    """

    def __init__(
        self, directory: Path, groups: Sequence[str], *, size: int = 3, settings: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(directory, size=size, name=groups[0], settings=settings)
        self.groups = tuple(groups)
        self.lines: dict[str, dict[str, str]] = {group: {} for group in groups}
        taken = {port for node in self.nodes.values() for port in (node.client_port, node.peer_port)}
        further = iter(free_ports(size * (len(groups) - 1), taken=taken) if groups[1:] else [])
        self._ports = {
            group: {
                node.node_id: node.client_port if group == groups[0] else next(further) for node in self.nodes.values()
            }
            for group in groups
        }

    def address(self, node: NodeId, group: str) -> str:
        """Where a node's broker of a group listens."""
        return f"{HOST}:{self._ports[group][node]}"

    def addresses_of(self, group: str) -> list[str]:
        """Those of all brokers of a group."""
        return [self.address(node, group) for node in self.nodes]

    def admin_of(self, group: str, timeout_s: float = 5.0) -> Admin:
        """A client that knows all brokers of a group; the caller closes it."""
        from rocketstore.client.blocking import Admin

        return Admin(self.addresses_of(group), timeout_s=timeout_s)

    def masters(self, group: str) -> list[NodeId]:
        """The nodes whose brokers of a group say at this moment that they are master, by term."""
        found: dict[NodeId, int] = {}
        with self.admin_of(group, ASK_TIMEOUT_S) as admin:
            for node in self.nodes:
                if self.is_running(node):
                    try:
                        status = admin.status(self.address(node, group)).runtime
                    except DLedgerError:
                        continue
                    if status.is_master:
                        found[node] = status.term
        return sorted(found, key=lambda node: found[node])

    def master_of(self, group: str, timeout_s: float = LEADER_TIMEOUT_S, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a broker of a group accepts messages, and return its node."""
        found: list[NodeId] = []

        def someone_is() -> bool:
            found[:] = [node for node in self.masters(group) if node != other_than]
            return bool(found)

        wait_until(someone_is, timeout_s, f"no broker became master of {group}")
        return found[-1]

    def lead(self, leaders: Mapping[str, NodeId], timeout_s: float = LEADER_TIMEOUT_S) -> None:
        """Transfer leadership of groups to these nodes, and wait until they are masters."""
        from dledger.client import DLedgerClient

        for group, node in leaders.items():
            with DLedgerClient(self.addresses_of(group), group=group, timeout_s=timeout_s) as client:

                def is_master(group: str = group, node: NodeId = node, client: DLedgerClient = client) -> bool:
                    try:
                        client.transfer_leadership(node)
                    except DLedgerError:  # it is not in sync yet
                        return False
                    return self.masters(group)[-1:] == [node]

                wait_until(is_master, timeout_s, f"{node} did not become master of {group}")

    def root_dir_of(self, node: NodeId, group: str) -> Path:
        """The ``storePathRootDir`` of a node's broker of a group."""
        return self.directory / group / node

    def command(self, node: NodeId) -> list[str]:
        """Write a conf file for each group, and return the command line."""
        words = super().command(node)
        ours = [*words[:4], *(word for group in self.groups for word in ("-c", str(self._conf(node, group))))]
        return self._ending_with_us(ours)

    def _conf(self, node: NodeId, group: str) -> Path:
        root = self.root_dir_of(node, group)
        lines = {
            **self.conf_lines(node),
            "brokerName": group,
            "dLegerGroup": group,
            "listenPort": str(self._ports[group][node]),
            "storePathRootDir": str(root),
            "storePathCommitLog": str(root / "commitlog"),
            **self.lines[group],
        }
        file = self.directory / f"broker-{node}-{group}.conf"
        file.write_text("".join(f"{name}={text}\n" for name, text in lines.items()))
        return file
