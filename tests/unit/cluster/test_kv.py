"""The map of ``dledger kv``: swaps, leases in the log's time, watches, and a snapshot that goes on alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cluster import kv
from cluster.kv import KeyValueMap
from dledger.statemachine.ports import Applied
from dledger.types import LogIndex, Term


class Log:
    """A map, and the entries applied to it."""

    def __init__(self) -> None:
        self.map = KeyValueMap()
        self.index = 0
        self.now_ms = 1000

    def apply(self, body: bytes) -> Any:  # noqa: ANN401 - JSON
        self.index += 1
        (result,) = self.map.apply([Applied(LogIndex(self.index), Term(1), self.now_ms, body)])
        return json.loads(result)

    def do(self, op: str, key: str = "", **fields: object) -> Any:  # noqa: ANN401 - JSON
        return self.apply(json.dumps({"op": op, "key": key, **fields}).encode())

    def get(self, key: str, **fields: object) -> dict[str, str]:
        answer = json.loads(self.map.query(json.dumps({"op": "get", "key": key, **fields}).encode()))
        return {one["key"]: one["value"] for one in answer["items"]}

    def watch(self, key: str, after: int, **fields: object) -> Any:  # noqa: ANN401 - JSON
        return json.loads(self.map.query(json.dumps({"op": "watch", "key": key, "after": after, **fields}).encode()))

    def saved(self) -> bytes:
        parts: list[bytes] = []

        class Writer:
            def write(self, data: bytes) -> None:
                parts.append(data)

        self.map.save().write(Writer())
        return b"".join(parts)

    def loaded(self) -> Log:
        """Another map, from this one's snapshot."""
        content = self.saved()

        class Reader:
            format = 1
            at = 0

            def read(self, bytes_max: int) -> bytes:
                data = content[self.at : self.at + min(bytes_max, 7)]
                self.at += len(data)
                return data

        other = Log()
        other.index, other.now_ms = self.index, self.now_ms
        other.map.load(Reader())
        return other


def test_a_swap_succeeds_at_the_revision_that_its_client_saw() -> None:
    """Revision 0 is that of a key that there is not; a refusal tells what there is."""
    log = Log()
    assert log.do("put", "a", value="1", if_revision=0) == {"ok": True, "revision": 1, "previous": None}
    assert log.do("put", "a", value="2", if_revision=0) == {"ok": False, "revision": 1, "value": "1"}
    assert log.do("put", "a", value="2", if_revision=1)["revision"] == 3
    assert log.do("delete", "a", if_revision=1)["ok"] is False
    assert log.get("a") == {"a": "2"}
    assert log.do("delete", "a", if_revision=3) == {"ok": True, "revision": 5, "previous": "2"}
    assert log.do("delete", "a") == {"ok": False, "revision": 0, "value": None}
    assert log.get("a") == {}


def test_a_lease_ends_in_the_logs_time_alone() -> None:
    """With the first entry after it, whatever that is; a put without a lease ends the lease, not the key."""
    log = Log()
    log.do("put", "a", value="1", ttl_ms=100)
    log.do("put", "b", value="1", ttl_ms=100)
    log.do("put", "c", value="1", ttl_ms=100)
    log.now_ms += 50
    log.do("put", "b", value="2", ttl_ms=100)
    log.do("put", "c", value="2")
    log.now_ms += 50
    assert log.get("", prefix=True) == {"a": "1", "b": "2", "c": "2"}
    assert log.map.has_leases
    log.do("tick")
    assert log.get("", prefix=True) == {"b": "2", "c": "2"}
    log.now_ms += 50
    log.apply(b"garbage")
    assert log.get("", prefix=True) == {"c": "2"}
    assert not log.map.has_leases


def test_a_watch_gets_every_change_after_its_revision() -> None:
    """Deletions and ended leases included."""
    log = Log()
    log.do("put", "a", value="1", ttl_ms=10)
    log.do("put", "ab", value="1")
    log.do("delete", "ab")
    log.now_ms += 10
    log.do("tick")
    events = [(one["revision"], one["key"], one["value"]) for one in log.watch("a", 0, prefix=True)["events"]]
    assert events == [(1, "a", "1"), (2, "ab", "1"), (3, "ab", None), (4, "a", None)]
    assert [one["revision"] for one in log.watch("a", 1)["events"]] == [4]


def test_changes_of_one_entry_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next question, after that revision, would miss the rest."""
    monkeypatch.setattr(kv, "EVENTS_ANSWERED", 2)
    log = Log()
    for key in "abc":
        log.do("put", key, value="1", ttl_ms=10)
    log.now_ms += 10
    log.do("tick")
    log.do("put", "d", value="1")
    assert [one["key"] for one in log.watch("", 2, prefix=True)["events"]] == ["c", "a", "b", "c"]
    assert [one["key"] for one in log.watch("", 4, prefix=True)["events"]] == ["d"]


def test_a_watch_that_is_too_late_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are bounded; nothing may be missed silently."""
    monkeypatch.setattr(kv, "EVENTS_KEPT", 2)
    log = Log()
    log.map._events = type(log.map._events)(maxlen=2)
    for number in range(4):
        log.do("put", "a", value=str(number))
    assert [one["revision"] for one in log.watch("a", 2)["events"]] == [3, 4]
    assert "not kept" in log.watch("a", 1)["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b'"x"',
        b"{}",
        b'{"op":"put","key":"a"}',
        b'{"op":"put","key":7,"value":"x"}',
        b'{"op":"put","key":"a","value":"x","ttl_ms":"soon"}',
        b'{"op":"put","key":"a","value":"x","ttl_ms":Infinity}',
        b'{"op":"fly","key":"a"}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_a_malformed_command_is_answered_and_changes_nothing(body: bytes) -> None:
    """S2: an exception would stop every member."""
    log = Log()
    log.do("put", "a", value="1")
    before = log.saved()
    assert log.apply(body) == {"error": kv._MALFORMED}
    assert log.saved() == before


def test_a_map_from_a_snapshot_goes_on_alike() -> None:
    """Byte for byte: values, leases, revisions and events."""
    log = Log()
    for number in range(30):
        log.now_ms += 7
        log.do("put", f"k{number % 11}", value=str(number), ttl_ms=50 * (number % 3))
    other = log.loaded()
    assert other.saved() == log.saved()
    for one in (log, other):
        one.now_ms += 60
        one.do("tick")
        one.do("delete", "k3")
    assert other.saved() == log.saved()
    assert other.watch("", 5, prefix=True) == log.watch("", 5, prefix=True)


def test_a_prolonged_lease_takes_no_room_for_each_time() -> None:
    """A lock that is held for days is prolonged every few seconds."""
    log = Log()
    for _ in range(1000):
        log.do("put", "a", value="1", ttl_ms=10**9)
    assert len(log.map._leases) < 200
