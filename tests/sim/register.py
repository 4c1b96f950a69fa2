"""The state machine of the simulator: a map with compare-and-swap, which also keeps a digest of all that it was given.

A command is ``p|key|value|revision``: put, and only if the key's revision is that one, or without a condition if that
is empty. A revision is the index of the entry that put the value, 0 of none. Any other body is a command, too, which
does nothing: other clients append to the same log.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from crc32c import crc32c

from dledger.statemachine.ports import Applied, Snapshot, SnapshotReader, SnapshotWriter, StateMachine
from dledger.types import NO_INDEX, LogIndex

WRITE_BYTES = 600
"""Of a snapshot at a time: some writes of each."""


class Put(NamedTuple):
    """A command."""

    key: str
    value: str
    if_revision: int | None

    def encode(self) -> bytes:
        """Its body."""
        condition = "" if self.if_revision is None else str(self.if_revision)
        return f"p|{self.key}|{self.value}|{condition}".encode()


class State(NamedTuple):
    """The state after entry ``at``; never changed, but replaced."""

    at: LogIndex
    digest: int
    time_ms: int
    values: dict[str, tuple[str, int]]


class Swapped(NamedTuple):
    """The result of a command: the key's former value if it is done, else the present one."""

    done: bool
    revision: int
    value: str | None


class Found(NamedTuple):
    """The answer to a query: one key of the state after entry ``at``."""

    at: int
    digest: int
    revision: int
    value: str | None


BEGIN = State(NO_INDEX, 0, 0, {})
Watch = Callable[[Applied, State, State, bytes], None]
"""Called with an entry, the state before and after, and the result."""


def apply_one(state: State, entry: Applied) -> tuple[State, bytes]:
    """The state after an entry, and its result."""
    facts = f"{entry.index} {entry.term} {entry.time_ms} {entry.producer} {entry.sequence} ".encode()
    digest = crc32c(facts + entry.body, state.digest)
    values, result = state.values, b"?"
    if entry.body.startswith(b"p|"):
        key, value, condition = entry.body[2:].decode().split("|")
        known, revision = state.values.get(key, (None, 0))
        if condition and int(condition) != revision:
            result = encode(Swapped(done=False, revision=revision, value=known))
        else:
            values = {**state.values, key: (value, entry.index)}
            result = encode(Swapped(done=True, revision=entry.index, value=known))
    return State(entry.index, digest, entry.time_ms, values), result


def encode(answer: Swapped | Found) -> bytes:
    """Of results and answers."""
    return json.dumps(answer).encode()


class Register(StateMachine):
    """Applies a range at once, while its lock is held."""

    def __init__(
        self, applied: Watch, loaded: Callable[[State], None], pause: Callable[[], None] = lambda: None
    ) -> None:
        self._applied = applied
        self._loaded = loaded
        self._pause = pause
        self.state = BEGIN

    def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
        """See ``StateMachine``."""
        state, results = self.state, []
        for entry in entries:
            before, (state, result) = state, apply_one(state, entry)
            results.append(result)
            self._applied(entry, before, state, result)
            self._pause()
        self.state = state
        return results

    def query(self, request: bytes) -> bytes:
        """See ``StateMachine``."""
        state = self.state
        self._pause()
        value, revision = state.values.get(request.decode(), (None, 0))
        return encode(Found(state.at, state.digest, revision, value))

    def save(self) -> Saved:
        """See ``StateMachine``."""
        return Saved(self.state)

    def load(self, reader: SnapshotReader) -> None:
        """See ``StateMachine``."""
        parts: list[bytes] = []
        while part := reader.read(WRITE_BYTES):
            parts.append(part)
            self._pause()
        self.state = decode_state(b"".join(parts))
        self._loaded(self.state)


class ConcurrentRegister(Register):
    """Its states are replaced as a whole, so queries may come while it applies or loads."""

    queries_are_concurrent = True


class Saved(Snapshot):
    """A view."""

    def __init__(self, state: State) -> None:
        self._state = state

    def write(self, writer: SnapshotWriter) -> None:
        """See ``Snapshot``."""
        content = json.dumps([*self._state[:3], sorted(self._state.values.items())]).encode()
        for start in range(0, len(content), WRITE_BYTES):
            writer.write(content[start : start + WRITE_BYTES])


def decode_state(content: bytes) -> State:
    """What a snapshot's file holds."""
    at, digest, time_ms, values = json.loads(content)
    return State(LogIndex(at), digest, time_ms, {key: (value, revision) for key, (value, revision) in values})
