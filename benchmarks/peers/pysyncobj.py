"""Three PySyncObj processes on loopback, with the journal enabled and defaults otherwise."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.processes import ChildError, PythonChild
from dledger_cli.local.group import free_ports

INSTALL = "the extra `bench` (pip install pysyncobj)"


def available() -> bool:
    """Whether PySyncObj is installed here."""
    return importlib.util.find_spec("pysyncobj") is not None


class PySyncObjGroup:
    """A running group with a leader."""

    def __init__(self, nodes: list[PythonChild]) -> None:
        self._nodes = nodes

    def leader(self, timeout_seconds: float = 30.0) -> PythonChild:
        """The leader's node, once it reports that it is ready."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            for node in self._nodes:
                status = node.ask({"do": "status"}, 10.0)
                if status["leader"] and status["ready"]:
                    return node
            time.sleep(0.1)
        raise ChildError(f"no PySyncObj node became leader in {timeout_seconds:g} s")

    def appends_per_second(self, seconds: float, warmup_seconds: float, body_bytes: int, window: int) -> float:
        """Entries acknowledged per second with ``window`` of them outstanding on the leader."""
        command = {
            "do": "measure",
            "seconds": seconds,
            "warmup_seconds": warmup_seconds,
            "window": window,
            "body_bytes": body_bytes,
        }
        answer = self.leader().ask(command, seconds + warmup_seconds + 60.0)
        if answer["failed"] or not answer["drained"]:
            raise ChildError(f"PySyncObj lost appends during the measurement: {answer}")
        return float(answer["per_second"])


@contextlib.contextmanager
def pysyncobj_group(directory: Path) -> Iterator[PySyncObjGroup]:
    """Start three nodes with their journals in ``directory``; end them by id afterwards."""
    directory.mkdir(parents=True)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    with contextlib.ExitStack() as stack:
        nodes = []
        for number, address in enumerate(addresses):
            others = [other for other in addresses if other != address]
            arguments = [address, *others, str(directory / f"journal-{number}")]
            log = directory / f"node-{number}.log"
            nodes.append(stack.enter_context(PythonChild("benchmarks.peers.pysyncobj_node", arguments, log)))
        yield PySyncObjGroup(nodes)
