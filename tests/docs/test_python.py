"""``docs/python.md`` and ``docs/brokers.md``: their programs and commands are run, against one broker."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

import rocketstore.client
from dledger.values import MIB
from dledger_cli.cli import main
from dledger_cli.local.brokers import LocalBrokers
from rocketstore.nameserver.server import NameServer
from rocketstore.nameserver.settings import NameServerConfig
from rocketstore.settings import load_broker_settings
from tests.docs.documents import ROOT, lines, table_below
from tests.support.waiting import wait_until
from tools.docs_reference import configuration
from tools.docs_reference.records import default_text

pytestmark = pytest.mark.lane("processes")  # real ones, which want a small machine for themselves

PYTHON: Final = ROOT / "docs" / "python.md"
BROKERS: Final = ROOT / "docs" / "brokers.md"
HERE: Final = "127.0.0.1:10911"
TIMEOUT_S: Final = 120.0
CHECKS: Final = """
assert result.topic == "orders" and result.status == "SEND_OK", result
assert len({(one.broker, one.queue, one.offset) for one in places}) == 1000
assert "pass tags=... to Message" in refused, refused
assert sorted(set(billed)) == [b"order 1", b"order 2", b"order 3", b"order 3 is paid", b"order 6 is paid"], billed
assert b"order 4" in bodies and b"bulk 999" in bodies and b"line 99" in bodies and b"order 7 is paid" not in bodies
assert len({one.queue for one in in_order}) == 1
assert again[0].queue == queue and again[0].queue_offset == 0 and len(behind) == 4
assert stored >= 1108 and left >= 0 and [one.body for one in found] == [b"order 3"]
assert body == b"order 8"
assert order.body == b"order 3 is paid"
"""
NAME_SERVER: Final = "127.0.0.1:9876"


@dataclass(frozen=True, slots=True)
class Running:
    """One plain broker, and a name server that knows it."""

    broker: str
    name_server: str


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("broker")
    server = NameServer(NameServerConfig(listen_port=0, kv_config_path=place / "kvConfig.json"))
    server.start()
    try:
        settings = {"namesrvAddr": server.address}
        with LocalBrokers(place, size=1, plain=True, settings=settings) as brokers:
            brokers.master()
            (one,) = brokers.addresses
            yield Running(one, server.address)
    finally:
        server.stop()


def program_of_the_page(*without: str) -> str:
    """All its blocks: they continue each other; but for the sections with these headings."""
    found: list[str] = []
    heading = ""
    for line in lines(PYTHON):
        if line.fence is None and line.text.startswith("#"):
            heading = line.text.lstrip("# ")
        elif line.fence == "python" and heading not in without:
            found.append(line.text)
    return "\n".join(found)


@pytest.mark.slow
def test_the_programs_of_the_page_do_what_it_says(running: Running, tmp_path: Path) -> None:
    """All blocks, one after the other, as a program of its own."""
    text = program_of_the_page()
    assert text.count(HERE) >= 5
    assert text.count(NAME_SERVER) == 2
    (command,) = [line.text for line in lines(PYTHON) if line.fence == "text"]
    assert command == f"dledger topic create orders -b {HERE}"
    assert not _shown(command.partition(" -b")[0], running.broker).startswith("FAILED")
    program = tmp_path / "page.py"
    program.write_text(text.replace(HERE, running.broker).replace(NAME_SERVER, running.name_server) + CHECKS)

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stderr


def test_the_errors_of_the_page_come_from_the_client() -> None:
    """Every error that it names is importable from there, and it names every error that is."""
    named = set(re.findall(r"`(\w+Error)`", PYTHON.read_text()))

    assert len(named) > 15
    assert named == {one for one in rocketstore.client.__all__ if one.endswith("Error")}


def _shown(command: str, address: str) -> str:
    """What a command of the page prints."""
    words = shlex.split(command)
    assert words.pop(0) == "dledger"
    result = CliRunner().invoke(main, [*words, "-b", address])
    return result.output if result.exit_code == 0 else f"FAILED {command}: {result.output}"


@pytest.mark.slow
def test_the_commands_of_the_page_are_run(running: Running) -> None:
    """Each of them ends well on a new broker. Queues and index follow the log, so what reads them is repeated."""
    commands = [line.text for line in lines(BROKERS) if line.fence == "console"]
    assert len(commands) == 10
    for command in commands:
        if "query-by-key" in command or "consume " in command:
            wait_until(lambda command=command: "an invoice" in _shown(command, running.broker), command)  # type: ignore[misc]
        else:
            shown = _shown(command, running.broker)
            assert not shown.startswith("FAILED"), shown


def test_the_conf_files_of_the_page_are_understood(tmp_path: Path) -> None:
    """Every setting has an effect; the first is a plain broker, the second a member of a group."""
    files = re.findall(r"```properties\n(.*?)```", BROKERS.read_text(), re.DOTALL)
    found = []
    for number, text in enumerate(files):
        path = tmp_path / f"{number}.conf"
        path.write_text(text)
        config, warnings = load_broker_settings(path, {}, {})
        assert list(warnings) == []
        found.append(config)

    assert [one.dledger is not None for one in found] == [False, True]


def test_the_limits_of_the_page_are_the_defaults() -> None:
    """Row by row."""
    defaults = {one.name: default_text(one.field, "") for one in configuration.entries()}
    rows = table_below(BROKERS, "Limits")

    assert len(rows) >= 7
    for _, shown, setting in rows:
        name = re.sub(r"\[(\w+)\].*", r"\1", setting)
        number = int(shown.split()[0]) * (MIB if shown.endswith("MiB") else 1)
        assert str(number) == defaults[name], name
