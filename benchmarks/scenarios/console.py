"""The cost of the idle web console: a share of one core, with a page open and without."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.registry import Scenario
from cluster.local.brokers import LocalBrokers

SECONDS_MIN: Final = 30.0
SETTLE_SECONDS: Final = 5.0
NO_PAGE: Final = "console_idle_no_page"
ONE_PAGE: Final = "console_idle_one_page"


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Three brokers with a topic of four queues, which cost more than three log nodes; the console as a process."""
    from rocketstore.client import TopicInfo

    seconds = max(SECONDS_MIN, 3 * context.settings.seconds)
    with LocalBrokers(context.directory / "brokers-console") as brokers:
        brokers.master()
        with brokers.admin() as admin:
            admin.put_topic(TopicInfo("orders"))
        with _console(brokers.addresses) as (process, url):
            if NO_PAGE in names:
                yield Figure(NO_PAGE, _core_share(process.pid, seconds), "% of a core", "", None)
            if ONE_PAGE in names:
                with _page(url):
                    yield Figure(ONE_PAGE, _core_share(process.pid, seconds), "% of a core", "", None)


@contextmanager
def _console(addresses: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [sys.executable, "-m", "cluster.cli", "console", "--nodes", ",".join(addresses)]
    words += ["--listen", "127.0.0.1:0", "--until-stdin-closes"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[-1] if process.stdout is not None else ""
            yield process, url
        finally:
            process.terminate()


@contextmanager
def _page(url: str) -> Iterator[None]:
    """Receive the events like a page, in this process, which is not measured."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ended = threading.Event()
    with opener.open(f"{url}api/events", timeout=10) as events:

        def take() -> None:
            for _ in events:  # one every half second
                if ended.is_set():
                    return

        taking = threading.Thread(target=take)
        taking.start()
        try:
            yield
        finally:
            ended.set()
            taking.join()


def _core_share(pid: int, seconds: float) -> float:
    """Percentage of one core used by the process, over ``seconds`` after a settling time."""
    never = threading.Event()
    never.wait(SETTLE_SECONDS)
    before = _ticks(pid)
    never.wait(seconds)
    return (_ticks(pid) - before) / os.sysconf("SC_CLK_TCK") / seconds * 100


def _ticks(pid: int) -> int:
    """User and system time (``/proc/PID/stat``, fields 14 and 15) of all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


IDLE: Final = Scenario("the web console while nothing happens", (NO_PAGE, ONE_PAGE), measure)
