"""``dledger topic`` at whole brokers: what it prints, where it goes, and with which exit code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger.remoting.codes import AnswerCode
from dledger_cli import cli, terminal
from dledger_cli.local.group import free_ports
from rocketstore.message.message import Message
from rocketstore.remoting.codes import RequestCode
from tests.support.scripted_server import Topics, refuses, silence
from tests.unit.dledger_cli.commands.brokers_here import Here, one_broker, scripted, two_brokers
from tests.unit.rocketstore.nameserver import wire

NOWHERE = "127.0.0.1:1"
USUAL = ("any", "log")
"""The type and the retention of a topic that was given none."""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with one_broker(tmp_path_factory.mktemp("broker")) as found:
        yield found


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Here]:
    with two_brokers(tmp_path_factory.mktemp("brokers")) as found:
        yield found


# --- one broker ------------------------------------------------------------------------------------------------------


def test_topics(here: Here) -> None:
    """Created, listed, looked at, deleted."""
    assert here.run("topic", "create", "new", "-q", "8", "-w", "2", "-p", "r").exit_code == 0
    assert here.run("topic", "create", "other", "-q", "2").exit_code == 0
    assert here.rows("topic", "list") == [["new", "2", "8", "r", *USUAL], ["other", "2", "2", "rw", *USUAL]]
    names = [one["name"] for one in json.loads(here.run("topic", "list", "--json").stdout)]
    assert names == ["new", "other"]
    assert here.run("topic", "delete", "new", "--yes").stdout == "deleted topic new\n"
    assert here.run("topic", "delete", "other", stdin=b"n\n").exit_code == 1  # no answer is no
    assert here.rows("topic", "list") == [["other", "2", "2", "rw", *USUAL]]
    here.run("topic", "delete", "other", "--yes")


def test_a_topics_type_and_retention_are_given_kept_and_removed(here: Here) -> None:
    """A change that does not name them leaves them; a retention beyond the log's is refused with that time."""
    for words, told in (
        (("--type", "fifo", "--retention", "36h"), ("fifo", "36h")),
        (("--permission", "r"), ("fifo", "36h")),
        (("--type", "unspecified", "--retention", "log"), USUAL),
    ):
        assert here.run("topic", "create", "typed", "-q", "1", *words).exit_code == 0
        assert tuple(here.rows("topic", "list")[0][4:]) == told
    for wrong in ("1000h", "soon", "1s"):
        refused = here.run("topic", "create", "typed", "--retention", wrong)
        assert (refused.exit_code, "retention" in refused.stderr) == (1, True)
    assert "72 h" in here.run("topic", "create", "typed", "--retention", "1000h").stderr
    here.run("topic", "delete", "typed", "--yes")


def test_the_broker_says_how_many_queues_it_takes(here: Here) -> None:
    """RocketMQ's takes more than ours. That nothing was changed is certain: the exit code is not 3."""
    for count in ("1025", "100000"):
        refused = here.run("topic", "create", "wide", "-q", count)
        assert (refused.exit_code, "1024" in refused.stderr) == (1, True), refused.stderr
        assert "unknown" not in refused.stderr
    assert here.rows("topic", "list") == []
    assert here.run("topic", "create", "wide", "-q", "0").exit_code == 2


def test_what_is_not_given_stays_as_it_is(here: Here) -> None:
    """A change of the permission hides no queues, and one of the queues allows no writing."""
    here.run("topic", "create", "stays", "-q", "8")
    here.run("topic", "create", "stays", "--permission", "r")
    assert here.rows("topic", "list")[0] == ["stays", "8", "8", "r", *USUAL]
    here.run("topic", "create", "stays", "-w", "6")
    here.run("topic", "create", "stays")
    assert here.rows("topic", "list")[0] == ["stays", "6", "8", "r", *USUAL]
    assert here.run("topic", "create", "newer").stdout == "topic newer: 4 write queues, 4 read queues, rw\n"
    for name in ("stays", "newer"):
        here.run("topic", "delete", name, "--yes")


def test_queues_with_messages_are_not_hidden_unasked(here: Here) -> None:
    """Whether they were consumed or not, and also those that may no longer be written; empty ones are."""
    broker = next(iter(here.brokers))
    here.run("topic", "create", "hidden", "-q", "2")
    here.put(broker, "hidden", *(Message("hidden", b"x") for _ in range(3)), queue=1)
    here.run("topic", "create", "hidden", "-w", "1")
    fewer = ("topic", "create", "hidden", "--queues", "1")
    refused = here.run(*fewer)

    assert (refused.exit_code, here.rows("topic", "list")[0]) == (1, ["hidden", "1", "2", "rw", *USUAL])
    assert "can no longer be read, consumed or not: 3" in refused.output
    assert here.run(*fewer, "--yes").exit_code == 0
    assert here.rows("topic", "list")[0] == ["hidden", "1", "1", "rw", *USUAL]
    here.run("topic", "create", "empty", "--queues", "8")
    assert here.run("topic", "create", "empty", "--queues", "2").exit_code == 0
    for name in ("hidden", "empty"):
        here.run("topic", "delete", name, "--yes")


def test_topic_status_and_route(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row per queue, a row per broker; in a narrow terminal the time of the last change gives way to offsets."""
    ((name, server),) = here.brokers.items()
    here.run("topic", "create", "seen", "-q", "2")
    here.put(name, "seen", *(Message("seen", b"x") for _ in range(3)), queue=1)

    assert [row[:3] for row in here.rows("topic", "status", "seen")] == [["0", "0", "0"], ["1", "0", "3"]]
    assert here.rows("topic", "route", "seen") == [[name, "0", server.address, "master", "2", "2", "rw"]]
    told = json.loads(here.run("topic", "status", "seen", "--json").stdout)[1]
    assert (told["broker"], told["queue_id"], told["max_offset"]) == (name, 1, 3)
    assert told["last_update_ms"] > 0
    route = json.loads(here.run("topic", "route", "seen", "--json").stdout)
    assert (route["name"], route["brokers"][0]["address"]) == ("seen", server.address)
    monkeypatch.setattr(terminal, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = here.run("topic", "status", "seen").stdout
    assert narrow.split()[:5] == ["queue", "min", "offset", "max", "offset"]
    assert "(no room for: last update)" in narrow
    here.run("topic", "delete", "seen", "--yes")


def test_a_topic_that_does_not_exist_is_told_before_anybody_is_asked(here: Here) -> None:
    """A misspelled name is no reason to decide anything."""
    for words in (("topic", "delete", "oders"), ("topic", "status", "oders"), ("topic", "route", "oders")):
        shown = here.run(*words, stdin=b"y\n")
        assert (shown.exit_code, shown.stdout) == (1, "")
        assert "error: topic oders does not exist" in shown.stderr


def test_nobody_answers() -> None:
    """A sentence and exit code 1."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    shown = CliRunner().invoke(cli.main, ["topic", "list", "-b", address, "--timeout", "0.3"])

    assert shown.exit_code == 1
    assert shown.stderr.startswith("error: no broker answered: ")
    assert address in shown.stderr


def test_an_unknown_outcome_of_a_change_has_its_own_code() -> None:
    """3, and only for commands that change something, once they have begun."""
    with scripted() as server:

        def exit_code(*words: str) -> int:
            return CliRunner().invoke(cli.main, [*words, "-b", server.address, "--timeout", "3"]).exit_code

        server.scripts[RequestCode.GET_ALL_TOPIC_CONFIG] = silence
        look, not_begun = exit_code("topic", "list"), exit_code("topic", "create", "new")
        server.scripts[RequestCode.GET_ALL_TOPIC_CONFIG] = lambda frame: frame.answer(body=b"{}")
        server.scripts[RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER] = lambda frame: frame.answer(body=b"{}")
        server.scripts[RequestCode.UPDATE_AND_CREATE_TOPIC] = silence
        unknown = exit_code("topic", "create", "new")
        server.scripts[RequestCode.UPDATE_AND_CREATE_TOPIC] = refuses(AnswerCode.NO_PERMISSION)
        refused = exit_code("topic", "create", "new")

    assert (look, not_begun, unknown, refused) == (1, 1, 3, 1)


# --- several brokers behind a name server ----------------------------------------------------------------------------


def test_a_topic_is_at_every_broker_or_at_one(several: Here) -> None:
    """As mqadmin's updateTopic does for a cluster (-c) or a broker (-b); the broker's name is the first column."""
    assert several.run("topic", "create", "all", "-q", "2").exit_code == 0
    assert several.run("topic", "create", "one", "-q", "1", "--broker-name", "b").exit_code == 0

    assert several.rows("topic", "list") == [
        ["a", "all", "2", "2", "rw", *USUAL],
        ["b", "all", "2", "2", "rw", *USUAL],
        ["b", "one", "1", "1", "rw", *USUAL],
    ]
    assert several.rows("topic", "list", "--broker-name", "b") == [
        ["all", "2", "2", "rw", *USUAL],
        ["one", "1", "1", "rw", *USUAL],
    ]
    assert [row[:2] for row in several.rows("topic", "status", "all")] == [
        ["a", "0"],
        ["a", "1"],
        ["b", "0"],
        ["b", "1"],
    ]
    assert [row[:3] for row in several.rows("topic", "status", "one")] == [["0", "0", "0"]]
    assert [row[0] for row in several.rows("topic", "route", "all")] == ["a", "b"]
    assert several.run("topic", "delete", "all", "--yes", "--broker-name", "a").exit_code == 0
    assert [row[:2] for row in several.rows("topic", "list")] == [["b", "all"], ["b", "one"]]
    assert several.run("topic", "status", "all", "--broker-name", "a").exit_code == 1
    assert several.run("topic", "delete", "all", "--yes").exit_code == 0
    assert several.run("topic", "delete", "one", "--yes").exit_code == 0
    assert several.rows("topic", "list") == []


def test_an_unknown_name_of_brokers_is_told_with_those_that_exist(several: Here) -> None:
    """Before anything is changed."""
    for words in (("topic", "list"), ("topic", "create", "new"), ("topic", "status", "new")):
        shown = several.run(*words, "--broker-name", "c")
        assert shown.exit_code == 1
        assert "no brokers named c have registered, only a, b" in shown.stderr


def test_the_more_explicit_addresses_win(several: Here) -> None:
    """-b, --namesrv, DLEDGER_BROKER, DLEDGER_NAMESRV, in this order."""
    several.run("topic", "create", "wins", "-q", "1")
    a, names = several.brokers["a"].address, several.environment["DLEDGER_NAMESRV"]

    def count(*words: str, broker: str = "", namesrv: str = "") -> int:
        given = {"DLEDGER_BROKER": broker, "DLEDGER_NAMESRV": namesrv}
        environment = {name: address for name, address in given.items() if address}
        shown = CliRunner().invoke(cli.main, ["topic", "list", "--json", *words], env=environment)
        return len(json.loads(shown.stdout))

    assert count("-b", a, "--namesrv", NOWHERE, broker=NOWHERE, namesrv=NOWHERE) == 1
    assert count("--namesrv", names, broker=NOWHERE, namesrv=NOWHERE) == 2
    assert count(broker=a, namesrv=NOWHERE) == 1
    assert count(namesrv=names) == 2
    several.run("topic", "delete", "wins", "--yes")


def test_without_brokers_or_name_servers_it_says_so(tmp_path: Path) -> None:
    """Exit code 1."""
    words = ("topic", "list", "--timeout", "1", "--namesrv")
    with wire.running(wire.config_in(tmp_path)) as server:
        empty = CliRunner().invoke(cli.main, [*words, server.address])
    nobody = CliRunner().invoke(cli.main, [*words, NOWHERE])

    assert (empty.exit_code, nobody.exit_code) == (1, 1)
    assert "no broker has registered" in empty.stderr
    assert f"cannot connect to {NOWHERE}" in nobody.stderr


def test_clusters_are_not_mixed(several: Here) -> None:
    """A topic for two clusters was probably meant for one."""
    with scripted() as server:
        topics = Topics({"a": {0: server.address}, "b": {0: server.address}}, {})
        topics.clusters_of = {"a": "east", "b": "west"}
        topics.serve(server)
        server.scripts[RequestCode.GET_ALL_TOPIC_CONFIG] = lambda frame: frame.answer(body=b"{}")
        server.scripts[RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER] = lambda frame: frame.answer(body=b"{}")
        shown = CliRunner().invoke(cli.main, ["topic", "create", "new", "--namesrv", server.address])

        assert shown.exit_code == 2
        assert "a (cluster east), b (cluster west)" in shown.stderr
        assert not server.of(RequestCode.UPDATE_AND_CREATE_TOPIC)
