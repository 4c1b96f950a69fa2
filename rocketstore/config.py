"""Every setting of the message store, with RocketMQ's defaults (4.9.8). Pure: it reads no files.

Field names are RocketMQ's in this project's spelling; ``rocketstore.settings`` reads conf files and accepts both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

from dledger.values import AnyMillis, Bytes, BytesOrZero, Millis, Percent, Positive, Range, Unit
from rocketstore.types import QUEUE_UNIT, BrokerRole, FlushDiskType, HaHandshake

KIB: Final = 1024
MIB: Final = 1024 * KIB
KEYS_INDEXED_MAX: Final = 1024
"""Only the first keys of a record, up to this many, are indexed; earlier versions accepted messages with more."""
DEFAULT_DELAY_LEVELS: Final = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


@dataclass(frozen=True, slots=True)
class MessageStoreConfig:
    """RocketMQ's ``MessageStoreConfig``. Intervals are milliseconds, sizes bytes, ratios percent."""

    store_path_root_dir: Path = field(default_factory=lambda: Path.home() / "store")
    """Root directory of everything the store keeps."""
    store_path_commit_log: str = ""
    """Comma-separated directories of the plain commit log; empty: ``<root>/commitlog``."""
    read_only_commit_log_store_paths: str = ""
    """Comma-separated directories whose log files are read but never written to."""
    mapped_file_size_commit_log: Bytes = 1024 * MIB
    """Size of a log file; must be the same on all members of a group and cannot change during a log's life."""
    mapped_file_size_consume_queue: Bytes = 6_000_000
    """Size of a consume queue file, rounded up to whole 20-byte units; cannot change during a store's life."""
    flush_disk_type: FlushDiskType = FlushDiskType.ASYNC_FLUSH
    """SYNC_FLUSH: puts are answered once durable; ASYNC_FLUSH: before that. Unset in a DLedger broker: durable."""
    flush_interval_commit_log: Millis = 500
    """How often asynchronous flushing checks for work (ms)."""
    flush_commit_log_least_pages: int = 4
    """With fewer dirty 4 KiB pages, an asynchronous flush is left to the thorough one."""
    flush_commit_log_thorough_interval: AnyMillis = 10_000
    """How often an asynchronous flush writes everything (ms)."""
    flush_commit_log_timed: bool = True
    """Whether asynchronous flushes run only at intervals; if false, also after every put."""
    commit_interval_commit_log: Millis = 200
    """Like ``flush_interval_commit_log``, from the transient store pool to the file."""
    commit_commit_log_least_pages: int = 4
    """Like ``flush_commit_log_least_pages``, from the transient store pool to the file."""
    commit_commit_log_thorough_interval: AnyMillis = 200
    """Like ``flush_commit_log_thorough_interval``, from the transient store pool to the file."""
    flush_interval_consume_queue: Millis = 1000
    """How often consume queues and the index are flushed (ms)."""
    flush_consume_queue_least_pages: int = 2
    """Consume queues with fewer dirty pages are left to the thorough flush."""
    flush_consume_queue_thorough_interval: AnyMillis = 60_000
    """How often consume queues and the index are flushed completely and the checkpoint is written (ms)."""
    sync_flush_timeout: Millis = 5000
    """How long a put waits for SYNC_FLUSH before it is answered FLUSH_DISK_TIMEOUT (ms)."""
    slave_timeout: Millis = 3000
    """How long a put on a SYNC_MASTER waits for slaves before it is answered FLUSH_SLAVE_TIMEOUT (ms)."""
    os_page_cache_busy_timeout_mills: AnyMillis = 1000
    """Puts are refused (OS_PAGECACHE_BUSY) while the previous one has been writing for longer than this (ms)."""
    dispatch_behind_bytes_max: Bytes = 32 * MIB
    """Puts are refused (OS_PAGECACHE_BUSY) while this much of the log is missing from consume queues and the index."""
    message_keys_max: Annotated[int, Range(1, KEYS_INDEXED_MAX)] = 64
    """Maximum keys per message (up to 1024): indexing each costs as much as a whole message with one key."""
    max_message_size: Bytes = 4 * MIB
    """Maximum body size of a message or a batch."""
    check_crc_on_recover: bool = True
    """Whether bodies in a plain log are checked against their CRCs at startup."""
    transient_store_pool_enable: bool = False
    """Whether puts go to memory buffers first (ASYNC_FLUSH only); a killed process loses their contents."""
    transient_store_pool_size: Positive = 5
    """Number of these buffers, each as large as a log file."""
    fast_fail_if_no_buffer_in_store_pool: bool = False
    """Whether puts are refused, rather than written to the file, while all buffers are in use."""
    clean_resource_interval: Millis = 10_000
    """How often to measure disk usage and look for expired files (ms)."""
    delete_when: str = "04"
    """Hours of the day (local time) at which expired files are removed, separated by ``;``."""
    file_reserved_time: Annotated[int, Range(0), Unit.HOURS] = 72
    """Hours after its last write when a log file may be removed."""
    disk_max_used_space_ratio: Percent = 75
    """Disk usage (percent) above which expired files are removed at any hour (limited to 10 to 95)."""
    disk_space_warning_level_ratio: Percent = 90
    """Disk usage (percent) above which messages are refused."""
    disk_space_clean_forcibly_ratio: Percent = 85
    """Disk usage (percent) above which the oldest files are removed at any age, if ``clean_file_forcibly_enable``."""
    clean_file_forcibly_enable: bool = False
    """Whether the oldest files are removed at any age above ``disk_space_clean_forcibly_ratio``: **this deletes
    acknowledged messages** to make room for new ones. RocketMQ's default is true; here a conf file must ask for it.
    Otherwise everything is kept for ``file_reserved_time``, and messages are refused above
    ``disk_space_warning_level_ratio``."""
    delete_commit_log_files_interval: AnyMillis = 100
    """Pause between removing two log files (ms)."""
    message_index_enable: bool = True
    """Whether keys are indexed so that messages can be queried by key."""
    message_index_safe: bool = True
    """True here; false in RocketMQ, where a crash permanently loses keys older than the start of the replay."""
    derived_scrub_bytes_per_s: BytesOrZero = MIB
    """How fast a running broker continuously verifies its key index and its consume queues with the messages they point
    to (bytes per second, counting at least 1 KiB per message; 0: never). Damage found here or elsewhere is rebuilt from
    the log."""
    max_hash_slot_num: Positive = 5_000_000
    """Hash slots of an index file (4 bytes each)."""
    max_index_num: Positive = 20_000_000
    """Entries of an index file (20 bytes each)."""
    max_msgs_num_batch: int = 64
    """Maximum messages returned by a query by key."""
    default_query_max_num: Positive = 32
    """Messages returned by a query by key that sets no limit."""
    max_transfer_bytes_on_message_in_memory: Bytes = 256 * KIB
    """Maximum bytes per get while they are probably in memory; in a broker, 1 MiB."""
    max_transfer_count_on_message_in_memory: Positive = 32
    """Maximum messages per get while they are probably in memory; in a broker, 4096."""
    max_transfer_bytes_on_message_in_disk: Bytes = 64 * KIB
    """Maximum bytes per get from further behind; in a broker, 1 MiB."""
    max_transfer_count_on_message_in_disk: Positive = 8
    """Maximum messages per get from further behind; in a broker, 4096."""
    access_message_in_memory_max_ratio: Percent = 40
    """Percentage of the machine's memory assumed to cache the end of the log."""
    offset_check_in_slave: bool = False
    """Whether a slave, too, corrects an offset outside a queue."""
    message_delay_level: str = DEFAULT_DELAY_LEVELS
    """Delay levels, starting with level 1, separated by spaces."""
    broker_role: BrokerRole = BrokerRole.ASYNC_MASTER
    """Role of a plain broker: ASYNC_MASTER answers puts without waiting for slaves, SYNC_MASTER once
    ``in_sync_replicas`` have them; SLAVE follows a master."""
    ha_listen_port: Annotated[int | None, Range(0, 65535)] = None
    """Port for slaves of a plain master; 0: none. Unset: ``listen_port`` + 1, and if that port is taken, or if access
    control or TLS is on without ``ha_tls``, an ASYNC_MASTER does without.
    """
    ha_master_address: str = ""
    """The master's address for slaves, as ``host:port``. Empty: as the name servers say."""
    ha_send_heartbeat_interval: Millis = 5_000
    """How often master and slave give a sign of life (ms)."""
    ha_housekeeping_interval: Millis = 20_000
    """After how long without one they give up a connection (ms)."""
    ha_transfer_batch_size: Annotated[int, Range(1, 4 * MIB - 12), Unit.BYTES] = 32 * KIB
    """Most bytes in one frame to a slave of RocketMQ; one of ours takes up to 1 MiB."""
    ha_slave_fallbehind_max: Bytes = 256 * MIB
    """A slave that lacks more than this counts as absent (SYNC_MASTER)."""
    ha_slaves_max: Positive = 16
    """Maximum connected slaves."""
    ha_handshake: HaHandshake = HaHandshake.AUTO
    """Whether the other side must say who it is, and be compared: ``auto``: if it can; ``required``: it must, so
    RocketMQ's are refused; ``off``: a slave does not.
    """
    ha_tls: bool = False
    """Whether slaves connect with TLS. Both sides present certificates of the same authority, and the subjectAltName of
    each has ``DNS:`` and the broker's name, or one of ``ha_tls_names``.
    """
    ha_tls_names: str = ""
    """Further DNS names that masters and slaves of this broker may have in their certificates, separated by commas."""
    in_sync_replicas: Annotated[int, Range(1, 16)] = 2
    """How many brokers, the master included, must have a message before a SYNC_MASTER answers PUT_OK. With fewer
    connected, it answers SLAVE_NOT_AVAILABLE.
    """
    min_in_sync_replicas: Annotated[int, Range(1, 16)] = 1
    """With fewer brokers than this, the master included, a SYNC_MASTER refuses messages."""
    enable_dledger_commit_log: bool = False
    """Whether the log is replicated (a DLedger broker) or plain."""

    @property
    def ha_names(self) -> frozenset[str]:
        """``ha_tls_names``, taken apart."""
        return frozenset(filter(None, (one.strip() for one in self.ha_tls_names.split(","))))

    @property
    def commit_log_dirs(self) -> tuple[Path, ...]:
        """The directories for the plain commit log's files."""
        text = self.store_path_commit_log or str(self.store_path_root_dir / "commitlog")
        return tuple(Path(part.strip()) for part in text.split(",") if part.strip())

    @property
    def read_only_commit_log_dirs(self) -> tuple[Path, ...]:
        """The directories of older files of the plain commit log, which are read but never written."""
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
    def timers_dir(self) -> Path:
        """Where the files of timed messages are."""
        return self.store_path_root_dir / "timers"

    @property
    def consume_queue_dir(self) -> Path:
        """Where consume queues are."""
        return self.store_path_root_dir / "consumequeue"

    @property
    def config_dir(self) -> Path:
        """Where the broker's JSON files are."""
        return self.store_path_root_dir / "config"
