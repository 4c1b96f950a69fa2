"""``dledger nameserver``: its settings, and its life as a process."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.config import ClientAuth
from dledger.types import TlsServerMode
from dledger_cli import cli
from dledger_cli.commands import serve as nameserver_module
from rocketstore.nameserver.settings import NameServerConfig
from tests.unit.rocketstore.nameserver.wire import Caller

TIMEOUT_S = 60


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[NameServerConfig]:
    """The configurations that would have been run."""
    found: list[NameServerConfig] = []

    def run(config: NameServerConfig, *, until_stdin_closes: bool) -> int:
        found.append(config)
        return 0

    monkeypatch.setattr(nameserver_module, "_run", run)
    return found


def run(*words: str, **environ: str) -> Result:
    """The command."""
    return CliRunner().invoke(cli.main, ["nameserver", *words], env=environ)


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path, started: list[NameServerConfig]) -> None:
    """RocketMQ's names and ours; its namesrv.conf as it is."""
    file = tmp_path / "namesrv.conf"
    file.write_text(
        f"listenPort=1\nbindAddress=localhost\nkvConfigPath={tmp_path}/kv.json\norderMessageEnable=true\n"
        "serverWorkerThreads=8\ntls.server.mode=permissive\n"
    )
    words = ("-c", str(file), "--port", "3", "--set", "topicsMax=77", "--set", "tls_client_auth=none")

    result = run(*words, DLEDGER_LISTEN_PORT="2", DLEDGER_ALLOWED_BROKERS="10.0.0.0/8")

    assert result.exit_code == 0, result.output
    (config,) = started
    assert (config.listen_port, config.listen_host, config.topics_max) == (3, "localhost", 77)
    assert (config.kv_config_path, config.order_message_enable) == (tmp_path / "kv.json", True)
    assert (config.allowed_brokers, config.tls_server_mode) == ("10.0.0.0/8", TlsServerMode.PERMISSIVE)
    assert config.security.tls_client_auth is ClientAuth.NONE


def test_settings_without_effect_are_listed_and_the_default_is_loopback(
    started: list[NameServerConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """With the default file in the home directory, as RocketMQ has it."""
    with caplog.at_level(logging.INFO):
        assert run("--set", "rocketmqHome=/x").exit_code == 0

    assert "settings that change nothing here: rocketmqHome (files have one form)" in caplog.text
    (config,) = started
    assert (config.listen_host, config.listen_port) == ("127.0.0.1", 9876)
    assert config.kv_config_path == Path.home() / "namesrv" / "kvConfig.json"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--host", "0.0.0.0"), "insecure=true"),
        (("--set", "listenPrt=2"), "did you mean listenPort?"),
        (("--set", "tls_server_mode=some"), "use one of disabled, permissive, enforcing"),
        (("--set", "tls_server_mode=enforcing"), "requires a certificate"),
        (("--set", "allowedBrokers=everyone"), "allowed_brokers: invalid address 'everyone'"),
        (("--set", "topicsMax=0"), "topics_max=0 must be"),
        (("-c", "/no/such/file"), "cannot be read"),
    ],
)
def test_wrong_settings_are_exit_code_2(
    words: tuple[str, ...], complaint: str, started: list[NameServerConfig]
) -> None:
    """With a sentence that says what to do."""
    result = run(*words)

    assert result.exit_code == 2
    assert complaint in result.output
    assert not started


def test_as_a_process_it_says_where_it_listens_and_stops_when_it_is_told_to(tmp_path: Path) -> None:
    """SIGTERM is a clean end; what administrators had set is there again."""
    command = [sys.executable, "-m", "dledger_cli.cli", "nameserver", "--port", "0", "--kv", str(tmp_path / "kv.json")]
    process = subprocess.Popen([*command, "--until-stdin-closes"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("name server is ready: 127.0.0.1:")
        caller = Caller(line.split()[4].rstrip(","))
        with caller.socket:
            caller.register(0, "a:1")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()
