"""State machines for tests: one that keeps everything it is given, which shows order and repetition."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import ClassVar

from dledger.statemachine.ports import Applied, Snapshot, SnapshotReader, SnapshotWriter, StateMachine


class Saved(Snapshot):
    """A copy of the state."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def write(self, writer: SnapshotWriter) -> None:
        for start in range(0, len(self._content), 1000):
            writer.write(self._content[start : start + 1000])


class History(StateMachine):
    """Keeps the bodies, and answers each with its number among them.

    ``fail`` as a body makes it fail. The query ``fail`` does, too; any other returns the bodies, as JSON.
    """

    format: ClassVar[int] = 1

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.seen: list[Applied] = []
        """Since the start of this process."""

    def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
        results = []
        for entry in entries:
            if entry.body == b"fail":
                raise ValueError("it was told to")
            self.bodies.append(entry.body)
            self.seen.append(entry)
            results.append(str(len(self.bodies)).encode())
        return results

    def query(self, request: bytes) -> bytes:
        if request == b"fail":
            raise ValueError("it was told to")
        return json.dumps([body.decode() for body in self.bodies]).encode()

    def save(self) -> Saved:
        return Saved(json.dumps([body.decode() for body in self.bodies]).encode())

    def load(self, reader: SnapshotReader) -> None:
        content = b"".join(iter(lambda: reader.read(100), b""))
        self.bodies = [body.encode() for body in json.loads(content)]
