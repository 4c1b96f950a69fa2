"""``dledger broker``: what becomes of its options, and what it says."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger_cli import cli
from dledger_cli.commands import broker as broker_module
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
    """By name, with the subject; the broker starts all the same."""
    file = tmp_path / "broker.conf"
    file.write_text("flushDelayOffsetInterval=3000\n")

    with caplog.at_level(logging.WARNING):
        assert run("-c", str(file)).exit_code == 0

    assert "settings that change nothing here: flushDelayOffsetInterval (delays need none)" in caplog.text
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


@pytest.mark.parametrize("flag", [("-n", "x"), ("-i", "n1"), ("--port", "1"), ("-s", "/tmp/x")])
def test_flags_of_one_broker_are_refused_for_several(tmp_path: Path, flag: tuple[str, str]) -> None:
    """They would win over every file."""
    result = run(*_several(tmp_path, 20911, 20921), *flag)

    assert result.exit_code == 2
    assert "cannot be given for several groups: write it into each file" in result.output


def test_ports_of_several_brokers_that_meet_are_told_with_both_files(tmp_path: Path) -> None:
    """And nothing is created: the second one's gRPC port is the first one's VIP port."""
    words = _several(tmp_path, 20915, 20911)

    for result in (run(*words), run("start", DLEDGER_CONFIG=f"{words[1]}:{words[3]}")):
        assert result.exit_code == 2
        told = f"port 20913 is vipPort in {words[1]} and grpcServerPort in {words[3]}: change one of them"
        assert told in result.output
    assert not (tmp_path / "a").exists()


def _several(directory: Path, *listen_ports: int) -> list[str]:
    """The options for brokers of as many groups."""
    words = []
    for group, port in zip("ab", listen_ports, strict=True):
        file = directory / f"{group}.conf"
        lines = {
            "enableDLegerCommitLog": "true",
            "dLegerGroup": group,
            "dLegerSelfId": "n0",
            "dLegerPeers": "n0-127.0.0.1:20901",
            "listenPort": str(port),
            "storePathRootDir": str(directory / group),
        }
        file.write_text("".join(f"{name}={text}\n" for name, text in lines.items()))
        words += ["-c", str(file)]
    return words


def test_the_help_has_examples() -> None:
    """Both kinds of broker."""
    result = run("start", "--help")

    assert result.exit_code == 0
    assert "dledger broker -c broker-n0.conf" in result.output
    assert "enableDLegerCommitLog=true" in result.output
