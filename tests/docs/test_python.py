"""``docs/python.md`` and ``docs/brokers.md``: their programs and commands are run, against one broker."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner

import rocketstore.client
from cluster.cli import main
from cluster.local.brokers import LocalBrokers
from dledger.values import MIB
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
assert receipt.topic == "orders" and receipt.status == "PUT_OK", receipt
assert failed == [], failed
assert "pass tags=... to Message" in refused, refused
assert sorted(billed) == [b"order 1", b"order 1 is paid"], billed
assert bodies.count(b"row 1") == 1 and b"remind customer 7" in bodies and len(set(bodies)) == 1107
assert body == b"order 4"
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalBrokers(tmp_path_factory.mktemp("broker"), size=1, plain=True) as brokers:
        brokers.master()
        (one,) = brokers.addresses
        yield one


@pytest.mark.slow
def test_the_programs_of_the_page_do_what_it_says(address: str, tmp_path: Path) -> None:
    """All blocks, one after the other, as a program of its own."""
    text = "\n".join(line.text for line in lines(PYTHON) if line.fence == "python")
    assert text.count(HERE) >= 5
    program = tmp_path / "page.py"
    program.write_text(text.replace(HERE, address) + CHECKS)

    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    assert done.returncode == 0, done.stderr


def test_the_errors_of_the_page_come_from_the_client() -> None:
    """Every name in its tables that looks like an error or a client is importable from there."""
    text = PYTHON.read_text()
    names = set(re.findall(r"`(\w+Error)`", text)) | set(re.findall(r"`((?:Async|Cluster)\w+)`", text))

    assert len(names) > 15
    assert names - {"AsyncDLedgerClient"} <= set(rocketstore.client.__all__)


def _shown(command: str, address: str) -> str:
    """What a command of the page prints."""
    words = shlex.split(command)
    assert words.pop(0) == "dledger"
    result = CliRunner().invoke(main, [*words, "-b", address])
    return result.output if result.exit_code == 0 else f"FAILED {command}: {result.output}"


@pytest.mark.slow
def test_the_commands_of_the_page_are_run(address: str) -> None:
    """Each of them ends well on a new broker. Queues and index follow the log, so what reads them is repeated."""
    commands = [line.text for line in lines(BROKERS) if line.fence == "console"]
    assert len(commands) == 10
    for command in commands:
        if "query-by-key" in command or "consume " in command:
            wait_until(lambda command=command: "an invoice" in _shown(command, address), command, 60)  # type: ignore[misc]
        else:
            shown = _shown(command, address)
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
