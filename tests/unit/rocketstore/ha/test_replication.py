"""Masters and slaves over loopback, with real logs; and what RocketMQ's say, word by word."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.clock import Clock
from dledger.rpc import tls
from dledger.rpc.tls import TlsStream
from dledger_cli import certs
from rocketstore.commit_log.plain import PlainCommitLog
from rocketstore.ha import master as master_module
from rocketstore.ha.master import GREETING_MAX_PER_HOST
from rocketstore.ha.protocol import (
    FRAME,
    GREETING,
    REPORT,
    TAIL_BYTES,
    VERDICT,
    FrameReader,
    HaPace,
    SlaveVerdict,
    SlaveWords,
    tail_of,
)
from rocketstore.ha.waits import ReplicaWaits
from rocketstore.types import FlushDiskType, PutMessageStatus
from tests.support.certificates import files
from tests.support.waiting import wait_until
from tests.unit.rocketstore.commit_log.support import FILE_BYTES, small_config
from tests.unit.rocketstore.ha.records import bytes_of, files_of, filled, more, opened
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
from tests.unit.rocketstore.ha.test_inbox import contexts


@pytest.mark.parametrize("flush", list(FlushDiskType))
def test_the_slaves_log_is_the_masters_byte_for_byte(
    replication: Replication, tmp_path: Path, flush: FlushDiskType
) -> None:
    """What was there before, what comes then, blanks included; and after a restart it goes on where it was."""
    master_log = opened(small_config(tmp_path / "m", flush_disk_type=flush))
    more(master_log, 30)
    master, address = replication.master(master_log)
    config = small_config(tmp_path / "s", flush_disk_type=flush)
    slave_log = opened(config)
    slave = replication.slave(slave_log, address)
    caught_up(slave_log, master_log)
    more(master_log, 30)
    caught_up(slave_log, master_log)
    wait_until(lambda: [one.acknowledged for one in master.slaves()] == [master_log.end_offset], "acknowledged")
    assert slave.view().is_ours
    assert master.slaves()[0].broker_id == 1

    replication.bridge.run(slave.close())
    slave_log.shutdown()
    more(master_log, 30)
    slave_log = opened(config)
    replication.slave(slave_log, address)
    caught_up(slave_log, master_log)

    assert bytes_of(slave_log) == bytes_of(master_log)
    slave_log.shutdown()
    master_log.shutdown()
    assert files_of(tmp_path / "s") == files_of(tmp_path / "m")


def test_what_is_not_flushed_is_not_acknowledged(replication: Replication, tmp_path: Path) -> None:
    """It is written and can be read at the slave, and the master does not count it yet."""
    master_log, slave_log = filled(tmp_path / "m", 3), opened(small_config(tmp_path / "s"))
    held = HeldLog(slave_log)
    master, address = replication.master(master_log)
    replication.slave(held, address)
    caught_up(slave_log, master_log)
    before = master_log.end_offset
    wait_until(lambda: [one.acknowledged for one in master.slaves()] == [before], "acknowledged")
    held.holds = True
    more(master_log, 3)
    caught_up(slave_log, master_log)
    wait_until(lambda: held.held != [], "a flush waits")
    more(master_log, 1)
    caught_up(slave_log, master_log)
    assert [one.acknowledged for one in master.slaves()] == [before]
    end, done = held.held[0]
    done(PutMessageStatus.PUT_OK, "")
    wait_until(lambda: [one.acknowledged for one in master.slaves()] == [end], "what was flushed is acknowledged")


@pytest.mark.parametrize("introduces", [True, False])
def test_a_slave_says_nothing_before_what_it_has_is_flushed(
    replication: Replication, tmp_path: Path, *, introduces: bool
) -> None:
    """Where it asks to go on from counts as acknowledged, and a connection that broke may have left more unflushed."""
    log = filled(tmp_path / "s", 3)
    held = HeldLog(log)
    held.holds = True
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        replication.slave(held, address, replace(PACE, introduces=introduces))
        link, _ = listening.accept()
        with link:
            wait_until(lambda: held.held != [], "a flush waits")
            link.setblocking(False)
            with pytest.raises(BlockingIOError):
                link.recv(8)
            ((end, done),) = held.held
            assert end == log.end_offset
            done(PutMessageStatus.PUT_OK, "")
            link.settimeout(PATIENCE_S)
            assert REPORT.unpack(link.recv(8)) == ((GREETING if introduces else end),)


def test_a_slave_whose_flush_fails_acknowledges_nothing_more(replication: Replication, tmp_path: Path) -> None:
    """It says why, and the master counts it out."""
    master_log, slave_log = filled(tmp_path / "m", 3), opened(small_config(tmp_path / "s"))
    held = HeldLog(slave_log)
    master, address = replication.master(master_log)
    slave = replication.slave(held, address)
    caught_up(slave_log, master_log)
    held.holds = True
    more(master_log, 1)
    wait_until(lambda: held.held != [], "a flush waits")
    for _, done in held.held:
        done(PutMessageStatus.UNKNOWN_ERROR, "the disk is gone")
    more(master_log, 1)
    wait_until(lambda: "the disk is gone" in slave.view().problem, "the slave says so")
    wait_until(lambda: all(one.acknowledged < master_log.end_offset for one in master.slaves()), "not acknowledged")


def test_a_slave_without_a_log_gets_all_files(replication: Replication, tmp_path: Path) -> None:
    """RocketMQ sends only the newest one."""
    master_log = filled(tmp_path / "m", 30)
    _, address = replication.master(master_log)
    slave_log = opened(small_config(tmp_path / "s"))
    replication.slave(slave_log, address)
    caught_up(slave_log, master_log)
    assert slave_log.min_offset == 0
    assert bytes_of(slave_log) == bytes_of(master_log)
    slave_log.shutdown()
    master_log.shutdown()


def test_a_slave_waits_for_master(replication: Replication, tmp_path: Path) -> None:
    """It tries again until there is one, and says meanwhile why it does not follow."""
    address: list[str] = [""]
    slave_log = opened(small_config(tmp_path / "s"))
    slave = replication.slave(slave_log, lambda: address[0])
    wait_until(lambda: "haMasterAddress" in slave.view().problem, "it says what is missing")
    master_log = filled(tmp_path / "m", 3)
    address[0] = replication.master(master_log)[1]
    caught_up(slave_log, master_log)
    assert slave.view().is_connected
    assert slave.view().problem == ""
    slave_log.shutdown()
    master_log.shutdown()


# -- what does not fit -----------------------------------------------------------------------------------------------


def refused(replication: Replication, tmp_path: Path, slave_log: PlainCommitLog, address: str, why: str) -> None:
    """The slave says why it does not follow, and its log is as it was."""
    before = bytes_of(slave_log)
    slave = replication.slave(slave_log, address)
    wait_until(lambda: why in slave.view().problem, f"the slave says: {why}")
    assert bytes_of(slave_log) == before
    slave_log.shutdown()
    del tmp_path


def test_a_slave_with_more_than_the_master_is_refused(replication: Replication, tmp_path: Path) -> None:
    """RocketMQ's would stall without a word: a master replaced by an older copy."""
    master_log, slave_log = filled(tmp_path / "m", 3), filled(tmp_path / "s", 5)
    refused(replication, tmp_path, slave_log, replication.master(master_log)[1], "bytes more than the master")
    master_log.shutdown()


def test_a_slave_with_other_messages_is_refused(replication: Replication, tmp_path: Path) -> None:
    """The old master returns as slave with what its successor never got: same length or less, other bytes."""
    master_log, slave_log = filled(tmp_path / "m", 5, b"hello"), filled(tmp_path / "s", 3, b"other")
    refused(replication, tmp_path, slave_log, replication.master(master_log)[1], "differs from the master's")
    master_log.shutdown()


def test_a_slave_behind_what_the_master_still_has_is_refused(replication: Replication, tmp_path: Path) -> None:
    """What is between has expired: a log with a gap is none."""
    master_log, slave_log = filled(tmp_path / "m", 30), filled(tmp_path / "s", 2)
    first = master_log._queue.files()[0]
    assert master_log._queue.delete_first(first)
    refused(replication, tmp_path, slave_log, replication.master(master_log)[1], "has expired")
    master_log.shutdown()


def test_another_groups_broker_is_refused(replication: Replication, tmp_path: Path) -> None:
    """Two brokers whose addresses were mixed up."""
    master_log = filled(tmp_path / "m", 3)
    slave_log = opened(small_config(tmp_path / "s"))
    refused(replication, tmp_path, slave_log, replication.master(master_log, name="other")[1], "it is other of c")
    master_log.shutdown()


def test_other_file_sizes_are_refused(replication: Replication, tmp_path: Path) -> None:
    """Blanks would be elsewhere."""
    master_log = filled(tmp_path / "m", 3)
    slave_log = opened(small_config(tmp_path / "s", mapped_file_size_commit_log=2 * FILE_BYTES))
    refused(replication, tmp_path, slave_log, replication.master(master_log)[1], "its log files have 1024 bytes")
    master_log.shutdown()


def test_an_outdated_master_is_not_followed(replication: Replication, tmp_path: Path) -> None:
    """A slave that has followed its successor knows it by its epoch."""
    master_log = filled(tmp_path / "m", 3)
    slave_log = opened(small_config(tmp_path / "s"))
    replication.epoch("slave").follow(3)
    address = replication.master(master_log, epoch=2)[1]
    refused(replication, tmp_path, slave_log, address, "followed a later master (epoch 3, there 2)")
    master_log.shutdown()


# -- RocketMQ's slave ------------------------------------------------------------------------------------------------


def test_a_slave_of_rocketmq_is_served(replication: Replication, tmp_path: Path) -> None:
    """It sends numbers, gets frames of at most ``haTransferBatchSize``, and signs of life."""
    master_log = filled(tmp_path / "m", 30)
    master, address = replication.master(master_log, replace(PACE, batch_bytes=100))
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        begin, log = received(link, master_log.end_offset)
        assert (begin, log) == (0, bytes_of(master_log))
        link.sendall(REPORT.pack(master_log.end_offset))
        wait_until(lambda: [one.acknowledged for one in master.slaves()] == [master_log.end_offset], "acknowledged")
        assert FRAME.unpack(link.recv(FRAME.size)) == (master_log.end_offset, 0)
    wait_until(lambda: not master.slaves(), "the master has noticed that it is gone")
    master_log.shutdown()


@pytest.mark.parametrize("number", [-2, -(2**63), 10**9])
def test_a_first_number_outside_the_log_ends_the_connection(
    replication: Replication, tmp_path: Path, number: int
) -> None:
    """RocketMQ's master would send signs of life for ever, and count the slave in."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log)
    with connected(address) as link:
        link.sendall(REPORT.pack(number))
        assert is_closed(link)
    wait_until(lambda: not master.slaves(), "it is forgotten")
    master_log.shutdown()


@pytest.mark.parametrize("number", [10**6, -1, 0])
def test_an_acknowledgement_of_what_was_not_sent_ends_the_connection(
    replication: Replication, tmp_path: Path, number: int
) -> None:
    """Too much, or less than before: neither is a copy of the log."""
    master_log = filled(tmp_path / "m", 3)
    _, address = replication.master(master_log)
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        received(link, master_log.end_offset)
        link.sendall(REPORT.pack(master_log.end_offset) + REPORT.pack(number))
        assert is_closed(link)
    master_log.shutdown()


def test_an_acknowledgement_may_arrive_in_parts(replication: Replication, tmp_path: Path) -> None:
    """Wherever the eight bytes are cut, and with the next number behind them."""
    master_log = filled(tmp_path / "m", 6)
    master, address = replication.master(master_log)
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        received(link, master_log.end_offset)
        half = REPORT.pack(master_log.end_offset // 2)
        link.sendall(half + half[:3])
        wait_until(lambda: [one.acknowledged for one in master.slaves()] == [master_log.end_offset // 2], "the first")
        link.sendall(half[3:] + REPORT.pack(master_log.end_offset))
        wait_until(lambda: [one.acknowledged for one in master.slaves()] == [master_log.end_offset], "the last")
    master_log.shutdown()


def test_a_silent_slave_is_given_up(replication: Replication, tmp_path: Path) -> None:
    """After ``haHousekeepingInterval``, whether it has said from where or not."""
    master_log = filled(tmp_path / "m", 3)
    _, address = replication.master(master_log, replace(PACE, silence_s_max=0.3))
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        assert is_closed(link)
    master_log.shutdown()


@pytest.mark.parametrize("turns", range(6))
def test_a_master_that_closes_ends_whoever_is_just_connecting(
    replication: Replication, tmp_path: Path, turns: int
) -> None:
    """However many turns of the loop ago it was accepted: its task may not have begun."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log)

    async def close_meanwhile() -> socket.socket:
        host, _, port = address.rpartition(":")
        link = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        for _ in range(turns):
            await asyncio.sleep(0)
        await master.close()
        return link

    with replication.bridge.run(close_meanwhile()) as link:
        assert is_closed(link)
    master_log.shutdown()


def introduced(
    link: socket.socket, broker_id: int, *, end: int = 0, tail: tuple[int, int] = (0, 0), epoch: int = 0
) -> SlaveVerdict:
    """What the master answers a slave of ours; if it does not refuse it, once it has sent more."""
    words = SlaveWords("c", "b", broker_id, epoch, FILE_BYTES, end, *tail)
    link.sendall(REPORT.pack(GREETING) + words.encode(GREETING))
    reader, said = FrameReader(), dict[int, bytes]()
    while True:
        data = link.recv(1 << 16)
        for offset, part in reader.feed(data):
            said.setdefault(offset, part)
        verdict = SlaveVerdict.decode(said[VERDICT]) if VERDICT in said else None
        if verdict is not None and (verdict.refusal or verdict.begin in said):
            return verdict
        assert data, "the master has closed the connection"


def test_tls_begins_however_soon_a_slave_says_hello(replication: Replication, tmp_path: Path) -> None:
    """Also if its first bytes have arrived before the master has accepted it."""
    accepting, connecting = contexts(tmp_path / "certs")
    _, address = replication.master(filled(tmp_path / "master", 5), tls=accepting)
    stream = TlsStream(connecting)

    with ExitStack() as stack:

        async def connect() -> socket.socket:
            link = stack.enter_context(connected(address))
            link.sendall(stream.shake_hands(b""))
            return link

        link = replication.bridge.run(connect())
        while not stream.agreed:
            received_now = link.recv(1 << 16)
            assert received_now, "the master has closed the connection"
            link.sendall(stream.shake_hands(received_now))
        link.sendall(stream.seal(REPORT.pack(GREETING)))

        said = b""
        while len(said) < FRAME.size:
            stream.feed(link.recv(1 << 16))
            said += stream.read()
        assert FRAME.unpack_from(said)[0] == GREETING


def test_tls_that_is_begun_and_not_finished_ends_soon(
    replication: Replication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as a greeting that does not come: connections that say little must not keep slaves out."""
    monkeypatch.setattr(master_module, "GREETING_TIMEOUT_S", 0.2)
    accepting, _ = contexts(tmp_path / "certs")
    _, address = replication.master(filled(tmp_path / "master", 5), tls=accepting)

    with connected(address) as link:
        link.sendall(b"\x16\x03\x01")  # of a handshake
        assert is_closed(link)


def test_a_slave_that_connects_twice_is_one_copy(replication: Replication, tmp_path: Path) -> None:
    """Its connection of before may look alive for a while: a put that needs two slaves must not count both."""
    master_log, answers = filled(tmp_path / "m", 3), list[PutMessageStatus]()
    end = master_log.end_offset
    waits = ReplicaWaits(Clock(), slaves_needed=2, timeout_ms=60_000, behind_bytes_max=10**9, end=lambda: end)
    master, address = replication.master(master_log, waits=waits)
    with connected(address) as before, connected(address) as now, connected(address) as other:
        introduced(before, 1)
        introduced(now, 1)
        assert waits.in_sync == 1
        introduced(other, 2)
        assert waits.in_sync == 2
        waits.wait_for(end, lambda status, _why: answers.append(status))
        other.sendall(REPORT.pack(end))
        now.sendall(REPORT.pack(end))
        wait_until(lambda: [one.acknowledged for one in master.slaves()] == [0, end, end], "both have said so")
        assert answers == []
        before.sendall(REPORT.pack(end))
        wait_until(lambda: answers == [PutMessageStatus.PUT_OK], "two brokers have it")
        before.close()
        assert waits.in_sync == 2
    master_log.shutdown()


@pytest.mark.parametrize("tail_bytes", [TAIL_BYTES + 1, -1])
def test_a_slave_may_compare_only_so_much(replication: Replication, tmp_path: Path, tail_bytes: int) -> None:
    """The master would read a whole file for it, while the other slaves wait."""
    master_log = filled(tmp_path / "m", 3)
    with connected(replication.master(master_log)[1]) as link:
        verdict = introduced(link, 1, end=master_log.end_offset, tail=(tail_bytes, 0))
        assert f"it may compare {TAIL_BYTES}" in verdict.refusal
    master_log.shutdown()


def test_a_slave_proves_that_it_has_what_it_says(replication: Replication, tmp_path: Path) -> None:
    """By the end of its log: else whoever can connect makes a SYNC_MASTER count a copy that nobody has."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log)
    end, (length, crc) = master_log.end_offset, tail_of(master_log, master_log.end_offset)
    for tail in ((0, 0), (0, crc), (length, crc ^ 1), (length - 1, crc)):
        with connected(address) as link:
            assert introduced(link, 1, end=end, tail=tail).refusal
    assert master.slaves() == []
    with connected(address) as link:
        assert introduced(link, 1, end=end, tail=(length, crc)).refusal == ""
    master_log.shutdown()


def test_another_connection_of_a_slave_takes_nothing_from_it(replication: Replication, tmp_path: Path) -> None:
    """While the slave is alive, whoever else gives its number does not count, and does not stop it from counting."""
    master_log, answers = filled(tmp_path / "m", 3), list[PutMessageStatus]()
    end = master_log.end_offset
    waits = ReplicaWaits(Clock(), slaves_needed=1, timeout_ms=60_000, behind_bytes_max=10**9, end=lambda: end)
    master, address = replication.master(master_log, waits=waits)
    with connected(address) as real:
        introduced(real, 1)
        with connected(address) as forged:
            introduced(forged, 1)
            forged.sendall(REPORT.pack(end))
            wait_until(lambda: [one.acknowledged for one in master.slaves()] == [0, end], "it says to have all")
            waits.wait_for(end, lambda status, _why: answers.append(status))
            assert answers == []
        wait_until(lambda: len(master.slaves()) == 1, "it has gone")
        assert waits.in_sync == 1
        real.sendall(REPORT.pack(end))
        wait_until(lambda: answers == [PutMessageStatus.PUT_OK], "the slave has it")
    master_log.shutdown()


def test_the_certificate_of_a_slave_names_its_broker(replication: Replication, tmp_path: Path) -> None:
    """Any client's is of the same authority: it must not read the whole log past access control."""
    _, stranger = contexts(tmp_path / "certs", "n0")
    certs.make_node(tmp_path / "certs", "b")
    certs.make_client(tmp_path / "certs", "mallory")
    client = tls.client_context(tls.read(files(tmp_path / "certs", "mallory")))
    made = tls.read(files(tmp_path / "certs", "b"))
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log, tls=tls.server_context(made))
    for context in (stranger, client):
        with connected(address) as link, context.wrap_socket(link) as secured:
            secured.sendall(REPORT.pack(0))
            assert FrameReader().feed(secured.recv(1 << 16))[0][0] == VERDICT
            assert is_closed(secured)
    assert master.slaves() == []
    slave_log = opened(small_config(tmp_path / "t"))
    slave = replication.slave(slave_log, address, epoch="t", tls=stranger)
    wait_until(lambda: "but must have DNS:b" in slave.view().problem, "the slave is told why")
    slave_log.shutdown()
    slave_log = opened(small_config(tmp_path / "u"))
    replication.slave(slave_log, address, epoch="u", tls=tls.client_context(made))
    caught_up(slave_log, master_log)
    slave_log.shutdown()
    master_log.shutdown()


def test_the_certificate_of_a_master_names_its_broker(replication: Replication, tmp_path: Path) -> None:
    """Whoever has some certificate of the authority, and the master's address, must not feed its slaves."""
    accepting, _ = contexts(tmp_path / "certs", "other")
    certs.make_node(tmp_path / "certs", "b")
    connecting = tls.client_context(tls.read(files(tmp_path / "certs", "b")))
    master_log = filled(tmp_path / "m", 3)
    _, address = replication.master(master_log, tls=accepting)
    slave_log = opened(small_config(tmp_path / "s"))
    slave = replication.slave(slave_log, address, tls=connecting)
    wait_until(lambda: "but must have DNS:b" in slave.view().problem, "the slave says so")
    assert slave_log.end_offset == 0
    slave_log.shutdown()
    master_log.shutdown()


def test_there_are_only_so_many_slaves(replication: Replication, tmp_path: Path) -> None:
    """``haSlavesMax``: the next one is turned away, those that are there stay."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log, replace(PACE, slaves_max=1))
    with connected(address) as first, connected(address) as second:
        first.sendall(REPORT.pack(0))
        received(first, master_log.end_offset)
        second.sendall(REPORT.pack(0))
        assert is_closed(second)
        assert len(master.slaves()) == 1
    master_log.shutdown()


def test_one_host_cannot_take_all_places_of_slaves_that_do_not_say_who_they_are(
    replication: Replication, tmp_path: Path
) -> None:
    """Half of them at most."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log, replace(PACE, slaves_max=4))
    with ExitStack() as stack:
        links = [stack.enter_context(connected(address)) for _ in range(3)]
        for link in links[:2]:
            link.sendall(REPORT.pack(0))
            received(link, master_log.end_offset)
        links[2].sendall(REPORT.pack(0))
        assert is_closed(links[2])
        assert len(master.slaves()) == 2
    master_log.shutdown()


def test_a_slave_that_says_who_it_is_takes_the_place_of_one_that_does_not(
    replication: Replication, tmp_path: Path
) -> None:
    """Whoever sends eight bytes may hold a place; a real slave gets it."""
    master_log, slave_log = filled(tmp_path / "m", 3), opened(small_config(tmp_path / "s"))
    master, address = replication.master(master_log, replace(PACE, slaves_max=1))
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        received(link, master_log.end_offset)
        replication.slave(slave_log, address)
        caught_up(slave_log, master_log)
        assert is_closed(link)
        assert [one.broker_id for one in master.slaves()] == [1]
    with connected(address) as link:  # and keeps it
        link.sendall(REPORT.pack(0))
        assert is_closed(link)
    assert [one.broker_id for one in master.slaves()] == [1]
    slave_log.shutdown()
    master_log.shutdown()


def test_a_slave_that_comes_anew_takes_its_own_place(
    replication: Replication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its old connection has been silent for a while; before, somebody else might take the place of a slave."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log, replace(PACE, slaves_max=1))
    with connected(address) as old, connected(address) as new:
        assert introduced(old, 7).refusal == ""
        with connected(address) as too_soon:
            assert "ha_slaves_max" in introduced(too_soon, 7).refusal  # the old one has just said something
        monkeypatch.setattr(HaPace, "living_ms", 0)
        assert introduced(new, 7).refusal == ""
        assert is_closed(old)
        assert len(master.slaves()) == 1
        with connected(address) as other:
            assert "ha_slaves_max" in introduced(other, 8).refusal
    master_log.shutdown()


def test_idle_connections_keep_no_slave_out(
    replication: Replication, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: the oldest of the host that has most is ended for the next, before its time is over."""
    monkeypatch.setattr("rocketstore.ha.master.GREETING_TIMEOUT_S", 3600.0)
    master_log, slave_log = filled(tmp_path / "m", 3), opened(small_config(tmp_path / "s"))
    _, address = replication.master(master_log, replace(PACE, slaves_max=1))
    with ExitStack() as stack:
        links = [stack.enter_context(connected(address)) for _ in range(GREETING_MAX_PER_HOST + 3)]
        assert is_closed(links[0])
        replication.slave(slave_log, address)
        caught_up(slave_log, master_log)
    slave_log.shutdown()
    master_log.shutdown()


def test_the_old_master_that_returns_is_told_of_its_successor(replication: Replication, tmp_path: Path) -> None:
    """As slave, with what its successor never got: where that took over, and how much is only here."""
    master_log, slave_log = filled(tmp_path / "m", 5, b"hello"), filled(tmp_path / "s", 3, b"other")
    replication.epoch("slave").begin(0)
    begin = slave_log.end_offset - 50
    address = replication.master(master_log, epoch=2, begin_offset=begin)[1]
    refused(replication, tmp_path, slave_log, address, f"took over at offset {begin} (epoch 2), as the successor")
    master_log.shutdown()


@pytest.mark.parametrize(
    ("begin_at", "epoch", "is_refused"), [(0, 1, True), (1, 1, False), (0, 2, False), (0, 0, False)]
)
def test_who_went_on_without_its_successor_does_not_fit_even_if_its_end_looks_alike(
    replication: Replication, tmp_path: Path, begin_at: int, epoch: int, *, is_refused: bool
) -> None:
    """Both masters may have written the same last records; a follower of this master has its number."""
    master_log = filled(tmp_path / "m", 4)
    end = master_log.end_offset
    began, tail = end if begin_at else end - 1, tail_of(master_log, end)
    with connected(replication.master(master_log, epoch=2, begin_offset=began)[1]) as link:
        more(master_log, 1)
        refusal = introduced(link, 1, end=end, tail=tail, epoch=epoch).refusal
        assert ("exist only in this broker's log" in refusal) == is_refused
        assert bool(refusal) == is_refused
    master_log.shutdown()


def test_a_slave_keeps_masters_number(replication: Replication, tmp_path: Path) -> None:
    """On disk, before it has anything of its log: by it an old master is known, and the next one counts on."""
    master_log, slave_log = filled(tmp_path / "m", 3), opened(small_config(tmp_path / "s"))
    replication.slave(slave_log, replication.master(master_log, epoch=3)[1])
    caught_up(slave_log, master_log)
    assert replication.epoch("slave").now == 3


def test_an_outdated_master_learns_it_from_a_slave(replication: Replication, tmp_path: Path) -> None:
    """Of its successor's: somebody must stop it."""
    master_log, told = filled(tmp_path / "m", 3), list[str]()
    _, address = replication.master(master_log, epoch=2, outdated=told.append)
    with connected(address) as link:
        assert "followed a later master" in introduced(link, 1, epoch=3).refusal
    assert "followed a later master (epoch 3, here 2)" in told[0]
    master_log.shutdown()


def test_a_master_knows_how_far_its_slaves_are_behind(replication: Replication, tmp_path: Path) -> None:
    """In bytes, and since when."""
    master_log = filled(tmp_path / "m", 3)
    master, address = replication.master(master_log)
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        received(link, master_log.end_offset)
        wait_until(lambda: master.slaves()[0].lag_ms >= 20, "time passes")
        assert master.slaves()[0].lag_bytes == master_log.end_offset
        link.sendall(REPORT.pack(master_log.end_offset))
        wait_until(lambda: master.slaves()[0].lag_bytes == 0, "it has everything")
        assert master.slaves()[0].lag_ms == 0
    master_log.shutdown()


def test_what_a_slave_lacks_does_not_shrink_while_master_sends(replication: Replication, tmp_path: Path) -> None:
    """Each piece ends before what the master has said it has: if it is gone then, a promotion would lose the rest."""
    slave = replication.slave(opened(small_config(tmp_path / "s")), "")

    async def hear() -> list[int]:
        slave.heard(5000, is_ours=True)
        ends = []
        for end in (1000, 2000, 6000):
            slave.heard(end)
            ends.append(slave.view().master_end)
        return ends

    assert replication.bridge.run(hear()) == [5000, 5000, 6000]


def test_who_must_introduce_itself_is_refused_otherwise(replication: Replication, tmp_path: Path) -> None:
    """``haHandshake=required``, on both sides."""
    master_log = filled(tmp_path / "m", 3)
    _, address = replication.master(master_log, replace(PACE, introduction_required=True))
    with connected(address) as link:
        link.sendall(REPORT.pack(0))
        assert is_closed(link)
    with silent_master() as silent:
        slave_log = opened(small_config(tmp_path / "s"))
        slave = replication.slave(slave_log, silent, replace(PACE, introduction_required=True))
        wait_until(lambda: "does not say who it is" in slave.view().problem, "the slave says so")
        slave_log.shutdown()
    master_log.shutdown()


# -- RocketMQ's master -----------------------------------------------------------------------------------------------


@contextmanager
def silent_master() -> Iterator[str]:
    """Accepts and says nothing, as RocketMQ's after a greeting."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_slave_follows_a_master_of_rocketmq(replication: Replication, tmp_path: Path) -> None:
    """It greets, is not answered, and asks in RocketMQ's way; cut frames and signs of life in between."""
    log = filled(tmp_path / "m", 20)
    content = bytes_of(log)
    log.shutdown()
    slave_log = opened(small_config(tmp_path / "s"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        slave = replication.slave(slave_log, f"127.0.0.1:{listening.getsockname()[1]}")
        link, _ = listening.accept()
        with link:
            link.settimeout(PATIENCE_S)
            assert REPORT.unpack(link.recv(8)) == (GREETING,)
            assert REPORT.unpack(link.recv(8)) == (0,)
            at = 0
            while at < len(content):
                part = content[at : min(at + 333, (at // FILE_BYTES + 1) * FILE_BYTES)]
                link.sendall(FRAME.pack(at, 0) + FRAME.pack(at, len(part)) + part[:9])
                link.sendall(part[9:])
                at += len(part)
            wait_until(lambda: slave_log.end_offset == len(content), "the slave has it")
            reports, last = b"", 0
            while last < len(content):
                reports += link.recv(1 << 16)
                last = REPORT.unpack(reports[-8:])[0]
            assert bytes_of(slave_log) == content
            assert not slave.view().is_ours
            assert slave.view().master_end == len(content)
    slave_log.shutdown()


def test_an_empty_slave_begins_with_a_file(replication: Replication, tmp_path: Path) -> None:
    """A master that begins elsewhere has files of another size: its log would not be found in ours."""
    slave_log = opened(small_config(tmp_path / "s"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        slave = replication.slave(slave_log, address, replace(PACE, introduces=False))
        link, _ = listening.accept()
        with link:
            link.settimeout(PATIENCE_S)
            assert REPORT.unpack(link.recv(8)) == (0,)
            link.sendall(FRAME.pack(FILE_BYTES + 100, 4) + b"\0\0\1\0")
            wait_until(lambda: "in the middle of a file" in slave.view().problem, "the slave says so")
    assert slave_log.end_offset == 0


def test_a_slave_does_not_take_what_is_damaged(replication: Replication, tmp_path: Path) -> None:
    """Neither written nor acknowledged: what is sound before it is."""
    log = filled(tmp_path / "m", 4)
    content = bytearray(bytes_of(log))
    log.shutdown()
    content[-1 - len(b"\1t\0\0")] ^= 1  # the last byte of the last body
    slave_log = opened(small_config(tmp_path / "s"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        slave = replication.slave(slave_log, f"127.0.0.1:{listening.getsockname()[1]}", replace(PACE, introduces=False))
        link, _ = listening.accept()
        with link:
            link.settimeout(PATIENCE_S)
            link.sendall(FRAME.pack(0, len(content)) + content)
            wait_until(lambda: "CRC" in slave.view().problem, "the slave says so")
            reports = b""
            while data := link.recv(1 << 16):
                reports += data
    assert max(one for (one,) in REPORT.iter_unpack(reports)) <= slave_log.end_offset < len(content)
    slave_log.shutdown()


def test_a_silent_master_is_given_up(replication: Replication, tmp_path: Path) -> None:
    """RocketMQ's slave takes its own reports for signs of life of the master."""
    slave_log = opened(small_config(tmp_path / "s"))
    with silent_master() as silent:
        slave = replication.slave(slave_log, silent, replace(PACE, introduces=False, silence_s_max=0.5))
        wait_until(lambda: slave.view().problem == "it is silent", "the slave says so")
    slave_log.shutdown()


def test_a_slave_with_a_blank_file_that_is_not_the_masters_first_is_refused(
    replication: Replication, tmp_path: Path
) -> None:
    """It has nothing to prove what it says it has."""
    master_log = filled(tmp_path / "m", 30)
    begin = master_log.end_offset - master_log.end_offset % FILE_BYTES
    assert begin > master_log.min_offset
    config = small_config(tmp_path / "s")
    (tmp_path / "s" / "commitlog").mkdir(parents=True)
    (tmp_path / "s" / "commitlog" / f"{begin:020}").write_bytes(bytes(FILE_BYTES))
    slave_log = opened(config)
    assert slave_log.end_offset == begin
    with connected(replication.master(master_log)[1]) as link:
        assert introduced(link, 2, end=begin).refusal
    slave_log.shutdown()
    master_log.shutdown()
