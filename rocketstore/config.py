"""Every setting of the message store, with RocketMQ's defaults (4.9.8). Pure: it reads no file.

Field names are RocketMQ's in this project's spelling; ``rocketstore.settings`` reads conf files and knows both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from dledger.limits import AnyMillis, Bytes, BytesOrZero, Millis, Percent, Positive, Range, Unit
from rocketstore.types import QUEUE_UNIT, BrokerRole, FlushDiskType

KIB: Final = 1024
MIB: Final = 1024 * KIB
KEYS_INDEXED_MAX: Final = 1024
"""Keys of one record that it is found by, the first ones; earlier versions took messages with more."""
DEFAULT_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


@dataclass(frozen=True, slots=True)
class MessageStoreConfig:
    """RocketMQ's ``MessageStoreConfig``. Intervals are milliseconds, sizes bytes, ratios percent."""

    store_path_root_dir: Path = field(default_factory=lambda: Path.home() / "store")
    """Where everything is kept."""
    store_path_commit_log: str = ""
    """Directories of the plain commit log, separated by commas; empty: ``<root>/commitlog``."""
    read_only_commit_log_store_paths: str = ""
    """Directories whose log files are read but never written to, separated by commas."""
    mapped_file_size_commit_log: Bytes = 1024 * MIB
    """Size of a log file; for the life of a log, and the same on all members of a group."""
    mapped_file_size_consume_queue: Bytes = 6_000_000
    """Size of a consume queue's file, rounded up to whole units of 20 bytes; for the life of a store."""
    flush_disk_type: FlushDiskType = FlushDiskType.ASYNC_FLUSH
    """SYNC_FLUSH: a put is answered when it is durable; ASYNC_FLUSH: before. Not given in a DLedger broker: durable."""
    flush_interval_commit_log: Millis = 500
    """How often an asynchronous flush looks for work (ms)."""
    flush_commit_log_least_pages: int = 4
    """With fewer dirty pages of 4 KiB an asynchronous flush waits for the thorough one."""
    flush_commit_log_thorough_interval: AnyMillis = 10_000
    """How often an asynchronous flush takes everything (ms)."""
    flush_commit_log_timed: bool = True
    """Whether asynchronous flushes come at intervals only; else also whenever something was put."""
    commit_interval_commit_log: Millis = 200
    """As ``flush_interval_commit_log``, from the transient store pool to the file."""
    commit_commit_log_least_pages: int = 4
    """As ``flush_commit_log_least_pages``, from the transient store pool to the file."""
    commit_commit_log_thorough_interval: AnyMillis = 200
    """As ``flush_commit_log_thorough_interval``, from the transient store pool to the file."""
    flush_interval_consume_queue: Millis = 1000
    """How often consume queues and index are flushed (ms)."""
    flush_consume_queue_least_pages: int = 2
    """Consume queues with fewer dirty pages wait for the thorough flush."""
    flush_consume_queue_thorough_interval: AnyMillis = 60_000
    """How often consume queues and index are flushed whole and the checkpoint is written (ms)."""
    sync_flush_timeout: Millis = 5000
    """How long a put waits for SYNC_FLUSH before it is answered FLUSH_DISK_TIMEOUT (ms)."""
    slave_timeout: Millis = 3000
    """How long a put would wait for a slave (ms)."""
    os_page_cache_busy_timeout_mills: AnyMillis = 1000
    """A put that finds the one before writing for longer is refused (OS_PAGECACHE_BUSY)."""
    dispatch_behind_bytes_max: Bytes = 32 * MIB
    """With so much of the log not yet in consume queues and index, puts are refused (OS_PAGECACHE_BUSY)."""
    message_keys_max: Annotated[int, Range(1, KEYS_INDEXED_MAX)] = 64
    """Keys of one message (up to 1024): each costs as much to index as a whole message with one."""
    max_message_size: Bytes = 4 * MIB
    """Largest body of a message or a batch."""
    check_crc_on_recover: bool = True
    """Whether a plain log's bodies are checked against their CRCs at start."""
    warm_mapped_file_enable: bool = False
    """Whether new files of a plain log are written to once before use."""
    transient_store_pool_enable: bool = False
    """Whether puts go to buffers in memory first (ASYNC_FLUSH only): a killed process loses them."""
    transient_store_pool_size: Positive = 5
    """How many such buffers there are, each as large as a log file."""
    fast_fail_if_no_buffer_in_store_pool: bool = False
    """Whether a put is refused rather than written to the file when all buffers are in use."""
    clean_resource_interval: Millis = 10_000
    """How often disks are measured and expired files are looked for (ms)."""
    delete_when: str = "04"
    """Local hours of the day in which expired files are removed, separated by ``;``."""
    file_reserved_time: Annotated[int, Range(0), Unit.HOURS] = 72
    """Hours after its last write from which a log file may be removed."""
    disk_max_used_space_ratio: Percent = 75
    """Percentage of the disk in use above which expired files are removed at any hour (10 to 95 count)."""
    disk_space_warning_level_ratio: Percent = 90
    """Percentage above which no messages are taken."""
    disk_space_clean_forcibly_ratio: Percent = 85
    """Percentage above which the oldest files go whatever their age, if ``clean_file_forcibly_enable``."""
    clean_file_forcibly_enable: bool = True
    """Whether a disk that is too full costs files that have not expired."""
    delete_commit_log_files_interval: AnyMillis = 100
    """Pause between the removals of two log files (ms)."""
    delete_consume_queue_files_interval: AnyMillis = 100
    """RocketMQ's pause between the removals of two queue files (ms)."""
    redelete_hanged_file_interval: AnyMillis = 120_000
    """RocketMQ's interval of trying again to remove a file that readers hold (ms)."""
    message_index_enable: bool = True
    """Whether keys are indexed, for queries by key."""
    message_index_safe: bool = True
    """True here, false in RocketMQ, where keys older than the replay's start stay lost after a crash."""
    derived_scrub_bytes_per_s: BytesOrZero = MIB
    """How fast a running broker verifies its consume queues, with the messages that they lead to, and its key index,
    again and again (bytes a second, at least 1 KiB per message; 0: not at all). What is wrong is made again from the
    log, whoever finds it."""
    max_hash_slot_num: Positive = 5_000_000
    """Hash slots of an index file (4 bytes each)."""
    max_index_num: Positive = 20_000_000
    """Entries of an index file (20 bytes each)."""
    max_msgs_num_batch: int = 64
    """Most messages that a query by key gives."""
    default_query_max_num: Positive = 32
    """How many messages a query by key gives when it does not say."""
    max_transfer_bytes_on_message_in_memory: Bytes = 256 * KIB
    """Most bytes that one get gives while they are probably in memory; in a broker 1 MiB."""
    max_transfer_count_on_message_in_memory: Positive = 32
    """Most messages that one get gives while they are probably in memory; in a broker 4096."""
    max_transfer_bytes_on_message_in_disk: Bytes = 64 * KIB
    """Most bytes that one get gives from further behind; in a broker 1 MiB."""
    max_transfer_count_on_message_in_disk: Positive = 8
    """Most messages that one get gives from further behind; in a broker 4096."""
    access_message_in_memory_max_ratio: Percent = 40
    """Percentage of the machine's memory that is taken for the log's end being in the page cache."""
    disk_fall_recorded: bool = True
    """Whether RocketMQ counts how far consumers are behind on the disk."""
    offset_check_in_slave: bool = False
    """Whether a slave, too, puts an offset right that lies outside a queue."""
    message_delay_level: str = DEFAULT_DELAY_LEVELS
    """The delay levels, from 1 on, separated by blanks."""
    flush_delay_offset_interval: Millis = 10_000
    """How often RocketMQ writes the progress of delayed delivery (ms)."""
    broker_role: BrokerRole = BrokerRole.ASYNC_MASTER
    """RocketMQ's role of a plain broker: ASYNC_MASTER or SYNC_MASTER."""
    ha_listen_port: int = 10_912
    """RocketMQ's port for slaves."""
    enable_dledger_commit_log: bool = False
    """Whether the log is replicated (a DLedger broker) or plain."""

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
        return -(-self.mapped_file_size_consume_queue // QUEUE_UNIT.size) * QUEUE_UNIT.size

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
