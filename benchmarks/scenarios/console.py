"""The web console: its share of one core, with a page open and without, and how soon a page has its list."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Final
from urllib.parse import urlsplit

from benchmarks.context import Context
from benchmarks.figures import Figure
from benchmarks.process_facts import processor_s
from benchmarks.registry import Scenario
from dledger_cli.local.brokers import LocalBrokers

SECONDS_MIN: Final = 30.0
SETTLE_SECONDS: Final = 5.0
LIST_TIMEOUT_S: Final = 60.0
NO_PAGE: Final = "console_idle_no_page"
ONE_PAGE: Final = "console_idle_one_page"
MANY_TOPICS: Final = "console_page_1000_topics"
FIRST_LIST: Final = "console_first_list_10000"
CREATORS: Final = 16


def measure(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """Three brokers with a topic of four queues, which cost more than three log nodes; the console as a process."""
    from rocketstore.client.aio.admin_requests import TopicInfo
    from rocketstore.client.blocking import Admin

    seconds = max(SECONDS_MIN, 3 * context.settings.seconds)
    with LocalBrokers(context.directory / "brokers-console") as brokers:
        brokers.master()
        with Admin(brokers.addresses) as admin:
            admin.put_topic(TopicInfo("orders"))
        with _console(brokers.addresses) as (process, url):
            if NO_PAGE in names:
                yield Figure(NO_PAGE, _core_share(process.pid, seconds), "% of a core", "", None)
            if ONE_PAGE in names:
                with _page(url):
                    yield Figure(ONE_PAGE, _core_share(process.pid, seconds), "% of a core", "", None)


def measure_many(context: Context, names: frozenset[str]) -> Iterator[Figure]:
    """The same with a thousand topics of four queues, and with ten thousand of one queue the time to the first list."""
    seconds = max(SECONDS_MIN, 3 * context.settings.seconds)
    with LocalBrokers(context.directory / "brokers-topics") as brokers:
        brokers.master()
        if MANY_TOPICS in names:
            _create(brokers, 1000, 4)
            with _console(brokers.addresses) as (process, url), _page(url):
                _list(url, until_all=True)
                yield Figure(MANY_TOPICS, _core_share(process.pid, seconds), "% of a core", "", None)
        if FIRST_LIST in names:
            _create(brokers, context.settings.sized(10_000), 1)
            with _console(brokers.addresses) as (_, url):
                _get(f"{url}healthz")
                started = time.perf_counter()
                _get(url)
                with _page(url):
                    _list(url)
                    yield Figure(FIRST_LIST, time.perf_counter() - started, "s", "", None)


def _create(brokers: LocalBrokers, topics: int, queues: int) -> None:
    from rocketstore.client.aio.admin_requests import TopicInfo
    from rocketstore.client.blocking import Admin

    with Admin(brokers.addresses) as admin, ThreadPoolExecutor(CREATORS) as threads:
        made = [TopicInfo(f"topic-{number:05}", queues, queues) for number in range(topics)]
        list(threads.map(admin.put_topic, made))


def _list(url: str, *, until_all: bool = False) -> None:
    """Ask for the first page of topics until it is there, and if wanted until the figures of all are."""
    give_up_at = time.monotonic() + LIST_TIMEOUT_S
    while time.monotonic() < give_up_at:
        found = json.loads(_get(f"{url}api/topics"))
        if found["loaded"] and not (until_all and found["unseen"]):
            return
        threading.Event().wait(0.02)
    raise TimeoutError(f"the console has no list of topics after {LIST_TIMEOUT_S:g} s")


def _get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body


@contextmanager
def _console(addresses: list[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    words = [sys.executable, "-m", "dledger_cli.cli", "console", "--nodes", ",".join(addresses)]
    words += ["--listen", "127.0.0.1:0", "--until-stdin-closes"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[-1] if process.stdout is not None else ""
            yield process, url
        finally:
            process.terminate()


@contextmanager
def _page(url: str) -> Iterator[None]:
    """Receive events and ask for the list as a page does, in this process, which is not measured."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    ended = threading.Event()
    kept = HTTPConnection(urlsplit(url).netloc, timeout=10)  # browsers ask again over the same connection
    with opener.open(f"{url}api/events", timeout=10) as events, closing(kept):

        def take() -> None:
            for line in events:  # some every second
                if ended.is_set():
                    return
                if line == b"event: catalog\n":
                    kept.request("GET", "/api/topics")
                    kept.getresponse().read()

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
    before = processor_s(pid)
    never.wait(seconds)
    return (processor_s(pid) - before) / seconds * 100


IDLE: Final = Scenario("the web console while nothing happens", (NO_PAGE, ONE_PAGE), measure)
MANY: Final = Scenario("the web console of very many topics", (MANY_TOPICS, FIRST_LIST), measure_many)
