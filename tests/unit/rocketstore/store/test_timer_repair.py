"""Files of timed messages that are damaged while a store runs: built again from its log, as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.errors import CorruptLogError
from dledger.monitoring import ConditionKind
from rocketstore.config import MIB, MessageStoreConfig
from rocketstore.message.message import Message
from rocketstore.message.timed import make_timed, recall_message
from rocketstore.store.message_store import MessageStore
from rocketstore.timer.hours import ENTRY, HOUR_MS
from tests.support.waiting import wait_until
from tests.unit.rocketstore.bench import running

DUE_MS = 2_000_000_000_000
HOUR = DUE_MS // HOUR_MS


def send(store: MessageStore, number: int, due_ms: int = DUE_MS) -> None:
    message = Message("T", b"%d" % number, 0, {"UNIQ_KEY": f"{number:02X}"})
    make_timed(message, due_ms + number)
    assert store.put(message).ok
    assert store.put(Message("other", bytes(200), 0)).ok


def fill(store: MessageStore) -> None:
    """Two hours, and a recall in the first."""
    for number in range(30):
        send(store, number, DUE_MS + number % 2 * HOUR_MS)
    host = Message("T", b"").store_host
    assert store.put(recall_message(4, DUE_MS + 4, "04", host, 1)).ok
    assert store.wait_dispatched(60)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def is_sound(store: MessageStore) -> bool:
    return not store.timers.damaged() and not store._derived.conditions.holds(ConditionKind.DAMAGED)


@pytest.mark.parametrize("harm", [truncated, flipped, Path.unlink])
def test_a_damaged_hour_is_built_again_as_it_was(config: MessageStoreConfig, harm: Callable[[Path], None]) -> None:
    """T2: at once, and a condition says so; nothing of it is served meanwhile, and the numbers stay."""
    with running(config) as store:
        fill(store)
        store.flush()
        path = store.timers.path(HOUR)
        whole, numbers = path.read_bytes(), store.timers.open_count(1)
        store._rounds._scrubbing.stop(60)  # its work is done step by step here
        harm(path)
        with pytest.raises(CorruptLogError, match="built again"):
            store.timers.entries(HOUR)
        assert store._derived.conditions.holds(ConditionKind.DAMAGED, str(path))
        with pytest.raises(CorruptLogError):
            store.timers.find(HOUR, 0)
        assert len(store.timers.entries(HOUR + 1)) == 15
        store._rounds.scrub.step()
        assert is_sound(store)
        assert (path.read_bytes(), store.timers.open_count(1)) == (whole, numbers)
        assert store.timers.is_recalled(HOUR, 4)
        assert not store._derived.conditions.holds(ConditionKind.REPAIRING)
    with running(config) as store:
        assert store.timers.path(HOUR).read_bytes() == whole


def test_what_comes_while_an_hour_is_damaged_and_while_it_is_built_is_in_it(
    config: MessageStoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost: dispatch goes on, also if the file is missing when it wants to write."""
    with running(config) as store:
        fill(store)
        store._rounds._scrubbing.stop(60)
        path = store.timers.path(HOUR)
        path.unlink()
        send(store, 40)
        assert store.wait_dispatched(60)
        assert store.timers.damaged() == [HOUR]
        store.flush()
        read = store.log.read_together
        sent: list[int] = []

        def read_late(places: list[tuple[int, int]]) -> list[bytes | None]:
            if not sent:
                sent.append(41)
                send(store, 41)
                assert store.wait_dispatched(60)
            return read(places)

        monkeypatch.setattr(store.log, "read_together", read_late)
        store._rounds.scrub.step()
        assert is_sound(store)
        send(store, 42)
        assert store.wait_dispatched(60)
        origins = [int(one["due_ms"]) - DUE_MS for one in store.timers.entries(HOUR)]
        assert origins == [*range(0, 30, 2), 4, 40, 41, 42]
        store.flush()
        whole = path.read_bytes()
    with running(config) as store:
        assert store.timers.path(HOUR).read_bytes() == whole


def test_damage_is_found_before_anybody_needs_the_hour(config: MessageStoreConfig) -> None:
    """The thread that verifies queues and index goes through the hours, too."""
    with running(replace(config, derived_scrub_bytes_per_s=MIB)) as store:
        fill(store)
        flipped(store.timers.path(HOUR + 1))
        wait_until(lambda: bool(store._rounds.scrub._timer_repair.repaired), "it is repaired")
        assert len(store.timers.entries(HOUR + 1)) == 15


def test_what_cannot_be_read_yet_is_tried_again(config: MessageStoreConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The condition says why; the hour is not given up."""
    with running(config) as store:
        fill(store)
        store._rounds._scrubbing.stop(60)
        flipped(store.timers.path(HOUR))
        with pytest.raises(CorruptLogError):
            store.timers.entries(HOUR)
        with monkeypatch.context() as patched:
            patched.setattr(store.log, "read_together", lambda places: [None for _ in places])
            patched.setattr(store.log, "read", lambda _offset, _size: None)
            store._rounds.scrub.step()
        told = {one.subject: one.message for one in store._derived.conditions.now()}
        assert "cannot be read at" in told[str(store.timers.path(HOUR))]
        store._rounds.scrub._timer_repair._due_ms = 0
        store._rounds.scrub.step()
        assert is_sound(store)


def test_an_hour_that_is_over_needs_no_file(config: MessageStoreConfig) -> None:
    """T4: it is settled while it is damaged."""
    with running(config) as store:
        fill(store)
        store._rounds._scrubbing.stop(60)
        flipped(store.timers.path(HOUR))
        with pytest.raises(CorruptLogError):
            store.timers.entries(HOUR)
        store.timers.delete_settled(store.timers._settled._replace(due_ms=(HOUR + 1) * HOUR_MS, offset=99))
        store._rounds.scrub.step()
        assert is_sound(store)
        assert store.timers.hours() == [HOUR + 1]


@pytest.mark.parametrize("harm", [truncated, flipped, Path.unlink])
def test_a_start_builds_all_hours_again_as_they_were(config: MessageStoreConfig, harm: Callable[[Path], None]) -> None:
    """T2: from the log alone, and so on every member."""
    with running(config) as store:
        fill(store)
    paths = sorted(path for path in config.timers_dir.iterdir() if path.name.isdigit())
    whole = [path.read_bytes() for path in paths]
    assert [len(one) // ENTRY.size for one in whole] == [16, 15]
    harm(paths[1])
    with running(config) as store:
        assert store.wait_dispatched(60)
        assert [path.read_bytes() for path in paths] == whole
        assert store.timers.open_count(1)[0] == 29
