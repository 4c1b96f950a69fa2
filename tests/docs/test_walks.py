"""The walks of ``ARCHITECTURE.md`` against real appends and messages: same steps, same order, no file missing."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.docs.documents import ROOT
from tools.tidy.calls import NotedCall, cost
from tools.tidy.operations import watch_appends, watch_deliveries

pytestmark = pytest.mark.lane("processes")  # real ones, which want a small machine for themselves

WALKS: Final = ROOT / "ARCHITECTURE.md"
REPETITIONS: Final = 20
"""A thread that is late can change who has the last word: each thread's steps are found in order in one of them."""
CALLS_MIN: Final = 3
"""Files that the acknowledging threads call less often per append need not be named."""
PASSED_BY: Final = {
    "dledger/client/shared.py",
    "dledger/clock.py",
    "dledger/config.py",
    "dledger/core/log_matching.py",
    "dledger/core/node.py",
    "dledger/core/messages.py",
    "dledger/core/failure_detection.py",
    "dledger/errors.py",
    "dledger/monitoring.py",
    "dledger/rpc/clients/connections.py",
    "dledger/rpc/clients/codec.py",
    "dledger/rpc/peers/identity.py",
    "dledger/runtime/threads.py",
    "dledger/sending/aio.py",
    "dledger/sending/batch.py",
    "dledger/sending/futures.py",
    "dledger/store/durable_state.py",
    "dledger/store/headers.py",
    "dledger/store/log_files.py",
    "dledger/types.py",
}
"""Called on the way, but deciding nothing about the append: clock, records, figures, counts, connections."""
_STEP: Final = re.compile(r"^\d+\. \*(.+?)\*: (.*(?:\n   .*)*)", re.MULTILINE)
_NAMED: Final = re.compile(r"`([\w/]+\.py)`(?:\s+`([\w.]+)`)?|`(\w+\.\w+)`")


def _section(heading: str) -> str:
    return WALKS.read_text().partition(f"### {heading}")[2].partition("\n### ")[0]


def _steps(section: str) -> dict[str, list[tuple[str, str]]]:
    """File and function of each step, by whose thread it is on."""
    found: dict[str, list[tuple[str, str]]] = {}
    for who, text in _STEP.findall(section):
        file = ""
        for named, function, other in _NAMED.findall(text):
            file = named or file
            if function or other:
                found.setdefault(who, []).append((file, function or other))
    return found


def _leads(calls: Iterable[NotedCall], thread: str, steps: Sequence[tuple[str, str]]) -> str:
    """The first step that is missing behind those before it; nothing if all are there."""
    mine = iter([(call.file, call.function) for call in calls if re.fullmatch(thread, call.thread)])
    return next((f"{file} {function}" for file, function in steps if (file, function) not in mine), "")


def _check(section: str, repetitions: Sequence[Sequence[NotedCall]], threads: Mapping[str, str]) -> None:
    steps = _steps(section)

    assert set(steps) == set(threads)
    missing = {
        who: problems
        for who, wanted in steps.items()
        if all(problems := [_leads(calls, threads[who], wanted) for calls in repetitions])
    }
    assert missing == {}


@pytest.fixture(scope="module")
def caller() -> str:
    """This thread's name."""
    return re.escape(threading.current_thread().name)


@pytest.mark.slow
def test_an_append_takes_the_steps_of_its_walk(tmp_path: Path, caller: str) -> None:
    """In a group of three, on loopback; every file that is called often on the way is named."""
    section = _section("An append")
    appends = watch_appends(tmp_path, REPETITIONS)
    leader, followers = appends.leader, "|".join(appends.followers)
    threads = {
        "caller": caller,
        "leader's loop": f"dledger-client-rpc-{leader}",
        "leader's flusher": f"dledger-flush-{leader}",
        "leader": f"dledger-(client-rpc|flush)-{leader}",
        "answering loop": f"dledger-client-rpc-{leader}",
        "follower": f"dledger-(push-in|flush)-({followers})",
        "client's loop": "dledger-client",
    }

    _check(section, appends.calls, threads)

    acknowledging = re.compile("|".join(threads.values()))
    calls = [[call for call in one if acknowledging.fullmatch(call.thread)] for one in appends.calls]
    often = {
        file
        for file in cost(calls).files
        if sum(call.file == file for one in calls for call in one) >= CALLS_MIN * len(calls)
    }
    assert often - PASSED_BY - set(re.findall(r"`([\w/]+\.py)`", section)) == set()


@pytest.mark.slow
def test_a_message_takes_the_steps_of_its_walk(tmp_path: Path, caller: str) -> None:
    """Through a broker, to a consumer that waits for it; over remoting on loopback."""
    threads = {
        "caller": caller,
        "broker's loop": "dledger-client-rpc-n0",
        "flusher": "dledger-flush-n0",
        "clients' loop": "rocketmq-clients",
        "dispatch": "rocketstore-dispatch",
        "delivering loop": "dledger-client-rpc-n0",
        "consumer's loop": "rocketmq-clients",
    }

    _check(_section("A message"), watch_deliveries(tmp_path, REPETITIONS), threads)


def test_every_file_and_function_of_the_walks_is_there() -> None:
    """Also of those that a run does not call by itself."""
    for file in re.findall(r"`([\w/]+\.py)`", WALKS.read_text()):
        assert (ROOT / file).is_file(), file
