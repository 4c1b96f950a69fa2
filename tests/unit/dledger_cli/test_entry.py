"""The first instructions of the ``dledger`` command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dledger_cli.cli import COMMANDS, main
from dledger_cli.commands.log import LineReader, append
from dledger_cli.terminal import count_lines

ENTRY = [sys.executable, "-m", "dledger_cli.entry"]


def ended_by_signal_while_loading(word: str, number: signal.Signals) -> int:
    """The exit code of ``dledger WORD`` when a signal comes while the command is being imported."""
    script = (
        "import os, signal, sys, importlib.abc\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever runs the tests may ignore it
        "class AtImport(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'dledger_cli.cli':\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "            sys.exit('the signal did nothing')\n"
        f"sys.argv = ['dledger', {word!r}]\n"
        "from dledger_cli.entry import main\n"
        "sys.meta_path.insert(0, AtImport())\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("word", ["serve", "broker", "nameserver", "console"])
def test_a_server_stopped_before_it_has_begun_stopped_gracefully(word: str, number: signal.Signals) -> None:
    """Exit code 0, as after any stop: nothing was opened yet."""
    assert ended_by_signal_while_loading(word, number) == 0


def test_ctrl_c_while_a_command_is_loaded_shows_no_traceback() -> None:
    """The process ends by the signal, as shells expect."""
    assert ended_by_signal_while_loading("status", signal.SIGINT) == -signal.SIGINT


def test_a_full_device_for_output_is_an_error_without_a_traceback() -> None:
    """Exit code 1, and the reason."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*ENTRY, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )

    assert done.returncode == 1
    assert done.stderr == "error: cannot write to standard output: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_standard_stream_is_as_good_as_dev_null(closed: str) -> None:
    """And no socket or file takes its number, to be written into by what prints."""
    done = subprocess.run(
        ["bash", "-c", f'exec {closed}; exec "$@"', "bash", *ENTRY, "--version"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0
    assert "Traceback" not in done.stderr


def test_lines_of_a_pipe_are_read_once() -> None:
    """What is counted beforehand is gone for whoever sends it."""
    reading, writing = os.pipe()

    def write() -> None:
        os.write(writing, b"one\ntwo\n")
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(reading, "rb") as stream:
        total = count_lines(stream)
        found = list(LineReader(stream).lines(lambda: True))
    writer.join()

    assert total is None
    assert found == [b"one", b"two"]


def test_lines_of_a_file_are_counted_and_then_read_from_the_begin(tmp_path: Path) -> None:
    """A progress bar has a total."""
    (tmp_path / "lines").write_bytes(b"one\ntwo")
    with (tmp_path / "lines").open("rb") as stream:
        assert count_lines(stream) == 2
        assert list(LineReader(stream).lines(lambda: True)) == [b"one", b"two"]


def _loaded(*argv: str) -> set[str]:
    """The modules in memory when a command has ended."""
    script = (
        "import sys; from dledger_cli.cli import main\n"
        f"try: main({list(argv)!r})\n"
        "except SystemExit: pass\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.splitlines()[-1].split())


def test_asking_for_one_command_loads_no_other() -> None:
    """Loading all of them takes longer than most take to run."""
    loaded = _loaded("append", "--help")

    assert not loaded & {"rich", "numpy", "grpc", "asyncio", "dledger_cli.commands.serve"}
    assert main.get_command(None, "append") is append  # type: ignore[arg-type]  # needs no context


def test_the_list_of_commands_loads_none_of_them() -> None:
    """``dledger --help`` takes 0.1 s of processor time at most, which allows for little more than click."""
    loaded = _loaded("--help")

    heavy = ("dledger_cli.commands.", "grpc", "numpy", "asyncio", "rich", "logging")
    assert not [one for one in loaded if one.startswith(heavy)]


def test_the_list_of_commands_says_what_each_says_of_itself() -> None:
    """The list is written by hand, so that it can be shown without loading the commands."""
    for name, (_, line) in COMMANDS.items():
        command = main.get_command(None, name)  # type: ignore[arg-type]  # needs no context

        assert command is not None
        assert command.get_short_help_str(200) == line, name


def test_asking_for_the_status_loads_no_server_no_broker_and_nothing_that_appends() -> None:
    """``dledger status`` takes 0.15 s of processor time at most; gRPC alone takes 0.05 s."""
    loaded = _loaded("status", "--bootstrap", "127.0.0.1:1", "--timeout", "0.2")

    others = {"dledger.config", "dledger.core.messages", "dledger.sending.window", "dledger.server"}
    heavy = ("numpy", "rich", "pyspark", "grpc", "tenacity", "rocketstore", "dledger.store", "dledger.rpc.peers")
    assert "dledger.client.aio.client" in loaded
    assert not [one for one in loaded if one.startswith(heavy) or one in others]


TALKING = (
    "append x",
    "get 1",
    "tail",
    "transfer-leader",
    "status",
    "health",
    "topic list",
    "message send -t orders x",
    "message consume -t orders",
    "message query-by-key -t orders k",
    "consumer progress",
    "consumer reset-offset -g g -t orders --to first",
    "broker status",
    "cluster list",
    "ha status",
)
"""Commands that talk to nodes or brokers, at an address where nobody is."""


def test_no_command_that_talks_to_a_group_loads_grpc() -> None:
    """They speak RocketMQ's protocol, ours included; gRPC costs as much as everything else together."""
    script = f"""import sys
from dledger_cli.cli import main
for words in {TALKING!r}:
    try:
        main([*words.split(), "-b", "127.0.0.1:1", "--timeout", "0.2"])
    except SystemExit as end:
        assert end.code == 1, words
    assert "grpc" not in sys.modules, words
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", [["--help"], ["context", "list", "--json"], ["inspect", "--help"]])
def test_a_reader_that_has_gone_ends_a_command_like_sigpipe(words: list[str]) -> None:
    """Exit code 141 without a traceback, whether the output fits into the pipe or not."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [*ENTRY, *words], stdout=closed, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )

    assert (done.returncode, done.stderr) == (141, "")
