"""``dledger message query-by-id``, ``query-by-key``, ``print`` and ``transaction resume`` at whole brokers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator

import pytest

from rocketstore.client.aio.consumer_options import ConsumerOptions
from rocketstore.client.blocking import Producer
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import SYS_FLAG_COMPRESSED, HostAddress, Message
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.commands.brokers_here import Here, one_broker, two_brokers


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with one_broker(tmp_path_factory.mktemp("broker")) as found:
        yield found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with two_brokers(tmp_path_factory.mktemp("brokers")) as found:
        yield found


def put(here: Here, topic: str, *messages: Message, queue: int = 0) -> list[str]:
    """At the only broker; the topic has two queues."""
    (name,) = here.brokers
    assert here.run("topic", "create", topic, "-q", "2").exit_code == 0
    return here.put(name, topic, *messages, queue=queue)


def numbered(topic: str, queue: int, count: int, keys: str = "") -> list[Message]:
    return [Message(topic, b"%d-%d" % (queue, number), keys=keys) for number in range(count)]


# --- by id and by key ------------------------------------------------------------------------------------------------


def test_query_by_id(here: Here) -> None:
    """A line per fact, or JSON; exit code 1 if there is none."""
    (message_id,) = put(here, "ids", Message("ids", b"\xff", keys="k"), queue=1)

    shown = [line.split() for line in here.run("message", "query-by-id", message_id).stdout.splitlines()]
    described = json.loads(here.run("message", "query-by-id", message_id, "--json").stdout)

    assert ["queue", "id", "1"] in shown
    assert ["body", "\\xff"] in shown
    assert (described["body_base64"], described["offset_message_id"]) == ("/w==", message_id)
    assert here.run("message", "query-by-id", "0" * 32).exit_code == 1


@pytest.mark.parametrize("text", ["x", "7F000001256B30946E09854E45E90000"])
def test_query_by_id_says_how_to_find_a_producers_own_id(here: Here, text: str) -> None:
    """Which is what RocketMQ's clients print; nothing is asked."""
    shown = here.run("message", "query-by-id", text)

    assert shown.exit_code == 2
    assert text in shown.stderr.splitlines()[-1]
    assert "dledger message query-by-key -t TOPIC --unique ID" in shown.stderr


def test_query_by_key(here: Here) -> None:
    """A row per message, or JSON; exit code 1 if there is none."""
    put(here, "keys", *numbered("keys", 1, 2, "k1 k2"), queue=1)
    words = ("message", "query-by-key", "-t", "keys")

    rows = here.rows(*words, "k2")
    newest = json.loads(here.run(*words, "k1", "--max", "1", "--json").stdout)
    the_same = json.loads(here.run(*words, "--unique", newest["message_id"], "--json").stdout)

    assert [row[1:3] for row in rows] == [["1", "0"], ["1", "1"]]
    assert newest["body"] == "1-1"
    assert the_same == newest
    assert here.run("message", "query-by-key", "-t", "keys", "none").exit_code == 1
    assert here.run("message", "query-by-key", "-t", "keys", "k2", "--end", "5").exit_code == 1


def test_compressed_messages_are_found_decompressed(here: Here) -> None:
    """By their ids and keys as in their queues; RocketMQ's producers compress what is longer than 4 KiB."""
    body = b"a long order" * 100
    stored = Message("zipped", zlib.compress(body), keys="k", sys_flag=SYS_FLAG_COMPRESSED)
    (message_id,) = put(here, "zipped", stored)

    by_id = here.run("message", "query-by-id", message_id, "--json").stdout
    by_key = here.run("message", "query-by-key", "-t", "zipped", "k", "--json").stdout

    assert json.loads(by_id)["body"] == json.loads(by_key)["body"] == body.decode()
    assert body.decode()[:60] in here.run("message", "query-by-key", "-t", "zipped", "k").stdout


def test_only_what_was_given_up_is_resumed(here: Here) -> None:
    """Any other message is none of a transaction: exit code 1, and the broker's reason."""
    (message_id,) = put(here, "plain", Message("plain", b"x"))
    shown = here.run("transaction", "resume", message_id)

    assert shown.exit_code == 1
    assert f"no transaction that was given up has the id {message_id}" in shown.stderr


# --- print -----------------------------------------------------------------------------------------------------------


def test_print_shows_queues_one_after_the_other(here: Here) -> None:
    """All, or one from an offset on; also queues that may no longer be written, and none that may not be read."""
    put(here, "pages", *numbered("pages", 0, 600))
    put(here, "pages", *numbered("pages", 1, 2), queue=1)
    here.run("topic", "create", "pages", "-w", "1")

    assert len(here.run("message", "print", "-t", "pages").stdout.split()) == 602
    assert here.run("message", "print", "-t", "pages", "--max", "1").stdout.split() == ["0-0", "1-0"]
    some = here.run("message", "print", "-t", "pages", "--queue", "0", "--offset", "400", "--max", "2")
    assert some.stdout.split() == ["0-400", "0-401"]
    refused = here.run("message", "print", "-t", "pages", "--queue", "3")
    assert (refused.exit_code, "topic pages has 2 read queues: there is no queue 3" in refused.stderr) == (1, True)


def test_print_by_tag_is_exact(here: Here) -> None:
    """Brokers compare hash codes: ``Aa`` and ``BB`` have the same."""
    put(here, "tags", Message("tags", b"1", tags="Aa"), Message("tags", b"2", tags="BB"), Message("tags", b"3"))

    assert here.run("message", "print", "-t", "tags", "--tags", "BB").stdout.split() == ["2"]
    assert here.run("message", "print", "-t", "tags", "--tags", "Aa || BB").stdout.split() == ["1", "2"]


def test_a_message_that_cannot_be_decompressed_hides_none_behind_it(here: Here) -> None:
    """It is printed as it is stored, and standard error says so."""
    broken = Message("broken", b"lz4", sys_flag=SYS_FLAG_COMPRESSED | 0x100)
    put(here, "broken", broken, Message("broken", b"next"))

    shown = here.run("message", "print", "-t", "broken")

    assert shown.exit_code == 0
    assert shown.stdout.split() == ["lz4", "next"]
    assert "note: broken, queue 0, offset 0 is shown as stored: the body is " in shown.stderr


# --- several brokers behind a name server ----------------------------------------------------------------------------


def test_messages_are_found_where_their_topic_is(several: Here) -> None:
    """At all brokers, or at one; an id names its broker."""
    assert several.run("topic", "create", "orders", "-q", "1").exit_code == 0
    ids = {name: several.put(name, "orders", Message("orders", name.encode(), keys="k"))[0] for name in "ab"}

    assert len(several.rows("message", "query-by-key", "-t", "orders", "k")) == 2
    assert len(several.rows("message", "query-by-key", "-t", "orders", "k", "--broker-name", "b")) == 1
    assert several.run("message", "print", "-t", "orders").stdout.split() == ["a", "b"]
    assert several.run("message", "print", "-t", "orders", "--broker-name", "b").stdout.split() == ["b"]
    one = several.run("message", "print", "-t", "orders", "--queue", "0")
    assert (one.exit_code, "several groups of brokers: a, b; choose one with --broker-name" in one.stderr) == (2, True)
    for name, message_id in ids.items():
        assert json.loads(several.run("message", "query-by-id", message_id, "--json").stdout)["body"] == name
    elsewhere = several.run("message", "query-by-id", offset_message_id(HostAddress(b"\x7f\0\0\1", 1), 0))
    assert (elsewhere.exit_code, "127.0.0.1:1" in elsewhere.stderr) == (1, True)


def test_the_way_of_a_message_is_shown(here: Here) -> None:
    """From the traces that its producer and its consumer have written; without any, what could be the reason."""
    ((_, server),) = here.brokers.items()
    missing = here.run("message", "trace", "7F0000011F9018B4AAC24DD5B1B70000")
    assert missing.exit_code == 1
    with Producer(server.address, group="senders", trace=True, timeout_s=30) as producer:
        sent = producer.send(Message("traced", b"x"))
    options = ConsumerOptions(start="first", trace=True)
    with Consumer(server.address, group="readers", topics="traced", options=options) as consumer:
        wait_until(lambda: bool(consumer.poll(1)), "it is consumed")
    wait_until(lambda: here.run("message", "trace", sent.message_id, "--json").stdout.count("\n") == 2, "both traces")
    first, second = map(json.loads, here.run("message", "trace", sent.message_id, "--json").stdout.splitlines())
    assert (first["step"], first["group"], first["detail"]) == ("sent", "senders", server.address)
    assert (second["step"], second["group"], second["ok"]) == ("consumed", "readers", True)
    shown = here.run("message", "trace", sent.message_id).stdout.splitlines()
    assert [line.split()[:2] for line in shown[1:]] == [["sent", "senders"], ["consumed", "readers"]]
    assert "no trace" in here.run("message", "trace", "7F0000011F9018B4AAC24DD5B1B70000").stderr
