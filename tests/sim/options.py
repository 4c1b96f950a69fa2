"""What one seed decides before the run: the group, its timers and which kinds of faults may strike."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from dledger.config import ElectionConfig, Member, ReplicationConfig, ServerConfig, StoreConfig
from dledger.types import NodeId

SWARM: Final = (
    "drop",
    "duplicate",
    "reorder",
    "spike",
    "partition",
    "one_way",
    "isolate_leader",
    "minority_leader",
    "bridge",
    "crash_one",
    "crash_leader",
    "crash_minority",
    "crash_majority",
    "crash_all",
    "crash_point",
    "harass_leader",
    "pause",
    "slow_flush",
    "slow_save",
    "slow_read",
    "transfer",
    "disk_full",
    "drift",
    "expire",
    "late_start",
    "wipe",
    "connection_lost",
    "corrupt",
    "set_back",
    "lose_kind",
    "hang_flush",
)
"""Every kind of fault; a seed switches a random part of them on."""
_FIRST: Final = SWARM.index("set_back")
NEW_WORLDS: Final = 100_000
"""From this seed on all kinds strike; those before stay the worlds in which something was found once."""


@dataclass(frozen=True, slots=True)
class Options:
    """One seed's world."""

    seed: int
    events: int
    size: int
    faults: tuple[str, ...]
    fault_interval_us: int
    think_us: int
    clients: int
    producers: int
    drop: float
    duplicate: float
    reorder: float
    spike: float
    segment_bytes: int
    election: ElectionConfig
    replication: ReplicationConfig

    def has(self, fault: str) -> bool:
        """Whether this run has that kind of fault."""
        return fault in self.faults

    @property
    def names(self) -> tuple[NodeId, ...]:
        """The members, in order."""
        return tuple(NodeId(f"n{number}") for number in range(self.size))

    def config_of(self, name: NodeId) -> ServerConfig:
        """The configuration of one member."""
        members = tuple(Member(other, "127.0.0.1", 1 + number) for number, other in enumerate(self.names))
        return ServerConfig(
            node_id=name,
            members=members,
            election=self.election,
            replication=self.replication,
            store=StoreConfig(segment_bytes=self.segment_bytes),
        ).check()


def choose(seed: int, events: int) -> Options:
    """Decide everything about a seed's world."""
    random = Random(f"options/{seed}")
    more = Random(f"more options/{seed}")  # drawn apart, so that seeds of before stay the same worlds
    yet_more = Random(f"yet more options/{seed}")
    density = random.choice((0.05, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9))
    faults = tuple(fault for fault in SWARM[:_FIRST] if random.random() < density)
    if more.random() < density:
        faults += ("set_back", "snapshot")
    if seed >= NEW_WORLDS:
        faults += tuple(fault for fault in SWARM[_FIRST + 1 :] if yet_more.random() < density / 2)
    return Options(
        seed=seed,
        events=events,
        size=random.choices((1, 3, 5), (4, 70, 26))[0],
        faults=faults,
        fault_interval_us=random.choice((200_000, 500_000, 500_000, 1_500_000)),
        think_us=random.choice((10_000, 40_000, 40_000, 120_000, 400_000)),
        clients=random.choice((1, 2, 3)),
        producers=more.choice((0, 1, 2, 4)),
        drop=random.choice((0.01, 0.05, 0.3)) if "drop" in faults else 0.0,
        duplicate=random.choice((0.02, 0.1, 0.5)) if "duplicate" in faults else 0.0,
        reorder=random.choice((0.02, 0.2, 0.5)) if "reorder" in faults else 0.0,
        spike=random.choice((0.002, 0.02, 0.1)) if "spike" in faults else 0.0,
        segment_bytes=random.choice((512, 2048, 1 << 20)),
        election=ElectionConfig(
            heartbeat_interval_ms=random.choice((100, 100, 160)),
            transfer_max_lag_entries=random.choice((3, 1000)),
            preferred_leaders=(NodeId("n0"),) if random.random() < 0.15 else (),
        ),
        replication=ReplicationConfig(
            push_bytes_max=random.choice((150, 600, 4096)),
            inflight_pushes_max=random.choice((1, 2, 4, 16)),
            handler_queue_pushes_max=random.choice((16, 256)),
            pending_entries_max=random.choice((8, 10_000)),
            ack_timeout_ms=random.choice((600, 2500)),
            producer_snapshot_entries=more.choice((1, 4, 20, 16_384)),
        ),
    )
