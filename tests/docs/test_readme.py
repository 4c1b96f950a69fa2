"""README's first minutes, from top to bottom, against a fresh demo: what is typed there prints what is shown there."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dledger.client import DLedgerClient
from dledger_cli.commands import demo
from dledger_cli.commands.demo import spark_lines
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.settings import load_broker_settings
from tests.docs.documents import ROOT, svg_lines
from tests.integration.harness import STEADY

pytestmark = pytest.mark.lane("readme")  # one demo for all

DEADLINE_S = 120
SHOWN_AT_END = 12005
"""The last index of README's demo, with one election and one failover."""
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
AFTER_THE_KILL = (
    "dledger message send -t orders --keys order-18 'after the kill'",
    "dledger message query-by-key -t orders order-17",
    "dledger consumer progress -g billing",
    "dledger cluster list",
)
DEMO = """
import json, sys
from dledger_cli.commands import demo
demo.SEGMENTS.update(json.loads(sys.argv[1]))
sys.exit(demo.run(None, keep=True))
"""
_INDEX = re.compile(r"(?<![\d,.:])12\d{3}(?![\d,])")


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """What ``dledger demo --keep`` prints; its processes are ended by the command it gives.

    Its members wait longer than usual for their leader, so that a stall of the machine does not cost an election, which
    would take an index.
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("demo"))}
    done = subprocess.run(
        [sys.executable, "-c", DEMO, json.dumps({**STEADY, "transfer_timeout_ms": "10000"})],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=environment,
    )
    ending = re.search(r"End it: +(kill -9 [\d ]+; rm -r \S+)", done.stdout)
    assert ending is not None, done.stdout + done.stderr
    try:
        assert done.returncode == 0
        yield done.stdout
    finally:
        subprocess.run(["sh", "-c", ending[1]], check=True, timeout=DEADLINE_S)


def section(name: str) -> str:
    """The text of a section of README."""
    text = (ROOT / "README.md").read_text()
    begin = text.index(f"\n## {name}\n")
    return text[begin : text.index("\n## ", begin + 1)]


def block(text: str, first_line: str) -> list[str]:
    """The lines of the block that begins with this line."""
    begin = text.index(f"```\n{first_line}") + 4
    return text[begin : text.index("\n```", begin)].splitlines()


def bootstrap(told: str) -> str:
    """The addresses of the demo's group."""
    found = re.search(r"DLEDGER_BOOTSTRAP=(\S+)", told)
    assert found is not None
    return found[1]


def bare(line: str) -> str:
    """A line without what differs from run to run: who leads, ports, terms, times, sizes of files and of text."""
    for pattern, instead in (
        (r"^(n[0-2] .*127\.0\.0\.1:\d+).*", r"\1"),  # notes, if the machine is very busy
        (r"\bn[0-2]\b", "nX"),
        (r"(FOLLOWER|LEADER) +\d+", "ROLE #"),
        (r'"term": \d+, "position": \d+', '"term": #, "position": #'),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"\bc-[0-9a-f]{24}", "PRODUCER"),
        (r"in [\d.]+ s \([\d,]+/s\)", "in # s"),
        (r"\b7F000001[0-9A-F]{24}\b", "MESSAGE"),
        (r"queue \d at offset \d+", "QUEUE"),
        (r"[0-9a-f]{16}$", "DIGEST"),
        (r"/tmp/\S+", "DIRECTORY"),
        (r"\s+", " "),
    ):
        line = re.sub(pattern, instead, line)
    return line.strip()


def without_figures(line: str) -> str:
    """For lines that speak of times, rates and sizes."""
    return re.sub(r"[\d,]+", "#", bare(line))


def run_at_terminal(line: str, environment: dict[str, str]) -> list[str]:
    """What a line of README prints there, which may be more than a pipe gets."""
    ours, theirs = pty.openpty()
    try:
        with subprocess.Popen(["bash", "-c", line], stdin=theirs, stdout=theirs, env=environment) as running:
            assert running.wait(DEADLINE_S) == 0
        return os.read(ours, 65536).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)


def run(line: str, environment: dict[str, str]) -> list[str]:
    """What a line of README prints into a pipe."""
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return [one for one in lines if not re.match(r"n[0-2]: ", one)]  # what is the matter with a member, as above


@pytest.mark.slow
def test_the_picture_shows_the_steps_that_the_demo_reports(told: str) -> None:
    """Each of them, in this order, and the table."""
    first, *lines = [line for line in svg_lines(ROOT / "docs" / "images" / "demo.svg") if line]
    shown = [without_figures(line) for line in lines]
    assert first == "$ make demo"
    steps = [without_figures(line) for line in told.splitlines() if line.startswith(("✓", "node", "n0", "n1", "n2"))]

    assert len(shown) == 13
    assert steps == shown


@pytest.mark.slow
def test_the_lines_print_what_is_shown(told: str) -> None:
    """Indexes included, from the log's end on, which each election of the demo moves by one."""
    shown = block(section("Five minutes"), "$ dledger status")
    environment = {
        **os.environ,
        "DLEDGER_BOOTSTRAP": bootstrap(told),
        "PATH": PATH,
    }
    with closing(DLedgerClient(bootstrap(told).split(","))) as client:
        moved = client.metadata().end_index - SHOWN_AT_END
    assert 0 <= moved < 10

    def there(line: str) -> str:
        return _INDEX.sub(lambda index: str(int(index[0]) + moved), line)

    commands = [there(line)[2:] for line in shown if line.startswith("$ ")]
    printed = [line for command in commands for line in (f"$ {command}", *run(command, environment))]

    assert len(commands) == 4
    assert [bare(line) for line in printed] == [there(bare(line)) for line in shown]
    first = run("dledger inspect " + directory(told) + "/dledger-n0", environment)
    assert first[-1] == "no problems found"


def directory(told: str) -> str:
    """Where the demo keeps its files."""
    found = re.search(r"three processes in (\S+)", told)
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_the_python_lines_run(told: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The loop, which would wait for new entries, ends after the first ones: the text's."""
    text = section("Python")
    begin = text.index("```python\n") + 10
    addresses = ", ".join(f'"{address}"' for address in bootstrap(told).split(","))
    program = re.sub(r'\["127[^]]*\]', f"[{addresses}]", text[begin : text.index("```", begin)])
    names: dict[str, Any] = {}  # Any: what somebody's Python session holds

    exec(program.replace("client.follow(0)", "__import__('itertools').islice(client.follow(0), 20)"), names)
    names["client"].close()

    printed = capfd.readouterr().out.splitlines()
    assert names["futures"][-1].result().index - names["result"].index >= 10_000
    assert re.fullmatch(r"\d+ \d+ \d+", printed[0])
    assert printed[1].endswith(f" {demo.generated_lines(1)[0]!r}")


@pytest.mark.slow
def test_a_kept_demo_prints_the_lines_for_spark_and_a_console_that_answers(told: str) -> None:
    """With its own addresses."""
    page = re.search(r"In a browser: +(http://\S+)", told)

    assert page is not None
    assert told.startswith(f"Watch it in a browser: {page[1]}\n")
    with urllib.request.urlopen(page[1], timeout=DEADLINE_S) as answer:
        assert answer.status == 200
    for line in spark_lines(bootstrap(told)):
        assert f"    {line}\n" in told


def test_the_conf_files_of_the_brokers_make_one_group() -> None:
    """They exist, at the ports that the next line names, and start small."""
    lines = block(section("Five minutes"), "$ dledger broker -c examples/brokers/broker-n0.conf &")
    files = [line.split()[4] for line in lines if line.startswith("$ dledger broker -c")]
    loaded = [load_broker_settings(ROOT / file, {}, {}) for file in files]
    nodes = [config.dledger for config, _ in loaded if config.dledger is not None]

    assert [warnings for _, warnings in loaded] == [()] * 3
    assert [node.node_id for node in nodes] == ["n0", "n1", "n2"]
    assert len({node.members for node in nodes}) == 1
    ports = ",".join(f"127.0.0.1:{config.listen_port}" for config, _ in loaded)
    assert any(line.startswith(f"$ export DLEDGER_BROKER={ports} ") for line in lines)
    assert {node.store.segment_bytes for node in nodes} == {64 << 20}


def python_lines(addresses: str) -> str:
    """The lines for messages, with other addresses."""
    text = section("Python")
    begin = text.index("from rocketstore.client import")
    program = text[begin : text.index("```", begin)]
    assert program.count("127.0.0.1:30911,127.0.0.1:30921,127.0.0.1:30931") == 2
    return program.replace("127.0.0.1:30911,127.0.0.1:30921,127.0.0.1:30931", addresses)


@pytest.mark.slow
def test_the_lines_for_brokers_print_what_is_shown(tmp_path: Path) -> None:
    """Then the master is killed: messages stay, and the list of brokers, whose rates differ, has a new master."""
    shown = block(section("Five minutes"), "$ dledger broker -c examples/brokers/broker-n0.conf &")
    shown = shown[shown.index("$ dledger topic create orders") :]
    steady = {"mappedFileSizeCommitLog": "4m", "warm_bytes": "0", **STEADY}
    with LocalBrokers(tmp_path, settings=steady) as brokers:
        master = brokers.master(timeout_s=DEADLINE_S)
        environment = {**os.environ, "DLEDGER_BROKER": ",".join(brokers.addresses), "PATH": PATH}
        commands = [line[2:] for line in shown if line.startswith("$ ")]
        printed: list[str] = []
        for command in commands:
            shows = run_at_terminal if command.startswith("dledger message send") else run
            printed += (f"$ {command}", *shows(command, environment))
        received = run(shlex.join([sys.executable, "-c", python_lines(environment["DLEDGER_BROKER"])]), environment)
        brokers.kill(master)
        brokers.master(timeout_s=DEADLINE_S, other_than=master)
        later = [run(line, environment) for line in AFTER_THE_KILL]

    assert [bare(line) for line in printed] == [bare(line) for line in shown]
    assert received in (["b'hello 17'"], ["b'hello from Python'"])  # in whichever queue it looks first
    sent, found, progress, listed = later
    assert listed[0].split()[:5] == ["cluster", "broker", "id", "address", "role"]
    assert sum("SYNC_MASTER" in line for line in listed) == 1
    assert [bare(line) for line in sent] == ["MESSAGE"]
    assert any("hello 17" in line for line in found)
    assert any("orders" in line for line in progress)
