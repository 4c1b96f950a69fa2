"""A group whose nodes live in network namespaces of their own, joined by a bridge: packets can really be dropped.

The bridge has a namespace, too. In the machine's own, Docker's usual state (no forwarding but its own, and bridged
packets go through iptables) would drop every packet between the nodes.
"""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dledger.client import ClientSecurity
from dledger.types import NodeId
from dledger_cli.local.group import LocalNode
from tests.integration.harness import Group
from tests.support.lacking import lacks, need_root, program


def need_namespaces() -> None:
    """Skip the test where they cannot be used."""
    need_root()
    for tool, package in (("ip", "iproute2"), ("iptables", "iptables"), ("nsenter", "util-linux")):
        program(tool, package)
    probe = f"dlprobe{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        _run(*inside(probe), "iptables", "-L", "INPUT", "-n")
    except subprocess.CalledProcessError as error:
        lacks("network namespaces", error.stderr)
    finally:
        subprocess.run(["ip", "netns", "del", probe], check=False, capture_output=True)


def inside(namespace: str) -> list[str]:
    """The words before a command that put it there.

    Not ``ip netns exec``: that makes a mount namespace, too, which would keep alive whatever is mounted at the time.
    """
    return ["nsenter", f"--net=/run/netns/{namespace}"]


_BRIDGE: Final = "br0"
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class NamespacedNode(LocalNode):
    """A node with an address of its own."""

    host: str
    namespace: str

    @property
    def client_address(self) -> str:
        """As ``LocalNode.client_address``, at the node's own address."""
        return f"{self.host}:{self.client_port}"


class NamespacedGroup(Group):
    """Makes the namespaces at once; ``close`` removes them."""

    def __init__(self, directory: Path, *, size: int = 3, settings: Mapping[str, str] | None = None) -> None:
        # The addresses are not loopback's, and the tests are not about TLS.
        super().__init__(directory, size=size, settings={"insecure": "true", **(settings or {})})
        # The kernel takes a namespace's links away some time after the namespace: no name or address is used twice.
        number = next(_numbers)
        tag = f"dl{os.getpid() % 100_000}x{number}"
        subnet = f"10.{200 + os.getpid() % 50}.{(os.getpid() // 50 + number) % 250}"
        self._hub = f"{tag}hub"
        self._cable = f"{tag}h"
        self.hosts: dict[NodeId, NamespacedNode] = {}
        self._removed = False
        try:
            self._make_hub(f"{subnet}.254/24")
            for place, (node, one) in enumerate(tuple(self.nodes.items())):
                self.hosts[node] = NamespacedNode(
                    node, one.peer_port, one.client_port, one.log_file, f"{subnet}.{place + 1}", f"{tag}{node}"
                )
                self._plug_in(self.hosts[node], f"{tag}v{place}")
        except BaseException:
            self._remove()
            raise
        self.nodes.update(self.hosts)
        self.prefixes = {node: inside(one.namespace) for node, one in self.hosts.items()}

    def _make_hub(self, address: str) -> None:
        """The bridge, and a cable to it with our own address."""
        hub = ["ip", "-n", self._hub]
        _run("ip", "netns", "add", self._hub)
        _run(*hub, "link", "add", _BRIDGE, "type", "bridge")
        _run(*hub, "link", "set", _BRIDGE, "up")
        _run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "host", "netns", self._hub)
        _run(*hub, "link", "set", "host", "master", _BRIDGE, "up")
        _run("ip", "addr", "add", address, "dev", self._cable)
        _run("ip", "link", "set", self._cable, "up")

    def _plug_in(self, node: NamespacedNode, cable: str) -> None:
        inside = ["ip", "-n", node.namespace]
        _run("ip", "netns", "add", node.namespace)
        _run(
            "ip", "-n", self._hub, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", node.namespace
        )
        _run("ip", "-n", self._hub, "link", "set", cable, "master", _BRIDGE, "up")
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "addr", "add", f"{node.host}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")

    @property
    def security(self) -> ClientSecurity:
        """Plaintext, though it leaves the machine as far as a client can tell."""
        return ClientSecurity(insecure=True)

    def peer_address(self, node: NodeId, other: LocalNode) -> str:
        """At the other's own address."""
        return f"{self.hosts[other.node_id].host}:{other.peer_port}"

    def drop(self, source: NodeId, target: NodeId) -> None:
        """Packets of ``source`` vanish before ``target``."""
        _run(*self._iptables(target), "-A", "INPUT", "-s", self.hosts[source].host, "-j", "DROP")

    def heal_all(self) -> None:
        """No packet vanishes any more."""
        for node in self.hosts:
            _run(*self._iptables(node), "-F", "INPUT")

    def _iptables(self, node: NodeId) -> list[str]:
        return [*inside(self.hosts[node].namespace), "iptables", "-w"]

    def close(self) -> None:
        """End the nodes, then remove the network."""
        super().close()
        if not self._removed:
            self._remove()

    def _remove(self) -> None:
        self._removed = True
        for node in self.hosts.values():
            subprocess.run(["ip", "netns", "del", node.namespace], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._cable], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self._hub], check=False, capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
