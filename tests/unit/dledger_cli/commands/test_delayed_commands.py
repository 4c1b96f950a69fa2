"""``dledger message delayed`` at whole brokers: what waits is listed, found, and recalled."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketstore.client.aio import admin_requests
from rocketstore.client.blocking import Producer
from rocketstore.message.message import Message
from tests.unit.dledger_cli.commands.brokers_here import TIMEOUT_S, Here, one_broker, two_brokers

HOUR_MS = 3_600_000
DELAYED = ("message", "delayed")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    with one_broker(tmp_path) as found:
        yield found


def wait(here: Here, *dues_ms: int, broker: str = "", topic: str = "orders") -> list[str]:
    """Send messages ``k0``, ``k1`` … that are due then; returns their handles."""
    server = here.brokers[broker or next(iter(here.brokers))]
    with Producer(server.address, timeout_s=TIMEOUT_S) as producer:
        messages = [
            Message(topic, b"body", keys=f"k{number}", tags="t", deliver_at=due_ms)
            for number, due_ms in enumerate(dues_ms)
        ]
        return [producer.send(one).recall_handle for one in messages]


def listed(here: Here, *words: str) -> list[dict[str, Any]]:
    shown = here.run(*DELAYED, *words, "--json")
    assert shown.exit_code == 0, shown.output
    return [json.loads(line) for line in shown.stdout.splitlines()]


def soon_ms() -> int:
    return int(time.time()) * 1000 + HOUR_MS


def test_a_list_says_when_each_is_due_and_how_many_wait(here: Here) -> None:
    """In lines: time, time left, topic, id, tag, keys, handle; and the numbers apart, so that lines can be piped."""
    nothing = here.run(*DELAYED, "list")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "0 messages wait for their time" in nothing.stderr
    due_ms = soon_ms()
    handles = wait(here, due_ms, due_ms + HOUR_MS)
    shown = here.run(*DELAYED, "list")
    lines = shown.stdout.splitlines()
    assert [lines[1].strip(), lines[3].strip()] == handles
    assert "  orders  " in lines[0]
    assert lines[0].endswith("[t] k0")
    assert "  in 35" in lines[0]
    assert "2 messages wait for their time, the next one at " in shown.stderr


def test_json_has_everything_of_each_message(here: Here) -> None:
    """One object a line, and nothing else on either channel."""
    due_ms = soon_ms()
    (handle,) = wait(here, due_ms)
    shown = here.run(*DELAYED, "list", "--json")
    found = json.loads(shown.stdout)
    assert shown.stderr == ""
    assert {name: found[name] for name in ("broker", "topic", "due_ms", "keys", "tags", "recall_handle")} == {
        "broker": next(iter(here.brokers)),
        "topic": "orders",
        "due_ms": due_ms,
        "keys": "k0",
        "tags": "t",
        "recall_handle": handle,
    }
    assert set(found) == {
        *("broker", "topic", "queue", "due_ms", "message_id", "keys", "tags", "size", "born_ms", "recall_handle"),
    }


def test_a_list_is_narrowed_and_goes_on_over_pages(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """By topic, from a time on, at most so many; those due at one moment are listed once each."""
    monkeypatch.setattr(admin_requests, "PAGE", 3)
    due_ms = soon_ms()
    wait(here, *[due_ms] * 7, due_ms + HOUR_MS)
    wait(here, due_ms + 1, topic="others")
    assert [one["keys"] for one in listed(here, "list", "-t", "orders")] == [f"k{number}" for number in range(8)]
    assert [one["topic"] for one in listed(here, "list", "-t", "others")] == ["others"]
    assert [one["keys"] for one in listed(here, "list", "--max", "4")] == ["k0", "k1", "k2", "k3"]
    assert [one["keys"] for one in listed(here, "list", "--from", str(due_ms + 2))] == ["k7"]


def test_a_search_finds_keys_and_ids_and_says_if_there_is_none(here: Here) -> None:
    due_ms = soon_ms()
    wait(here, due_ms, due_ms + HOUR_MS)
    (found,) = listed(here, "search", "k1")
    assert [one["keys"] for one in listed(here, "search", found["message_id"])] == ["k1"]
    none = here.run(*DELAYED, "search", "k2")
    assert (none.exit_code, none.stdout) == (1, "")
    assert here.run(*DELAYED, "search", "k1", "-t", "others").exit_code == 1


def test_a_cancelled_message_is_listed_no_more_and_cannot_be_cancelled_again(here: Here) -> None:
    due_ms = soon_ms()
    first, second = wait(here, due_ms, due_ms + HOUR_MS)
    done = here.run(*DELAYED, "cancel", first)
    assert (done.exit_code, "will not be delivered" in done.stdout) == (0, True), done.output
    assert [one["recall_handle"] for one in listed(here, "list")] == [second]
    again = here.run(*DELAYED, "cancel", first)
    assert again.exit_code == 1
    assert "it was delivered or recalled" in again.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("cancel", "nonsense"), 2, "pass the recall_handle of a send's result"),
        (("cancel",), 2, "HANDLE"),
        (("list", "--max", "0"), 2, "--max"),
        (("list", "--from", "noon"), 2, "invalid time 'noon'"),
        (("search",), 2, "KEY"),
    ],
)
def test_wrong_words_are_told_before_anything_is_asked(words: tuple[str, ...], code: int, told: str) -> None:
    shown = Here({}, {"DLEDGER_BROKER": "127.0.0.1:1"}).run(*DELAYED, *words)
    assert (shown.exit_code, told in shown.stderr) == (code, True), shown.output


def test_all_brokers_behind_a_name_server_are_asked(tmp_path: Path) -> None:
    """Each with its own numbers; a handle names its broker."""
    with two_brokers(tmp_path) as here:
        due_ms = soon_ms()
        for broker in "ab":
            here.run("topic", "create", "orders", "-q", "1")
            (handle,) = wait(here, due_ms, broker=broker)
        found = here.run(*DELAYED, "list")
        assert [line.partition(":")[0] for line in found.stderr.splitlines()] == ["a", "b"]
        assert [one["broker"] for one in listed(here, "list")] == ["a", "b"]
        assert here.run(*DELAYED, "cancel", handle).exit_code == 0
        assert [one["broker"] for one in listed(here, "list")] == ["a"]
