"""A linearizable map on a log, as an example of a state machine: compare-and-swap, leases (TTL), watches by revision.

A key's revision is the index of the log's entry that last changed it. Commands and queries are JSON objects, and so are
results; ``dledger kv`` makes them. Time is the log's: a lease ends with the first entry after it, so the members that
serve it append a ``tick`` each second while there are leases.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any, ClassVar, Final

from dledger.records import record
from dledger.statemachine.ports import Applied, Snapshot, SnapshotReader, SnapshotWriter, StateMachine
from dledger.values import MIB

EVENTS_KEPT: Final = 10_000
EVENTS_CHARS_MAX: Final = 64 * MIB
"""Of their keys and values, which may be those of keys that are gone."""
EVENTS_ANSWERED: Final = 1000
EXPIRED_MAX: Final = 10_000
"""With one entry, as the commands behind it wait; the next entries take the rest."""
KEYS_LISTED: Final = 1000
KEY_CHARS_MAX: Final = 1024
VALUE_BYTES_MAX: Final = 256 * 1024
"""Of a value as JSON, where a character takes up to 12 bytes: an answer, which holds one, must fit 1 MiB."""
ANSWER_BYTES_MAX: Final = 2 * MIB
"""Of listed values and of events, plus one of them: the rest comes with the next request."""
KEYS_MAX: Final = 1_000_000
"""A view of so many is made within the 20 ms that a snapshot may hold up commands."""
STATE_BYTES_MAX: Final = 1024 * MIB
"""Of keys and values as JSON: it is in the memory of each member."""
TTL_MS_MAX: Final = 10 * 365 * 24 * 3_600_000
_NO_LEASE: Final = 0
_MALFORMED: Final = "malformed command: see `dledger kv --help` for what there is"
_Json = Mapping[str, Any]  # Any: a request of a client; what does not fit fails, and is answered


class _RefusedError(Exception):
    """Raised when a request is not carried out; the text is the answer, and so the same on all members."""


@record(frozen=True, slots=True)
class Item:
    """A value. ``revision``: of its last change; ``created``: of its first; ``expires_ms``: 0 for no lease."""

    value: str
    revision: int
    created: int
    expires_ms: int


class KeyValueMap(StateMachine):
    format: ClassVar[int] = 1

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._leases: list[tuple[int, str]] = []  # a heap; some are of items that were changed since
        self._bytes = 0
        self._events: deque[tuple[int, str, str | None]] = deque()
        self._events_chars = 0
        self._forgotten = -1
        """The revision of the last event that watchers cannot get any more."""

    @property
    def has_leases(self) -> bool:
        """Whether something may expire."""
        return bool(self._leases)

    def apply(self, entries: Sequence[Applied]) -> Sequence[bytes]:
        results = []
        for entry in entries:
            self._expire(entry)
            try:
                result = self._command(entry, json.loads(entry.body, object_pairs_hook=_flat))
            except _RefusedError as refusal:
                result = {"error": str(refusal)}
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
                self._put(key, _value(wanted), _ttl_ms(wanted), entry)
            case "delete" if known is not None:
                self._delete(key, entry.index)
            case "delete":
                return {"ok": False, **told}
            case _:
                raise ValueError(f"unknown operation {operation!r}")
        return {"ok": True, "revision": entry.index, "previous": told["value"]}

    def _put(self, key: str, value: str, ttl_ms: int, entry: Applied) -> None:
        known = self._items.get(key)
        more = _size(key, value) - (0 if known is None else _size(key, known.value))
        if (known is None and len(self._items) >= KEYS_MAX) or (more > 0 and self._bytes + more > STATE_BYTES_MAX):
            raise _RefusedError(
                f"the map is full: it holds up to {KEYS_MAX} keys and {STATE_BYTES_MAX // MIB} MiB; delete some first"
            )
        created = entry.index if known is None else known.created
        item = Item(value, entry.index, created, entry.time_ms + ttl_ms if ttl_ms > 0 else _NO_LEASE)
        self._items[key] = item
        self._bytes += more
        if item.expires_ms:
            heappush(self._leases, (item.expires_ms, key))
            if len(self._leases) > 2 * len(self._items) + 100:  # mostly of leases that were prolonged
                self._find_leases()
        self._note(item.revision, key, item.value)

    def _delete(self, key: str, revision: int) -> None:
        self._bytes -= _size(key, self._items.pop(key).value)
        self._note(revision, key, None)

    def _note(self, revision: int, key: str, value: str | None) -> None:
        self._events.append((revision, key, value))
        self._events_chars += len(key) + len(value or "")
        while len(self._events) > EVENTS_KEPT or self._events_chars > EVENTS_CHARS_MAX:
            self._forgotten, key, value = self._events.popleft()
            self._events_chars -= len(key) + len(value or "")

    def _expire(self, entry: Applied) -> None:
        expired = 0  # keys, not leases: a map from a snapshot has no old leases of the same keys
        while expired < EXPIRED_MAX and self._leases and self._leases[0][0] <= entry.time_ms:
            expires_ms, key = heappop(self._leases)
            item = self._items.get(key)
            if item is not None and item.expires_ms == expires_ms:
                self._delete(key, entry.index)
                expired += 1

    def query(self, request: bytes) -> bytes:
        asked: dict[str, Callable[[_Json], _Json]] = {"get": self._get, "watch": self._watch}
        try:
            wanted = json.loads(request)
            answer = asked[wanted["op"]](wanted)
        except _RefusedError as refusal:
            answer = {"error": str(refusal)}
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            answer = {"error": _MALFORMED}
        return json.dumps(answer).encode()

    def _get(self, wanted: _Json) -> _Json:
        key = _text(wanted, "key", KEY_CHARS_MAX)
        if not wanted.get("prefix"):
            keys, more = [key] if key in self._items else [], False
        else:
            after = _text(wanted, "after_key", KEY_CHARS_MAX) if "after_key" in wanted else None
            found = (one for one in self._items if one.startswith(key) and (after is None or one > after))
            keys = nsmallest(KEYS_LISTED + 1, found)
            more = len(keys) > KEYS_LISTED
        items: list[_Json] = []
        size = 0
        for one in keys[:KEYS_LISTED]:
            if size > ANSWER_BYTES_MAX:
                more = True
                break
            items.append({"key": one, **_shown(self._items[one])})
            size += _size(one, self._items[one].value)
        return {"items": items, "more": more}

    def _watch(self, wanted: _Json) -> _Json:
        key, after, prefix = _text(wanted, "key", KEY_CHARS_MAX), int(wanted["after"]), bool(wanted.get("prefix"))
        if after < self._forgotten:
            return {
                "error": f"events up to revision {self._forgotten} are not kept: get the keys, and watch from there"
            }
        events: list[_Json] = []
        size = 0
        for revision, one, value in self._events:
            if revision > after and (one.startswith(key) if prefix else one == key):
                is_full = len(events) >= EVENTS_ANSWERED or size > ANSWER_BYTES_MAX
                if is_full and revision != events[-1]["revision"]:
                    break  # the next question continues after the last revision
                events.append({"revision": revision, "key": one, "value": value})
                size += _size(one, value or "")
        return {"events": events}

    def save(self) -> Snapshot:
        """See ``StateMachine``; items are never changed in place, so a copy of the table is a view."""
        return _Saved(dict(self._items), list(self._events), self._forgotten)

    def load(self, reader: SnapshotReader) -> None:
        lines = b"".join(iter(lambda: reader.read(MIB), b"")).splitlines()
        self._forgotten, events = json.loads(lines[0])
        self._events = deque((revision, key, value) for revision, key, value in events)
        self._events_chars = sum(len(key) + len(value or "") for _, key, value in self._events)
        self._items = {key: Item(*item) for key, *item in map(json.loads, lines[1:])}
        self._bytes = sum(_size(key, one.value) for key, one in self._items.items())
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


def _flat(fields: Sequence[tuple[str, object]]) -> _Json:
    """The fields of a command. None is nested: at which depth a parser gives up differs between versions of Python, and
    a command that only some members can read would make their maps differ.
    """
    if any(isinstance(value, list | dict) for _, value in fields):
        raise ValueError("a nested field")
    return dict(fields)


def _shown(item: Item) -> dict[str, object]:
    return {"value": item.value, "revision": item.revision, "created": item.created, "leased": item.expires_ms > 0}


def _text(wanted: _Json, name: str, chars_max: int) -> str:
    text = wanted[name]
    if not isinstance(text, str) or len(text) > chars_max:
        raise _RefusedError(f"{name} must be a text of at most {chars_max} characters")
    return text


def _value(wanted: _Json) -> str:
    value = _text(wanted, "value", VALUE_BYTES_MAX)
    if len(json.dumps(value)) > VALUE_BYTES_MAX:
        raise _RefusedError(
            f"value must be at most {VALUE_BYTES_MAX} bytes as JSON: beyond ASCII, a character takes 6 or 12"
        )
    return value


def _ttl_ms(wanted: _Json) -> int:
    ttl_ms = wanted.get("ttl_ms", 0)
    if not isinstance(ttl_ms, int) or not 0 <= ttl_ms <= TTL_MS_MAX:
        raise _RefusedError(f"ttl_ms must be a whole number from 0 (no lease) to {TTL_MS_MAX}, ten years")
    return ttl_ms


def _size(key: str, value: str) -> int:
    return len(json.dumps([key, value]))
