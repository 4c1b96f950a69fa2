"""Brokers as processes, started from RocketMQ's kind of conf files: a group that loses its master, and a plain one."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dledger_cli.local.brokers import LocalBrokers
from dledger_cli.local.group import free_ports
from rocketstore.client.aio.admin_requests import TopicInfo
from rocketstore.client.blocking import Admin, Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.remoting.codes import RequestCode
from tests.support.remoting import RemotingSocket, pull_fields
from tests.support.waiting import wait_until

SMALL = {
    "mappedFileSizeCommitLog": "4m",
    "mappedFileSizeConsumeQueue": "20000",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
}


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[LocalBrokers]:
    """A group of three."""
    with LocalBrokers(tmp_path, settings=SMALL | {"index_segment_bytes": "320k", "warm_bytes": "0"}) as running:
        running.master()
        yield running


def make_topic(brokers: LocalBrokers) -> None:
    """Create T with one queue, which a number can choose then."""
    with Admin(brokers.addresses, timeout_s=60.0) as admin:
        admin.put_topic(TopicInfo("T", 1, 1))


def send_numbers(producer: Producer, numbers: Iterable[int]) -> list[int]:
    """Send a message for each number to queue 0; gives their queue offsets."""
    return [producer.send(Message("T", b"%d" % number), queue=0).offset for number in numbers]


def queue_offsets(brokers: LocalBrokers, topic: str, count: int) -> list[int]:
    """Queue offsets of the first ``count`` messages of queue 0, as a consumer gets them; bodies are numbered alike."""
    with Consumer(brokers.addresses, topics=topic, assign="all", start="first") as consumer:
        found: list[int] = []
        for message in itertools.chain.from_iterable(iter(lambda: consumer.poll(timeout_s=10.0), [])):
            assert message.body == b"%d" % len(found)
            found.append(message.queue_offset)
            if len(found) == count:
                break
        return found


@pytest.mark.smoke
def test_a_group_goes_on_when_its_master_is_killed(brokers: LocalBrokers) -> None:
    """What was acknowledged is there, queue offsets go on without gap or repeat, the old master comes back as slave."""
    make_topic(brokers)
    # The brokers know a message again by its number: one whose answer is lost with the master is sent to the next one.
    with Producer(brokers.addresses, timeout_s=60.0, enable_idempotence=True) as producer:
        before = send_numbers(producer, range(20))
        master = brokers.master()
        brokers.kill(master)
        after = send_numbers(producer, range(20, 40))

    brokers.start(master)
    assert before + after == list(range(40))
    assert queue_offsets(brokers, "T", 40) == list(range(40))
    address = brokers.nodes[master].client_address
    with Admin(address) as admin:
        wait_until(lambda: admin.brokers()[0].master not in ("", address), "it knows the new master")
        assert admin.status(address).table["brokerRole"] == "SLAVE"


def test_a_master_that_is_stopped_hands_over_first(brokers: LocalBrokers) -> None:
    """SIGTERM: another member leads within the time of a transfer, not of an election; exit code 0."""
    master = brokers.master()

    assert brokers.stop(master) == 0

    assert brokers.master(other_than=master) != master
    assert "handing over" in brokers.logs(master)


def messages_in(records: bytes) -> Iterator[Message]:
    """Those of an answer to a pull: whole records, each of which begins with its length."""
    while records:
        size = int.from_bytes(records[:4], "big")
        yield decode_record(records[:size])
        records = records[size:]


@pytest.mark.smoke
def test_rocketmqs_protocol_sends_and_pulls_over_a_kill(tmp_path: Path) -> None:
    """Frame by frame, over one connection to the broker's port; what was acknowledged is there when it starts again."""
    bodies = [b"%d" % number for number in range(3)]
    with LocalBrokers(tmp_path, size=1, plain=True, settings=SMALL) as brokers:
        (node,) = brokers.nodes
        brokers.master()
        with RemotingSocket(brokers.nodes[node].client_port) as client:
            assert [client.send("T", body).code for body in bodies] == [0, 0, 0]
        brokers.kill(node)
        brokers.start(node)
        brokers.master()
        with RemotingSocket(brokers.nodes[node].client_port) as client:

            def pulled() -> list[bytes]:
                answer = client.ask(RequestCode.PULL_MESSAGE, pull_fields("g", "T"))
                return [message.body for message in messages_in(answer.body)]

            assert client.subscribe("g", "T").code == 0
            wait_until(lambda: pulled() == bodies, "all are in the queue")


@pytest.mark.smoke
def test_a_plain_broker_needs_no_settings(tmp_path: Path) -> None:
    """One process, one directory; messages outlive a kill."""
    with LocalBrokers(tmp_path, size=1, plain=True, settings=SMALL) as brokers:
        (node,) = brokers.nodes
        brokers.master()
        make_topic(brokers)
        with Producer(brokers.addresses, timeout_s=60.0) as producer:
            send_numbers(producer, range(10))
            brokers.kill(node)
            brokers.start(node)
            assert send_numbers(producer, range(10, 11)) == [10]
        assert queue_offsets(brokers, "T", 11) == list(range(11))
        assert brokers.stop(node) == 0


def run_broker(*words: str) -> subprocess.CompletedProcess[str]:
    """``dledger broker`` with something wrong, so that it ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "dledger_cli.cli", "broker", *words],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_everything_wrong_with_a_conf_file_is_told_at_once(tmp_path: Path) -> None:
    """Exit code 2, one line each, nothing opened."""
    file = tmp_path / "broker.conf"
    file.write_text(f"storePathRootDir={tmp_path / 'store'}\nlistenPrt=1\nflushDiskType=SOMETIMES\n")

    done = run_broker("-c", str(file))

    assert done.returncode == 2
    assert [line.partition(": ")[2] for line in done.stderr.splitlines()] == [
        f"{file}:2: unknown setting 'listenPrt': did you mean listenPort?",
        f"{file}:3: flushDiskType: invalid value 'SOMETIMES': use one of SYNC_FLUSH, ASYNC_FLUSH",
    ]
    assert not (tmp_path / "store").exists()


def test_a_taken_port_and_a_taken_directory_are_named(tmp_path: Path) -> None:
    """Exit codes 2 and 1, no traceback."""
    with LocalBrokers(tmp_path, size=1, plain=True, settings=SMALL) as brokers:
        (node,) = brokers.nodes.values()
        port = run_broker("-s", str(tmp_path / "other"), "--port", str(node.client_port))
        directory = run_broker("-s", str(brokers.root_dir(node.node_id)), "--port", str(free_ports(1)[0]))

    assert (port.returncode, directory.returncode) == (2, 1)
    assert f"error: cannot listen on the broker's address 127.0.0.1:{node.client_port}" in port.stderr
    assert str(brokers.root_dir(node.node_id)) in directory.stderr.splitlines()[-1]
    assert "Traceback" not in port.stderr + directory.stderr


def test_a_stop_signal_ends_it_with_exit_code_0(tmp_path: Path) -> None:
    """Although numpy's threads do not know the signal."""
    command = [sys.executable, "-m", "dledger_cli.cli", "broker", "-s", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert " is ready: " in process.stdout.readline()
        process.send_signal(signal.SIGTERM)

        assert process.wait(30) == 0
