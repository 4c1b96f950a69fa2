"""What a member of a simulated group talks through, in the place of gRPC: links that lose, delay and break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from dledger.config import ServerConfig
from dledger.errors import UnavailableError
from dledger.host import ServedLog
from dledger.requests import PeerMessages
from dledger.rpc.peers.exchanges import committed_crcs
from dledger.rpc.peers.identity import PeerIdentity
from dledger.types import LogIndex, NodeId
from tests.sim_store.memory_transport import MemoryNetwork, MemoryTransport
from tests.sim_store.threads import Scheduler, running

PEER_BYTES_MAX: Final = 1 << 20


class SimNetwork(MemoryNetwork):
    """Between all members of one run."""

    def __init__(self, scheduler: Scheduler, random: Random) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.random = random
        self.loss = 0.0
        self.delay_us = 1_000
        self.spikes = 0.0
        self.hits: Counter[str] = Counter()

    def find(self, source: NodeId, address: str) -> MemoryTransport | None:
        """Nobody, if the message is lost."""
        if self.loss and self.random.random() < self.loss:
            self.hits["lost message"] += 1
            return None
        return super().find(source, address)

    def latency_us(self) -> int:
        """How long a message is under way."""
        if self.spikes and self.random.random() < self.spikes:
            self.hits["late message"] += 1
            return int(self.random.random() * 500_000)
        return int(self.random.random() * self.delay_us)

    def calm(self) -> None:
        """Everything arrives, and soon."""
        self.heal()
        self.loss = self.spikes = 0.0


_networks: list[SimNetwork] = []


def connect(network: SimNetwork) -> None:
    """Members that are made from now on use this network."""
    _networks[:] = [network]


class SimTransport(MemoryTransport):
    """Implements ``Transport``; made as ``PeerTransport`` is."""

    def __init__(self, config: ServerConfig, *, client_address: str, identity: PeerIdentity, **_: object) -> None:
        self._sim = _networks[0]
        super().__init__(self._sim, config, client_address=client_address, identity=identity)

    def _post(self, queue: Any, action: Callable[[], None]) -> None:  # noqa: ANN401  # a queue of actions
        scheduler = self._sim.scheduler
        due_us = scheduler.now_us + self._sim.latency_us()

        def arrive() -> None:
            if due_us > scheduler.now_us:
                scheduler.sleep_us(due_us - scheduler.now_us)
            action()

        super()._post(queue, arrive)

    @property
    def receiver(self) -> PeerMessages:
        """The member's end."""
        found = self._the_receiver
        if not isinstance(found, PeerMessages):
            raise TypeError(found)
        return found


class NoClients:
    """In the place of ``ClientServer``: clients of a simulation are in the process."""

    def __init__(self, logs: Sequence[ServedLog], *_: object) -> None:
        self.address = f"client-of-{logs[0].config.node_id}"
        self.grpc_port = 0
        self.bridge = None

    def start(self, *, ports: bool = True) -> None:
        """Nothing listens."""

    def close(self) -> None:
        """Nothing listened."""


class NoPort:
    """In the place of ``PeerPort``: members of a simulation find each other in the process."""

    def __init__(self, *_: object) -> None: ...

    def open(self) -> None:
        """Nothing listens."""

    def accept(self) -> None:
        """Nobody connects."""

    def close(self) -> None:
        """Nothing listened."""


class PeerLogs:
    """In the place of ``PeerLogClient``: the other members' logs, as far as they can be reached."""

    def __init__(self, identity: PeerIdentity, *_: object) -> None:
        self._identity = identity
        self._sim = _networks[0]

    @property
    def peers(self) -> tuple[NodeId, ...]:
        """Whom it can ask."""
        return self._identity.addresses.peers

    @property
    def voting_peers(self) -> tuple[NodeId, ...]:
        """See ``PeerLogClient.voting_peers``."""
        return self._identity.addresses.voting_peers

    @property
    def quorum(self) -> int:
        """See ``PeerLogClient.quorum``."""
        return self._identity.addresses.quorum

    def read_log(self, peer: NodeId, position: int, length: int) -> bytes | None:
        """See ``PeerLogClient.read_log``."""
        return self._find(peer).log.copy_committed(position, min(length, PEER_BYTES_MAX))

    def chain_crcs(self, peer: NodeId, indexes: Sequence[LogIndex]) -> dict[LogIndex, int]:
        """See ``PeerLogClient.chain_crcs``."""
        return committed_crcs(self._find(peer).log, indexes)

    def close(self) -> None:
        """Nothing is open."""

    def _find(self, peer: NodeId) -> PeerMessages:
        running().sleep_us(self._sim.latency_us())
        member = self._identity.addresses.first(peer)
        transport = None if member is None else self._sim.find(self._identity.node_id, member.address)
        if not isinstance(transport, SimTransport):
            raise UnavailableError(f"{peer} does not answer")
        return transport.receiver
