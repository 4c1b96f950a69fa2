"""The systemd units, as far as it can be judged without systemd running."""

from __future__ import annotations

import configparser
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cluster.image import DEPLOY, PROJECT
from dledger_cli.cli import main
from dledger_cli.terminal import EXIT_USAGE
from tests.support.lacking import program

UNITS = PROJECT / DEPLOY / "systemd"
NAMES = ("dledger", "dledger-broker", "dledger-nameserver")
_DATA = ("base_dir", "store_path_root_dir", "kv_config_path")
EXPOSURE_MAX = 20
"""Of 100, by ``systemd-analyze security``; a service without any of these settings has 96."""


@pytest.fixture(params=NAMES)
def file(request: pytest.FixtureRequest) -> Path:
    """Each of them."""
    return UNITS / f"{request.param}.service"


@pytest.fixture
def unit(file: Path) -> configparser.ConfigParser:
    """What the unit says; of settings given twice, the last."""
    found = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    found.optionxform = str  # type: ignore[assignment,method-assign]  # keep capitals, as configparser's docs have it
    found.read(file, encoding="utf-8")
    return found


def test_it_runs_a_command_that_there_is(unit: configparser.ConfigParser) -> None:
    """With options that it takes."""
    program, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "dledger"

    command: click.Command = main
    while isinstance(command, click.Group):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None
        command, words = found, words[1:]
    context = command.make_context("dledger", words)

    files = {str(one) for name, one in context.params.items() if name in ("config_file", *_DATA)}
    files |= {str(one) for one in context.params.get("config_files", ())}
    data = f"/var/lib/{unit['Service']['StateDirectory']}"
    assert files in (
        {"/etc/dledger/node.conf", data},
        {"/etc/dledger/broker.conf", data},
        {"/etc/dledger/namesrv.conf", f"{data}/kvConfig.json"},
    )


def test_each_service_has_a_directory_of_its_own() -> None:
    """With a dynamic user, systemd gives a shared one to the service that starts last."""
    directories = [
        line
        for name in NAMES
        for line in (UNITS / f"{name}.service").read_text().splitlines()
        if line.startswith("StateDirectory=")
    ]

    assert len(set(directories)) == len(NAMES)


def test_wrong_settings_are_not_tried_again(unit: configparser.ConfigParser) -> None:
    """The exit code that says so is not restarted upon; a failure is."""
    assert unit["Service"]["RestartPreventExitStatus"] == str(EXIT_USAGE)
    assert unit["Service"]["Restart"] == "on-failure"


def test_systemd_takes_it(file: Path, tmp_path: Path) -> None:
    """No unknown setting, no wrong value; and little is left that the service could do to its machine."""
    program("systemd-analyze", "systemd")
    copy = tmp_path / file.name
    copy.write_text(file.read_text(encoding="utf-8").replace("/opt/dledger/bin/dledger", sys.executable))

    verified = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE_MAX}", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stdout
