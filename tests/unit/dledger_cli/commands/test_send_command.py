"""``dledger message send`` at whole brokers, and at scripted ones for refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.remoting.codes import AnswerCode
from dledger_cli import cli, terminal
from tests.support.pipes import named_pipe
from tests.support.scripted_server import MessageStore, refuses, silence
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.commands.brokers_here import Here, one_broker, scripted, two_brokers


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with one_broker(tmp_path_factory.mktemp("broker")) as found:
        yield found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with two_brokers(tmp_path_factory.mktemp("brokers")) as found:
        yield found


def made(here: Here, topic: str, queues: int = 2) -> str:
    """The name of a topic that exists now."""
    assert here.run("topic", "create", topic, "-q", str(queues)).exit_code == 0
    return topic


def printed(here: Here, topic: str, *words: str) -> list[str]:
    return here.run("message", "print", "-t", topic, *words).stdout.split()


@pytest.mark.parametrize(("name", "option"), [("TAGS", "--tags"), ("KEYS", "--keys"), ("DELAY", "--delay-level")])
def test_a_property_that_has_an_option_is_refused_with_it(here: Here, name: str, option: str) -> None:
    """It means something to the store, as in RocketMQ: with DELAY it is delivered later, and has no place yet."""
    refused = here.run("message", "send", "-t", "refused", "x", "--property", f"{name}=3")

    assert (refused.exit_code, f"use {option}" in refused.stderr, refused.stdout) == (2, True, "")
    assert here.run("topic", "status", "refused").exit_code == 1


def test_send_prints_the_id_of_each_argument(here: Here) -> None:
    """With tag, keys and any other property."""
    topic = made(here, "arguments")
    words = ("--tags", "new", "--keys", "a b", "--property", "x=y", "--queue", "1", "hello", "wörld")
    ids = here.run("message", "send", "-t", topic, *words).stdout.split()

    stored = [json.loads(here.run("message", "query-by-id", one, "--json").stdout) for one in ids]
    assert [one["body"] for one in stored] == ["hello", "wörld"]
    assert [one["queue_id"] for one in stored] == [1, 1]
    assert (stored[0]["tags"], stored[0]["keys"], stored[0]["properties"]["x"]) == ("new", ["a", "b"], "y")


def test_send_speaks_json_and_to_people(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """One object per message, or a sentence."""
    topic = made(here, "spoken")
    described = json.loads(here.run("message", "send", "-t", topic, "--queue", "0", "--json", "x").stdout)
    monkeypatch.setattr(terminal, "on_terminal", lambda: True)
    sentence = here.run("message", "send", "-t", topic, "--queue", "0", "x").stdout

    assert (described["status"], described["queue_id"], described["queue_offset"]) == ("SEND_OK", 0, 0)
    assert described["broker"] in here.brokers
    assert sentence.startswith("sent to queue 0 at offset 1, id 7F000001")


@pytest.mark.parametrize("words", [("later",), ("-",)])
def test_a_delayed_message_has_no_place_in_its_topic(
    here: Here, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """It has none before it is delivered: another message may get the place where it waits meanwhile."""
    topic = made(here, "delayed")
    send = ("message", "send", "-t", topic, "--delay-level", "18", *words)
    (fields, *_) = map(json.loads, here.run(*send, "--json", stdin=b"a\nb\n").stdout.splitlines())

    assert (fields["status"], fields["topic"], fields["queue_offset"]) == ("SEND_OK", topic, None)
    assert fields["delayed"] is True
    if words == ("later",):
        monkeypatch.setattr(terminal, "on_terminal", lambda: True)
        sentence = here.run(*send).stdout
        assert re.match(r"sent to queue \d+ to be delivered later, id 7F000001", sentence)


def test_send_takes_lines(here: Here, tmp_path: Path) -> None:
    """Of standard input, of a file, or of a named pipe, which can be read only once; with a key in order."""
    topic = made(here, "lines")
    file = tmp_path / "lines"
    file.write_bytes(b"c\nd\n")
    words = ("message", "send", "-t", topic, "--key", "k")

    shown = here.run(*words, "-", stdin=b"a\nb\r\n\xff")
    assert here.run(*words, "--file", str(file), "--json").exit_code == 0
    with named_pipe(tmp_path, b"e\nf\n") as pipe:
        assert here.run(*words, "--file", str(pipe)).exit_code == 0

    assert shown.stdout.startswith("sent 3 messages to lines")
    expected = ["a", "b", "\ufffd", "c", "d", "e", "f"]
    wait_until(lambda: printed(here, topic) == expected, "all are in their queue")


def test_send_says_what_is_stored_less_safely_than_asked_for() -> None:
    """Also to scripts, which get ids only: on the error output, and the exit code stays 0."""
    store = MessageStore()
    with scripted({"orders": {"a": 1}}) as server:
        store.serve(server)

        def send(*words: str, status: int, stdin: bytes | None = None) -> Result:
            store.status = status
            line = ["message", "send", "-t", "orders", "-b", server.address, *words]
            return CliRunner().invoke(cli.main, line, input=stdin)

        arguments = send("a", "b", status=AnswerCode.SLAVE_NOT_AVAILABLE)
        lines = send("-", status=AnswerCode.FLUSH_DISK_TIMEOUT, stdin=b"a\n")
        sound = send("c", status=0)

    text = "note: 2 of 2 messages stored as SLAVE_NOT_AVAILABLE: too few slaves follow, so perhaps only the master has"
    assert (arguments.exit_code, arguments.stderr) == (0, f"{text} them\n")
    assert (lines.exit_code, "stored as FLUSH_DISK_TIMEOUT" in lines.stderr) == (0, True)
    assert sound.stderr == ""


def test_send_has_a_code_for_unknown_outcomes() -> None:
    """3 if something may be stored, 1 if certainly nothing is."""
    store = MessageStore()
    with scripted({"orders": {"a": 1}}) as server:
        store.serve(server)

        def send(*words: str) -> Result:
            line = ["message", "send", "-t", "orders", "-b", server.address, "--timeout", "2", *words]
            return CliRunner().invoke(cli.main, line, input=b"x\n")

        store.answers.extend([silence] * 100)
        unknown, stream = send("x"), send("-")
        store.answers.clear()
        store.answers.extend([refuses(AnswerCode.MESSAGE_ILLEGAL)] * 2)
        refused, refused_stream = send("x"), send("-")

    assert [one.exit_code for one in (unknown, refused, stream, refused_stream)] == [3, 1, 3, 1]
    assert "1 with unknown outcome" in stream.stderr


def test_messages_go_to_all_brokers_that_have_the_topic(several: Here) -> None:
    """In turn, or to those of one name; a queue needs the name."""
    topic = made(several, "spread", 1)
    assert several.run("message", "send", "-t", topic, *"abcd").exit_code == 0
    assert several.run("message", "send", "-t", topic, "-", stdin=b"e\nf\n").exit_code == 0

    def at(name: str) -> list[str]:
        return printed(several, topic, "--broker-name", name)

    wait_until(lambda: sorted(at("a") + at("b")) == list("abcdef"), "all are in their queues")
    assert len(at("a")) == 3
    assert several.run("message", "send", "-t", topic, "--broker-name", "b", "g", "h").exit_code == 0
    assert several.run("message", "send", "-t", topic, "--broker-name", "b", "--queue", "0", "i").exit_code == 0
    wait_until(lambda: at("b")[-3:] == ["g", "h", "i"], "the last ones are, too")
    refused = several.run("message", "send", "-t", topic, "--queue", "0", "x")
    assert (refused.exit_code, "choose one with --broker-name" in refused.stderr) == (2, True)
