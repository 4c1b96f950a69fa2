"""The map of ``dledger kv``: swaps, leases in the log's time, watches, and a snapshot that goes on alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dledger.statemachine.ports import Applied
from dledger.types import LogIndex, Term
from dledger_cli import kv
from dledger_cli.kv import KeyValueMap


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
        b'{"op":"fly","key":"a"}',
        b"[" * 100_000,
        b"\xff",
        b'{"op":"put","key":"a","value":"2","more":[1]}',
        b'{"op":"put","key":"a","value":"2","more":{}}',
        b'{"op":"put","key":"a","value":"2","more":[[]],"more":1}',
    ],
)
def test_a_malformed_command_is_answered_and_changes_nothing(body: bytes) -> None:
    """S2: an exception would stop every member. Nor is anything nested, which some members' parser may give up on."""
    log = Log()
    log.do("put", "a", value="1")
    before = log.saved()
    assert log.apply(body) == {"error": kv._MALFORMED}
    assert log.saved() == before


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"key": 7}, "key must be"),
        ({"key": "k" * (1 << 20)}, "key must be"),
        ({"value": "x" * (1 << 20)}, "value must be"),
        ({"value": "\N{GRINNING FACE}" * 100_000}, "value must be"),
        ({"value": "\0" * 100_000}, "value must be"),
        ({"ttl_ms": "soon"}, "ttl_ms must be"),
        ({"ttl_ms": float("inf")}, "ttl_ms must be"),
        ({"ttl_ms": -1}, "ttl_ms must be"),
        ({"ttl_ms": 10**4299}, "ttl_ms must be"),
    ],
)
def test_what_is_too_large_is_refused_with_its_limit(fields: dict[str, object], told: str) -> None:
    """S2: a result or a snapshot that cannot be made would stop every member, at each start again."""
    log = Log()
    log.do("put", "a", value="1")
    before = log.saved()
    assert told in log.do("put", **{"key": "a", "value": "1", **fields})["error"]  # type: ignore[arg-type]
    assert log.saved() == before


@pytest.mark.parametrize("one", ["x", "\0", "\N{GRINNING FACE}", "\ud800", '"'])
def test_every_answer_to_a_change_fits(one: str) -> None:
    """A result has at most 1 MiB (``StateMachine.apply``), with the largest value that is taken."""
    log = Log()
    low, high = 0, kv.VALUE_BYTES_MAX
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if "ok" in log.do("put", "k" * 1024, value=one * middle) else (low, middle - 1)
    assert low > 20_000
    for _ in range(2):
        body = json.dumps({"op": "put", "key": "k" * 1024, "value": one * low}).encode()
        (result,) = log.map.apply([Applied(LogIndex(10**6), Term(1), log.now_ms, body)])
        assert b"previous" in result
        assert len(result) < 1 << 20


def test_the_map_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys and of bytes; what is deleted makes room, and what replaces a value needs no more."""
    monkeypatch.setattr(kv, "KEYS_MAX", 2)
    monkeypatch.setattr(kv, "STATE_BYTES_MAX", 1000)
    log = Log()
    for key in "ab":
        assert log.do("put", key, value="x")["ok"]
    assert "the map is full" in log.do("put", "c", value="x")["error"]
    assert "the map is full" in log.do("put", "a", value="x" * 1000)["error"]
    assert log.do("put", "a", value="y" * 900)["ok"]
    for one in (log, log.loaded()):
        assert "the map is full" in one.do("put", "b", value="x" * 900)["error"]
        assert one.do("delete", "a")["ok"]
        assert one.do("put", "b", value="x" * 900)["ok"]


def test_answers_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list tells that there is more; a watch goes on after its last event."""
    log = Log()
    for number in range(20):
        log.do("put", f"k{number:02}", value="x" * 1000)
    monkeypatch.setattr(kv, "ANSWER_BYTES_MAX", 5000)
    listed = json.loads(log.map.query(b'{"op": "get", "key": "", "prefix": true}'))
    assert listed["more"]
    assert [one["key"] for one in listed["items"]] == [f"k{number:02}" for number in range(5)]
    seen: list[int] = []
    while events := log.watch("", seen[-1] if seen else 0, prefix=True)["events"]:
        assert len(events) <= 6
        seen += [one["revision"] for one in events]
    assert seen == list(range(1, 21))


def test_events_have_a_bound_of_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold values that are in the map no more; a map from a snapshot forgets the same ones."""
    monkeypatch.setattr(kv, "EVENTS_CHARS_MAX", 3500)
    log = Log()
    for _ in range(10):
        log.do("put", "k", value="x" * 1000)
    other = log.loaded()
    for one in (log, other):
        one.do("put", "k", value="x" * 1000)
        assert [event["revision"] for event in one.watch("k", 8)["events"]] == [9, 10, 11]
        assert "not kept" in one.watch("k", 7)["error"]
    assert other.saved() == log.saved()


def test_leases_that_end_together_end_a_few_with_each_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands wait meanwhile. A map from a snapshot, which knows no leases of the past, ends the same ones."""
    monkeypatch.setattr(kv, "EXPIRED_MAX", 3)
    log = Log()
    for _ in range(3):
        for number in range(8):
            log.do("put", f"k{number}", value="x", ttl_ms=10)
        log.now_ms += 1
    other = log.loaded()
    for one in (log, other):
        one.now_ms += 100
        left = []
        for _ in range(3):
            one.do("tick")
            left.append(len(one.get("", prefix=True)))
        assert left == [5, 2, 0]
    assert other.saved() == log.saved()


@pytest.mark.parametrize("request_", [b"", b"[]", b"{}", b'{"op":"fly"}', b'{"op":"watch","key":"a"}'])
def test_a_malformed_query_is_told_what_there_is(request_: bytes) -> None:
    """As a command is."""
    assert json.loads(Log().map.query(request_)) == {"error": kv._MALFORMED}


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
