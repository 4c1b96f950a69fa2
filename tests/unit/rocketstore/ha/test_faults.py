"""Replication when disks are full or slow, connections break anywhere, and the other side talks nonsense."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.monitoring import ConditionKind
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.ha.master import BUFFER_BYTES_MAX, CHUNK_BYTES
from rocketstore.ha.protocol import FRAME, GREETING, REPORT, VERDICT, MasterWords, SlaveVerdict, SlaveWords
from rocketstore.ha.waits import ReplicaWaits
from rocketstore.types import PutMessageStatus
from tests.crash.crash_fs import FailingFs
from tests.support.waiting import wait_until
from tests.unit.rocketstore.commit_log.support import (
    FILE_BYTES,
    abandon,
    heads_of,
    message,
    open_log,
    put,
    small_config,
)
from tests.unit.rocketstore.ha.records import bytes_of, filled, kept, more, opened
from tests.unit.rocketstore.ha.replicating import (
    PACE,
    PATIENCE_S,
    HeldLog,
    Replication,
    caught_up,
    connected,
    is_closed,
    received,
)

IMPATIENT = replace(PACE, heartbeat_s=0.05, retry_s=0.05, refused_retry_s=0.05)


# -- disks -----------------------------------------------------------------------------------------------------------


def test_a_slave_whose_disk_is_full_says_so_and_goes_on_when_there_is_room(
    replication: Replication, tmp_path: Path
) -> None:
    """It acknowledges nothing that it has no room for, the master goes on, and later the slave has everything."""
    is_full = [False]
    fs = FailingFs(lambda call, _path: errno.ENOSPC if is_full[0] and call == "allocate" else None)
    master_log = filled(tmp_path / "m", 3)
    slave_log = kept(open_log(small_config(tmp_path / "s"), fs))
    master, address = replication.master(master_log)
    slave = replication.slave(slave_log, address, IMPATIENT)
    caught_up(slave_log, master_log)

    is_full[0] = True
    more(master_log, 60)  # more files than are prepared
    wait_until(lambda: "no space left" in slave.view().problem, "the slave says so")
    assert replication.conditions("slave").holds(ConditionKind.NOT_REPLICATING)
    had = slave_log.end_offset
    assert had < master_log.end_offset
    assert all(one.acknowledged <= had for one in master.slaves())
    more(master_log, 5)

    is_full[0] = False
    caught_up(slave_log, master_log)
    assert bytes_of(slave_log) == bytes_of(master_log)
    wait_until(lambda: not replication.conditions("slave").now(), "the condition is over")


def test_a_condition_holds_until_the_slave_goes_on(replication: Replication, tmp_path: Path) -> None:
    """A slave that connects again and again, and each time fails at the same place, does not look healthy between."""
    is_full = [True]
    fs = FailingFs(lambda call, _path: errno.ENOSPC if is_full[0] and call == "allocate" else None)
    master_log, slave_log = filled(tmp_path / "m", 60), kept(open_log(small_config(tmp_path / "s"), fs))
    master, address = replication.master(master_log)
    slave = replication.slave(slave_log, address, IMPATIENT)
    wait_until(lambda: "no space left" in slave.view().problem, "the slave says so")
    (began,) = replication.conditions("slave").now()
    attempts = fs.calls.count(("allocate", fs.calls[-1][1]))
    wait_until(lambda: len([one for one in fs.calls if one[0] == "allocate"]) > attempts + 3, "it tries again")
    (still,) = replication.conditions("slave").now()
    assert still.since_ms == began.since_ms
    del master


def test_an_acknowledgement_that_a_slow_disk_delays_is_not_forgotten(replication: Replication, tmp_path: Path) -> None:
    """The flush took longer than it may (``syncFlushTimeout``), and nothing more is sent: the slave says it later."""
    master_log, slave_log = filled(tmp_path / "m", 3), opened(small_config(tmp_path / "s"))
    held = HeldLog(slave_log)
    master, address = replication.master(master_log)
    replication.slave(held, address, IMPATIENT)
    before = master_log.end_offset
    wait_until(lambda: [one.acknowledged for one in master.slaves()] == [before], "acknowledged")
    held.holds = True
    more(master_log, 1)
    wait_until(lambda: held.held != [], "a flush waits")
    held.holds = False
    while held.held:
        held.held.pop()[1](PutMessageStatus.FLUSH_DISK_TIMEOUT, "the flush timed out")
    wait_until(lambda: [one.acknowledged for one in master.slaves()] == [master_log.end_offset], "acknowledged later")


def test_flushes_that_end_out_of_order_take_no_acknowledgement_back(replication: Replication, tmp_path: Path) -> None:
    """What is durable stays so; a master ends the connection of a slave that has less than it had."""
    master_log, slave_log = filled(tmp_path / "m", 3), opened(small_config(tmp_path / "s"))
    held = HeldLog(slave_log)
    master, address = replication.master(master_log)
    replication.slave(held, address)
    begun = master_log.end_offset
    wait_until(lambda: [one.acknowledged for one in master.slaves()] == [begun], "acknowledged")
    (connection,) = (one.address for one in master.slaves())
    held.holds = True
    for _ in range(2):
        more(master_log, 1)
        wait_until(lambda: held.held != [] and held.held[-1][0] == master_log.end_offset, "its flush waits")
    held.holds = False

    for _, done in sorted(held.held, key=lambda one: -one[0]):
        done(PutMessageStatus.PUT_OK, "")
    more(master_log, 1)

    wait_until(lambda: [one.acknowledged for one in master.slaves()] == [master_log.end_offset], "all acknowledged")
    assert [one.address for one in master.slaves()] == [connection]


# -- slow slaves -------------------------------------------------------------------------------------------------------


def test_a_slave_that_reads_nothing_costs_its_master_a_buffer(replication: Replication, tmp_path: Path) -> None:
    """Of bounded size; another slave gets everything meanwhile, and the puts go on."""
    big = small_config(tmp_path / "m", mapped_file_size_commit_log=1 << 20)
    master_log, slave_log = opened(big), opened(replace(big, store_path_root_dir=tmp_path / "s"))
    for _ in range(24):
        put(master_log, message(b"x" * 1_000_000))
    master, address = replication.master(master_log)
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        wait_until(lambda: len(master.slaves()) == 1, "it follows")
        replication.slave(slave_log, address)
        caught_up(slave_log, master_log)
        more(master_log, 3)
        caught_up(slave_log, master_log)

        def waiting() -> int:
            return max(one._writer.transport.get_write_buffer_size() for one in master._slaves.values())

        wait_until(lambda: waiting() > BUFFER_BYTES_MAX // 4, "its buffer fills")
        replication.bridge.run(rounds(1000))
        assert waiting() <= BUFFER_BYTES_MAX + CHUNK_BYTES + FRAME.size
        (stuck,) = [one for one in master.slaves() if one.broker_id < 0]
        assert stuck.sent < master_log.end_offset
        assert stuck.lag_bytes == master_log.end_offset


async def rounds(count: int) -> None:
    """So many of the event loop: whoever does not wait gets on in each."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("reports", "why"),
    [((10, 5), "after having acknowledged"), ((0, -1), "after having acknowledged"), ((1 << 40,), "was sent only")],
)
def test_reports_that_cannot_be_end_the_connection(
    replication: Replication, tmp_path: Path, reports: tuple[int, ...], why: str
) -> None:
    """Of less than before, of nothing sensible, of what was never sent: nothing of it counts."""
    master_log = filled(tmp_path / "m", 3)
    end = master_log.end_offset
    waits = ReplicaWaits(Clock(), slaves_needed=1, timeout_ms=60_000, behind_bytes_max=10**9, end=lambda: end)
    answers: list[PutMessageStatus] = []
    _, address = replication.master(master_log, waits=waits)
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        received(link, end)
        waits.wait_for(end, lambda status, _why: answers.append(status))
        link.sendall(b"".join(map(REPORT.pack, reports)))
        assert is_closed(link)
    wait_until(lambda: waits.in_sync == 0, "it does not count any more")
    assert why in replication.conditions("master").now()[0].message
    assert not answers


def test_a_master_that_stops_waits_for_its_slaves(replication: Replication, tmp_path: Path) -> None:
    """Until they have everything; and not for ever."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log)
    replication.bridge.run(master.drain(60))  # nobody is there
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        received(link, master_log.end_offset)
        replication.bridge.run(master.drain(0.05))
        draining = threading.Thread(target=lambda: replication.bridge.run(master.drain(60)))
        draining.start()
        link.sendall(REPORT.pack(master_log.end_offset - 1))
        wait_until(lambda: master.slaves()[0].lag_bytes == 1, "it has almost everything")
        assert draining.is_alive()
        link.sendall(REPORT.pack(master_log.end_offset))
        draining.join(PATIENCE_S)
        assert not draining.is_alive()


# -- connections that break --------------------------------------------------------------------------------------------


def serve_in_cuts(listening: socket.socket, content: bytes, cut: int) -> int:
    """As RocketMQ's master: send the log from where the slave asks, ``cut`` bytes of a frame, and hang up."""
    listening.settimeout(PATIENCE_S)
    link, _ = listening.accept()
    with link:
        link.settimeout(PATIENCE_S)
        begin: int = REPORT.unpack(link.recv(REPORT.size, socket.MSG_WAITALL))[0]
        end = min(len(content), (begin // FILE_BYTES + 1) * FILE_BYTES)
        frame = FRAME.pack(begin, end - begin) + content[begin:end]
        link.sendall(frame[:cut])
    return begin


def test_a_connection_may_end_at_any_byte(replication: Replication, tmp_path: Path) -> None:
    """The slave's log always ends with a whole record, or in the blank after it, and goes on from there."""
    log = filled(tmp_path / "m", 12)
    content = bytes_of(log)
    slave_log = opened(small_config(tmp_path / "s"))
    whole = {0} | {head.offset + head.size for head in heads_of(log)}
    blanks = [max(one for one in whole if one <= base) for base in range(FILE_BYTES, len(content), FILE_BYTES)]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        slave = replication.slave(slave_log, address, replace(IMPATIENT, introduces=False, retry_s=0.0))
        cut, begun = 0, list[int]()
        while slave_log.end_offset < len(content):
            begun.append(serve_in_cuts(listening, content, cut % 120))
            cut += 1
            assert cut < 3 * len(content), f"no way on from {slave_log.end_offset}: {slave.view().problem}"
    assert begun == sorted(begun)
    in_blanks = {at for begin in blanks for at in range(begin, begin - begin % FILE_BYTES + FILE_BYTES + 1)}
    assert set(begun) <= whole | in_blanks
    assert set(begun) - whole, "no connection ended in a blank"
    assert bytes_of(slave_log) == content


@pytest.mark.parametrize("cut", [8, 9, 40])
def test_a_slave_goes_on_in_the_middle_of_a_blank(replication: Replication, tmp_path: Path, cut: int) -> None:
    """The connection broke there, or the slave was started again: what follows is no record."""
    log = opened(small_config(tmp_path / "m"))
    more(log, 3)
    put(log, message(b"x" * (FILE_BYTES // 2)))
    put(log, message(b"y" * (FILE_BYTES // 2)))
    content = bytes_of(log)
    at = log.scan(0, FILE_BYTES).heads[-1]
    blank = at.offset + at.size
    slave_log = opened(small_config(tmp_path / "s"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        slave = replication.slave(slave_log, address, replace(IMPATIENT, introduces=False))
        assert serve_in_cuts(listening, content, FRAME.size + blank + cut) == 0
        assert serve_in_cuts(listening, content, FRAME.size) == blank + cut
        assert serve_in_cuts(listening, content, FRAME.size + FILE_BYTES) == blank + cut
        assert serve_in_cuts(listening, content, FRAME.size + FILE_BYTES) == FILE_BYTES
        wait_until(lambda: slave_log.end_offset == len(content), "it has everything")
        replication.bridge.run(slave.close())
    assert bytes_of(slave_log) == content


@pytest.mark.parametrize("cut", [0, 8, 40])
def test_a_slave_that_was_killed_in_a_blank_goes_on(replication: Replication, tmp_path: Path, cut: int) -> None:
    """The same after SIGKILL: recovery finds the blank's head, or the record before it."""
    log = opened(small_config(tmp_path / "m"))
    more(log, 3)
    put(log, message(b"x" * (FILE_BYTES // 2)))
    put(log, message(b"y" * (FILE_BYTES // 2)))
    content = bytes_of(log)
    at = log.scan(0, FILE_BYTES).heads[-1]
    blank = at.offset + at.size
    config = small_config(tmp_path / "s")
    first = open_log(config)
    first.append_received(0, content[:blank], 1)
    if cut:
        first.append_received(blank, content[blank : blank + cut], 0)
    abandon(first)
    slave_log = kept(open_log(config, clean_stop=False))
    _, address = replication.master(log)
    replication.slave(slave_log, address)
    caught_up(slave_log, log)
    assert bytes_of(slave_log) == content


# -- nonsense ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [b"[" * 16_000, b'{"a":' * 3_000, b"1" * 16_000, b"null", b"\xff\xfe", b"{}"],
    ids=lambda one: one[:6].hex(),
)
def test_nonsense_instead_of_an_introduction_is_a_reason_to_hang_up(
    replication: Replication, tmp_path: Path, words: bytes
) -> None:
    """On both sides: neither a slave's thread nor the master's ends by it."""
    slave_log, master_log = opened(small_config(tmp_path / "s")), filled(tmp_path / "m", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        slave = replication.slave(slave_log, f"127.0.0.1:{listening.getsockname()[1]}", IMPATIENT)
        listening.settimeout(PATIENCE_S)
        link, _ = listening.accept()
        with link:
            link.sendall(FRAME.pack(GREETING, len(words)) + words)
            wait_until(lambda: "introduction" in slave.view().problem, "the slave says why")
    master, address = replication.master(master_log)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as link:
        link.sendall(REPORT.pack(GREETING) + FRAME.pack(GREETING, len(words)) + words)
        while link.recv(1 << 16):
            pass
    assert "introduction" in replication.conditions("master").now()[0].message
    assert not master.slaves()


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "a" * 70 + ":1", "::::", "\0:1", "ä..b:1"])
def test_an_address_that_is_none_does_not_end_a_slave(replication: Replication, tmp_path: Path, address: str) -> None:
    """Name servers pass on what a broker says of itself: the slave says what is wrong, and follows the next one."""
    now, master_log = [address], filled(tmp_path / "m", 3)
    slave_log: PlainCommitLog = opened(small_config(tmp_path / "s"))
    slave = replication.slave(slave_log, lambda: now[0], IMPATIENT)
    wait_until(lambda: slave.view().problem != "", "the slave says what is wrong")
    now[0] = replication.master(master_log)[1]
    caught_up(slave_log, master_log)


def test_a_slave_that_was_refused_is_forgotten_once_it_follows(replication: Replication, tmp_path: Path) -> None:
    """It was wiped, as its master's condition asked for: nobody needs to wait until that is over by itself."""
    master_log, other = filled(tmp_path / "m", 3), filled(tmp_path / "o", 5)
    _, address = replication.master(master_log)
    wrong = replication.slave(other, address, IMPATIENT, epoch="wrong")
    wait_until(lambda: "bytes more than the master" in wrong.view().problem, "it is refused")
    assert replication.conditions("master").holds(ConditionKind.NOT_REPLICATING, "127.0.0.1")
    replication.bridge.run(wrong.close())
    slave_log = opened(small_config(tmp_path / "s"))
    replication.slave(slave_log, address)
    caught_up(slave_log, master_log)
    assert not replication.conditions("master").now()


@pytest.mark.parametrize("further", [-100, 100])
def test_a_slave_follows_from_its_own_end_only(replication: Replication, tmp_path: Path, further: int) -> None:
    """It says so before it takes anything, and does not have that master's number either."""
    slave_log = filled(tmp_path / "s", 5)
    end = slave_log.end_offset
    with socket.create_server(("127.0.0.1", 0)) as listening:
        slave = replication.slave(slave_log, f"127.0.0.1:{listening.getsockname()[1]}")
        link, _ = listening.accept()
        with link:
            link.settimeout(PATIENCE_S)
            assert REPORT.unpack(link.recv(REPORT.size)) == (GREETING,)
            link.sendall(MasterWords("c", "b", 7, FILE_BYTES, 0, 10**6).encode(GREETING))
            _, size = FRAME.unpack(link.recv(FRAME.size, socket.MSG_WAITALL))
            assert SlaveWords.decode(link.recv(size, socket.MSG_WAITALL)).end == end
            link.sendall(SlaveVerdict(end + further, "").encode(VERDICT))
            wait_until(lambda: "comes next" in slave.view().problem, "the slave says so")
    assert f"it sends from offset {end + further} on, and {end} comes next" in slave.view().problem
    assert replication.epoch("slave").now == 0
