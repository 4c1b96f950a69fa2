"""Who reads a broker's log itself: what a whole broker offers, from raw chunks to the lag that tools show."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger.client import DLedgerClient
from dledger.records import ENTRY_HEADER_BYTES
from dledger.store.format import decode_entry
from dledger.types import Entry, LogPlace, Magic
from dledger_cli.commands.consumer import consumer
from rocketstore.client import Admin, Producer, TopicInfo
from rocketstore.message.message import HostAddress, Message
from rocketstore.message.record import MESSAGE_MAGIC, decode_record, encode_record, stored_at
from rocketstore.server import BrokerServer
from tests.support.waiting import wait_until
from tests.unit.rocketstore.test_server import alone, plain, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[BrokerServer]:
    """The only member of group G, with 30 messages: 10 in each of 3 queues of topic T."""
    with running(alone(tmp_path)) as server:
        fill(server)
        yield server


def fill(server: BrokerServer) -> None:
    """Thirty messages, sent one by one, so that they have times of their own; now in their queues."""
    with Admin([server.address]) as admin, Producer([server.address]) as producer:
        admin.put_topic(TopicInfo("T", 3, 3))
        for number in range(30):
            producer.send(Message("T", b"%d" % number), queue=number % 3)
    wait_until(
        lambda: [server.store.max_offset("T", queue) for queue in range(3)] == [10] * 3, "all are in their queues"
    )


def entries(client: DLedgerClient, chunk_bytes: int = 0) -> list[Entry]:
    """All entries of the raw log."""
    found: list[Entry] = []
    for chunk in client.fetch_log(0, chunk_bytes=chunk_bytes):
        offset = 0
        for _ in range(chunk.count):
            found.append(decode_entry(chunk.data, offset))
            assert found[-1].position == chunk.position + offset
            offset += ENTRY_HEADER_BYTES + len(found[-1].body)
        assert offset == len(chunk.data)
    return found


def messages(client: DLedgerClient) -> list[tuple[Entry, Message]]:
    """The messages of topic T in it."""
    found = [(one, decode_record(one.body)) for one in entries(client) if one.magic is Magic.NORMAL]
    return [(one, message) for one, message in found if message.topic == "T"]


def lags(admin: Admin, group: str) -> list[int]:
    """Of the three queues that have messages; the others have no lag."""
    rows = admin.progress(group)
    assert not any(row.lag for row in rows[3:])
    return [row.lag for row in rows[:3]]


def test_the_raw_log_is_served_at_the_brokers_own_address(server: BrokerServer) -> None:
    """Records as they are stored, each knowing its place; metadata says that these are messages."""
    with DLedgerClient(server.address, group="G") as client:
        status = client.metadata()
        found = entries(client, chunk_bytes=700)

        assert (status.is_broker, status.cluster_id) == (True, "G")
        assert [one.index for one in found] == list(range(len(found)))
        sent = messages(client)
        begins, registered = [one.index for one in found if one.magic is Magic.NOOP]  # a term, a producer
        assert begins == 0
        assert registered < sent[0][0].index  # the broker may have noted more or less of its own before
        assert [message.body for _, message in sent] == [b"%d" % number for number in range(30)]
        assert all(message.offset == one.position + ENTRY_HEADER_BYTES for one, message in sent)
        assert client.metadata().committed_position >= found[-1].position + ENTRY_HEADER_BYTES + len(found[-1].body)


def test_a_time_leads_to_the_first_message_stored_then(server: BrokerServer) -> None:
    """By the messages' store times, whatever lies between (a NOOP has none, though its record has the field)."""
    with DLedgerClient(server.address, group="G") as client:
        normal = [(one, decode_record(one.body)) for one in entries(client) if one.magic is Magic.NORMAL]
        for wanted in {message.store_timestamp + more for _, message in normal for more in (0, 1)}:
            first = next((one.index for one, message in normal if message.store_timestamp >= wanted), None)
            if first is not None:
                assert client.index_by_time(wanted) == first
        assert client.index_by_time(0) == normal[0][0].index
        located = client.locate(store_times_ms=(1 << 50,))
        assert located.places == (located.range.end,)


def test_a_committed_place_shows_as_lag(server: BrokerServer) -> None:
    """``dledger consumer progress`` counts what is still to come, queue by queue; nothing goes back."""
    with DLedgerClient(server.address, group="G") as client, Admin([server.address]) as admin:
        sent = messages(client)

        reached = admin.commit_position("stream", sent[20][0].position, ["T"])

        assert {one.queue_id: offset for one, offset in reached.items()} == {0: 7, 1: 7, 2: 6}
        assert lags(admin, "stream") == [3, 3, 4]
        shown = CliRunner().invoke(
            consumer, ["progress", "-g", "stream", "--json", "--broker", server.address], catch_exceptions=False
        )
        assert [(row["queue_id"], row["committed"], row["lag"]) for row in json.loads(shown.stdout)[:3]] == [
            (0, 7, 3),
            (1, 7, 3),
            (2, 6, 4),
        ]
        admin.commit_position("stream", sent[5][0].position, ["T"])
        assert lags(admin, "stream") == [3, 3, 4]


def test_the_end_of_the_log_is_no_lag(server: BrokerServer) -> None:
    """Also a place beyond what this master knows to be committed, as a reader of another member may have."""
    with DLedgerClient(server.address, group="G") as client, Admin([server.address]) as admin:
        end = client.locate().range.end

        assert len(admin.commit_position("stream", end.position + 100, ["T"])) == 3
        assert lags(admin, "stream") == [0, 0, 0]
        admin.commit_position("late", 0, ["T"])
        assert lags(admin, "late") == [10, 10, 10]


def test_places_of_messages_can_be_asked_for_at_once(server: BrokerServer) -> None:
    """How a reader cuts a range into even parts."""
    with DLedgerClient(server.address, group="G") as client:
        found = entries(client)
        half = found[len(found) // 2]

        located = client.locate(indexes=(0, half.index), positions=(half.position, half.position + 1))

        assert [one.index for one in located.places] == [0, half.index, half.index, half.index + 1]
        assert located.places[1] == LogPlace(half.index, half.position)


def test_a_plain_broker_takes_positions(tmp_path: Path) -> None:
    """Its log has no indexes; a record's offset is its position."""
    with running(plain(tmp_path)) as server, Admin([server.address]) as admin:
        fill(server)
        record = server.store.get("T", 0, 4, max_count=1).records[0]
        assert stored_at(record) is not None
        offset = decode_record(record).offset

        reached = admin.commit_position("stream", offset, ["T"])
        assert {one.queue_id: at for one, at in reached.items()}[0] == 4


def test_a_store_time_is_read_from_the_head_of_a_record_only() -> None:
    """With either kind of address; what is no record has none."""
    for host in (b"\x7f\0\0\1", bytes(15) + b"\1"):
        record = bytearray(
            encode_record(Message("T", b"x" * 100, born_host=HostAddress(host, 1), store_host=HostAddress(host, 2)))
        )
        at = 56 if len(host) == 4 else 68
        record[at : at + 8] = (12345).to_bytes(8, "big")
        assert stored_at(bytes(record[:76])) == 12345
        assert stored_at(bytes(record[:75])) is None
    assert stored_at(bytes(200)) is None
    assert stored_at((MESSAGE_MAGIC - 1).to_bytes(8, "big", signed=True) + bytes(200)) is None
