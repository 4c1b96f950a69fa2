"""The real Prometheus server with our configuration, rules and dashboard, beside real groups whose leader is killed."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import closing, suppress
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from dledger_cli.metrics.catalog import BROKER_SPECS, NODE_SPECS, SPECS, MetricKind
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from tests.integration.harness import SMALL_SEGMENTS
from tests.support.prometheus import DEPLOY, PrometheusServer, require
from tests.support.waiting import wait_until

RULES = DEPLOY / "prometheus" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dledger.json"
DOCS = Path(__file__).parents[2] / "docs"
RATE_INTERVAL = "5s"
FEW_FAILURES = {"dledger_append_failures_total"}
"""Series that a healthy group does not have."""
FEW_CHANGES = {"dledger_member_changes_total", "dledger_peer_ready"}
"""Series of a group whose members have been changed, or that has learners."""


def alert_rules() -> list[dict[str, Any]]:
    """Every rule of ours."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard_queries() -> list[str]:
    """Every expression of the dashboard, its variables filled in as for all nodes."""
    board = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [
        re.fullmatch(r"label_values\((.*), \w+\)", one["query"]["query"]) for one in board["templating"]["list"][1:]
    ]
    found += [one[1] for one in variables if one is not None]
    return filled_in(found)


def notes() -> list[str]:
    """What is marked on all of its panels: moments, so there may be none."""
    return filled_in([note["expr"] for note in json.loads(DASHBOARD.read_text())["annotations"]["list"]])


def filled_in(expressions: list[str]) -> list[str]:
    """Expressions with the dashboard's variables as they are for all nodes."""
    filled = [one.replace("$__rate_interval", RATE_INTERVAL) for one in expressions]
    filled = [re.sub(r"\$(group|node|broker)\b", ".*", one) for one in filled]
    assert not [one for one in filled if "$" in one]
    return filled


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression speaks of."""
    return set(re.findall(r"\b((?:dledger|rocketmq|process)_[a-z_]+)\b", re.sub(r'"[^"]*"', "", expression)))


def told_as(name: str) -> set[str]:
    """The series that a metric of the catalog makes."""
    spec = SPECS[name]
    return {f"{name}_{part}" for part in ("bucket", "count", "sum")} if spec.kind is MetricKind.HISTOGRAM else {name}


def promtool(*arguments: str, given: str = "") -> str:
    """Run it where the rules are, ``given`` being its input; its output, once it has succeeded."""
    ran = subprocess.run(
        [require("promtool"), *arguments], cwd=RULES.parent, input=given, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def test_configuration_and_rules_are_what_prometheus_understands() -> None:
    """promtool check config, check rules."""
    assert "SUCCESS" in promtool("check", "config", "prometheus.yml")
    assert f"SUCCESS: {len(alert_rules())} rules found" in promtool("check", "rules", "alerts.yml")


def test_every_rule_fires_when_it_should_and_only_then() -> None:
    """promtool test rules; and none is left out there."""
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")

    tests = yaml.safe_load((RULES.parent / "alerts_test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    assert fired == {rule["alert"] for rule in alert_rules()}


def test_every_alert_has_its_chapter() -> None:
    """What it means and what to do; the alert itself says where."""
    text = (DOCS / "monitoring.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    chapters = {line.removeprefix("### ").strip() for line in text.splitlines() if line.startswith("### ")}
    for rule in alert_rules():
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{rule['alert'].lower()}"
        assert rule["alert"] in chapters
    assert chapters == {rule["alert"] for rule in alert_rules()}


def test_rules_and_dashboard_speak_of_metrics_that_exist() -> None:
    """A renamed metric makes no empty panel and no alert that never fires."""
    known = {series for name in SPECS for series in told_as(name)}
    expressions = [rule["expr"] for rule in alert_rules()] + dashboard_queries() + notes()
    spoken_of = {name for one in expressions for name in metric_names(one)} - {"rocketmq_master", "dledger_role"}
    labels = {label for spec in SPECS.values() for label in spec.all_labels}

    unknown = {name for name in spoken_of - labels if not name.startswith("process_")} - known
    assert unknown == set()


def test_panels_do_not_lie_on_each_other() -> None:
    """What Grafana would move about or drop without a word: places, numbers, and a source that it can choose."""
    board = json.loads(DASHBOARD.read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)
    for panel in panels:
        assert panel["type"] == "row" or panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24


@pytest.mark.slow
def test_a_killed_leader_shows_in_prometheus_and_alarms(tmp_path: Path) -> None:
    """Role and term move to another node, the dead one is down; with two dead there is no leader; back, all is well."""
    group = LocalGroup(tmp_path / "group", settings=SMALL_SEGMENTS)
    group.serve_metrics()
    targets = [f"127.0.0.1:{port}" for port in group.metrics_ports.values()]
    with group, closing(group.client(timeout_s=30)) as client:
        old = group.leader()
        with PrometheusServer(tmp_path / "prometheus", targets, alert_after_s=1) as prometheus:

            def leaders() -> set[str]:
                return {labels["node"] for labels, _ in prometheus.query('dledger_role{role="leader"} == 1')}

            wait_until(lambda: leaders() == {old}, "the leader shows")
            (before,) = prometheus.query("max(dledger_term)")
            client.append(b"before the kill")

            group.kill(old)
            new = group.leader(other_than=old)
            wait_until(lambda: leaders() == {new}, "its successor shows")
            wait_until(
                lambda: prometheus.alerts().get("DLedgerNodeDown") == "firing", "the dead one shows", timeout_s=30
            )
            (after,) = prometheus.query("max(dledger_term)")
            assert after[1] > before[1]
            wait_until(lambda: "DLedgerNoLeader" not in prometheus.alerts(), "there is a leader")
            client.append(b"after the kill")

            group.kill(new)
            wait_until(lambda: prometheus.alerts().get("DLedgerNoLeader") == "firing", "nobody leads")
            assert "DLedgerSeveralLeadersInATerm" not in prometheus.alerts()

            group.start_all()
            client.append(b"all are back")
            gone = {"DLedgerNodeDown", "DLedgerNoLeader"}
            wait_until(lambda: not gone & set(prometheus.alerts()), "all is well again")


@pytest.mark.slow
def test_every_panel_of_the_dashboard_shows_something_of_real_brokers(tmp_path: Path) -> None:
    """Each expression is one that the real server understands, and gives series while a real group works."""
    brokers = LocalBrokers(tmp_path / "brokers", settings={"mappedFileSizeCommitLog": "16m"})
    brokers.serve_metrics()
    targets = [f"127.0.0.1:{port}" for port in brokers.metrics_ports.values()]
    with brokers, PrometheusServer(tmp_path / "prometheus", targets, alert_after_s=60) as prometheus:
        brokers.master()
        with Admin(brokers.addresses) as admin:
            admin.put_topic(TopicInfo("orders"))

        def work() -> None:
            with Producer(brokers.addresses) as producer:
                for _ in range(20):
                    producer.send(Message("orders", b"x" * 100))
            with Consumer(brokers.addresses, group="billing", topics="orders", start="first") as consumer:
                consumer.poll(5, timeout_s=10)
                consumer.commit()

        empty = {one for one in dashboard_queries() if not metric_names(one) & (FEW_FAILURES | FEW_CHANGES)}

        def nothing_is_empty() -> bool:
            work()
            empty.difference_update([one for one in empty if prometheus.query(one)])
            return not empty

        with suppress(AssertionError):
            wait_until(nothing_is_empty, "every query gives series")
        assert empty == set()
        for one in dashboard_queries() + notes():
            prometheus.query(one)  # also those that have nothing to show must be understood
        for port in brokers.metrics_ports.values():
            with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                assert promtool("check", "metrics", given=answer.read().decode()) == ""
        names = prometheus.names()
        of_machines = {
            spec.name for spec in NODE_SPECS if spec.meaning.startswith("State machine only")
        }  # brokers have none
        conditional = FEW_FAILURES | FEW_CHANGES | {"rocketmq_flush_latency_seconds"} | of_machines
        specs = (*NODE_SPECS, *BROKER_SPECS)
        expected = {spec.name for spec in specs if not spec.name.startswith("rocketmq_ha_")}  # of plain brokers only
        missing = {name for name in expected if not told_as(name) <= names} - conditional
        assert missing == set()
