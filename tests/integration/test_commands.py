"""The commands against real nodes: what README's tour promises."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.types import NodeId
from dledger_cli.cli import main
from dledger_cli.local.group import READY_WORDS, LocalGroup, free_ports

SMALL = {"segment_bytes": "64k", "index_segment_bytes": "16k"}
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroup]:
    """Three nodes for the tests of this module."""
    with LocalGroup(tmp_path_factory.mktemp("group"), settings=SMALL) as running:
        running.leader()
        yield running


@pytest.fixture
def dledger(group: LocalGroup) -> Callable[..., Result]:
    """Run a command against the group."""

    def run(*words: str, stdin: bytes | None = None) -> Result:
        environment = {"DLEDGER_BOOTSTRAP": ",".join(group.addresses)}
        return CliRunner().invoke(main, list(words), input=stdin, env=environment)

    return run


@pytest.mark.smoke
def test_what_is_appended_is_read_back(dledger: Callable[..., Result]) -> None:
    """Arguments, standard input, one entry, several, the end."""
    first = int(dledger("append", "hello").output)
    streamed = dledger("append", "-", stdin=b"".join(b"line %d\n" % number for number in range(3000)))
    single = dledger("get", str(first))
    linearizable = dledger("get", str(first), "--mode", "linearizable", "--json")
    begun, last = map(int, re.findall(r"index (\d+) to (\d+)", streamed.output)[0])
    several = dledger("get", str(begun), "--count", "3000")
    tail = dledger("tail", "-n", "2")

    assert streamed.exit_code == 0, streamed.output
    assert streamed.output.startswith("appended 3000 entries")
    assert last - begun >= 2999, "a new segment begins with what is known of producers, which is an entry"
    assert begun == first + 2, "between the two is the registration of the second command's client"
    assert single.stdout_bytes == b"hello\n"
    assert json.loads(linearizable.output)["body"] == "hello"
    assert several.stdout_bytes == b"".join(b"line %d\n" % number for number in range(3000))
    assert tail.stdout_bytes == b"line 2998\nline 2999\n"


def test_reading_beyond_the_end_is_an_error(dledger: Callable[..., Result]) -> None:
    """Exit code 1 and a sentence."""
    shown = dledger("get", "1000000")

    assert shown.exit_code == 1
    assert shown.stderr.startswith(("error: ", "Error: "))


@pytest.mark.smoke
def test_status_shows_three_members_and_one_leader(group: LocalGroup, dledger: Callable[..., Result]) -> None:
    """The same in JSON and as a table."""
    group.wait_converged()

    document, table = json.loads(dledger("status", "--json").output), dledger("status")

    assert table.exit_code == 0
    assert [node["node_id"] for node in document["nodes"]] == ["n0", "n1", "n2"]
    assert sorted(node["role"] for node in document["nodes"]) == ["FOLLOWER", "FOLLOWER", "LEADER"]
    begins = [line.split()[0] for line in table.output.splitlines()]
    assert begins[:4] == ["node", "n0", "n1", "n2"]
    assert set(begins[4:]) <= {"n0:", "n1:", "n2:"}, "what is the matter with a member, if the machine is very busy"
    assert all(address in table.output for address in group.addresses)


def test_leadership_goes_where_it_is_sent(group: LocalGroup, dledger: Callable[..., Result]) -> None:
    """And appends go on."""
    group.wait_converged()
    old = group.leader()
    target = next(node for node in group.nodes if node != old)

    shown = dledger("transfer-leader", target)

    assert (shown.exit_code, shown.output) == (0, f"{target} leads now\n")
    assert group.leader() == target
    assert dledger("append", "-", stdin=b"after the transfer").exit_code == 0


def test_transfer_to_a_stranger_is_refused(dledger: Callable[..., Result]) -> None:
    """A clear error."""
    shown = dledger("transfer-leader", "n9")

    assert shown.exit_code == 1
    assert "n9" in shown.stderr


def test_a_wrong_group_is_refused(dledger: Callable[..., Result]) -> None:
    """Not silently written into another log."""
    shown = dledger("append", "x", "-g", "other")

    assert shown.exit_code == 1
    assert "other" in shown.stderr


def test_nobody_there_is_an_error_in_bounded_time() -> None:
    """Exit code 1; the address is named."""
    (port,) = free_ports(1)

    shown = CliRunner().invoke(main, ["append", "x", "-b", f"127.0.0.1:{port}", "--timeout", "0.5"])

    assert shown.exit_code == 1
    assert str(port) in shown.stderr


def test_follow_shows_what_comes(group: LocalGroup) -> None:
    """``tail -f`` in a process of its own, ended by Ctrl-C with exit code 130."""
    words = [sys.executable, "-m", "dledger_cli.cli", "tail", "-f", "-n", "0", "-b", ",".join(group.addresses)]
    marker = "followed"
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        try:
            feeding = subprocess.Popen(
                [sys.executable, "-c", FEED, ",".join(group.addresses), marker], stdin=subprocess.PIPE
            )
            giving_up = threading.Timer(DEADLINE_S, tail.kill)  # else a line that never comes is waited for for ever
            giving_up.start()
            try:
                assert tail.stdout.readline() == marker.encode() + b"\n"
            finally:
                giving_up.cancel()
                feeding.kill()
                feeding.communicate()
            tail.send_signal(signal.SIGINT)
            tail.stdout.read()
            assert tail.wait(DEADLINE_S) == 130
        finally:
            tail.kill()


FEED = """
import sys
from dledger.client import DLedgerClient
from dledger.errors import DLedgerError
client = DLedgerClient(sys.argv[1].split(","))
while True:
    try:
        client.append(sys.argv[2].encode())
    except DLedgerError as error:  # an election: its outcome is unknown, and nobody counts what is fed
        print(error, file=sys.stderr)
"""


# --- serve -----------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_a_node_that_is_asked_to_stop_hands_over_and_exits_with_0(tmp_path: Path) -> None:
    """SIGTERM on the leader; the next start finds a clean log."""
    with LocalGroup(tmp_path, settings=SMALL) as group, group.client() as client:
        leader = group.leader()
        result = client.append(b"before")
        code = group.stop(leader)
        successor = group.leader(other_than=leader)
        after = client.append(b"after")
        group.start(leader)
        group.wait_converged()

        assert code == 0, group.logs(leader)
        assert successor != leader
        assert after.index > result.index
        assert "after a clean stop" in group.logs(leader)


def test_a_second_process_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    """Exit code 1, one sentence, and the first goes on."""
    with LocalGroup(tmp_path, size=1, settings=SMALL) as group:
        group.leader()
        ports = free_ports(2)
        words = ["serve", "-s", str(tmp_path), "-p", f"n0-127.0.0.1:{ports[0]}", "--client-port", str(ports[1])]

        second = subprocess.run(
            [sys.executable, "-m", "dledger_cli.cli", *words],
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
            text=True,
        )

        assert second.returncode == 1
        assert second.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in second.stderr
        assert group.is_running(NodeId("n0"))


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """Before anything is served."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["serve", "-s", str(tmp_path), "-p", f"n0-127.0.0.1:{free_ports(1)[0]}", "--client-port", str(port)]

        shown = subprocess.run(
            [sys.executable, "-m", "dledger_cli.cli", *words],
            capture_output=True,
            timeout=DEADLINE_S,
            check=False,
            text=True,
        )

    assert shown.returncode == 2
    assert str(port) in shown.stderr.splitlines()[-1]
    assert READY_WORDS not in shown.stdout


def test_a_damaged_node_says_so_and_repairs_itself_from_the_others(tmp_path: Path) -> None:
    """Refused with the file, the offset and the advice; ``--repair`` fetches the log again."""
    with LocalGroup(tmp_path, settings=SMALL) as group, group.client() as client:
        client.append_many([b"entry %d" % number for number in range(100)])
        group.wait_converged()
        node = next(one for one in group.nodes if one != group.leader())
        group.stop(node)
        segment = min((group.store_dir(node) / "data").iterdir())
        content = bytearray(segment.read_bytes())
        content[500] ^= 1
        segment.write_bytes(content)

        alone = [*group.command(node), "--set", "auto_repair=false"]
        refused = subprocess.run(alone, capture_output=True, timeout=DEADLINE_S, check=False, text=True)
        group.start(node, extra=["--repair"])
        group.wait_converged()

        assert refused.returncode == 1
        assert str(segment) in refused.stderr
        assert "--repair" in refused.stderr
        assert "Traceback" not in refused.stderr


# --- demo ------------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_demo_holds_what_it_promises(tmp_path: Path) -> None:
    """On a shorter text; exit code 0 and every step told."""
    file = tmp_path / "text"
    file.write_bytes(b"".join(b"line %d of a text\n" % number for number in range(3000)))

    shown = CliRunner().invoke(main, ["demo", "--file", str(file)])

    assert shown.exit_code == 0, shown.output
    assert shown.output.count("✓") >= 7
    assert "all 3,000 lines, each once, in order" in shown.output
