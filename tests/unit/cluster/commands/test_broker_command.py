"""``dledger broker``: what becomes of its options, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster import cli
from cluster.commands import broker as broker_module
from rocketstore.broker_config import BrokerConfig
from rocketstore.types import FlushDiskType


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[BrokerConfig, bool]]:
    """The configurations that would have been run, and whether with repair."""
    found: list[tuple[BrokerConfig, bool]] = []

    def run(config: BrokerConfig, *, repair: bool, until_stdin_closes: bool) -> int:
        found.append((config, repair))
        return 0

    monkeypatch.setattr(broker_module, "_run", run)
    return found


def run(*words: str, **environ: str) -> Result:
    """The command."""
    return CliRunner().invoke(cli.main, ["broker", *words], env=environ)


def test_options_and_assignments_are_settings(tmp_path: Path, started: list[tuple[BrokerConfig, bool]]) -> None:
    """Flags beat the environment, which beats the file."""
    file = tmp_path / "broker.conf"
    file.write_text("brokerName=file\nlistenPort=1\nfileReservedTime=1\n")
    words = ("-c", str(file), "-s", str(tmp_path), "--port", "3", "--flush", "sync", "--set", "maxMessageSize=64k")

    result = run(*words, DLEDGER_LISTEN_PORT="2", DLEDGER_BROKER_NAME="environment")

    assert result.exit_code == 0, result.output
    ((config, repair),) = started
    assert (config.name, config.listen_port, repair) == ("environment", 3, False)
    assert config.store.store_path_root_dir == tmp_path
    assert config.store.flush_disk_type is FlushDiskType.SYNC_FLUSH
    assert (config.store.file_reserved_time, config.store.max_message_size) == (1, 65536)


def test_settings_without_effect_are_warned_of(
    tmp_path: Path, started: list[tuple[BrokerConfig, bool]], caplog: pytest.LogCaptureFixture
) -> None:
    """By name, with the reason; the broker starts all the same."""
    file = tmp_path / "broker.conf"
    file.write_text("flushDelayOffsetInterval=3000\n")

    with caplog.at_level(logging.WARNING):
        assert run("-c", str(file)).exit_code == 0

    assert "flushDelayOffsetInterval (delivery progress of delayed messages is saved every second)" in caplog.text
    assert len(started) == 1


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--set", "nonsense"), "NAME=VALUE"),
        (("--port", "1", "--set", "listen_port=2"), "more than once"),
        (("--set", "listenPrt=2"), "did you mean listenPort?"),
        (("--port", "many"), "invalid whole number"),
        (("-c", "/no/such/file"), "cannot be read"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    words: tuple[str, ...], complaint: str, started: list[tuple[BrokerConfig, bool]]
) -> None:
    """With a sentence that says what to do."""
    result = run(*words)

    assert result.exit_code == 2
    assert complaint in result.output
    assert not started


def test_the_help_has_examples() -> None:
    """Both kinds of broker."""
    result = run("start", "--help")

    assert result.exit_code == 0
    assert "dledger broker -c broker-n0.conf" in result.output
    assert "enableDLegerCommitLog=true" in result.output
