"""A group of broker containers on its own private network.

The containers get nothing that a production broker would not have: no capabilities, a read-only root file system, one
volume. Faults come from outside: the engine kills, pauses and disconnects; iptables rules that this host sets in a
container's network namespace drop packets; a full disk is a full tmpfs volume.

A group may also grow and shrink. A node that is no member has neither container nor volume.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import docker
import requests
import tenacity
from docker.models.containers import Container
from docker.models.networks import Network
from docker.types import IPAMConfig, IPAMPool

from cluster.drill.target import (
    CLUSTER,
    SECURITY,
    SMALL_DISK_MIB,
    SMALL_FILES,
    SPARES,
    TOOL_TIMEOUT_S,
    Direction,
    DrillError,
    MigrationForm,
    NotPossibleError,
    change_members,
    plain_settings,
    wait_until,
)
from dledger.errors import DLedgerError
from dledger.types import NodeId
from rocketstore.client import Admin

if TYPE_CHECKING:
    import docker

LISTEN_PORT: Final = 10911
PEER_PORT: Final = 20911
SLAVES_PORT: Final = 10912
USER_ID: Final = 10001
"""The image's user, who must be able to write to the volume."""
LABEL: Final = "dledger.drill"
GROUP: Final = "drill"
READY_TIMEOUT_S: Final = 60.0
FREEZER_GAVE_UP: Final = "unable to freeze"
"""The engine's error when the kernel has not frozen a container in time."""
FREEZE_TIMEOUT_S: Final = 10.0
STOP_TIMEOUT_S: Final = 30
FILLER: Final = "/data/.drill-filler"
ROOT_SETTING: Final = "store_path_root_dir"
"""As the image's environment spells it."""
_ROOT: Final = "store"
_PLAIN_ROOT: Final = "plain"
_TOOL_DIR: Final = "/volumes"
_OF_GROUPS: Final = ("dleger", "enabledleger")
"""How the settings of a group's members begin."""
_FIRST_HOST: Final = 10
_SUBNETS_TRIED: Final = 20


class ContainerTarget:
    """See ``Target``. ``small_disks``: each node's volume is a tmpfs that can be filled."""

    kind = "containers"

    def __init__(
        self, client: docker.DockerClient, image: str, *, size: int, small_disks: bool = False, keep: bool = False
    ) -> None:
        self._client = client
        self._image = image
        self._small_disks = small_disks
        self._keep = keep
        self.name = f"dledger-drill-{os.getpid()}-{secrets.token_hex(2)}"
        self._all: Final = tuple(NodeId(f"n{number}") for number in range(size))
        self._hosts: dict[NodeId, str] = {}
        self._network: Network | None = None
        self._containers: dict[NodeId, Container] = {}
        self._volumes: dict[NodeId, str] = {}
        self._volumes_made = 0

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        return self._all

    @property
    def notes(self) -> tuple[str, ...]:
        """The containers' location, if they are kept."""
        if not self._keep:
            return ()
        return (f"the containers are kept: docker ps --all --filter label={LABEL}={self.name}",)

    def address(self, node: NodeId) -> str:
        """Its own address on the private network, which this host can reach."""
        return f"{self._hosts[node]}:{LISTEN_PORT}"

    # --- start and end -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Create network, volumes and containers, start them, and wait until all brokers respond."""
        self._network = self._make_network()
        for node in self.nodes:
            self._create(node)
        self._start(self.nodes)

    def _start(self, nodes: Iterable[NodeId]) -> None:
        chosen = tuple(nodes)
        self.restart(*chosen)
        for node in chosen:
            self._wait_ready(node)

    def close(self) -> None:
        """Remove everything, unless it is to be kept."""
        if self._keep:
            return
        with _told():
            self._at_once(lambda node: self._containers[node].remove(force=True), self._containers)
            self._containers.clear()
            for name in self._volumes.values():
                self._client.volumes.get(name).remove(force=True)
            self._volumes.clear()
            if self._network is not None:
                self._network.remove()
                self._network = None

    def _make_network(self) -> Network:
        """An internal network, which no packet leaves. We choose the subnet because members need fixed addresses."""
        for _ in range(_SUBNETS_TRIED):
            subnet = ipaddress.ip_network(f"10.{192 + secrets.randbelow(60)}.{secrets.randbelow(256)}.0/24")
            if _is_routed(str(subnet[1])):
                continue
            hosts = list(subnet.hosts())
            pool = IPAMPool(subnet=str(subnet), gateway=str(hosts[0]))
            try:
                network = self._client.networks.create(
                    self.name,
                    driver="bridge",
                    internal=True,
                    labels={LABEL: self.name},
                    ipam=IPAMConfig(pool_configs=[pool]),
                )
            except docker.errors.APIError as error:
                if "overlaps" in str(error):
                    continue
                raise NotPossibleError(f"the engine cannot create a network: {error.explanation}") from error
            self._hosts = {node: str(hosts[_FIRST_HOST + number]) for number, node in enumerate(self._all)}
            return network
        raise NotPossibleError("no free subnet for a private network")

    def _create(self, node: NodeId) -> None:
        self._volumes_made += 1
        name = f"{self.name}-{node}-{self._volumes_made}"
        options = {}
        if self._small_disks:
            size = f"size={SMALL_DISK_MIB}m,uid={USER_ID},gid={USER_ID},mode=0750"
            options = {"type": "tmpfs", "device": "tmpfs", "o": size}
        self._client.volumes.create(name, driver="local", driver_opts=options, labels={LABEL: self.name})
        self._volumes[node] = name
        self._contain(node)

    def _contain(self, node: NodeId) -> None:
        """Create its container, on its volume."""
        name = self._volumes[node]
        self._containers[node] = self._client.containers.create(
            self._image,
            name=f"{self.name}-{node}",
            hostname=node,
            labels={LABEL: self.name},
            environment=_environment(self._settings(node)),
            volumes={name: {"bind": "/data", "mode": "rw"}},
            network=self.name,
            networking_config={self.name: self._client.api.create_endpoint_config(ipv4_address=self._hosts[node])},
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            tmpfs={"/tmp": "size=16m,mode=1777"},
            healthcheck={"test": ["NONE"]},  # the drill checks itself, ten times as often and much cheaper
        )

    def _members_of(self, node: NodeId) -> tuple[NodeId, ...]:  # noqa: ARG002  # groups that change make a difference
        """Those that a node is told of."""
        return self.nodes

    def _settings(self, node: NodeId) -> dict[str, str]:
        return {
            "enableDLegerCommitLog": "true",
            "dLegerGroup": GROUP,
            "dLegerPeers": ";".join(f"{one}-{self._hosts[one]}:{PEER_PORT}" for one in self._members_of(node)),
            "dLegerSelfId": node,
            "brokerName": "drill",
            "listenPort": str(LISTEN_PORT),
            "flushDiskType": "SYNC_FLUSH",
            "insecure": "true",  # the network is private to this host
            **SMALL_FILES,
        }

    def _wait_ready(self, node: NodeId) -> None:
        """Wait until its status is available, or it has exited."""
        address = self.address(node)
        with Admin([address], timeout_s=1.0, security=SECURITY) as admin:

            def answers() -> bool:
                try:
                    admin.status(address)
                except DLedgerError:
                    if self._running(node):
                        return False
                    raise DrillError(f"{node} exited during startup\n{self.log_of(node)}") from None
                return True

            try:
                wait_until(answers, READY_TIMEOUT_S, f"{node} does not answer")
            except DrillError as error:
                raise DrillError(f"{error}\n{self.log_of(node)}") from None

    # --- what is done to them ----------------------------------------------------------------------------------------

    def kill(self, *nodes: NodeId) -> None:
        """SIGKILL through the engine, and wait until they are gone."""
        with _told():
            self._at_once(lambda node: self._containers[node].kill("SIGKILL"), nodes)
            self._at_once(lambda node: self._containers[node].wait(timeout=STOP_TIMEOUT_S), nodes)

    def stop(self, node: NodeId) -> None:
        """SIGTERM; having to kill the container, or an exit code other than 0, is an error."""
        with _told():
            self._containers[node].stop(timeout=STOP_TIMEOUT_S)
            code = self._containers[node].wait(timeout=STOP_TIMEOUT_S)["StatusCode"]
        if code != 0:
            raise DrillError(f"{node} was asked to stop and exited with code {code}\n{self.log_of(node)}")

    def restart(self, *nodes: NodeId) -> None:
        """Start them; they recover by themselves."""
        with _told():
            self._at_once(lambda node: self._containers[node].start(), nodes)

    def pause(self, node: NodeId) -> None:
        """Use the kernel's freezer; it may give up on a busy machine, so it is retried."""
        again = tenacity.Retrying(
            retry=tenacity.retry_if_exception(lambda error: FREEZER_GAVE_UP in str(error)),
            stop=tenacity.stop_after_delay(FREEZE_TIMEOUT_S),
            wait=tenacity.wait_fixed(0.1),
            reraise=True,
        )
        with _told():
            again(self._containers[node].pause)

    def resume(self, node: NodeId) -> None:
        with _told():
            self._containers[node].unpause()

    def disconnect(self, node: NodeId) -> None:
        """Detach its network interface; clients do not reach it either."""
        with _told():
            self._the_network().disconnect(self._containers[node], force=True)

    def reconnect(self, node: NodeId) -> None:
        """Attach a new interface with the old address."""
        with _told():
            self._the_network().connect(self._containers[node], ipv4_address=self._hosts[node])

    def isolate(self, node: NodeId, direction: Direction) -> None:
        """Drop packets to or from the other members."""
        chain, end = ("OUTPUT", "--destination") if direction is Direction.OUT else ("INPUT", "--source")
        for other in self.nodes:
            if other != node:
                self._iptables(node, "--append", chain, end, self._hosts[other], "--jump", "DROP")

    def rejoin(self, node: NodeId) -> None:
        """Remove the rules."""
        for chain in ("INPUT", "OUTPUT"):
            self._iptables(node, "--flush", chain)

    def fill_disk(self, node: NodeId) -> None:
        """Write to its volume until it is full."""
        said = self._run_inside(node, f"exec cat /dev/zero > {FILLER}")
        if "No space left" not in said:
            raise DrillError(f"cannot fill the volume of {node}: {said}")

    def free_disk(self, node: NodeId) -> None:
        """Remove the filler file."""
        said = self._run_inside(node, f"exec rm {FILLER}")
        if said:
            raise DrillError(f"cannot free the volume of {node}: {said}")

    def empty_volume(self, node: NodeId) -> None:
        """Remove the stopped container and its volume, and create both again."""
        self._discard(node)
        with _told():
            self._create(node)

    def _discard(self, node: NodeId) -> None:
        """Remove the stopped container and its volume."""
        if self._running(node):
            raise DrillError(f"{node} is still running: cannot take away its volume")
        with _told():
            self._containers.pop(node).remove()
            self._client.volumes.get(self._volumes.pop(node)).remove()

    def log_of(self, node: NodeId) -> str:
        """The last lines of its log."""
        with _told():
            return _text(self._containers[node].logs(tail=40))

    # --- machinery ---------------------------------------------------------------------------------------------------

    def _the_network(self) -> Network:
        if self._network is None:
            raise DrillError("the group was not started")
        return self._network

    def _running(self, node: NodeId) -> bool:
        with _told():
            self._containers[node].reload()
        return self._containers[node].status in ("running", "paused")

    def _run_inside(self, node: NodeId, script: str) -> str:
        with _told():
            return _text(self._containers[node].exec_run(["sh", "-c", script]).output).strip()

    def _iptables(self, node: NodeId, *words: str) -> None:
        with _told():
            self._containers[node].reload()
        process_id = self._containers[node].attrs["State"]["Pid"]
        inside = ["nsenter", f"--net=/proc/{process_id}/ns/net", "iptables", "--wait", "10"]
        missing = [tool for tool in ("nsenter", "iptables") if shutil.which(tool) is None]
        if os.geteuid() != 0 or missing:
            raise NotPossibleError(
                "dropping packets in one direction uses iptables in a container's network namespace, which requires "
                + (f"{' and '.join(missing)} on this host" if missing else "root on the engine's host")
            )
        done = subprocess.run([*inside, *words], check=False, capture_output=True, text=True)
        if done.returncode:
            raise DrillError(f"iptables in the network of {node}: {done.stderr.strip()}")

    def _at_once(self, act: Callable[[NodeId], object], nodes: Iterable[NodeId]) -> None:
        chosen = list(nodes)
        gate = threading.Barrier(len(chosen)) if chosen else None

        def together(node: NodeId) -> object:
            if gate is not None:
                gate.wait(STOP_TIMEOUT_S)
            return act(node)

        with ThreadPoolExecutor(max(1, len(chosen)), thread_name_prefix="drill-engine") as pool:
            list(pool.map(together, chosen))


class ContainerMigration(ContainerTarget):
    """A container's form is its environment: each form has new containers on the old volumes."""

    def __init__(self, client: docker.DockerClient, image: str, *, size: int, keep: bool = False) -> None:
        super().__init__(client, image, size=size, keep=keep)
        self._form = MigrationForm.PAIR

    def start(self) -> None:
        """Create everything, and start the pair; the volumes of the others are empty."""
        self._network = self._make_network()
        for node in self.nodes:
            self._create(node)
        self._start(self.nodes[:2])

    def start_as(self, form: MigrationForm, *nodes: NodeId) -> None:
        """Replace their containers by those of this form, and start them."""
        self._form = form
        for node in nodes:
            with _told():
                self._containers.pop(node).remove()
                self._contain(node)
        self._start(nodes)

    def _settings(self, node: NodeId) -> dict[str, str]:
        return self._settings_as(self._form, node)

    def _settings_as(self, form: MigrationForm, node: NodeId) -> dict[str, str]:
        root = f"/data/{_PLAIN_ROOT if form is MigrationForm.PLAIN else _ROOT}"
        settings = super()._settings(node) | {ROOT_SETTING: root, "brokerClusterName": CLUSTER}
        if form is MigrationForm.GROUP:
            return settings
        at = f"{self._hosts[self.nodes[0]]}:{SLAVES_PORT}"
        plain = plain_settings(form, self.nodes.index(node), at, SLAVES_PORT) | {"brokerIP1": self._hosts[node]}
        return {name: text for name, text in settings.items() if not name.lower().startswith(_OF_GROUPS)} | plain

    def root_of(self, node: NodeId) -> str:
        """On its volume."""
        return f"{_TOOL_DIR}/{node}/{_ROOT}"

    def conf_of(self, node: NodeId) -> str:
        """Made by ``run_tool``."""
        return f"/tmp/{node}.conf"

    def plain_root_of(self, node: NodeId) -> str:
        """On the same volume."""
        return f"{_TOOL_DIR}/{node}/{_PLAIN_ROOT}"

    def run_tool(self, *words: str) -> tuple[int, str]:
        """Run it in a container that has all volumes, and the conf files of the group."""
        confs, script = {}, []
        for number, node in enumerate(self.nodes):
            lines = self._settings_as(MigrationForm.GROUP, node)
            confs[f"CONF{number}"] = "".join(f"{name}={text}\n" for name, text in lines.items())
            script.append(f'printf %s "$CONF{number}" > {self.conf_of(node)}; mkdir -p {self.root_of(node)}')
        with _told():
            tool = self._client.containers.create(
                self._image,
                entrypoint=["sh", "-c", "; ".join(script) + '; exec dledger "$@"', "sh"],
                command=list(words),
                name=f"{self.name}-tool",
                labels={LABEL: self.name},
                environment=confs,
                volumes={name: {"bind": f"{_TOOL_DIR}/{node}", "mode": "rw"} for node, name in self._volumes.items()},
                network_mode="none",
                read_only=True,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                tmpfs={"/tmp": "size=16m,mode=1777"},
                healthcheck={"test": ["NONE"]},
            )
            try:
                tool.start()
                code = int(tool.wait(timeout=TOOL_TIMEOUT_S)["StatusCode"])
                said = _text(tool.logs(stdout=True, stderr=False))
                return code, said if said.strip() else _text(tool.logs(stdout=False, stderr=True))
            finally:
                tool.remove(force=True)


def _environment(settings: dict[str, str]) -> dict[str, str]:
    return {f"DLEDGER_{name.upper()}": text for name, text in settings.items()}


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Convert the engine's errors to ``DrillError``."""
    try:
        yield
    except docker.errors.APIError as error:
        raise DrillError(f"the Docker engine: {error.explanation or error}") from error
    except requests.exceptions.RequestException as error:
        raise DrillError(f"the Docker engine does not answer: {error}") from error


def _text(said: bytes | Iterable[bytes]) -> str:
    whole = said if isinstance(said, bytes) else b"".join(said)
    return whole.decode(errors="replace")


def _is_routed(address: str) -> bool:
    """Whether this host has a specific route (not only a default one) to an address."""
    try:
        done = subprocess.run(["ip", "route", "show", "match", address], check=False, capture_output=True, text=True)
    except FileNotFoundError:
        return False
    return any(not line.startswith("default") for line in done.stdout.splitlines())


class ContainerMembers(ContainerTarget):
    def __init__(self, client: docker.DockerClient, image: str, *, size: int, keep: bool = False) -> None:
        super().__init__(client, image, size=size + SPARES, keep=keep)
        self._members = list(self._all[:size])

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The present members."""
        return tuple(self._members)

    @property
    def spares(self) -> tuple[NodeId, ...]:
        return tuple(node for node in self._all if node not in self._members)

    def add(self, node: NodeId) -> None:
        """Start it, and wait until it votes."""
        self._join(node)
        self._change("add", self._place(node))
        self._members.append(node)

    def remove(self, node: NodeId) -> None:
        """Remove it first: a member that is stopped before would be one less to count."""
        self._change("remove", node)
        self._members.remove(node)
        self.stop(node)
        self._discard(node)

    def replace(self, lost: NodeId, node: NodeId) -> None:
        """One command does both steps."""
        self._join(node)
        self._change("replace", lost, self._place(node))
        self._members[self._members.index(lost)] = node
        self._discard(lost)

    def _join(self, node: NodeId) -> None:
        """Start it; it waits until it is added."""
        self._create(node)
        self._start([node])

    def _members_of(self, node: NodeId) -> tuple[NodeId, ...]:
        """The present members, and the node itself."""
        return self.nodes if node in self._members else (*self.nodes, node)

    def _settings(self, node: NodeId) -> dict[str, str]:
        settings = super()._settings(node)
        return settings if node in self._members else {**settings, "dLegerJoin": "true"}

    def _place(self, node: NodeId) -> str:
        return f"{node}={self._hosts[node]}:{PEER_PORT}"

    def _change(self, *words: str) -> None:
        change_members((self.address(node) for node in self.nodes), GROUP, *words)
