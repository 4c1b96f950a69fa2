"""A linearizable map on a log, as an example of a state machine: compare-and-swap, leases (TTL), watches by revision.

A key's revision is the index of the log's entry that last changed it. Commands and queries are JSON objects, and so are
results; ``dledger kv`` makes them. Time is the log's: a lease ends with the first entry after it, so the members that
serve it append a ``tick`` each second while there are leases.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, ClassVar, Final

from dledger.records import record
from dledger.statemachine.ports import Applied, Snapshot, SnapshotReader, SnapshotWriter, StateMachine
from dledger.values import MIB

EVENTS_KEPT: Final = 10_000
EVENTS_ANSWERED: Final = 1000
KEYS_LISTED: Final = 1000
KEY_CHARS_MAX: Final = 1024
VALUE_CHARS_MAX: Final = 100_000
_NO_LEASE: Final = 0
_MALFORMED: Final = "malformed command: see `dledger kv --help` for what there is"
_Json = Mapping[str, Any]  # Any: a request of a client; what does not fit fails, and is answered


@record(frozen=True, slots=True)
class Item:
    """A value. ``revision``: of its last change; ``created``: of its first; ``expires_ms``: 0 for no lease."""

    value: str
    revision: int
    created: int
    expires_ms: int


class KeyValueMap(StateMachine):
    """The map."""

    format: ClassVar[int] = 1

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._leases: list[tuple[int, str]] = []  # a heap; some are of items that were changed since
        self._events: deque[tuple[int, str, str | None]] = deque(maxlen=EVENTS_KEPT)
        self._forgotten = -1
        """The revision of the last event that watchers cannot get any more."""

    @property
    def has_leases(self) -> bool:
        """Whether something may expire."""
        return bool(self._leases)

    def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
        """See ``StateMachine``."""
        results = []
        for entry in entries:
            self._expire(entry)
            try:
                result = self._command(entry, json.loads(entry.body))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                result = {"error": _MALFORMED}  # without the reason: other Python versions may word it differently
            results.append(json.dumps(result).encode())
        return results

    def _command(self, entry: Applied, wanted: _Json) -> _Json:
        operation = wanted["op"]
        if operation == "tick":
            return {}
        key = _text(wanted, "key", KEY_CHARS_MAX)
        known = self._items.get(key)
        revision = 0 if known is None else known.revision
        told = {"revision": revision, "value": None if known is None else known.value}
        if (expected := wanted.get("if_revision")) is not None and expected != revision:
            return {"ok": False, **told}
        match operation:
            case "put":
                ttl_ms, created = int(wanted.get("ttl_ms", 0)), entry.index if known is None else known.created
                expires_ms = entry.time_ms + ttl_ms if ttl_ms > 0 else _NO_LEASE
                self._set(key, Item(_text(wanted, "value", VALUE_CHARS_MAX), entry.index, created, expires_ms))
            case "delete" if known is not None:
                self._delete(key, entry.index)
            case "delete":
                return {"ok": False, **told}
            case _:
                raise ValueError(f"unknown operation {operation!r}")
        return {"ok": True, "revision": entry.index, "previous": told["value"]}

    def _set(self, key: str, item: Item) -> None:
        self._items[key] = item
        if item.expires_ms:
            heappush(self._leases, (item.expires_ms, key))
            if len(self._leases) > 2 * len(self._items) + 100:  # mostly of leases that were prolonged
                self._find_leases()
        self._note(item.revision, key, item.value)

    def _delete(self, key: str, revision: int) -> None:
        del self._items[key]
        self._note(revision, key, None)

    def _note(self, revision: int, key: str, value: str | None) -> None:
        if len(self._events) == EVENTS_KEPT:
            self._forgotten = self._events[0][0]
        self._events.append((revision, key, value))

    def _expire(self, entry: Applied) -> None:
        while self._leases and self._leases[0][0] <= entry.time_ms:
            expires_ms, key = heappop(self._leases)
            item = self._items.get(key)
            if item is not None and item.expires_ms == expires_ms:
                self._delete(key, entry.index)

    def query(self, request: bytes) -> bytes:
        """See ``StateMachine``."""
        wanted = json.loads(request)
        asked: dict[str, Callable[[_Json], _Json]] = {"get": self._get, "watch": self._watch}
        return json.dumps(asked[wanted["op"]](wanted)).encode()

    def _get(self, wanted: _Json) -> _Json:
        key = _text(wanted, "key", KEY_CHARS_MAX)
        if not wanted.get("prefix"):
            keys = [key] if key in self._items else []
        else:
            keys = list(islice(sorted(one for one in self._items if one.startswith(key)), KEYS_LISTED))
        return {"items": [{"key": one, **_shown(self._items[one])} for one in keys]}

    def _watch(self, wanted: _Json) -> _Json:
        key, after, prefix = _text(wanted, "key", KEY_CHARS_MAX), int(wanted["after"]), bool(wanted.get("prefix"))
        if after < self._forgotten:
            return {
                "error": f"events up to revision {self._forgotten} are not kept: get the keys, and watch from there"
            }
        events: list[_Json] = []
        for revision, one, value in self._events:
            if revision > after and (one.startswith(key) if prefix else one == key):
                if len(events) >= EVENTS_ANSWERED and revision != events[-1]["revision"]:
                    break  # the next question continues after the last revision
                events.append({"revision": revision, "key": one, "value": value})
        return {"events": events}

    def save(self) -> Snapshot:
        """See ``StateMachine``; items are never changed in place, so a copy of the table is a view."""
        return _Saved(dict(self._items), list(self._events), self._forgotten)

    def load(self, reader: SnapshotReader) -> None:
        """See ``StateMachine``."""
        lines = b"".join(iter(lambda: reader.read(MIB), b"")).splitlines()
        self._forgotten, events = json.loads(lines[0])
        self._events = deque((tuple(one) for one in events), maxlen=EVENTS_KEPT)
        self._items = {key: Item(*item) for key, *item in map(json.loads, lines[1:])}
        self._find_leases()

    def _find_leases(self) -> None:
        self._leases = [(one.expires_ms, key) for key, one in self._items.items() if one.expires_ms]
        heapify(self._leases)


class _Saved(Snapshot):
    """A view of the map."""

    def __init__(self, items: dict[str, Item], events: list[tuple[int, str, str | None]], forgotten: int) -> None:
        self._items, self._events, self._forgotten = items, events, forgotten

    def write(self, writer: SnapshotWriter) -> None:
        """See ``Snapshot``. Sorted: members whose maps were made in other ways write the same."""
        writer.write(json.dumps([self._forgotten, self._events]).encode() + b"\n")
        for key in sorted(self._items):
            one = self._items[key]
            writer.write(json.dumps([key, one.value, one.revision, one.created, one.expires_ms]).encode() + b"\n")


def _shown(item: Item) -> dict[str, object]:
    return {"value": item.value, "revision": item.revision, "created": item.created, "leased": item.expires_ms > 0}


def _text(wanted: _Json, name: str, chars_max: int) -> str:
    text = wanted[name]
    if not isinstance(text, str) or len(text) > chars_max:
        raise ValueError(f"{name} must be a text of at most {chars_max} characters")
    return text
