"""What one seed decides before the run: the sizes of files, what is flushed when, and which faults may strike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from rocketstore.config import MessageStoreConfig
from rocketstore.state.broker_state import StateSettings
from rocketstore.types import FlushDiskType

FAULTS: Final = ("kill", "power", "full", "eio", "hang", "slow", "early_crash")
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
    preempt: float
    retention: bool
    store: MessageStoreConfig
    state: StateSettings

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


def at(options: Options, root: Path) -> MessageStoreConfig:
    """Its store's settings, in a directory."""
    return replace(options.store, store_path_root_dir=root)
