"""``dledger``'s commands about brokers at Apache RocketMQ's own, 4.9 and 5.5: ``make interop``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_cli import cli
from rocketstore.client import Admin, ClientError
from tests.interop import java, rocketmq, rocketmq5
from tests.interop.rocketmq import broker_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.interop

START_S = 120.0
CALL_S = 30.0


@pytest.mark.parametrize("release", [4, 5])
def test_commands_about_brokers_work_at_apaches(tmp_path: Path, release: int) -> None:
    """Topics, messages, groups and the brokers themselves, found by their name server; also those of one name."""
    java.build()
    programs = rocketmq if release == 4 else rocketmq5
    with programs.name_server(tmp_path / "namesrv") as address:
        port = broker_port()
        settings = {"listenPort": port, "namesrvAddr": address, "brokerName": "theirs"}

        def run(*words: str, lines: bytes | None = None) -> str:
            options = [*words, "--namesrv", address, "--timeout", "30"]
            shown = CliRunner().invoke(cli.main, options, input=lines, prog_name="dledger")
            assert shown.exit_code == 0, f"{words}: {shown.output}"
            return shown.stdout

        def registered() -> bool:
            with Admin(name_servers=address, timeout_s=CALL_S) as admin:
                try:
                    return bool(admin.brokers())
                except ClientError:
                    return False

        def consumed(*words: str) -> list[str]:
            return sorted(run("message", "consume", "-t", "orders", *words).split())

        with programs.broker(tmp_path / "broker", settings):
            wait_until(registered, "the broker has registered", START_S)
            run("topic", "create", "orders", "-q", "4")
            wait_until(lambda: "orders" in run("topic", "list"), "the topic is there", START_S)

            run("message", "send", "-t", "orders", "one", "--tags", "new", "--keys", "k1")
            run("message", "send", "-t", "orders", "two", "three", "--broker-name", "theirs")
            run("message", "send", "-t", "orders", "four", "--broker-name", "theirs", "--queue", "3")
            run("message", "send", "-t", "orders", "-", "--broker-name", "theirs", "--key", "alice", lines=b"5\n6\n")

            everything = sorted(["one", "two", "three", "four", "5", "6"])
            wait_until(lambda: consumed() == everything, "all are there", START_S)
            assert consumed("--tags", "new") == ["one"]
            assert consumed("--queue", "3", "--broker-name", "theirs").count("four") == 1
            assert consumed("-g", "billing", "--from", "first") == everything
            assert "one" in run("message", "query-by-key", "-t", "orders", "k1")

            progress = json.loads(run("consumer", "progress", "-g", "billing", "-t", "orders", "--json"))
            assert [(one["broker"], one["lag"]) for one in progress] == [("theirs", 0)] * 4
            reset = ("consumer", "reset-offset", "-g", "billing", "-t", "orders", "--to", "first", "--json")
            places = json.loads(run(*reset))
            assert places == {str(queue): 0 for queue in range(4)}
            assert consumed("-g", "billing") == everything

            listed = json.loads(run("cluster", "list", "--json"))
            (broker,) = listed["brokers"]
            assert (broker["broker_name"], broker["is_master"], listed["master"]) == ("theirs", True, broker["address"])
            assert broker["version"].startswith(f"V{release}_")
            assert json.loads(run("broker", "status", "--json"))["boot_ms"] > 0
            health = CliRunner().invoke(cli.main, ["health", broker["address"]])
            assert (health.exit_code, health.output) == (0, f"{broker['address']}: serving\n")
            run("consumer", "delete", "billing", "--yes")
            run("topic", "delete", "orders", "--yes")
