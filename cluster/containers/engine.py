"""Provides a Docker engine: the running one, or a temporary ``dockerd`` of our own.

Our own engine is shared by all processes that request one. Each holds a shared lock on ``users``; the last one to leave
stops the engine by its pid, and removes what it created: containers, networks, images, files, and its iptables chains.
Start and stop happen under the lock on ``door``. Both are kernel locks, so a killed user blocks nobody: the next one
takes the engine over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import docker
import requests

from cluster.containers import firewall
from dledger.errors import DLedgerError
from dledger_cli.local.group import LocalGroupError, wait_until

RUN_DIR: Final = Path("/run/dledger-engine")
"""Locks, socket, pid and log of our own engine. The path is short because socket names are limited."""
DATA_DIR: Final = Path("/var/lib/dledger-engine")
"""Its images, containers and volumes."""
LAYERS_BYTES_MAX: Final = 4 << 30
"""For images and containers if they are kept in memory."""
START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 60.0
REQUEST_TIMEOUT_S: Final = 300
"""A build is silent for a while."""
_LOG_BYTES_SHOWN: Final = 2000


class EngineUnavailableError(DLedgerError):
    """Raised when no Docker engine is running and none can be started; says why."""


class EngineClient(docker.DockerClient):
    """A client that exposes its engine's address, for programs that read ``DOCKER_HOST``."""

    def __init__(self, url: str) -> None:
        super().__init__(base_url=url, timeout=REQUEST_TIMEOUT_S)  # requests the engine's version at once
        self.url = url


@contextlib.contextmanager
def engine(*, keep: bool = False) -> Iterator[EngineClient]:
    """A client of a working engine. Raises ``EngineUnavailableError``.

    ``keep``: leave our own engine and its contents running; the next user without ``keep`` stops it.
    """
    others = _running_engine()
    if others is not None:
        with contextlib.closing(others):
            yield others
        return
    _check_tools()
    RUN_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (RUN_DIR / "users").open("w") as users, (RUN_DIR / "door").open("w") as door:
        with _locked(door):
            fcntl.flock(users, fcntl.LOCK_SH)
            client = _connect(_own_url()) or _start()
        try:
            yield client
        finally:
            with _locked(door), contextlib.closing(client):
                if not keep and _is_last(users):
                    _end(client)


def is_own(client: docker.DockerClient) -> bool:
    """Whether this is our own engine, which stops with its users and loses everything."""
    return isinstance(client, EngineClient) and client.url == _own_url()


def why_not() -> str:
    """Why no engine is available here; empty if there is one, or one can be tried."""
    client = _running_engine()
    if client is not None:
        client.close()
        return ""
    try:
        _check_tools()
    except EngineUnavailableError as error:
        return str(error)
    return ""


def _own_url() -> str:
    return f"unix://{RUN_DIR}/docker.sock"


def _running_engine() -> EngineClient | None:
    """The engine started by somebody else, at ``DOCKER_HOST`` or at Docker's default socket."""
    url = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    return _connect(url) if url != _own_url() else None


def _connect(url: str) -> EngineClient | None:
    """A client, if an engine responds there."""
    if url.startswith("unix://") and not _listens(Path(url.removeprefix("unix://"))):
        return None
    try:
        return EngineClient(url)
    except docker.errors.DockerException as error:  # it was just stopped
        _close_sockets(error)
        return None


def _close_sockets(error: BaseException | None) -> None:
    """Close the sockets that Docker's library leaks when it cannot connect: the error's frames hold them."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            for value in frame.f_locals.values():
                if isinstance(value, socket.socket):
                    value.close()
        error = error.__cause__ or error.__context__


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise EngineUnavailableError("no Docker engine is running, and only root can start one")
    missing = [tool for tool in ("dockerd", "containerd", "runc", "iptables", "setsid") if shutil.which(tool) is None]
    if missing:
        raise EngineUnavailableError(
            f"no Docker engine is running, and none can be started: {', '.join(missing)} missing (Debian: "
            "apt-get install docker.io iptables)"
        )


@contextlib.contextmanager
def _locked(file: IO[str]) -> Iterator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_last(users: IO[str]) -> bool:
    """Release our shared lock; true if nobody else holds one."""
    fcntl.flock(users, fcntl.LOCK_UN)
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _start() -> EngineClient:
    """Start ``dockerd`` and wait until it responds. Init is its parent, because it may outlive this process."""
    _pid_file().unlink(missing_ok=True)
    firewall.prepare(_firewall_file())
    log = RUN_DIR / "log"
    _lay_out_data()
    command = ["setsid", "--fork", "dockerd", "--host", _own_url(), "--data-root", str(DATA_DIR)]
    command += ["--exec-root", str(RUN_DIR / "exec"), "--pidfile", str(_pid_file())]
    command += ["--bridge", "none"]  # containers use networks created for them
    with log.open("wb") as output:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    found: list[EngineClient] = []

    def answers() -> bool:
        client = _connect(_own_url())
        found.extend([client] if client is not None else [])
        return client is not None

    try:
        wait_until(answers, START_TIMEOUT_S, "dockerd does not answer")
    except LocalGroupError as error:
        tail = log.read_bytes()[-_LOG_BYTES_SHOWN:].decode(errors="replace")
        _kill(signal.SIGKILL)
        firewall.restore(_firewall_file())
        _unmount(DATA_DIR)
        raise EngineUnavailableError(f"{error}; output:\n{tail}") from None
    return found[0]


def _end(client: EngineClient) -> None:
    with contextlib.suppress(docker.errors.DockerException, requests.exceptions.RequestException):
        for container in client.containers.list(all=True, ignore_removed=True):
            container.remove(force=True)
        client.networks.prune()
    pid = _pid()  # removed before the process exits, which still responds and writes for a moment
    _kill(signal.SIGTERM)
    try:
        wait_until(lambda: pid is None or not _is_engine(pid), STOP_TIMEOUT_S, "dockerd does not exit")
    except LocalGroupError:
        _kill(signal.SIGKILL)
        raise
    finally:
        firewall.restore(_firewall_file())
    _unmount(DATA_DIR)
    shutil.rmtree(DATA_DIR)
    shutil.rmtree(RUN_DIR / "exec", ignore_errors=True)


def _lay_out_data() -> None:
    """Keep images and containers in memory if there is room, and volumes (brokers' data) always on disk.

    Images end with the engine and consist of some ten thousand files, which a disk may take half a minute to remove.
    The data of a killed engine are reused, unless the machine has lost its images in a reboot.
    """
    layers = DATA_DIR / "overlay2"
    if DATA_DIR.is_mount() or (layers.is_dir() and any(layers.iterdir())):
        return
    shutil.rmtree(DATA_DIR, ignore_errors=True)
    if _available_bytes() < 2 * LAYERS_BYTES_MAX:
        return
    layers.mkdir(parents=True)
    size = f"size={LAYERS_BYTES_MAX},mode=0710"
    for arguments in (
        ["--bind", str(DATA_DIR), str(DATA_DIR)],  # dockerd would do this itself, on top of what is mounted below
        ["--make-private", str(DATA_DIR)],
        ["--make-shared", str(DATA_DIR)],
        ["--types", "tmpfs", "--options", size, "dledger-engine", str(layers)],
    ):
        done = subprocess.run(["mount", *arguments], check=False, capture_output=True)
        if done.returncode:  # then keep them on disk
            return


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) << 10


def _unmount(directory: Path) -> None:
    """Unmount everything at or below it: ``dockerd`` mounts its directory on itself, and may leave that behind."""
    mounts = [Path(os.fsdecode(line.split()[1])) for line in Path("/proc/self/mounts").read_bytes().splitlines()]
    for mount in reversed(mounts):  # the last mount is on top
        if mount == directory or directory in mount.parents:
            subprocess.run(["umount", "--lazy", str(mount)], check=True)


def _firewall_file() -> Path:
    return RUN_DIR / "firewall.json"


def _pid_file() -> Path:
    return RUN_DIR / "docker.pid"


def _pid() -> int | None:
    """The process id of our own ``dockerd``, if it is running; never that of another process with the same number."""
    try:
        pid = int(_pid_file().read_text())
    except (OSError, ValueError):
        return None
    return pid if _is_engine(pid) else None


def _is_engine(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return str(_pid_file()).encode() in words


def _kill(number: signal.Signals) -> None:
    pid = _pid()
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
