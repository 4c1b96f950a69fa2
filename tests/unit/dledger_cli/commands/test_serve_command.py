"""``dledger serve``: what is refused before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_cli.cli import main
from dledger_cli.local.group import free_ports


def _conf(path: Path, group: str, **lines: str) -> str:
    (port,) = free_ports(1)
    text = {
        "group": group,
        "node_id": "n0",
        "members": f"n0-127.0.0.1:{port}",
        "base_dir": str(path / group),
        "client_port": "0",
        **lines,
    }
    file = path / f"{group}.conf"
    file.write_text("".join(f"{name}={value}\n" for name, value in text.items()))
    return str(file)


@pytest.mark.parametrize("flag", [("-g", "x"), ("-i", "n1"), ("-p", "n0-127.0.0.1:1"), ("-s", "/tmp/x")])
def test_flags_of_one_group_are_refused_for_several(tmp_path: Path, flag: tuple[str, str]) -> None:
    """They would win over every file."""
    files = [word for group in ("a", "b") for word in ("-c", _conf(tmp_path, group))]

    result = CliRunner().invoke(main, ["serve", *files, *flag])

    assert result.exit_code == 2
    assert "cannot be given for several groups: write it into each file" in result.output


def test_settings_of_the_process_that_differ_are_told_with_both_files(tmp_path: Path) -> None:
    """And nothing is created."""
    first, second = _conf(tmp_path, "a", metrics_port="7"), _conf(tmp_path, "b", metrics_port="8")

    result = CliRunner().invoke(main, ["serve", "-c", first, "-c", second])

    assert result.exit_code == 2
    assert f"metrics_port is 7 in {first} and 8 in {second}" in result.output
    assert "the peer address is" in result.output
    assert not (tmp_path / "a").exists()
