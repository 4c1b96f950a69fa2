"""The scenarios, in order of execution: quiet and short ones first, those that fill the disk last."""

from __future__ import annotations

from typing import Final

from benchmarks.registry import Scenario
from benchmarks.scenarios import (
    appends,
    brokers,
    commands,
    console,
    crowds,
    failover,
    filters,
    handover,
    large_reads,
    members,
    messages,
    metrics,
    pop,
    remoting,
    replication,
    resources,
    restart,
    spark,
    spark_live,
    spark_replicas,
    store,
    tls,
)

ALL: Final[tuple[Scenario, ...]] = (
    resources.IDLE,
    resources.PENDING,
    commands.SCENARIO,
    console.IDLE,
    console.MANY,
    appends.SYNC,
    appends.ASYNC,
    metrics.SCRAPE,
    metrics.OVERHEAD,
    tls.SCENARIO,
    large_reads.SCENARIO,
    failover.SCENARIO,
    failover.FREEZING,
    members.GAPS,
    handover.SCENARIO,
    store.SCENARIO,
    messages.SCENARIO,
    brokers.GROUP,
    brokers.PLAIN,
    pop.POP,
    filters.SCENARIO,
    remoting.SCENARIO,
    replication.SCENARIO,
    crowds.SCENARIO,
    spark.DECODE,
    spark.SCANS,
    spark_live.SCENARIO,
    restart.SCENARIO,
    members.CATCHING_UP,
    spark_replicas.SCENARIO,
)
