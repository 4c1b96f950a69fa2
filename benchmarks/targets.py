"""The targets of the figures. Pure data, and their evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from benchmarks.figures import Figure

PYSYNCOBJ: Final = "PySyncObj"
ETCD: Final = "etcd"
RATIS: Final = "Apache Ratis"
JAVA_BROKERS: Final = "Java's brokers, DLedger mode, not flushed"
JAVA_PAIR: Final = "Java's SYNC_MASTER and SLAVE, Java's asynchronous producer"
APACHE_GATEWAY: Final = "Apache's broker 5.5 with its proxy"
BARE_GRPC: Final = "a gRPC server in Python that does nothing"
RAW_COPY: Final = "a raw copy of the same bytes over a socket"
APPEND_ALONE: Final = "the append alone"
PUT_ALONE: Final = "the put itself"
OWN_P50: Final = "own p50"
BARE_LOOP: Final = "bare pack+crc32c+copy loop into a fresh mapped file"
PLAINTEXT: Final = "the same in plaintext"
ALONE: Final = "the same client alone"
BARE_LOG: Final = "the same without a state machine"
UNMEASURED: Final = "the same group without metrics"
MD5SUM: Final = "md5sum of one replica"
SENT_MEANWHILE: Final = "what was sent meanwhile"
BARE_PRODUCER: Final = "a producer alone, the same bodies"
SMALL_LOG: Final = "same restart of a tenth of the log"
STRUCT_LOOP: Final = "a loop with struct, into lists, into a batch"
PARQUET: Final = "Spark's own scan of the same rows in Parquet (snappy)"
WITH_BODIES: Final = "the same with bodies"
BARE_PYTHON: Final = "an interpreter that does nothing"
NO_CHANGE: Final = "the same load without changes"
WIPED_MEMBER: Final = "a voter whose disk was wiped, by pushes alone"
ONE_GROUP: Final = "one group on as many processes"
BEFORE: Final = "the same messages before"
ONE_CORE: Final = "the same on one core"
SMALL_SPLITS: Final = "the same with splits of 32 MiB"


class TargetVerdict(StrEnum):
    """The result of comparing a figure with one limit."""

    MET = "met"
    MISSED = "MISSED"
    UNPROVEN = "UNPROVEN"
    """The baseline of the limit was not measured; counts as missed."""
    NOISY = "missed, not judged: the machine is not quiet"


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound on a figure's value, or (``baseline`` given) on its ratio to that baseline."""

    bound: float
    at_least: bool
    unit: str = ""
    baseline: str = ""
    quiet_machine_only: bool = False

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        bound = f"{self.bound:g}x {self.baseline}" if self.baseline else f"{self.bound:,g} {self.unit}"
        return f"{sign} {bound}" + (" (quiet machine)" if self.quiet_machine_only else "")

    def holds(self, measured: float) -> bool:
        """Whether a measured value or ratio is within the bound."""
        return measured >= self.bound if self.at_least else measured <= self.bound


@dataclass(frozen=True, slots=True)
class Judgement:
    """One limit applied to a measurement."""

    name: str
    limit: Limit
    verdict: TargetVerdict

    @property
    def failed(self) -> bool:
        """Whether it makes the run fail."""
        return self.verdict in {TargetVerdict.MISSED, TargetVerdict.UNPROVEN}


def at_least(bound: float, unit: str = "", *, baseline: str = "", quiet_machine_only: bool = False) -> Limit:
    """A lower bound."""
    return Limit(bound, True, unit, baseline, quiet_machine_only)


def at_most(bound: float, unit: str = "", *, baseline: str = "") -> Limit:
    """An upper bound."""
    return Limit(bound, False, unit, baseline)


TARGETS: Final[Mapping[str, tuple[Limit, ...]]] = {
    # Where the machine is noisy, the ratios decide.
    "append_pipelined": (
        at_least(100_000, "entries/s", quiet_machine_only=True),
        at_least(6, baseline=PYSYNCOBJ),
    ),
    "append_bulk": (
        at_least(130_000, "entries/s", quiet_machine_only=True),
        at_least(13, baseline=PYSYNCOBJ),
    ),
    "append_roundtrip_p50": (at_most(2.0, "ms"), at_most(1.0, baseline=ETCD)),
    "append_roundtrip_p99": (at_most(1.2, baseline=ETCD), at_most(5, baseline=OWN_P50)),
    "append_leader_processor": (at_most(0.4, "ms"),),
    # A state machine that does next to nothing, on all three members.
    "machine_append": (at_least(0.8, baseline=BARE_LOG),),
    "machine_snapshot_pause": (at_most(20, "ms"),),
    "machine_install": (at_least(100, "MB/s"),),
    "machine_install_elections": (at_most(0, "elections"),),
    "append_roundtrip_p50_async": (at_most(1.5, "ms"),),
    "append_roundtrip_p99_async": (at_most(5, baseline=OWN_P50),),
    "store_append": (at_least(250_000, "entries/s"), at_least(0.5, baseline=BARE_LOOP)),
    "follower_append": (at_least(0.5, "GB/s"),),
    "failover_p50": (at_most(0.15, "s"),),
    "failover_max": (at_most(0.5, "s"),),
    "failover_frozen_max": (at_most(1.1, "s"),),
    "handover_transfer_p50": (at_most(0.05, "s"),),
    "handover_stop_p50": (at_most(0.05, "s"),),
    "members_gap": (at_most(200, "ms"),),
    "members_transfer_gap": (at_most(300, "ms"),),
    "members_catch_up": (at_least(0.8, baseline=WIPED_MEMBER),),
    "restart_clean": (at_most(2.0, "s"),),
    # "after SIGKILL bounded by the unflushed tail, not the log": ten times the log may not even double it.
    "restart_killed": (at_most(2.0, baseline=SMALL_LOG),),
    "commitlog_put": (at_least(120_000, "messages/s", quiet_machine_only=True),),
    "commitlog_put_batch": (at_least(200_000, "messages/s", quiet_machine_only=True),),
    "dispatch_lag": (at_most(1.0, "s"),),
    "dispatch_rebuild": (at_least(200_000, "messages/s", quiet_machine_only=True),),
    "broker_send_3nodes": (at_least(55_000, "messages/s", quiet_machine_only=True),),
    "broker_send_plain": (at_least(60_000, "messages/s", quiet_machine_only=True),),
    "pull": (at_least(200_000, "messages/s", quiet_machine_only=True),),
    "query_p50": (at_most(1.5, "ms"),),
    "pop_8consumers": (at_least(10_000, "messages/s", quiet_machine_only=True),),
    # RocketMQ 5's official client, at plain brokers that acknowledge from memory, as Apache's does.
    "gateway_send": (at_least(1, baseline=APACHE_GATEWAY),),
    "gateway_pop": (at_least(1, baseline=APACHE_GATEWAY),),
    "gateway_timed_late_p99": (at_most(1, baseline=APACHE_GATEWAY),),
    "pop_latency_p50": (Limit(5, False, "ms", quiet_machine_only=True),),
    # With a million consumer offsets; messages of the state wait for a view of it.
    "broker_state_view": (at_most(20, "ms"),),
    "broker_failover_p99": (at_most(3.0, "s"),),
    # Of two groups, when the process that leads a third one is killed, or the disk of that one's leader is full. On a
    # busy machine, a p99 of the same load varies by more than that.
    "groups_kill_p99": (Limit(1.1, False, baseline=BEFORE, quiet_machine_only=True),),
    "groups_full_disk_p99": (Limit(1.1, False, baseline=BEFORE, quiet_machine_only=True),),
    # RocketMQ's own client. Java's brokers answer from memory, ours when a quorum has flushed.
    "remoting_send_one": (at_most(1.0, baseline=JAVA_BROKERS),),
    "remoting_send_threads": (at_least(1.2, baseline=JAVA_BROKERS),),
    "remoting_send_async": (at_least(1.2, baseline=JAVA_BROKERS),),
    "remoting_send_batch": (at_least(35_000, "messages/s", quiet_machine_only=True),),
    "remoting_push_consumer": (at_least(0.8, baseline=JAVA_BROKERS),),
    # Classic replication. SYNC_MASTER by our own pipelined producer, Java's pair by Java's asynchronous one.
    "ha_replication": (at_least(300, "MB/s", quiet_machine_only=True), at_least(0.5, baseline=RAW_COPY)),
    "sync_master_send": (at_least(40_000, "messages/s", quiet_machine_only=True), at_least(2, baseline=JAVA_PAIR)),
    "ha_idle_lag": (Limit(10, False, "ms", quiet_machine_only=True),),
    # What many clients, or bad ones, cost a broker, and what another client notices.
    "crowd_connections_memory": (at_most(150, "MB"),),
    "crowd_connections_send_p99": (Limit(50, False, "ms", quiet_machine_only=True),),
    "crowd_consumers_memory": (at_most(100, "MB"),),
    "crowd_consumers_send_p99": (Limit(50, False, "ms", quiet_machine_only=True),),
    "crowd_deaf_memory": (at_most(400, "MB"),),  # answer_bytes_max, and what else they may leave
    "crowd_deaf_send_p99": (Limit(50, False, "ms", quiet_machine_only=True),),
    "crowd_heartbeats_memory": (at_most(150, "MB"),),
    "crowd_heartbeats_send_p99": (Limit(50, False, "ms", quiet_machine_only=True),),
    # Ten groups with different SQL conditions on a topic that gets 10,000 messages/s, and its producer.
    "sql_groups_send_p99": (at_most(1.1, baseline=ALONE),),
    "metrics_scrape": (at_most(20, "ms"),),
    "metrics_overhead_pipelined": (at_most(1.1, baseline=UNMEASURED),),
    "metrics_overhead_single": (at_most(1.1, baseline=UNMEASURED),),
    # A whole command, in processor time.
    "cli_help": (at_most(0.08, "s"),),
    "cli_status": (at_most(0.15, "s"),),
    # The idle web console of three nodes.
    "console_idle_no_page": (at_most(2, "% of a core"),),
    "console_idle_one_page": (at_most(1, "% of a core"),),
    "console_page_1000_topics": (at_most(1, "% of a core"),),
    # From the request for the page to the first rows of its list.
    "console_first_list_10000": (at_most(1, "s"),),
    # TLS may cost a quarter of the plaintext throughput, in one run.
    "tls_append_pipelined": (at_least(0.75, baseline=PLAINTEXT),),
    "tls_broker_send": (at_least(0.75, baseline=PLAINTEXT),),
    # Spark, on 3 GiB of log with bodies of 200 B to 4 KiB; all on one processor except the scaling.
    "spark_decode": (at_least(3, "GB/s", quiet_machine_only=True), at_least(10, baseline=STRUCT_LOOP)),
    "spark_scan": (at_least(0.8, baseline=PARQUET),),
    "spark_scan_typed": (at_least(0.1, baseline=PARQUET),),
    "spark_scan_headers": (at_least(3, baseline=WITH_BODIES),),
    "spark_scaling": (at_least(1.4, baseline=ONE_CORE),),
    # A split of 256 MiB, the interpreter with numpy and Arrow, and a few batches.
    "spark_worker_memory": (at_most(550, "MB"),),
    # "audit of two replicas ≥ 3x md5sum of one; rebuild ≥ 400,000 records/s on two cores"
    "spark_audit": (at_least(3, baseline=MD5SUM),),
    "spark_rebuild": (at_least(400_000, "records/s", quiet_machine_only=True),),
    # "50,000 messages/s sustained from a live three-node group with lag < 5 s; sink ≥ 30,000 messages/s". Live, the
    # producer, the brokers and Spark share the processors: so keeping up with what is sent is judged, too.
    "spark_stream": (at_least(50_000, "messages/s", quiet_machine_only=True), at_least(0.95, baseline=SENT_MEANWHILE)),
    "spark_stream_lag": (Limit(5.0, False, "s", quiet_machine_only=True),),
    "spark_stream_drain": (at_least(50_000, "messages/s", quiet_machine_only=True),),
    "spark_table": (at_least(60_000, "messages/s", quiet_machine_only=True), at_least(0.95, baseline=SENT_MEANWHILE)),
    "spark_table_lag": (Limit(5.0, False, "s", quiet_machine_only=True),),
    "spark_table_memory": (at_most(550, "MB"),),
    "spark_sink": (at_least(30_000, "messages/s", quiet_machine_only=True),),
    "idle_rss": (at_most(150, "MB"),),
    "pending_threads": (at_most(64, "threads"),),
}


def judge(
    figures: Sequence[Figure], *, quiet: bool, targets: Mapping[str, tuple[Limit, ...]] = TARGETS
) -> list[Judgement]:
    """Every limit on every measured name, in the order of the figures. Names without limits are skipped."""
    by_name: dict[str, list[Figure]] = {}
    for figure in figures:
        by_name.setdefault(figure.name, []).append(figure)
    return [
        Judgement(name, limit, _verdict(limit, rows, quiet=quiet))
        for name, rows in by_name.items()
        for limit in targets.get(name, ())
    ]


def _verdict(limit: Limit, rows: Sequence[Figure], *, quiet: bool) -> TargetVerdict:
    if limit.baseline:
        ratios = [row.ratio for row in rows if row.baseline == limit.baseline and row.ratio is not None]
        if not ratios:
            return TargetVerdict.UNPROVEN
        held = all(limit.holds(one) for one in ratios)
    else:
        held = all(limit.holds(row.value) for row in rows)
    if held:
        return TargetVerdict.MET
    return TargetVerdict.NOISY if limit.quiet_machine_only and not quiet else TargetVerdict.MISSED
