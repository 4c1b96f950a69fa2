"""A command beside a dockerd of its own: the script with stand-ins for ``docker``, ``dockerd`` and ``id``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.support import lacking
from tests.support.waiting import wait_until

SCRIPT: Final = Path(__file__).parents[3] / "tools" / "with-dockerd.sh"
DOCKER: Final = """#!/bin/bash
host=$DOCKER_HOST
[ "$1" != --host ] || { host=$2; shift 2; }
case "$1" in
    info) [ -e "${host#unix://}" ] ;;
    ps) echo container ;;
    *) echo "$@" >>"$WITH_DOCKERD_DIR/asked" ;;
esac
"""
DOCKERD: Final = """#!/bin/bash
[ ! "$FAKE_FAILS" ] || { echo "no cgroup found"; exit 1; }
while [ "$#" -gt 0 ]; do case "$1" in --host) socket=${2#unix://} ;; --pidfile) pid=$2 ;; esac; shift; done
trap 'rm -f "$socket" "$pid"; exit' TERM
echo $$ >"$pid"
echo $$ >>"$WITH_DOCKERD_DIR/started"
[ "$FAKE_HANGS" ] || touch "$socket"
while :; do read -r -t 0.05 <> <(:) || true; done
"""
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts the script with a command, in a session of its own; all of them are over at the end."""
    for name, package in (("flock", "util-linux"), ("setsid", "util-linux"), ("awk", "mawk"), ("xargs", "findutils")):
        lacking.program(name, package)
    tools = tmp_path / "bin"
    tools.mkdir()
    fakes = {"docker": DOCKER, "dockerd": DOCKERD, "id": "#!/bin/bash\necho ${FAKE_UID:-0}\n"}
    for name, text in {**fakes, "containerd": "#!/bin/bash\n", "runc": "#!/bin/bash\n"}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = {name: text for name, text in os.environ.items() if name != "DOCKER_HOST"}
    environment |= {"PATH": f"{tools}:{os.environ['PATH']}", "WITH_DOCKERD_DIR": str(tmp_path / "engine")}
    with ExitStack() as started:

        def start(*command: str, **more: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                # a shell cannot trap what was ignored when it began, as it is in a background job
                ["/usr/bin/env", "--default-signal=INT,QUIT", "/bin/bash", str(SCRIPT), *command],
                env={**environment, "DOCKER_HOST": f"unix://{tmp_path}/nobody.sock", **more},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            started.enter_context(process)
            started.callback(process.terminate)
            return process

        yield start


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output and complaints."""
    output, complaints = process.communicate(timeout=60)
    return process.returncode, output, complaints


def daemons(engine: Path) -> list[bool]:
    """Whether each dockerd that was ever started still runs."""
    pids = (engine / "started").read_text().split() if (engine / "started").exists() else []
    return [is_running(int(pid), engine) for pid in pids]


def is_running(pid: int, engine: Path) -> bool:
    """Zombies, which nobody may have waited for, have no command line."""
    try:
        return str(engine).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def waits_for(file: Path) -> tuple[str, ...]:
    """A command that runs until the file is there, and prints its daemon."""
    return ("bash", "-c", f"echo $DOCKER_HOST; while [ ! -e {file} ]; do sleep 0.05; done; docker info")


def test_a_daemon_ends_with_its_command(begin: Begin, tmp_path: Path) -> None:
    """With containers and data; the command's exit code is the script's."""
    engine = tmp_path / "engine"

    code, output, complaints = ended(begin("bash", "-c", 'docker info && echo "$DOCKER_HOST" && exit 3'))

    assert (code, complaints) == (3, "")
    assert output == f"unix://{engine}/docker.sock\n"
    assert daemons(engine) == [False]
    assert "rm --force container" in (engine / "asked").read_text()
    assert not [file for file in ("data", "exec", "pid", "docker.sock") if (engine / file).exists()]


def test_two_commands_share_a_daemon_and_the_last_one_ends_it(begin: Begin, tmp_path: Path) -> None:
    """Two at once start only one, and the first to end does not take it from the other."""
    engine = tmp_path / "engine"
    stop = [tmp_path / "stop-0", tmp_path / "stop-1"]
    users = [begin(*waits_for(file)) for file in stop]
    for user in users:
        assert user.stdout is not None
        assert user.stdout.readline() == f"unix://{engine}/docker.sock\n"

    stop[0].touch()
    assert ended(users[0])[0] == 0
    assert daemons(engine) == [True]

    stop[1].touch()
    assert ended(users[1])[0] == 0
    assert daemons(engine) == [False]


def test_a_command_reads_what_the_script_is_given(begin: Begin) -> None:
    """Although it runs in the background, where shells give nothing to read."""
    assert begin("cat").communicate("a line\n", timeout=60)[0] == "a line\n"


def test_what_a_command_leaves_running_delays_nobody(begin: Begin, tmp_path: Path) -> None:
    """It holds no lock: the daemon ends with the command, and the next run starts its own."""
    _, output, _ = ended(begin("bash", "-c", "sleep 300 </dev/null >/dev/null 2>&1 & echo $!"))
    try:
        assert ended(begin("/bin/true"))[0] == 0
    finally:
        os.kill(int(output), signal.SIGKILL)

    assert daemons(tmp_path / "engine") == [False, False]


def test_a_signal_reaches_what_the_command_has_started(begin: Begin) -> None:
    """As Ctrl-C does in a terminal: a shell's ``make`` ends with the shell."""
    process = begin("bash", "-c", "trap 'exit 9' TERM; sleep 300 & echo $!; wait; wait")
    assert process.stdout is not None
    child = int(process.stdout.readline())

    process.terminate()

    try:
        assert ended(process)[0] == 9, "the output ends with the child that shares it"
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_the_command_and_the_daemon_ends(begin: Begin, tmp_path: Path, number: signal.Signals) -> None:
    """The command decides on its exit code; the script waits for it."""
    program = "import signal, sys\n"
    program += f"signal.signal({int(number)}, lambda *_: sys.exit(9))\nprint('ready', flush=True)\nsignal.pause()\n"
    process = begin(sys.executable, "-c", program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"

    process.send_signal(number)

    assert ended(process)[0] == 9
    assert daemons(tmp_path / "engine") == [False]


def test_the_next_run_takes_over_what_a_killed_one_left(begin: Begin, tmp_path: Path) -> None:
    """A killed script ends nothing; its daemon serves the next command, and ends with that."""
    engine = tmp_path / "engine"
    killed = begin(*waits_for(tmp_path / "stop"))
    assert killed.stdout is not None
    killed.stdout.readline()
    killed.kill()
    killed.wait()
    (tmp_path / "stop").touch()
    assert daemons(engine) == [True]

    assert ended(begin("docker", "info"))[0] == 0

    assert daemons(engine) == [False]


def test_a_running_daemon_is_used(begin: Begin, tmp_path: Path) -> None:
    """None is started beside it, also not by a script inside another."""
    (tmp_path / "running.sock").touch()

    code, output, _ = ended(begin("bash", "-c", "echo $DOCKER_HOST", DOCKER_HOST=f"unix://{tmp_path}/running.sock"))

    assert (code, output) == (0, f"unix://{tmp_path}/running.sock\n")
    assert daemons(tmp_path / "engine") == []


@pytest.mark.parametrize(
    ("missing", "why"),
    [({"FAKE_UID": "1000"}, "only root can start one"), ({"FAKE_FAILS": "1"}, "no cgroup found")],
)
def test_without_a_daemon_the_command_runs_and_a_line_says_why(
    begin: Begin, tmp_path: Path, missing: dict[str, str], why: str
) -> None:
    """Most tests need none, and drills have processes; nothing of the attempt is left."""
    code, output, complaints = ended(begin("echo", "done", **missing))

    assert (code, output) == (0, "done\n")
    assert why in complaints
    assert "no Docker" in complaints
    assert not (tmp_path / "engine" / "exec").exists()


def test_a_command_without_a_daemon_ignores_no_signal(begin: Begin) -> None:
    """It ends by Ctrl-C and by SIGTERM, although the attempt to start a daemon was not to be disturbed."""
    code, output, _ = ended(begin("grep", "SigIgn", "/proc/self/status", FAKE_FAILS="1"))

    ignored = int(output.split()[1], 16)
    assert code == 0
    assert not [one for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if ignored >> (one - 1) & 1]


def test_a_daemon_that_does_not_answer_is_ended(begin: Begin, tmp_path: Path) -> None:
    """Before a second one is started in its directory, and before the command begins without one."""
    command = ("bash", "-c", 'for pid in $(cat "$WITH_DOCKERD_DIR/started"); do ! kill -0 $pid || echo $pid; done')

    code, output, complaints = ended(begin(*command, FAKE_HANGS="1", WITH_DOCKERD_TRIES="5"))

    assert (code, output) == (0, "")
    assert "dockerd does not start" in complaints
    assert daemons(tmp_path / "engine") == [False, False]


def test_a_missing_program_is_named(begin: Begin, tmp_path: Path) -> None:
    """With the package that has it."""
    (tmp_path / "bin" / "dockerd").unlink()

    code, _, complaints = ended(begin("/bin/true", PATH=str(tmp_path / "bin")))

    assert code == 0
    assert "dockerd is missing (apt-get install docker.io)" in complaints


def test_signals_while_the_daemon_starts_leave_nothing(begin: Begin, tmp_path: Path) -> None:
    """The command does not begin then."""
    engine = tmp_path / "engine"
    process = begin("echo", "begun")
    wait_until(lambda: (engine / "users").exists(), "the script begins", 30)

    process.terminate()

    ended(process)
    assert not any(daemons(engine))
