"""Real processes: what a group tells Prometheus while its leader is killed, and what its logs say."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dledger.types import NodeId
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup, LocalGroupError, wait_until
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from tests.integration.harness import SMALL_SEGMENTS, STEADY
from tests.support.waiting import PATIENCE_S

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body."""
    with closing(HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def samples(port: int) -> Samples:
    """Everything that a node tells."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(get(port, "/metrics")[1])
        for sample in family.samples
    }


def value(found: Samples, name: str, **labels: str) -> float:
    """The one sample of this name that has these labels."""
    (fitting,) = (value for (one, has), value in found.items() if one == name and set(labels.items()) <= has)
    return fitting


def values(found: Samples, name: str, **labels: str) -> list[float]:
    """All samples of this name that have these labels."""
    return [value for (one, has), value in found.items() if one == name and set(labels.items()) <= has]


def log_lines(group: LocalGroup, node: NodeId) -> list[dict[str, Any]]:
    """A node's output, which must be JSON, every line of it."""
    return [json.loads(line) for line in group.logs(node).splitlines()]


def test_a_killed_leader_shows_in_metrics_and_logs(tmp_path: Path) -> None:
    """Term, role, leader, lag and reasons change as the group does; a node that came back is ready again."""
    group = LocalGroup(tmp_path, settings={**SMALL_SEGMENTS, **STEADY})
    group.serve_metrics()
    group.log_format = "json"
    with group, closing(group.client()) as client:
        old = group.leader()
        ports = group.metrics_ports
        for number in range(50):
            client.append(b"%d" % number)
        group.wait_converged()  # an append is answered when one of the others has it
        found = samples(ports[old])
        assert value(found, "dledger_role", role="leader") == 1
        assert value(found, "dledger_append_latency_seconds_count") == 50
        for peer in (node for node in group.nodes if node != old):
            assert value(found, "dledger_replication_latency_seconds_count", peer=peer) > 0
            assert value(found, "dledger_peer_lag_entries", peer=peer) >= 0
            # The term's NOOP, and the one that registers the client as a producer.
            assert value(samples(ports[peer]), "dledger_received_entries_total") == 52
            assert value(samples(ports[peer]), "dledger_leader_info", leader=old) == 1
        term = value(found, "dledger_term")

        group.kill(old)
        new = group.leader(other_than=old)
        client.append(b"after the kill")

        found = samples(ports[new])
        assert value(found, "dledger_term") > term
        assert value(found, "dledger_role_changes_total", role="leader", reason="elected") == 1
        assert value(found, "dledger_elections_total") >= 1
        wait_until(
            lambda: value(samples(ports[new]), "dledger_peer_last_contact_seconds", peer=old) > 1,
            PATIENCE_S,
            "it is silent",
        )
        assert value(samples(ports[new]), "dledger_peer_lag_entries", peer=old) >= 1
        group.start(old)
        wait_until(lambda: get(ports[old], "/readyz")[0] == 200, PATIENCE_S, "the restarted node is not ready")
        wait_until(
            lambda: value(samples(ports[new]), "dledger_peer_lag_bytes", peer=old) == 0,
            PATIENCE_S,
            "it did not catch up",
        )
        assert group.stop(new) == 0

        events = [line["event"] for line in log_lines(group, new) if "event" in line]
        assert events[0] == "recovery"
        assert "started" in events
        assert events[-1] == "stopped"
        assert "stopping" in events
        elected = [line for line in log_lines(group, new) if line.get("reason") == "elected"]
        assert [(line["node"], line["group"], line["role"], line["leader"]) for line in elected] == [
            (new, "default", "LEADER", new)
        ]
        recovered = [line for line in log_lines(group, old) if line.get("event") == "recovery"]
        first, second = (line["last_index"] for line in recovered)
        assert first == -1
        assert second >= 50


def test_brokers_tell_of_topics_and_of_their_log(tmp_path: Path) -> None:
    """A group of brokers: the node's figures and the broker's, arrivals on every member, what is given on one."""
    brokers = LocalBrokers(tmp_path, settings={**STEADY, "mappedFileSizeCommitLog": "16m"})
    brokers.serve_metrics()
    with brokers:
        master = brokers.master()
        with Admin(brokers.addresses) as admin:
            admin.put_topic(TopicInfo("orders", 1, 1))
        with Producer(brokers.addresses) as producer:
            for _ in range(20):
                producer.send(Message("orders", b"x" * 100))
        with Consumer(brokers.addresses, group="billing", topics="orders", start="first") as consumer:
            got = len(consumer.poll(12, timeout_s=60))
            consumer.commit()
        brokers.wait_converged()

        for node, port in brokers.metrics_ports.items():
            wait_until(
                lambda port=port: value(samples(port), "rocketmq_messages_in_total", topic="orders") == 20,  # type: ignore[misc]  # bound early
                PATIENCE_S,
                "the messages did not arrive",
            )
            found = samples(port)
            assert value(found, "rocketmq_master", node=node) == (node == master)
            assert value(found, "dledger_role", role="leader", node=node) == (node == master)
            wait_until(  # slaves gather what is committed for some milliseconds before they apply it
                lambda port=port: (
                    values(samples(port), "rocketmq_consumer_lag_messages", topic="orders")  # type: ignore[misc]  # bound early
                    == [20 - got]
                ),
                PATIENCE_S,
                "the offset of the group is not known",
            )
            wait_until(
                lambda port=port: (
                    value(samples(port), "dledger_applied_index")  # type: ignore[misc]  # bound early
                    == value(samples(port), "dledger_committed_index")
                ),
                PATIENCE_S,
                "what is committed is not dispatched",
            )
            assert get(port, "/readyz")[0] == 200
        found = samples(brokers.metrics_ports[master])
        assert (
            value(found, "rocketmq_messages_out_total", topic="orders", consumer_group="billing") >= got
        )  # it reads ahead
        assert value(found, "rocketmq_puts_total") >= 20


def test_a_metrics_port_in_use_is_told_before_anything_is_opened(tmp_path: Path) -> None:
    """A configuration error (exit code 2) that names the setting, not a traceback."""
    group = LocalGroup(tmp_path, size=1, settings={**SMALL_SEGMENTS, **STEADY})
    group.serve_metrics()
    with group:
        (node,) = group.nodes
        other = LocalGroup(tmp_path / "other", size=1)
        other.metrics_ports = dict(group.metrics_ports)
        with (
            pytest.raises(LocalGroupError, match=r"exited with code 2(.|\n)*cannot serve metrics at .*metrics_port"),
            other,
        ):
            pass
        assert not (tmp_path / "other" / f"dledger-{node}").exists()
