"""A group of real ``dledger serve`` processes on loopback, for the demo, benchmarks and integration tests.

Every process ends with the group, even if the process that created it is killed: each node watches a pipe that only the
creator holds open. A detached group (``dledger demo --keep``) is left running instead.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Final, Protocol, Self

from dledger.errors import DLedgerError
from dledger.types import NodeId, Role
from dledger.values import GRPC_PORT_OFFSET

if TYPE_CHECKING:
    from dledger.client import ClientSecurity, DLedgerClient
    from dledger.rpc.ports import NodeStatus

HOST: Final = "127.0.0.1"
READY_WORDS: Final = " is ready: "
"""In the line that ``dledger serve`` prints once it serves."""
START_TIMEOUT_S: Final = 30.0
"""How long a starting node may do nothing: neither log anything nor use the processor. A busy machine only slows it."""
START_S_MAX: Final = 300.0
STOP_TIMEOUT_S: Final = 60.0
LEADER_TIMEOUT_S: Final = 60.0
GIVEN_MAX: Final = 100
_POLL_S: Final = 0.02
_NEIGHBOURS: Final = 5
_OFFSETS: Final = range(-(_NEIGHBOURS // 2), _NEIGHBOURS // 2 + 1)
"""Of a port and those around it that belong to it."""


class LocalGroupError(Exception):
    """Raised when a process of the group fails to start or stop; contains the end of its log."""


@dataclass(frozen=True, slots=True)
class LocalNode:
    """The ports and directory of one node."""

    node_id: NodeId
    peer_port: int
    client_port: int
    log_file: Path

    @property
    def client_address(self) -> str:
        """``host:port`` for clients."""
        return f"{HOST}:{self.client_port}"

    @property
    def grpc_port(self) -> int:
        """The port of gRPC: the default one."""
        return self.client_port + GRPC_PORT_OFFSET

    @property
    def grpc_address(self) -> str:
        """``host:port`` of gRPC."""
        return f"{HOST}:{self.grpc_port}"


class NodeProcess(Protocol):
    """The part of ``subprocess.Popen`` that a group uses; others may implement it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[bytes] | None: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None:
        """The exit status (negative: a signal); None while running."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises ``subprocess.TimeoutExpired``."""

    def send_signal(self, number: int) -> None:
        """Send a signal; does nothing after the process has ended."""

    def kill(self) -> None:
        """SIGKILL."""


class LocalGroup:
    """Starts all nodes on entry and stops them on exit. Not thread-safe, except ``kill``."""

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 3,
        flush: str = "sync",
        name: str = "default",
        settings: Mapping[str, str] | None = None,
        detached: bool = False,
        tls: bool = False,
    ) -> None:
        self.directory = directory
        self.name = name
        self._settings = {"flush_mode": flush, **(settings or {})}
        self.is_detached = detached
        self._processes: dict[NodeId, NodeProcess] = {}
        self.log_format = "text"
        """The nodes' log format: ``text`` or ``json``."""
        self.metrics_ports: dict[NodeId, int] = {}
        """Each node's metrics port; see ``serve_metrics``."""
        directory.mkdir(parents=True, exist_ok=True)
        client_ports = free_ports(size)
        peer_ports = free_ports(size, taken=client_ports)
        self.nodes = {
            NodeId(f"n{number}"): LocalNode(
                NodeId(f"n{number}"), peer_ports[number], client_ports[number], directory / f"n{number}.log"
            )
            for number in range(size)
        }
        self.tls = LocalTls(directory / "certs", self.nodes) if tls else None

    def __enter__(self) -> Self:
        try:
            self.start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.is_detached or kind is not None:
            self.close()

    def serve_metrics(self) -> None:
        """Serve metrics from every node started from now on, each at its own port."""
        taken = {port for node in self.nodes.values() for port in (node.client_port, node.peer_port)}
        self.metrics_ports = dict(zip(self.nodes, free_ports(len(self.nodes), taken=taken), strict=True))

    def _metrics_lines(self, node: NodeId) -> dict[str, str]:
        port = self.metrics_ports.get(node)
        return {} if port is None else {"metrics_port": str(port)}

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_all(self) -> None:
        """Start all nodes that are not running, in parallel, and wait until they are ready."""
        self.start_together([node for node in self.nodes if not self.is_running(node)])

    def start_together(self, nodes: Sequence[NodeId]) -> None:
        """Start these in parallel, and wait until they are ready."""
        offsets = {node: self._spawn(node) for node in nodes}
        for node, offset in offsets.items():
            self._wait_ready(node, offset)

    def start(self, node: NodeId, *, extra: Sequence[str] = ()) -> None:
        """Start a node and wait until it is ready. ``extra`` is appended to its command line."""
        if self.is_running(node):
            raise LocalGroupError(f"{node} runs already")
        self._wait_ready(node, self._spawn(node, extra))

    def join(self, settings: Mapping[str, str] | None = None) -> LocalNode:
        """Start one more node, which waits until the group adds it, and wait until it is ready; see ``LocalNode``."""
        node_id = NodeId(f"n{len(self.nodes)}")
        taken = {port for one in self.nodes.values() for port in (one.client_port, one.peer_port)}
        (client_port,) = free_ports(1, taken=taken)
        (peer_port,) = free_ports(1, taken={*taken, client_port})
        self.nodes[node_id] = node = LocalNode(node_id, peer_port, client_port, self.directory / f"{node_id}.log")
        words = [
            word for name, text in {"join": "true", **(settings or {})}.items() for word in ("--set", f"{name}={text}")
        ]
        self.start(node_id, extra=words)
        return node

    def kill(self, node: NodeId) -> None:
        """SIGKILL, and wait until the process is gone."""
        process = self._process(node)
        process.kill()
        process.wait()

    def stop(self, node: NodeId, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM; wait for the graceful stop and return the exit code."""
        process = self._process(node)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LocalGroupError(f"{node} did not stop within {timeout_s} s\n{self._log_end(node)}") from None

    def wait_exit(self, node: NodeId, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait until a node exits by itself and return its exit code (negative: a signal)."""
        try:
            return self._process(node).wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise LocalGroupError(f"{node} is still running after {timeout_s} s\n{self._log_end(node)}") from None

    def pause(self, node: NodeId) -> None:
        """SIGSTOP: the process keeps its sockets, but is silent."""
        self._process(node).send_signal(signal.SIGSTOP)

    def resume(self, node: NodeId) -> None:
        self._process(node).send_signal(signal.SIGCONT)

    def is_running(self, node: NodeId) -> bool:
        """Whether the node's process exists (also when paused)."""
        process = self._processes.get(node)
        return process is not None and process.poll() is None

    def pid(self, node: NodeId) -> int:
        """The process id of a started node."""
        return self._process(node).pid

    def close(self) -> None:
        """Stop every process: SIGTERM to all, then SIGKILL to those that take too long. Idempotent."""
        running = [self._processes[node] for node in self.nodes if self.is_running(node)]
        for process in running:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        give_up_at = time.monotonic() + STOP_TIMEOUT_S
        for process in running:
            try:
                process.wait(max(0.0, give_up_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()

    # --- what they are and say ---------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """The client addresses of all nodes, running or not."""
        return [node.client_address for node in self.nodes.values()]

    def client(self, timeout_s: float = 30.0) -> DLedgerClient:
        """A client that knows all nodes; the caller closes it."""
        from dledger.client import DLedgerClient

        return DLedgerClient(self.addresses, group=self.name, timeout_s=timeout_s, security=self.security)

    @property
    def security(self) -> ClientSecurity | None:
        """The security settings that the group's clients need."""
        return self.tls.client() if self.tls is not None else None

    def leader(self, timeout_s: float = LEADER_TIMEOUT_S, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a node leads and can commit, and return it."""
        found: list[NodeId] = []

        def someone_leads() -> bool:
            leaders = [
                one
                for one in self.statuses().values()
                if one.role is Role.LEADER and one.node_id != other_than and one.committed_index >= 0
            ]
            found[:] = [max(leaders, key=lambda one: one.term).node_id] if leaders else []
            return bool(found)

        wait_until(someone_leads, timeout_s, "no node became leader")
        return found[0]

    def statuses(self) -> dict[NodeId, NodeStatus]:
        """The statuses of the running nodes; those that do not respond are left out."""
        answers: dict[NodeId, NodeStatus] = {}
        with closing(self.client(timeout_s=1.0)) as client:
            for node in self.nodes.values():
                if self.is_running(node.node_id):
                    try:
                        answers[node.node_id] = client.metadata(address=node.client_address)
                    except DLedgerError:
                        continue
        return answers

    def wait_converged(self, timeout_s: float = 120.0) -> dict[NodeId, NodeStatus]:
        """Wait until all nodes are running and have the same committed entries; returns their statuses."""
        answers: dict[NodeId, NodeStatus] = {}

        def all_alike() -> bool:
            answers.clear()
            answers.update(self.statuses())
            ends = {(one.end_index, one.committed_index, one.end_position) for one in answers.values()}
            return len(answers) == len(self.nodes) and len(ends) == 1 and all(e == c for e, c, _ in ends)

        wait_until(all_alike, timeout_s, "the nodes did not converge")
        return answers

    def logs(self, node: NodeId) -> str:
        """The complete output of the node's processes."""
        file = self.nodes[node].log_file
        return file.read_text(errors="replace") if file.exists() else ""

    def store_dir(self, node: NodeId) -> Path:
        """The node's directory: ``data/``, ``index/`` and the small files."""
        return self.directory / f"dledger-{node}"

    # --- internals ---------------------------------------------------------------------------------------------------

    def command(self, node: NodeId) -> list[str]:
        """The command line of a node."""
        here = self.nodes[node]
        words = [sys.executable, "-m", "dledger_cli.entry", "serve", "-g", self.name, "-i", node]
        words += ["-p", self.members_of(node)]
        words += ["-s", str(self.directory), "--client-port", str(here.client_port)]
        for name, text in {**self._settings, **self._metrics_lines(node), **self.tls_settings(node)}.items():
            words += ["--set", f"{name}={text}"]
        return self._ending_with_us(words)

    def tls_settings(self, node: NodeId) -> dict[str, str]:
        """The settings for a node's certificates; empty without TLS."""
        return self.tls.settings(node) if self.tls is not None else {}

    def members_of(self, node: NodeId) -> str:
        """The member list passed to ``node``."""
        return ";".join(f"{one.node_id}-{self.peer_address(node, one)}" for one in self.nodes.values())

    def peer_address(self, node: NodeId, other: LocalNode) -> str:  # noqa: ARG002  # some nodes go proxies
        """The address at which ``node`` reaches ``other``'s peer port."""
        return f"{HOST}:{other.peer_port}"

    def _ending_with_us(self, words: list[str]) -> list[str]:
        return words if self.is_detached else [*words, "--until-stdin-closes"]

    def _spawn(self, node: NodeId, extra: Sequence[str] = ()) -> int:
        """Start the process and return the previous size of its log."""
        log_file = self.nodes[node].log_file
        offset = log_file.stat().st_size if log_file.exists() else 0
        before = self._processes.get(node)
        if before is not None and before.stdin is not None:
            before.stdin.close()
        with log_file.open("ab") as log:
            self._processes[node] = self.launch([*self.command(node), *extra], log)
        return offset

    def launch(self, words: Sequence[str], log: IO[bytes]) -> NodeProcess:
        """Run a node's command line; its standard input is a pipe unless the group is detached."""
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if self.is_detached else subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=self.environment(),
            start_new_session=True,  # Ctrl-C is for the creator, which stops its nodes in order
        )

    def environment(self) -> dict[str, str]:
        """The environment of a node."""
        ours = {name: text for name, text in os.environ.items() if not name.startswith(("COVERAGE_", "DLEDGER_"))}
        return ours | {"DLEDGER_LOG_FORMAT": self.log_format}

    def _wait_ready(self, node: NodeId, offset: int) -> None:
        said = b""

        def ready_or_gone() -> bool:
            nonlocal said
            with self.nodes[node].log_file.open("rb") as log:
                log.seek(offset)
                said = log.read()
            return READY_WORDS.encode() in said or not self.is_running(node)

        def done_so_far() -> tuple[int, int]:
            return len(said), processor_ticks(self._process(node).pid)

        try:
            wait_while_working(ready_or_gone, done_so_far, f"{node} is not ready")
        except LocalGroupError as error:
            raise LocalGroupError(f"{error}\n{self._log_end(node)}") from None
        if not self.is_running(node):
            code = self._process(node).returncode
            raise LocalGroupError(f"{node} exited with code {code} during startup\n{self._log_end(node)}")

    def _process(self, node: NodeId) -> NodeProcess:
        if node not in self._processes:
            raise LocalGroupError(f"{node} was never started")
        return self._processes[node]

    def _log_end(self, node: NodeId) -> str:
        return "\n".join(self.logs(node).splitlines()[-30:])


def wait_while_working(condition: Callable[[], bool], done_so_far: Callable[[], object], complaint: str) -> None:
    """Poll until the condition holds. Raises ``LocalGroupError`` once nothing was done for ``START_TIMEOUT_S``, or
    after ``START_S_MAX``.
    """
    never = threading.Event()
    began_s = progress_s = time.monotonic()
    before: object = None
    while not condition():
        now_s, done = time.monotonic(), done_so_far()
        if done != before:
            before, progress_s = done, now_s
        if now_s - progress_s >= START_TIMEOUT_S or now_s - began_s >= START_S_MAX:
            raise LocalGroupError(f"{complaint} within {now_s - began_s:.0f} s")
        never.wait(_POLL_S)


def processor_ticks(pid: int) -> int:
    """The processor time that a process has used, in clock ticks; 0 if the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, ValueError, IndexError):
        return 0


def wait_until(
    condition: Callable[[], bool], timeout_s: float, complaint: str, *, error: type[Exception] = LocalGroupError
) -> None:
    """Poll until the condition holds. Raises ``error`` with the complaint at the deadline."""
    never = threading.Event()
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= give_up_at:
            raise error(f"{complaint} within {timeout_s:g} s")
        never.wait(_POLL_S)


def free_ports(count: int, *, companion: int = 0, taken: Collection[int] = ()) -> list[int]:
    """Distinct free TCP ports, none of ``taken``; the port ``companion`` higher is free, too.

    A port comes with the two below and above it, of which brokers and nodes take some beside the one that they were
    given (the VIP port, that for slaves, that of gRPC): they are free as well, and nobody else's.

    The last ``GIVEN_MAX`` of this process are left out: perhaps nobody listens there yet.

    They are below the kernel's range for outgoing connections: otherwise a client that reconnects to a killed node
    might get that node's own port, and the node could not be restarted.

    Processes that call this in parallel may be given separate shares of the ports, so that none takes the port of a
    node that another one has killed and will restart: ``LOCAL_PORTS=1/8`` means every eighth five ports.
    """
    share, shares = map(int, os.environ.get("LOCAL_PORTS", "0/1").split("/"))
    low = 10_000
    high = max(_ephemeral_start() - companion, low + 1000)
    first = low // _NEIGHBOURS
    mine = range(first + (share - first) % shares, high // _NEIGHBOURS, shares)
    dice = random.SystemRandom()
    found: list[int] = []
    used = {*taken, *(one for given in _given for one in given)}
    for _ in range(100 * count):
        port = dice.choice(mine) * _NEIGHBOURS + _NEIGHBOURS // 2
        wanted = {one + offset for one in (port, port + companion) for offset in _OFFSETS}
        if wanted & used or not all(map(_is_free, wanted)):
            continue
        used |= wanted
        _given.append(wanted)
        found.append(port)
        if len(found) == count:
            return found
    raise LocalGroupError(f"no {count} free ports between {low} and {high}")


_given: Final[deque[set[int]]] = deque(maxlen=GIVEN_MAX)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _ephemeral_start() -> int:
    try:
        return max(11_000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return 32_768


class LocalTls:
    """A CA, a certificate for each node, and one for clients."""

    def __init__(self, directory: Path, nodes: Iterable[NodeId]) -> None:
        from dledger_cli import certs  # here: it needs an optional package

        self.directory = directory
        certs.make_authority(directory)
        for node in nodes:
            certs.make_node(directory, node)
        certs.make_client(directory, "client")

    def settings(self, node: NodeId) -> dict[str, str]:
        """The TLS settings of a node."""
        return {
            "tls_cert_path": str(self.directory / f"{node}.crt"),
            "tls_key_path": str(self.directory / f"{node}.key"),
            "tls_trust_cert_path": str(self.directory / "ca.crt"),
        }

    def client(self, name: str = "client") -> ClientSecurity:
        """The TLS settings of a client."""
        return client_security(self.directory, name)


def client_security(directory: Path, name: str = "client") -> ClientSecurity:
    """Client settings for a certificate in a directory made by ``dledger certs``."""
    from dledger.client.shared import ClientSecurity, TlsFiles  # here, so that --help does not load gRPC

    return ClientSecurity(TlsFiles(directory / "ca.crt", directory / f"{name}.crt", directory / f"{name}.key"))


class SeveralGroups(LocalGroup):
    """Each node is a process with a member of every group; ``name`` is the first of them."""

    def __init__(
        self, directory: Path, groups: Sequence[str], *, size: int = 3, settings: Mapping[str, str] | None = None
    ) -> None:
        self.groups = tuple(groups)
        self.lines = dict(settings or {})
        """Of every conf file; may be changed before a start."""
        super().__init__(directory, size=size, name=groups[0])

    def command(self, node: NodeId) -> list[str]:
        """The command line of a node: a conf file for each group."""
        words = super().command(node)
        ours = [*words[:4], *(word for group in self.groups for word in ("-c", str(self._conf(node, group))))]
        return self._ending_with_us(ours)

    def _conf(self, node: NodeId, group: str) -> Path:
        file = self.directory / f"{node}-{group}.conf"
        lines = {
            "group": group,
            "node_id": node,
            "members": self.members_of(node),
            "base_dir": str(self.directory / group),
            "client_port": str(self.nodes[node].client_port),
            **self._metrics_lines(node),
            **self.lines,
        }
        file.write_text("".join(f"{name}={text}\n" for name, text in lines.items()))
        return file

    def client_of(self, group: str, timeout_s: float = 10) -> DLedgerClient:
        """A client of one group; the caller closes it."""
        from dledger.client import DLedgerClient

        return DLedgerClient(self.addresses, group=group, timeout_s=timeout_s)

    def leader_of(self, group: str, timeout_s: float = 30, *, other_than: NodeId | None = None) -> NodeId:
        """Wait until a node leads a group and can commit, and return it."""
        found: list[NodeId] = []

        def someone_leads() -> bool:
            found[:] = []
            with self.client_of(group, timeout_s=2) as client:
                for node in self.nodes.values():
                    if not self.is_running(node.node_id) or node.node_id == other_than:
                        continue
                    try:
                        status = client.metadata(address=node.client_address)
                    except DLedgerError:
                        continue
                    if status.role is Role.LEADER and status.committed_index >= 0:
                        found.append(node.node_id)
            return bool(found)

        wait_until(someone_leads, timeout_s, f"no node became leader of {group}")
        return found[0]

    def lead(self, group: str, node: NodeId, timeout_s: float = 30) -> None:
        """Transfer leadership of a group to a node, and wait until it leads."""

        def leads() -> bool:
            with self.client_of(group, timeout_s) as client:
                try:
                    return client.transfer_leadership(node).node_id == node
                except DLedgerError:  # it is not in sync yet
                    return False

        wait_until(leads, timeout_s, f"{node} did not become leader of {group}")

    def directory_of(self, node: NodeId, group: str) -> Path:
        """The directory of a node's member of a group."""
        return self.directory / group / f"dledger-{node}"
