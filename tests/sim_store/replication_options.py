"""What one seed decides before the run of a master and its slaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from rocketstore.broker_config import BrokerConfig
from rocketstore.config import MessageStoreConfig
from rocketstore.state.broker_state import StateSettings
from rocketstore.types import BrokerRole, FlushDiskType, HaHandshake
from tests.sim_store.options import choose

FAULTS: Final = (
    "kill",
    "power",
    "cut",
    "partition",
    "slow_links",
    "slow",
    "full",
    "garble",
    "promote",
    "two_masters",
    "older_copy",
    "clean_stop",
)


@dataclass(frozen=True, slots=True)
class ReplicationOptions:
    """One world."""

    seed: int
    role: BrokerRole
    """The master's."""
    slaves: int
    faults: frozenset[str]
    rounds: int
    work_ms: int
    clients: int
    queues: int
    preempt: float
    store: MessageStoreConfig
    state: StateSettings

    def has(self, fault: str) -> bool:
        """Whether that kind of fault may strike."""
        return fault in self.faults

    @property
    def is_sync(self) -> bool:
        """Whether what is acknowledged is with a slave."""
        return self.role is BrokerRole.SYNC_MASTER

    @property
    def is_flushed(self) -> bool:
        """Whether what is acknowledged is durable where it is."""
        return self.store.flush_disk_type is FlushDiskType.SYNC_FLUSH

    def config_of(self, number: int, role: BrokerRole, root: Path) -> BrokerConfig:
        """A broker's conf file, in this role. Its port for slaves is 1 more than its number."""
        store = replace(self.store, store_path_root_dir=root, broker_role=role, ha_listen_port=port_of(number))
        broker_id = number + 1 if role is BrokerRole.SLAVE else 0
        return BrokerConfig(store=store, broker_name="b", broker_id=broker_id)


def port_of(number: int) -> int:
    """For slaves."""
    return number + 1


def choose_replication(seed: int) -> ReplicationOptions:
    """The world of a master and one or two slaves."""
    plain = choose(seed)
    dice = Random(f"replication-options/{seed}")
    heartbeat_ms = dice.choice((200, 500))
    store = replace(
        plain.store,
        file_reserved_time=72,
        slave_timeout=dice.choice((300, 3000)),
        ha_send_heartbeat_interval=heartbeat_ms,
        ha_housekeeping_interval=4 * heartbeat_ms,
        ha_transfer_batch_size=dice.choice((100, 1000, 32 * 1024)),
        ha_slave_fallbehind_max=dice.choice((500, 4096, 256 * 1024 * 1024)),
        ha_handshake=dice.choice((HaHandshake.AUTO, HaHandshake.REQUIRED)),
        min_in_sync_replicas=dice.choice((1, 1, 2)),
    )
    return ReplicationOptions(
        seed=seed,
        role=BrokerRole.SYNC_MASTER if dice.random() < 0.6 else BrokerRole.ASYNC_MASTER,
        slaves=dice.choice((1, 1, 2)),
        faults=frozenset(fault for fault in FAULTS if dice.random() < 0.6) or frozenset({"power"}),
        rounds=dice.randrange(2, 6),
        work_ms=dice.choice((300, 1000, 3000)),
        clients=dice.randrange(1, 4),
        queues=plain.queues,
        preempt=dice.choice((0.0, 0.02, 0.1)),
        store=store,
        state=plain.state,
    )
