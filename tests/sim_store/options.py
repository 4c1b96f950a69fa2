"""What one seed decides before the run: the sizes of files, what is flushed when, and which faults may strike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from dledger.config import ElectionConfig, Member, ReplicationConfig, ServerConfig, StoreConfig
from dledger.types import NodeId
from rocketstore.config import MessageStoreConfig
from rocketstore.state.broker_state import StateSettings
from rocketstore.types import FlushDiskType

FAULTS: Final = ("kill", "power", "full", "eio", "hang", "slow", "early_crash", "crash_point", "derived")
LEVELS: Final = "1s 3s"
LEVEL_MS: Final = (1000, 3000)


@dataclass(frozen=True, slots=True)
class Options:
    """One world."""

    seed: int
    faults: frozenset[str]
    lives: int
    life_ms: int
    clients: int
    queues: int
    """Of each topic: with many, the set of their numbers takes several messages, and some fall silent."""
    preempt: float
    retention: bool
    store: MessageStoreConfig
    state: StateSettings
    transactions: bool = False

    def has(self, fault: str) -> bool:
        """Whether that kind of fault may strike."""
        return fault in self.faults


def choose(seed: int) -> Options:
    """The world of a plain broker."""
    dice = Random(f"store-options/{seed}")
    faults = frozenset(fault for fault in FAULTS if dice.random() < 0.6) or frozenset({"power"})
    segment = dice.choice((1024, 2048, 4096, 16384))
    store = MessageStoreConfig(
        store_path_root_dir=Path("/"),
        mapped_file_size_commit_log=segment,
        mapped_file_size_consume_queue=20 * dice.choice((2, 4, 5, 16)),
        flush_disk_type=dice.choice(list(FlushDiskType)),
        flush_interval_commit_log=dice.choice((20, 200, 500)),
        flush_commit_log_least_pages=dice.choice((0, 1, 4)),
        flush_commit_log_thorough_interval=dice.choice((500, 3000)),
        flush_commit_log_timed=dice.random() < 0.5,
        flush_interval_consume_queue=dice.choice((50, 300, 1000)),
        flush_consume_queue_thorough_interval=dice.choice((200, 1000, 5000)),
        clean_resource_interval=dice.choice((100, 500, 2000)),
        delete_when="",
        file_reserved_time=0,
        delete_commit_log_files_interval=0,
        max_hash_slot_num=dice.choice((2, 4, 20)),
        max_index_num=dice.choice((6, 12, 40)),
        message_delay_level=LEVELS,
        derived_scrub_bytes_per_s=dice.choice((0, 128 * 1024)),
    )
    return Options(
        seed=seed,
        faults=faults,
        lives=dice.randrange(2, 7),
        life_ms=dice.choice((300, 1500, 4000)),
        clients=dice.randrange(1, 4),
        queues=2 if seed % 4 else 14,
        preempt=dice.choice((0.0, 0.02, 0.1, 0.3)),
        retention=dice.random() < 0.6,
        store=store,
        state=StateSettings(
            snapshot_interval_ms=dice.choice((100, 1000, 5000)),
            rocketmq_files_interval_ms=dice.choice((300, 3000)),
            full_interval_ms=dice.choice((1000, 5000, 60_000)),
            accept_incomplete=True,
        ),
    )


GROUP_FAULTS: Final = (
    "kill",
    "power",
    "leader",
    "majority",
    "all",
    "partition",
    "loss",
    "spikes",
    "full",
    "eio",
    "hang",
    "slow",
    "wipe",
    "set_back",
    "damage",
    "transfer",
    "clean_stop",
)


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """The world of a group of brokers."""

    seed: int
    size: int
    faults: frozenset[str]
    work_ms: int
    clients: int
    queues: int
    preempt: float
    retention: bool
    election: ElectionConfig
    node: StoreConfig
    store: MessageStoreConfig
    state: StateSettings
    transactions: bool = False

    def has(self, fault: str) -> bool:
        """Whether that kind of fault may strike."""
        return fault in self.faults

    @property
    def names(self) -> tuple[NodeId, ...]:
        """The members, in order."""
        return tuple(NodeId(f"n{number}") for number in range(self.size))

    def config_of(self, name: NodeId, root: Path) -> ServerConfig:
        """The configuration of one member."""
        return ServerConfig(
            node_id=name,
            members=tuple(Member(other, "127.0.0.1", 1 + number) for number, other in enumerate(self.names)),
            election=self.election,
            replication=ReplicationConfig(ack_timeout_ms=2500),
            store=replace(self.node, base_dir=root),
        )


def choose_group(seed: int) -> GroupOptions:
    """The world of a group of three or five brokers."""
    plain = choose(seed)
    dice = Random(f"group-options/{seed}")
    segment = dice.choice((2048, 4096, 16 * 1024))
    retention = dice.random() < 0.6
    node = StoreConfig(
        segment_bytes=segment,
        index_segment_bytes=32 * dice.choice((8, 32, 512)),
        max_entry_bytes=segment - 64,
        warm_bytes=dice.choice((0, 512)),
        checkpoint_interval_ms=dice.choice((20, 100, 1000)),
        recovery_verify_bytes=dice.choice((0, 4096, 1 << 20)),
        retention_hours=0 if retention else 72,
        delete_hour=tuple(range(24)),
        clean_interval_ms=dice.choice((200, 1000)),
        follower_keep_bytes=dice.choice((4096, 1 << 20)),
        scrub_bytes_per_s=dice.choice((0, 64 * 1024)),
    )
    return GroupOptions(
        seed=seed,
        size=3 if dice.random() < 0.85 else 5,
        faults=frozenset(fault for fault in GROUP_FAULTS if dice.random() < 0.5) or frozenset({"power"}),
        work_ms=dice.choice((3000, 8000, 20_000)),
        clients=dice.randrange(1, 4),
        queues=plain.queues,
        preempt=dice.choice((0.0, 0.02, 0.1)),
        retention=retention,
        election=ElectionConfig(
            heartbeat_interval_ms=100,
            election_timeout_ms_min=dice.choice((300, 500)),
            election_timeout_ms_max=dice.choice((600, 1000)),
        ),
        node=node,
        store=replace(plain.store, enable_dledger_commit_log=True, mapped_file_size_commit_log=segment),
        state=replace(plain.state, accept_incomplete=False),
    )


def with_transactions(options: Options) -> Options:
    """The same world with transactions; mostly without retention, so that nothing may be missing in the end."""
    retention = options.retention and options.seed % 3 == 0
    store = options.store if retention else replace(options.store, file_reserved_time=72)
    return replace(options, transactions=True, retention=retention, store=store)


def group_with_transactions(options: GroupOptions) -> GroupOptions:
    """The same group with transactions; members forget nothing, so that nothing may be missing in the end."""
    retention = options.retention and options.seed % 3 == 0
    node = options.node if retention else replace(options.node, retention_hours=72)
    faults = options.faults - {"wipe", "set_back", "damage"} | {"leader"}
    return replace(options, transactions=True, retention=retention, node=node, faults=faults)


def group_with_rocketmq5(options: GroupOptions) -> GroupOptions:
    """The same group with pop and timed messages; members forget nothing, so that nothing may be missing in the end."""
    node = replace(options.node, retention_hours=72)
    faults, work_ms = options.faults | {"leader"}, min(options.work_ms, 8000)
    return replace(options, retention=False, node=node, faults=faults, work_ms=work_ms, clients=options.clients + 2)


def at(options: Options, root: Path) -> MessageStoreConfig:
    """Its store's settings, in a directory."""
    return replace(options.store, store_path_root_dir=root)


def in_group(options: GroupOptions, root: Path) -> MessageStoreConfig:
    """The same of a member."""
    return replace(options.store, store_path_root_dir=root)
