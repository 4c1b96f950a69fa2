"""A stream from one group into another while everything that can die does, again and again: no row lost, none twice."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Final

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import LocalGroup
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin
from tests.support.spark_copy import CopyProcess, stored_bodies, stored_count, wait_stored

ENTRIES: Final = 100_000
KILLED_DRIVERS: Final = 4
PATIENCE_S: Final = 300
QUEUES: Final = 4
TOPIC: Final = "copied"


def test_copying_stream_survives_kills_of_drivers_and_leaders(tmp_path: Path) -> None:
    """The source's leader, the sink's leader, driver and JVM: each dies in the middle of what the others do."""
    chance = random.Random(20261121)
    with LocalGroup(tmp_path / "source") as source, LocalBrokers(tmp_path / "sink") as sink:
        sink.master()
        with Admin(sink.addresses, timeout_s=30) as admin:
            admin.put_topic(TopicInfo(TOPIC, QUEUES, QUEUES))
        read = {
            "bootstrap.servers": ",".join(source.addresses),
            "group": source.name,
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "3000",
            "minPartitions": "2",
        }
        write = {"bootstrap.servers": ",".join(sink.addresses), "topic": TOPIC}
        producing = threading.Thread(target=produce, args=(source,), name="test-producer")
        producing.start()
        try:
            for round_ in range(KILLED_DRIVERS):
                before = stored_count(sink, TOPIC)
                with CopyProcess(tmp_path / "copy", read, write) as copy:
                    wanted = before + chance.randrange(1000, 12_000)
                    wait_stored(sink, copy, TOPIC, wanted)
                    group = (source, sink)[round_ % 2]
                    leader = group.leader()
                    group.kill(leader)
                    wait_stored(sink, copy, TOPIC, wanted + 2000)
                    copy.kill()
                    group.start(leader)
        finally:
            producing.join()
        with CopyProcess(tmp_path / "copy", read, write) as copy:
            copy.finish(PATIENCE_S)

        assert stored_bodies(sink, TOPIC) == list(range(ENTRIES))


def produce(source: LocalGroup) -> None:
    """Numbers, in order, each once."""
    with source.client(60) as client:
        for number in range(ENTRIES):
            client.submit(b"%d" % number)
