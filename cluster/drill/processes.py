"""A group of broker processes on loopback, for machines without Docker or root.

Faults that a process cannot have are simulated around it: partitions by TCP proxies between the members, a full disk by
a small file system for its directory (which requires root).

A group may also grow and shrink: by ``dledger member``, as an operator does it.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from cluster.drill.target import (
    CLUSTER,
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
)
from dledger.types import NodeId
from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import HOST, LocalGroupError, LocalNode
from dledger_cli.local.tcp_proxy import LocalProxiedGroup

FILLER: Final = ".drill-filler"
_CHUNK: Final = bytes(1 << 20)


class LocalProxiedBrokers(LocalProxiedGroup, LocalBrokers):
    """Brokers that reach each other only through a network in user space."""

    def __init__(self, directory: Path, *, size: int) -> None:
        super().__init__(directory, size=size, name="drill", settings=SMALL_FILES)


class ProcessTarget:
    """See ``Target``. ``small_disks``: each node's data are on their own file system, which can be filled."""

    kind = "processes"

    def __init__(self, *, size: int, small_disks: bool = False, keep: bool = False) -> None:
        if small_disks and os.geteuid() != 0:
            raise NotPossibleError(
                "filling a disk requires mounting a small file system, which requires root: run this drill as "
                "root, or in containers"
            )
        self._keep = keep
        self._small_disks = small_disks
        self.directory = Path(tempfile.mkdtemp(prefix="dledger-drill-"))
        self._group = self._make_group(size)
        self._mounted: list[Path] = []

    def _make_group(self, size: int) -> LocalProxiedBrokers:
        return LocalProxiedBrokers(self.directory, size=size)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """As named by the group."""
        return tuple(self._group.nodes)

    @property
    def notes(self) -> tuple[str, ...]:
        """Differences from containers."""
        notes = (
            "partitions are simulated by TCP proxies between the processes: held-back data arrives after the "
            "heal, as if TCP resent it, and clients on this host still reach a disconnected node",
        )
        return (*notes, f"the processes' files and logs are kept in {self.directory}") if self._keep else notes

    def address(self, node: NodeId) -> str:
        """Its ``listenPort`` on loopback."""
        return self._group.nodes[node].client_address

    def start(self) -> None:
        """Start all nodes."""
        if self._small_disks:
            for node in self.nodes:
                self._mount(self._group.root_dir(node))
        told(self._group.start_all)

    def close(self) -> None:
        """Stop all nodes, and remove their directory unless it is to be kept."""
        self._group.close()
        while self._mounted:
            subprocess.run(["umount", "--lazy", self._mounted.pop()], check=True)
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def kill(self, *nodes: NodeId) -> None:
        """SIGKILL all, then wait until they are gone."""
        for node in nodes:
            os.kill(self._group.pid(node), signal.SIGKILL)
        for node in nodes:
            self._group.kill(node)

    def stop(self, node: NodeId) -> None:
        """SIGTERM; an exit code other than 0 is an error."""
        codes: list[int] = []
        told(lambda: codes.append(self._group.stop(node)))
        if codes != [0]:
            raise DrillError(f"{node} was asked to stop and exited with code {codes[0]}\n{self.log_of(node)}")

    def restart(self, *nodes: NodeId) -> None:
        """Returns when they serve."""
        if nodes == self.nodes:
            told(self._group.start_all)
        else:
            for node in nodes:
                told(lambda node=node: self._group.start(node))  # type: ignore[misc]  # called at once

    def pause(self, node: NodeId) -> None:
        self._group.pause(node)

    def resume(self, node: NodeId) -> None:
        self._group.resume(node)

    def disconnect(self, node: NodeId) -> None:
        """Block both directions to the other members."""
        self._group.network.partition([node])

    def reconnect(self, node: NodeId) -> None:
        """Deliver held-back bytes."""
        self._heal(node)

    def isolate(self, node: NodeId, direction: Direction) -> None:
        """Block one direction."""
        for other in self.nodes:
            if other != node:
                ends = (node, other) if direction is Direction.OUT else (other, node)
                self._group.network.block(*ends)

    def rejoin(self, node: NodeId) -> None:
        """Deliver held-back bytes."""
        self._heal(node)

    def fill_disk(self, node: NodeId) -> None:
        """Write until the disk is full."""
        with self._filler(node).open("wb", buffering=0) as filler:
            try:
                while filler.write(_CHUNK):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def free_disk(self, node: NodeId) -> None:
        """Remove the filler file."""
        self._filler(node).unlink()

    def empty_volume(self, node: NodeId) -> None:
        """Remove the contents of its directory."""
        root = self._group.root_dir(node)
        if self._group.is_running(node):
            raise DrillError(f"{node} is still running: cannot take away its files")
        for one in root.iterdir():
            if one.is_dir():
                shutil.rmtree(one)
            else:
                one.unlink()

    def log_of(self, node: NodeId) -> str:
        """The last lines of its log."""
        return "\n".join(self._group.logs(node).splitlines()[-40:])

    def _heal(self, node: NodeId) -> None:
        for other in self.nodes:
            if other != node:
                self._group.network.heal(node, other)
                self._group.network.heal(other, node)

    def _filler(self, node: NodeId) -> Path:
        root = self._group.root_dir(node)
        if root not in self._mounted:
            raise NotPossibleError(f"the disk of {node} is shared with this host: not filling it")
        return root / FILLER

    def _mount(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m,mode=0700", "dledger-drill", str(directory)]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        if done.returncode:
            raise NotPossibleError(f"cannot mount a small file system here: {done.stderr.strip()}")
        self._mounted.append(directory)


class MigrationBrokers(LocalProxiedBrokers):
    """Brokers that change their form, from conf files, at the same addresses and on the same directories."""

    form = MigrationForm.PAIR

    def peer_address(self, node: NodeId, other: LocalNode) -> str:  # noqa: ARG002  # the same for every node
        """No proxies: members must have equal conf files."""
        return f"{HOST}:{other.peer_port}"

    def plain_root(self, node: NodeId) -> Path:
        """Where its log is exported to."""
        return self.directory / f"{node}-plain"

    def conf_lines(self, node: NodeId) -> dict[str, str]:
        """Those of the present form. A plain master listens for slaves where a member would for its peers."""
        self.plain = self.form is not MigrationForm.GROUP
        lines = super().conf_lines(node) | {"brokerClusterName": CLUSTER}
        if self.plain:
            master = next(iter(self.nodes.values()))
            at = f"{HOST}:{master.peer_port}"
            lines |= plain_settings(self.form, [*self.nodes].index(node), at, self.nodes[node].peer_port)
        if self.form is MigrationForm.PLAIN:
            root = self.plain_root(node)
            lines |= {"storePathRootDir": str(root), "storePathCommitLog": str(root / "commitlog")}
        return lines


class ProcessMigration(ProcessTarget):
    _group: MigrationBrokers

    def _make_group(self, size: int) -> MigrationBrokers:
        return MigrationBrokers(self.directory, size=size)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the files are, if they are kept."""
        return super().notes[1:]

    def start(self) -> None:
        """Start the pair; the directories of the others are empty."""
        for node in self.nodes:
            self._group.root_dir(node).mkdir(parents=True)
        self.start_as(MigrationForm.PAIR, *self.nodes[:2])

    def start_as(self, form: MigrationForm, *nodes: NodeId) -> None:
        """Start them in this form."""
        self._group.form = form
        told(lambda: self._group.start_together(nodes))

    def root_of(self, node: NodeId) -> str:
        return str(self._group.root_dir(node))

    def conf_of(self, node: NodeId) -> str:
        """A conf file of its own, so that it exists before the first start."""
        before, self._group.form = self._group.form, MigrationForm.GROUP
        lines = self._group.conf_lines(node)
        self._group.form = before
        file = self.directory / f"group-{node}.conf"
        file.write_text("".join(f"{name}={text}\n" for name, text in lines.items()))
        return str(file)

    def plain_root_of(self, node: NodeId) -> str:
        """Beside its directory."""
        return str(self._group.plain_root(node))

    def run_tool(self, *words: str) -> tuple[int, str]:
        """Run it as a process."""
        command = [sys.executable, "-m", "dledger_cli.entry", *words]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise DrillError(f"{' '.join(words[:2])} did not end within {TOOL_TIMEOUT_S:g} s") from error
        return done.returncode, done.stdout if done.stdout.strip() else done.stderr


def told(action: Callable[[], object]) -> None:
    """Convert the group's errors to ``DrillError``."""
    try:
        action()
    except LocalGroupError as error:
        raise DrillError(str(error)) from error


class MemberBrokers(LocalProxiedBrokers):
    """Brokers of which some wait to be added, without proxies: a member has one address for all others."""

    def __init__(self, directory: Path, *, size: int, spares: int) -> None:
        super().__init__(directory, size=size + spares)
        self.members = list(self.nodes)[:size]

    def members_of(self, node: NodeId) -> str:
        """The present members, and the node itself."""
        known = [*self.members, *([] if node in self.members else [node])]
        return ";".join(f"{one}-{HOST}:{self.nodes[one].peer_port}" for one in known)

    def conf_lines(self, node: NodeId) -> dict[str, str]:
        """A node that is no member yet waits to be added."""
        lines = super().conf_lines(node)
        return lines if node in self.members else {**lines, "dLegerJoin": "true"}


class ProcessMembers(ProcessTarget):
    _group: MemberBrokers

    def _make_group(self, size: int) -> MemberBrokers:
        return MemberBrokers(self.directory, size=size, spares=SPARES)

    @property
    def nodes(self) -> tuple[NodeId, ...]:
        """The present members."""
        return tuple(self._group.members)

    @property
    def spares(self) -> tuple[NodeId, ...]:
        return tuple(node for node in self._group.nodes if node not in self._group.members)

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the files are, if they are kept."""
        return super().notes[1:]

    def start(self) -> None:
        """Start the first members."""
        told(lambda: self._group.start_together(self.nodes))

    def add(self, node: NodeId) -> None:
        """Start it, and wait until it votes."""
        told(lambda: self._group.start(node))
        self._change("add", self._place(node))
        self._group.members.append(node)

    def remove(self, node: NodeId) -> None:
        """Remove it first: a member that is stopped before would be one less to count."""
        self._change("remove", node)
        self._group.members.remove(node)
        self.stop(node)
        self.empty_volume(node)

    def replace(self, lost: NodeId, node: NodeId) -> None:
        """One command does both steps."""
        told(lambda: self._group.start(node))
        self._change("replace", lost, self._place(node))
        self._group.members[self._group.members.index(lost)] = node
        self.empty_volume(lost)

    def _place(self, node: NodeId) -> str:
        return f"{node}={HOST}:{self._group.nodes[node].peer_port}"

    def _change(self, *words: str) -> None:
        change_members([self.address(node) for node in self.nodes], self._group.name, *words)
