"""``docs/metrics.md``: every metric, from the catalog that the endpoint itself is made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from cluster.metrics.catalog import BROKER_LABELS, BROKER_SPECS, NODE_LABELS, NODE_SPECS, Spec
from cluster.metrics.histogram import LATENCY_BOUNDS_S
from dledger.core.outbox import RoleReason

_HEAD: Final = """\
# Metrics

_Made from the code by `make docs`: change `cluster/metrics/catalog.py` or `tools/docs_reference/metrics.py`._

Off by default. Give a node or broker a port, and it tells Prometheus about itself:

```
dledger serve -c n0.conf --set metrics_port=5557
DLEDGER_METRICS_PORT=5557 DLEDGER_METRICS_HOST=0.0.0.0 dledger broker -c broker-n0.conf
curl http://127.0.0.1:5557/metrics
```

| path | answers |
|---|---|
| `/metrics` | everything below, in Prometheus's text format |
| `/healthz` | 200 while the process lives and has not failed (also during recovery) |
| `/readyz` | 200 once it knows a leader; a broker also must know what is committed. Otherwise 503 |

RocketMQ's names `metricsPromExporterPort` and `metricsPromExporterHost` work, too; `metricsExporterType` changes
nothing here: the port is the switch. The endpoint is read-only, neither encrypted nor guarded, and listens on loopback
unless `metrics_host` says otherwise: keep it inside.

- A Prometheus configuration and alert rules: [cluster/deploy/prometheus](../cluster/deploy/prometheus);
  what each alert means: [alerts.md](alerts.md).
- A Grafana dashboard: [cluster/deploy/grafana](../cluster/deploy/grafana).

**What it costs.** Gauges and most counters are read from the node's state when Prometheus asks. Only histograms are
fed while it works, once per batch, push or flush, never per entry. Without a port nothing is measured at all.

**Cardinality.** Topics, and pairs of a group and a topic, get series of their own up to `metrics_topics_max` (200). The
first ones stay, so that no counter goes back; all others are told together as `(others)`. Lags of groups beyond the
limit are left out, and `rocketmq_consumer_lags_left_out` says how many.

**Histograms of seconds** have these buckets: {buckets}.

**Also there**: `process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_open_fds` and the other process
metrics of the Prometheus client library.
"""

_REASONS: Final = {
    RoleReason.ELECTION_TIMEOUT: "no leader was heard for an election timeout, or it is alone in its group",
    RoleReason.PRE_VOTE_WON: "a quorum would vote for it, so it campaigns in a new term",
    RoleReason.LEADERSHIP_OFFERED: "the leader hands over to it",
    RoleReason.ELECTED: "a quorum voted for it",
    RoleReason.LEADER_HEARD: "a leader of its term or of a later one spoke",
    RoleReason.HIGHER_TERM: "somebody spoke of a later term",
    RoleReason.QUORUM_LOST: "it led, and a quorum has not answered for an election timeout",
    RoleReason.NO_PROGRESS: "it led, and committed nothing of what waited for several election timeouts",
    RoleReason.DISK_FULL: "it has no room for a new leader's first entry",
    RoleReason.UNREADABLE_PRODUCERS: "a later version wrote what it knows of producers, and this one cannot read it",
    RoleReason.STANDING_LOST: "it led or campaigned, and learned that it lacks what it once had",
    RoleReason.DAMAGED_LOG: "what its log tells of producers is damaged, so it must not lead",
}


def text() -> str:
    """The whole document."""
    buckets = ", ".join(f"{bound:g}" for bound in LATENCY_BOUNDS_S)
    reasons = "".join(f"| `{reason}` | {_REASONS[reason]} |\n" for reason in RoleReason)
    return "".join(
        [
            _HEAD.replace("{buckets}", buckets),
            "\n## Of every node\n\n",
            f"All have the labels {_names(NODE_LABELS)}. The last column is DLedger's name, where it has one (its "
            "values are microseconds, although it says milliseconds; ours are seconds).\n\n",
            _table(NODE_SPECS),
            "\n`reason` of `dledger_role_changes_total` and of the log's `role_change` lines:\n\n",
            f"| reason | the node's role, term or leader changed because |\n|---|---|\n{reasons}",
            "\n## Of a broker\n\n",
            f"All have the labels {_names(BROKER_LABELS)}. The last column is the name in RocketMQ 5 (4.9 has no "
            "Prometheus endpoint; its runtime info is named where that has the figure).\n\n",
            _table(BROKER_SPECS),
        ]
    )


def _table(specs: Iterable[Spec]) -> str:
    rows = "".join(
        f"| `{spec.name}` | {spec.kind} | {_names(spec.labels)} | {spec.meaning} | {_java(spec.java)} |\n"
        for spec in specs
    )
    return f"| metric | kind | labels | meaning | in Java |\n|---|---|---|---|---|\n{rows}"


def _names(labels: Iterable[str]) -> str:
    return " ".join(f"`{label}`" for label in labels)


def _java(words: str) -> str:
    if words.startswith(("dledger_", "rocketmq_")):
        name, space, rest = words.partition(" ")
        return f"`{name}`{space}{rest}"
    return words
