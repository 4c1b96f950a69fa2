"""Every setting of the message store, with RocketMQ's defaults (4.9.8). Pure: it reads no file.

Field names are RocketMQ's in this project's spelling; ``rocketstore.settings`` reads conf files and knows both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rocketstore.types import BrokerRole, FlushDiskType

KIB: Final = 1024
MIB: Final = 1024 * KIB
DEFAULT_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


@dataclass(frozen=True, slots=True)
class MessageStoreConfig:
    """RocketMQ's ``MessageStoreConfig``. Intervals are milliseconds, sizes bytes, ratios percent."""

    store_path_root_dir: Path = field(default_factory=lambda: Path.home() / "store")
    store_path_commit_log: str = ""
    """Directories of the plain commit log, separated by commas; empty: ``<root>/commitlog``."""
    read_only_commit_log_store_paths: str = ""
    mapped_file_size_commit_log: int = 1024 * MIB
    mapped_file_size_consume_queue: int = 6_000_000
    flush_disk_type: FlushDiskType = FlushDiskType.ASYNC_FLUSH
    flush_interval_commit_log: int = 500
    flush_commit_log_least_pages: int = 4
    flush_commit_log_thorough_interval: int = 10_000
    flush_commit_log_timed: bool = True
    commit_interval_commit_log: int = 200
    commit_commit_log_least_pages: int = 4
    commit_commit_log_thorough_interval: int = 200
    flush_interval_consume_queue: int = 1000
    flush_consume_queue_least_pages: int = 2
    flush_consume_queue_thorough_interval: int = 60_000
    sync_flush_timeout: int = 5000
    slave_timeout: int = 3000
    os_page_cache_busy_timeout_mills: int = 1000
    max_message_size: int = 4 * MIB
    check_crc_on_recover: bool = True
    warm_mapped_file_enable: bool = False
    transient_store_pool_enable: bool = False
    transient_store_pool_size: int = 5
    fast_fail_if_no_buffer_in_store_pool: bool = False
    clean_resource_interval: int = 10_000
    delete_when: str = "04"
    file_reserved_time: int = 72
    """Hours."""
    disk_max_used_space_ratio: int = 75
    disk_space_warning_level_ratio: int = 90
    disk_space_clean_forcibly_ratio: int = 85
    clean_file_forcibly_enable: bool = True
    delete_commit_log_files_interval: int = 100
    delete_consume_queue_files_interval: int = 100
    redelete_hanged_file_interval: int = 120_000
    message_index_enable: bool = True
    message_index_safe: bool = True
    """True here, false in RocketMQ, where keys older than the replay's start stay lost after a crash."""
    max_hash_slot_num: int = 5_000_000
    max_index_num: int = 20_000_000
    max_msgs_num_batch: int = 64
    default_query_max_num: int = 32
    max_transfer_bytes_on_message_in_memory: int = 256 * KIB
    max_transfer_count_on_message_in_memory: int = 32
    max_transfer_bytes_on_message_in_disk: int = 64 * KIB
    max_transfer_count_on_message_in_disk: int = 8
    access_message_in_memory_max_ratio: int = 40
    disk_fall_recorded: bool = True
    offset_check_in_slave: bool = False
    message_delay_level: str = DEFAULT_DELAY_LEVELS
    flush_delay_offset_interval: int = 10_000
    broker_role: BrokerRole = BrokerRole.ASYNC_MASTER
    ha_listen_port: int = 10_912
    enable_dledger_commit_log: bool = False

    @property
    def commit_log_dirs(self) -> tuple[Path, ...]:
        """Where the plain commit log's files go."""
        text = self.store_path_commit_log or str(self.store_path_root_dir / "commitlog")
        return tuple(Path(part.strip()) for part in text.split(",") if part.strip())

    @property
    def read_only_commit_log_dirs(self) -> tuple[Path, ...]:
        """Where older files of the plain commit log are read, never written."""
        return tuple(Path(part.strip()) for part in self.read_only_commit_log_store_paths.split(",") if part.strip())

    @property
    def consume_queue_file_bytes(self) -> int:
        """``mapped_file_size_consume_queue`` rounded up to whole units."""
        return -(-self.mapped_file_size_consume_queue // 20) * 20

    @property
    def index_dir(self) -> Path:
        """Where index files are."""
        return self.store_path_root_dir / "index"

    @property
    def consume_queue_dir(self) -> Path:
        """Where consume queues are."""
        return self.store_path_root_dir / "consumequeue"

    @property
    def config_dir(self) -> Path:
        """Where the broker's JSON files are."""
        return self.store_path_root_dir / "config"
