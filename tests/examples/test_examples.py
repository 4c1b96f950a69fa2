"""The examples that need no Spark, run as their docstrings say."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import free_ports
from rocketstore.client import Consumer
from tests.support.waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 120.0


def run(name: str, *words: str) -> str:
    """What it prints; it must end well."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(command: list[str], output: Path) -> subprocess.Popen[bytes]:
    with output.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream)


def test_what_is_produced_is_consumed(tmp_path: Path) -> None:
    """All of it; and a second run goes on behind the first."""
    with LocalBrokers(tmp_path, size=1) as brokers:
        brokers.master()
        shown = [run("produce_and_consume.py", ",".join(brokers.addresses), "--count", "30") for _ in range(2)]

    assert [text.splitlines()[0] for text in shown] == ["sent 30 messages"] * 2
    assert [text.splitlines()[1].partition(",")[0] for text in shown] == ["received 30 messages"] * 2


def test_a_group_shares_the_work(tmp_path: Path) -> None:
    """Two members bill every order once, and leave well."""
    with LocalBrokers(tmp_path, size=1) as brokers:
        brokers.master()
        addresses = ",".join(brokers.addresses)
        run("produce_and_consume.py", addresses, "--count", "0")  # which creates the topic
        command = [sys.executable, str(EXAMPLES / "work_in_a_group.py"), addresses, "--group", "work"]
        files = [tmp_path / "one", tmp_path / "two"]
        members = [start(command, file) for file in files]
        orders = {f"order {number}" for number in range(30)}

        def billed() -> list[str]:
            return [
                line.split(" (")[0].removeprefix("billed ") for file in files for line in file.read_text().splitlines()
            ]

        try:
            wait_until(lambda: all("joined" in file.read_text() for file in files), "both have joined")
            run("produce_and_consume.py", addresses, "--count", "30", "--group", "other")
            wait_until(lambda: orders <= set(billed()), "all are billed")
            for member in members:
                member.send_signal(signal.SIGINT)
            assert [member.wait(TIMEOUT_S) for member in members] == [0, 0]
        finally:
            for member in members:
                member.kill()
                member.wait()
    assert {file.read_text().splitlines()[-1] for file in files} == {"left"}


def test_orders_and_their_messages_agree(tmp_path: Path) -> None:
    """Each order that was written is delivered once, and none that was refused."""
    with LocalBrokers(tmp_path, size=1) as brokers:
        brokers.master()
        addresses = ",".join(brokers.addresses)
        database = tmp_path / "orders.db"
        shown = run("send_in_transaction.py", addresses, str(database), "--count", "30")
        bodies: list[str] = []
        with Consumer(addresses, group="billing", topics="orders", start="first") as consumer:

            def polled() -> bool:
                bodies.extend(one.body.decode() for one in consumer.poll(timeout_s=1.0))
                return len(bodies) >= 26

            wait_until(polled, "all are delivered")
            bodies += [one.body.decode() for one in consumer.poll(timeout_s=0.5)]

    assert Counter(line.split(": ")[1] for line in shown.splitlines()) == {"COMMIT": 26, "ROLLBACK": 4}
    with closing(sqlite3.connect(database)) as orders:
        written = [f"order {number}" for (number,) in orders.execute("select number from orders")]
    assert sorted(bodies) == sorted(written)


def test_each_fits_on_a_screen() -> None:
    """What does not is a program, and belongs elsewhere."""
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}

    assert len(lines) >= 7
    assert {name for name, count in lines.items() if count > 40} == set()


def test_an_embedded_node_keeps_its_map(tmp_path: Path) -> None:
    """Of all runs, the last assignment to each name."""
    (port,) = free_ports(1)
    words = (str(tmp_path / "map"), "--members", f"n0-127.0.0.1:{port}")

    assert run("embedded_node.py", *words, "colour=blue", "size=7") == "colour=blue\nsize=7\n"
    assert run("embedded_node.py", *words, "colour=red") == "colour=red\nsize=7\n"


def test_a_cluster_grows(tmp_path: Path) -> None:
    """All messages of the first half are in the first group, and everything is received.

    The second half is spread; how is another test's matter, for a group that elects a leader just then is passed over.
    """
    one, two, received = run("growing_cluster.py", str(tmp_path), "--count", "40").splitlines()

    assert one == "one group:  broker-a 40"
    places = re.fullmatch(r"two groups: broker-a (\d+), broker-b (\d+)", two)
    assert places is not None, two
    first, second = map(int, places.groups())
    assert (first >= 40, first + second) == (True, 80)
    assert received == "received 80 messages"
