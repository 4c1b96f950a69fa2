"""Jobs that write, under kill -9: run again, each row is stored once, and a store has whole queues or none."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Self

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from dledger_spark.rebuild.rows import STAGING
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from tests.spark.jobs.logs import TOPICS, bodies, write_log
from tests.support.spark_copy import ROOT, CopyProcess, Gate, stored_bodies, stored_count, wait_stored
from tests.support.spark_nodes import broker_node
from tests.support.waiting import POLL_S, wait_until
from tests.unit.dledger_spark.rebuild.stores import index_files, queue_files

PATIENCE_S: Final = 300.0
SETTINGS: Final = {
    "spark.driver.memory": "768m",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.ui.enabled": "false",
}
REPLAYED: Final = 8000
ROWS_PER_S: Final = 2000
COPIED: Final = 20_000
BODY_BYTES: Final = 200
HELD_AT: Final = (5200, 13_100)
"""Rows at which the writing waits until it is killed: none is near a boundary of partitions."""
ON_THEIR_WAY: Final = 1000
"""Of the rows before such a one, at most so many are not stored yet."""
STORED: Final = 4000
STORE_CONF: Final = "mappedFileSizeConsumeQueue=20000\nmaxHashSlotNum=100\nmaxIndexNum=400\n"
"""As ``BrokerNode`` has them."""


class Job:
    """``dledger pipeline …`` as an application in a session of its own."""

    def __init__(self, directory: Path, job: str, *words: str) -> None:
        settings = SETTINGS | {"spark.local.dir": str(directory / "local")}
        named = [word for name, text in settings.items() for word in ("--conf", f"{name}={text}")]
        self._errors = directory / "errors"
        with self._errors.open("ab") as errors:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", f"dledger_spark.jobs.{job}", *words, "--master", "local[2]", "--json", *named],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(all_of_it=True)

    @property
    def ended(self) -> bool:
        """Whether the driver has ended by itself."""
        return self._driver.poll() is not None

    def wait_for(self, condition: Callable[[], object], what: str, *, may_end: bool = False) -> None:
        """Until it holds, or, if it may, the job has ended."""
        wait_until(lambda: self.ended or bool(condition()), what, PATIENCE_S, poll_s=0.002 if may_end else POLL_S)
        assert may_end or not self.ended, f"it ended before {what}: {self.said()}"

    def kill(self, *, all_of_it: bool) -> None:
        """``kill -9`` of the driver, or of JVM and Python workers as well; returns when nothing is left of them."""
        self._driver.kill()  # before anything else: some moments are short
        for pid in self._processes() if all_of_it else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._driver.wait()
        wait_until(lambda: not self._processes(), "the JVM ends with its driver", PATIENCE_S)

    def finish(self) -> None:
        """Wait for its end, which must be a good one."""
        assert self._driver.wait(PATIENCE_S) == 0, self.said()

    def said(self) -> str:
        """The last of what it has complained of."""
        return self._errors.read_text(errors="replace")[-4000:]

    def _processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) == self._driver.pid and fields[0] != "Z":
                        found.append(int(entry.name))
        return found


def test_a_replay_that_is_killed_is_completed_by_the_next(tmp_path: Path) -> None:
    """Between its first row and its last: the driver alone, then all of it. No row is lost, none is there twice."""
    log = write_log(tmp_path / "log", REPLAYED, segment_bytes=1 << 20)
    chance = random.Random(7)
    with broker_node(tmp_path / "broker") as node, Admin(node.server.address) as admin:
        admin.put_topic(TopicInfo("again", 4, 4))
        words = [str(log.directory), "--to", node.server.address, "--to-group", "G", "--to-topic", "again"]
        words += ["--topic", ",".join(TOPICS), "--rate", str(ROWS_PER_S)]

        def stored() -> int:
            return sum(one.max_offset for one in admin.queue_ranges("again"))

        def reached(count: int) -> bool:
            return stored() >= count

        for all_of_it in (False, True):
            wanted = stored() + chance.randrange(1, REPLAYED // 3)
            with Job(tmp_path, "replay", *words) as job:
                job.wait_for(partial(reached, wanted), f"row {wanted} is stored")
                job.kill(all_of_it=all_of_it)
            assert wanted <= stored() < REPLAYED, "it was not killed in the middle"
        with Job(tmp_path, "replay", *words) as last:
            last.finish()

        assert stored() == REPLAYED
        found: Counter[bytes] = Counter()
        with Consumer(node.server.address, topics="again", assign="all", start="first") as consumer:
            while found.total() < REPLAYED:
                found.update(message.body for message in consumer.poll(timeout_s=10))
        assert found == bodies(log)


def test_a_write_with_a_writer_id_survives_its_driver(tmp_path: Path) -> None:
    """Killed while tasks hold rows back, twice: who writes the same under the same name adds what is missing."""
    with LocalGroup(tmp_path / "source", size=1) as source, LocalBrokers(tmp_path / "sink", size=1) as sink:
        with source.client(60) as client:
            for number in range(COPIED):
                client.submit((b"%d" % number).ljust(BODY_BYTES))
        sink.master()
        with Admin(sink.addresses, timeout_s=30) as admin:
            admin.put_topic(TopicInfo("copied", 4, 4))
        read = {"bootstrap.servers": ",".join(source.addresses), "group": source.name, "minPartitions": "6"}
        write = {"bootstrap.servers": ",".join(sink.addresses), "topic": "copied", "writerId": "job"}
        gate = Gate(tmp_path)
        for number in HELD_AT:
            gate.open_to(number)
            with CopyProcess(tmp_path / "copy", read, write, gate=gate) as copy:
                _wait_held(gate, copy, number)
                wait_stored(sink, copy, "copied", number - ON_THEIR_WAY)
                copy.kill()
            assert number - ON_THEIR_WAY < stored_count(sink, "copied") <= number, "it was not killed in the middle"
        gate.open_to(COPIED)
        with CopyProcess(tmp_path / "copy", read, write, gate=gate) as copy:
            copy.finish(PATIENCE_S)

        assert stored_bodies(sink, "copied") == list(range(COPIED))


def _wait_held(gate: Gate, copy: CopyProcess, number: int) -> None:
    wait_until(lambda: copy.ended or gate.keeper(number) is not None, f"row {number} is held back", PATIENCE_S)
    assert not copy.ended, copy.said()


def test_a_rebuild_that_is_killed_leaves_a_store_as_it_was_or_whole(tmp_path: Path) -> None:
    """While it derives, while tasks write, before and while it exchanges: what is there is old or new, at last new."""
    root, conf = tmp_path / "store", tmp_path / "broker.conf"
    conf.write_text(STORE_CONF)
    with broker_node(root) as node, Producer(node.server.address) as producer:
        producer.send_many([Message("orders", b"%d" % number, keys=f"k{number}") for number in range(STORED)])
    right = _parts(root)
    for name in ("consumequeue/orders/1", "index"):
        with min((root / name).iterdir()).open("r+b") as file:  # so that old is told from new
            file.seek(500)
            file.write(b"\xee")
    old = _parts(root)
    assert all(before != after for before, after in zip(old, right, strict=True))

    killed = 0
    brief = ("built", "built/old-consumequeue")  # the job may have ended before anybody sees these
    for pattern in ("", ".attempts-*/*/consumequeue/*/*/*", *brief):
        left = set(root.glob(f"{STAGING}*"))  # by those that were killed before
        with Job(tmp_path, "rebuild", str(root), "-c", str(conf)) as job:
            job.wait_for(partial(_has_made, root, left, pattern), f"it has made {pattern}", may_end=pattern in brief)
            killed += not job.ended
            job.kill(all_of_it=killed % 2 == 1)
        assert all(
            found in (before, after, None) for found, before, after in zip(_parts(root), old, right, strict=True)
        )
    with Job(tmp_path, "rebuild", str(root), "-c", str(conf)) as last:
        last.finish()

    assert killed >= 2
    assert _parts(root) == right
    assert not list(root.glob(".*"))


def _parts(root: Path) -> tuple[object, object]:
    """Queues and index; None for what is not there."""
    queues, index = root / "consumequeue", root / "index"
    return queue_files(queues) if queues.exists() else None, index_files(index) if index.exists() else None


def _has_made(root: Path, left: set[Path], pattern: str) -> bool:
    """Whether a rebuild that was not there before has something of this name; of none: whether it is there."""
    new = [one for one in root.glob(f"{STAGING}*") if one not in left]
    return any(not pattern or next(one.glob(pattern), None) is not None for one in new)
