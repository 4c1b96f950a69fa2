"""The tables of metrics in ``docs/monitoring.md``, from the catalog that the endpoint itself is made from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from dledger.core.messages import RoleReason
from dledger_cli.metrics.catalog import BROKER_LABELS, BROKER_SPECS, NAME_SERVER_SPECS, NODE_LABELS, NODE_SPECS, Spec
from dledger_cli.metrics.recorder import LATENCY_BOUNDS_S
from tools.docs_reference.sections import replaced

_REASONS: Final = {
    RoleReason.ELECTION_TIMEOUT: "it heard no leader for an election timeout, or is alone in its group",
    RoleReason.LEADER_GONE: "its leader's process has ended, so it asks for votes at once",
    RoleReason.PRE_VOTE_WON: "a quorum would vote for it, so it campaigns in a new term",
    RoleReason.LEADERSHIP_OFFERED: "the leader transfers leadership to it",
    RoleReason.ELECTED: "a quorum voted for it",
    RoleReason.LEADER_HEARD: "it received a message from a leader of its term or of a later one",
    RoleReason.HIGHER_TERM: "it received a message of a later term",
    RoleReason.QUORUM_LOST: "it led, and a quorum did not answer for an election timeout",
    RoleReason.NO_PROGRESS: "it led, and committed none of its pending entries for several election timeouts",
    RoleReason.DISK_FULL: "it has no room for a new leader's first entry",
    RoleReason.UNREADABLE_PRODUCERS: "its log holds a producer table of a later version, which it cannot read",
    RoleReason.STANDING_LOST: "it led or campaigned, and learned that it lacks entries it once had",
    RoleReason.NO_VOTER: "it is a learner, or was removed or not added yet, so it neither campaigns nor leads",
    RoleReason.DAMAGED_LOG: "the producer table in its log is damaged, so it must not lead",
}


def text() -> str:
    """The whole document. Raises ``ValueError`` if it has no place for the tables."""
    return replaced("monitoring.md", "metrics", tables())


def tables() -> str:
    """Every metric, by the kind of server."""
    buckets = ", ".join(f"{bound:g}" for bound in LATENCY_BOUNDS_S)
    reasons = "".join(f"| `{reason}` | {_REASONS[reason]} |\n" for reason in RoleReason)
    return "".join(
        [
            f"Histograms of seconds have these buckets: {buckets}.\n",
            "\n### Metrics of every node\n\n",
            f"All have the labels {_names(NODE_LABELS)}. The last column is DLedger's name, if any (its values are "
            "in microseconds, although it says milliseconds; ours are in seconds).\n\n",
            _table(NODE_SPECS),
            "\n`reason` of `dledger_role_changes_total` and of the log's `role_change` lines:\n\n",
            f"| reason | the node's role, term or leader changed because |\n|---|---|\n{reasons}",
            "\n### Metrics of brokers\n\n",
            f"All have the labels {_names(BROKER_LABELS)}. The last column is the name in RocketMQ 5 (4.9 has no "
            "Prometheus endpoint; where its runtime info contains the value, that is named).\n\n",
            _table(BROKER_SPECS),
            "\n### Metrics of name servers\n\n",
            "Java's have none. `request` is a name of [the table of requests](rocketmq.md#requests), or `unknown`; "
            "`code` is RocketMQ's.\n\n",
            _table(NAME_SERVER_SPECS),
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
