"""A node with a state machine of the benchmarks: ``python -m benchmarks.children.machine_node MACHINE OPTIONS…``.

MACHINE is the bytes of its state. OPTIONS are those of ``dledger serve``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from random import Random
from typing import Final

from dledger import settings
from dledger.statemachine.ports import Applied, Snapshot, SnapshotReader, SnapshotWriter, StateMachine
from dledger.values import MIB
from dledger_cli import process
from dledger_cli.commands.serve import run_node

_RANDOM: Final = Random(1).randbytes(MIB)  # the same on all members
_COUNTS_BYTES: Final = 42


class Counting(StateMachine):
    """Counts commands and the bytes of their bodies.

    Beside the counts, its snapshots have ``ballast`` bytes, which it does not keep in memory: a state of gigabytes,
    three times, would leave no room for what is measured.
    """

    def __init__(self, ballast: int) -> None:
        self.commands = self.body_bytes = 0
        self._ballast = ballast

    def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
        """See ``StateMachine``."""
        self.commands += len(entries)
        self.body_bytes += sum(len(one.body) for one in entries)
        return [b""] * len(entries)

    def query(self, request: bytes) -> bytes:  # noqa: ARG002  # there is one question
        """See ``StateMachine``."""
        return b"%d %d" % (self.commands, self.body_bytes)

    def save(self) -> Saved:
        """See ``StateMachine``."""
        return Saved(b"%20d %20d\n" % (self.commands, self.body_bytes), self._ballast)

    def load(self, reader: SnapshotReader) -> None:
        """See ``StateMachine``."""
        self.commands, self.body_bytes = map(int, reader.read(_COUNTS_BYTES).split())
        while reader.read(MIB):
            pass


class Saved(Snapshot):
    """The counts and the ballast."""

    def __init__(self, counts: bytes, ballast: int) -> None:
        self._counts, self._ballast = counts, ballast

    def write(self, writer: SnapshotWriter) -> None:
        """See ``Snapshot``."""
        writer.write(self._counts)
        for at in range(0, self._ballast, MIB):
            writer.write(_RANDOM[: self._ballast - at])


def main() -> None:
    """Serve until SIGTERM."""
    words = argparse.ArgumentParser()
    words.add_argument("machine", type=int)
    for flag, name in (("-g", "group"), ("-i", "node_id"), ("-p", "members"), ("-s", "base_dir")):
        words.add_argument(flag, dest=name)
    words.add_argument("--client-port")
    words.add_argument("--set", dest="assignments", action="append", default=[])
    words.add_argument("--until-stdin-closes", action="store_true")
    given = words.parse_args()
    named = {name: getattr(given, name) for name in ("group", "node_id", "members", "base_dir", "client_port")}
    flags = process.begin(named, given.assignments, insecure=False, log_level="info", log_format="text")
    loaded = settings.load(None, os.environ, flags)
    machine = Counting(given.machine)
    sys.exit(run_node(loaded.config, repair=False, until_stdin_closes=given.until_stdin_closes, machine=machine))


if __name__ == "__main__":
    main()
