"""A Spark cluster on this machine: a standalone master and workers as processes on loopback, from Spark's pip package.

For trying a job on a cluster, and for tests. The pip package lacks ``start-master.sh`` and ``start-worker.sh``, so
``spark-class`` runs the same classes. One directory holds the list of processes (``cluster.json``), their logs and
their working files. The cluster cannot be reached from other machines; any user of this one can use it.

``python -m tools.spark_standalone start|status|stop``, or ``make spark-cluster``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import click

from dledger.errors import DLedgerError
from dledger_cli.local.group import HOST, free_ports
from dledger_cli.terminal import ErrorReportingGroup
from dledger_spark.errors import PipelineError
from dledger_spark.session import java_version

START_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 20.0
HTTP_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.1
STATE_FILE: Final = "cluster.json"
LOG_LINES_SHOWN: Final = 20
WORKERS_MAX: Final = 16
DAEMON_MEMORY: Final = "256m"
_MASTER_CLASS: Final = "org.apache.spark.deploy.master.Master"
_WORKER_CLASS: Final = "org.apache.spark.deploy.worker.Worker"


class SparkClusterError(PipelineError):
    """Raised when the cluster fails to start or stop; contains the end of a process's log if one exited."""


@dataclass(frozen=True, slots=True)
class Options:
    """The processes to start. Port 0 selects a free one."""

    directory: Path
    workers: int = 2
    cores: int = 1
    """Per worker."""
    memory: str = "1g"
    """Per worker, for its executors."""
    port: int = 7077
    ui_port: int = 8080


@dataclass(frozen=True, slots=True)
class Process:
    """A process; its start time distinguishes it from a later one with the same pid."""

    name: str
    pid: int
    began: str

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return _began(self.pid) == self.began


@dataclass(frozen=True, slots=True)
class StandaloneCluster:
    """A started cluster."""

    master: str
    """The URL that sessions connect to."""
    ui: str
    workers: int
    processes: tuple[Process, ...]

    @property
    def alive(self) -> bool:
        """Whether all its processes are running."""
        return all(process.alive for process in self.processes)


def start(options: Options) -> StandaloneCluster:
    """Start a cluster and wait until all workers have joined. Raises ``SparkClusterError``, ``JavaMissingError``."""
    running = load(options.directory)
    if running is not None and any(process.alive for process in running.processes):
        raise SparkClusterError(f"a cluster of {options.directory} runs at {running.master}: stop it first")
    java_version(os.environ)
    home = _spark_home()
    options.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    port, ui_port = options.port or free_ports(1)[0], options.ui_port
    ui_port = ui_port or free_ports(1, taken=[port])[0]
    master = f"spark://{HOST}:{port}"
    environment = _environment(options.directory)
    processes: list[Process] = []

    def spawn(name: str, *words: str) -> None:
        pid = _spawn([f"{home}/bin/spark-class", *words], environment, options.directory / f"{name}.log")
        processes.append(Process(name, pid, _began(pid)))
        _save(
            options.directory, StandaloneCluster(master, f"http://{HOST}:{ui_port}", options.workers, tuple(processes))
        )

    try:
        spawn("master", _MASTER_CLASS, "--host", HOST, "--port", str(port), "--webui-port", str(ui_port))
        _wait(options.directory, processes, lambda: _alive_workers(ui_port) is not None, "the master to answer")
        for number in range(1, options.workers + 1):
            size = ("-c", str(options.cores), "-m", options.memory)
            spawn(f"worker-{number}", _WORKER_CLASS, "--host", HOST, *size, "--webui-port", "0", master)
        _wait(
            options.directory, processes, lambda: _alive_workers(ui_port) == options.workers, "all workers to be there"
        )
    except BaseException:
        _end(processes)
        raise
    return StandaloneCluster(master, f"http://{HOST}:{ui_port}", options.workers, tuple(processes))


def stop(directory: Path) -> bool:
    """Stop the cluster of ``directory`` and remove its files except logs; False if there was none."""
    cluster = load(directory)
    if cluster is None:
        return False
    _end(cluster.processes)
    for name in ("work", "local"):
        shutil.rmtree(directory / name, ignore_errors=True)
    (directory / STATE_FILE).unlink(missing_ok=True)
    return True


def load(directory: Path) -> StandaloneCluster | None:
    """The cluster that was last started in ``directory`` and not stopped. Raises ``SparkClusterError``."""
    path = directory / STATE_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        processes = tuple(Process(one["name"], one["pid"], one["began"]) for one in found["processes"])
        return StandaloneCluster(found["master"], found["ui"], found["workers"], processes)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise SparkClusterError(
            f"{path} is damaged ({error!r}): remove it, and end Spark's processes yourself"
        ) from error


def _save(directory: Path, cluster: StandaloneCluster) -> None:
    temporary = directory / f"{STATE_FILE}.tmp"
    temporary.write_text(json.dumps(asdict(cluster), indent=2), encoding="utf-8")
    temporary.replace(directory / STATE_FILE)


def _spark_home() -> str:
    try:
        from pyspark.find_spark_home import _find_spark_home
    except ImportError as error:
        raise SparkClusterError(f"Spark is not installed ({error}): run make install") from error
    return str(_find_spark_home())


def _environment(directory: Path) -> dict[str, str]:
    """This process's environment, plus settings that keep the cluster on loopback and its files in ``directory``."""
    environment = dict(os.environ)
    environment.pop("SPARK_NO_DAEMONIZE", None)
    places = {"SPARK_WORKER_DIR": "work", "SPARK_LOCAL_DIRS": "local", "SPARK_LOG_DIR": "log", "SPARK_PID_DIR": "log"}
    for name, place in places.items():
        (directory / place).mkdir(exist_ok=True)
        environment[name] = str(directory / place)
    fixed_ports = "-Dspark.port.maxRetries=0"  # otherwise Spark silently moves to another port if one is taken
    return environment | {
        "SPARK_LOCAL_IP": HOST,
        "SPARK_DAEMON_MEMORY": DAEMON_MEMORY,
        "SPARK_MASTER_OPTS": f"{fixed_ports} -Dspark.master.rest.enabled=false",
        "SPARK_WORKER_OPTS": "-Dspark.worker.cleanup.enabled=true",
        "PYSPARK_PYTHON": sys.executable,
    }


def _spawn(words: list[str], environment: Mapping[str, str], log: Path) -> int:
    """Start a process that outlives this one and its terminal; return its pid."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    silence = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        channels = [
            (os.POSIX_SPAWN_DUP2, source, target) for source, target in ((silence, 0), (output, 1), (output, 2))
        ]
        return os.posix_spawn(words[0], words, environment, file_actions=channels, setsid=True)
    finally:
        os.close(silence)
        os.close(output)


def _alive_workers(ui_port: int) -> int | None:
    """The number of workers that have joined the master; None if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{HOST}:{ui_port}/json/", timeout=HTTP_TIMEOUT_S) as answer:
            said = json.load(answer)
    except (OSError, ValueError):
        return None
    return int(said["aliveworkers"])


def _wait(directory: Path, processes: Sequence[Process], condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        for process in processes:
            if not process.alive:
                raise SparkClusterError(f"{process.name} ended while starting\n{_log_end(directory, process)}")
        if time.monotonic() > deadline:
            ends = "\n".join(_log_end(directory, process) for process in processes)
            raise SparkClusterError(f"waited {START_TIMEOUT_S:g} s in vain for {what}\n{ends}")
        time.sleep(POLL_S)


def _log_end(directory: Path, process: Process) -> str:
    path = directory / f"{process.name}.log"
    return "\n".join([f"{path}:", *path.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]])


def _end(processes: Sequence[Process]) -> None:
    """SIGTERM, workers first, which stop their executors; then SIGKILL for those still running."""
    order = processes[::-1]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in order:
            if process.alive:
                os.kill(process.pid, number)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(process.alive for process in order) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _began(pid: int) -> str:
    """A process's start time in kernel ticks; empty if it is not running (zombies are not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


# --- the command -----------------------------------------------------------------------------------------------------


@click.group(cls=ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-d",
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/spark-cluster"),
    show_default=True,
    help="Directory for the cluster's state, logs and working files.",
)
@click.pass_context
def main(context: click.Context, directory: Path) -> None:
    """A Spark master and workers on this machine, to try jobs on a cluster."""
    context.obj = directory.absolute()


@main.command("start")
@click.option("--workers", type=click.IntRange(1, WORKERS_MAX), default=2, show_default=True)
@click.option("--cores", type=click.IntRange(1), default=1, show_default=True, help="Of each worker.")
@click.option("--memory", default="1g", show_default=True, help="Of each worker, for its executors.")
@click.option("--port", type=click.IntRange(0, 65535), default=7077, show_default=True, help="Of the master; 0: any.")
@click.option("--ui-port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Of its page; 0: any.")
@click.pass_obj
def start_command(directory: Path, workers: int, cores: int, memory: str, port: int, ui_port: int) -> None:
    """Start it, and print how to use it."""
    cluster = start(Options(directory, workers, cores, memory, port, ui_port))
    click.echo(f"{cluster.workers} workers have joined {cluster.master}; its page: {cluster.ui}")
    click.echo(f"A job on it:  dledger pipeline stats DIRECTORY --master {cluster.master}")
    click.echo(f"A session:    dledger_spark.spark_session({cluster.master!r})")
    click.echo(f"Logs:         {directory}")
    click.echo("End it:       make spark-cluster CLUSTER=stop")


@main.command("status")
@click.pass_obj
def status_command(directory: Path) -> None:
    """Show its processes. Exit code 1 unless all are running."""
    cluster = load(directory)
    if cluster is None:
        raise DLedgerError(f"there is no cluster in {directory}: make spark-cluster")
    click.echo(f"{cluster.master}, page {cluster.ui}")
    for process in cluster.processes:
        click.echo(f"{process.name:<12} {process.pid:>8} {'runs' if process.alive else 'is gone'}")
    if not cluster.alive:
        raise DLedgerError("not all of its processes run: stop it and start it again")


@main.command("stop")
@click.pass_obj
def stop_command(directory: Path) -> None:
    """Stop it. Logs are kept."""
    click.echo("Ended." if stop(directory) else f"There is no cluster in {directory}.")


if __name__ == "__main__":
    main(prog_name="python -m tools.spark_standalone")
