"""The broker's commands against fake brokers: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import click
import pytest
from click.testing import CliRunner, Result

from cluster import cli
from cluster.broker_target import DEFAULT_BROKER, Moment, time_text
from cluster.commands import mq_broker
from rocketstore.message.message import Message
from tests.support.fake_broker import FakeBrokers, fake_brokers

Run = Callable[..., Result]


@pytest.fixture
def brokers() -> Iterator[FakeBrokers]:
    with fake_brokers(2) as group:
        group.add_topic("orders", 2)
        yield group


@pytest.fixture
def run(brokers: FakeBrokers) -> Run:
    """Run ``dledger`` with these words, at these brokers."""

    def invoke(*words: str, stdin: bytes | None = None) -> Result:
        environment = {"DLEDGER_BROKER": ",".join(brokers.addresses)}
        return CliRunner().invoke(cli.main, list(words), input=stdin, prog_name="dledger", env=environment)

    return invoke


def put(brokers: FakeBrokers, count: int, queue_id: int = 0, **properties: str) -> None:
    for number in range(count):
        brokers.put(
            Message(
                "orders",
                b"%d-%d" % (queue_id, number),
                queue_id,
                properties,
                store_timestamp=1_700_000_000_000 + number,
            )
        )


def lines_of(shown: Result) -> list[list[str]]:
    return [line.split() for line in shown.stdout.splitlines()]


def groups() -> list[tuple[str, str]]:
    return [
        (name, sub)
        for name in sorted(cli.COMMANDS)
        if isinstance(command := cli.main.get_command(click.Context(cli.main), name), click.Group)
        for sub in sorted(command.commands)
    ]


# --- help and usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "name"), groups())
def test_every_command_has_help_with_examples(run: Run, group: str, name: str) -> None:
    """``--help`` shows how the command is used."""
    shown = run(group, name, "--help")

    assert shown.exit_code == 0
    assert "Examples:" in shown.output
    assert f"dledger {group}" in shown.output


@pytest.mark.parametrize("group", sorted({group for group, _ in groups()}))
def test_a_list_of_commands_says_whole_sentences(group: str) -> None:
    """In a terminal of 80 columns; click would cut what is longer."""
    shown = CliRunner().invoke(cli.main, [group, "--help"], prog_name="dledger", terminal_width=80)

    commands = shown.output.partition("Commands:")[2].partition("Examples:")[0]
    assert commands
    assert "..." not in commands


def test_an_option_after_broker_starts_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As RocketMQ's mqbroker is started: ``dledger broker -c FILE``."""
    started: list[tuple[object, ...]] = []

    @click.command()
    @click.option("-c", "--config")
    def start(config: str) -> None:
        started.append((config,))

    monkeypatch.setitem(mq_broker.broker.commands, "start", start)

    assert run("broker", "-c", "broker-n0.conf").exit_code == 0
    assert run("broker", "start", "-c", "other.conf").exit_code == 0
    assert started == [("broker-n0.conf",), ("other.conf",)]
    assert "status" in run("broker", "--help").output


@pytest.mark.parametrize(
    "words",
    [
        ("message", "send", "-t", "orders"),
        ("message", "send", "-t", "orders", "x", "--file", "pyproject.toml"),
        ("message", "send", "-t", "orders", "x", "--queue", "1", "--key", "k"),
        ("message", "send", "-t", "orders", "x", "--property", "novalue"),
        ("message", "send", "-t", "orders", "x", "--property", "TAGS=new"),
        ("message", "send", "-t", "orders", "x", "--delay-level", "19"),
        ("message", "print", "-t", "orders", "--offset", "3"),
        ("message", "consume", "-t", "orders", "--from", "yesterday"),
        ("consumer", "reset-offset", "-g", "g", "-t", "orders"),
        ("consumer", "reset-offset", "-g", "g", "-t", "orders", "--offset", "1"),
        ("topic", "list", "-b", "nowhere"),
    ],
)
def test_wrong_usage_is_told(run: Run, words: tuple[str, ...]) -> None:
    """Exit code 2, nothing asked."""
    assert run(*words).exit_code == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("first", "first"),
        ("0", 0),
        ("1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20+00:00", 1_700_000_000_000),
    ],
)
def test_times_are_words_figures_or_iso(text: str, expected: object) -> None:
    """What ``--from`` takes."""
    assert Moment(ends=True).convert(text, None, None) == expected


def test_times_may_be_ago() -> None:
    """Half an hour is 1,800,000 ms."""
    now, ago = Moment().convert("0s", None, None), Moment().convert("30m", None, None)

    assert isinstance(now, int)
    assert isinstance(ago, int)
    assert 1_799_000 < now - ago <= 1_800_000
    assert time_text(-1) == ""
    assert DEFAULT_BROKER == "127.0.0.1:10911"


@pytest.mark.parametrize("text", ["-30m", f"1{'0' * 400}d", "soon"])
def test_what_is_no_time_is_refused(text: str) -> None:
    """Neither taken for one to come, nor for the age of the world."""
    with pytest.raises(click.BadParameter, match="invalid time"):
        Moment().convert(text, None, None)


# --- brokers ---------------------------------------------------------------------------------------------------------


def test_cluster_list_shows_every_broker(run: Run, brokers: FakeBrokers) -> None:
    """As a table and as JSON."""
    shown = run("cluster", "list")
    found = json.loads(run("cluster", "list", "--json").stdout)

    assert shown.exit_code == 0
    assert [row[3:5] for row in lines_of(shown)[1:]] == sorted(
        [[brokers.addresses[0], "SYNC_MASTER"], [brokers.addresses[1], "SLAVE"]]
    )
    assert found["master"] == brokers.addresses[0]
    assert {one["address"]: one["role"] for one in found["brokers"]} == {
        brokers.addresses[0]: "SYNC_MASTER",
        brokers.addresses[1]: "SLAVE",
    }


def test_cluster_list_tells_of_the_dead(run: Run, brokers: FakeBrokers) -> None:
    """Without a master the exit code is 1."""
    brokers.nodes[0].stop()
    brokers.elect(None)

    shown = run("cluster", "list")

    assert shown.exit_code == 1
    assert "unreachable" in shown.stdout
    assert shown.stdout.count(brokers.addresses[0]) == 1
    assert "connection refused" in shown.stdout
    assert "no master" in shown.stderr
    assert json.loads(run("cluster", "list", "--json").stdout)["master"] is None


def test_broker_status(run: Run, brokers: FakeBrokers) -> None:
    """Of the master or of the one named; the store's own figures included."""
    shown = dict(row for row in lines_of(run("broker", "status")) if len(row) == 2)
    other = json.loads(run("broker", "status", "--node", brokers.addresses[1], "--json").stdout)

    assert (shown["node_id"], shown["role"], shown["bootTimestamp"]) == ("n0", "SYNC_MASTER", "1700000000000")
    assert (other["node_id"], other["role"]) == ("n1", "SLAVE")
    assert (shown["replicated"], shown["is_master"]) == ("true", "true")
    assert re.fullmatch(r"\d+\.\d\d", shown["put_tps"])
    assert (other["is_master"], type(other["put_tps"])) == (False, float)


# --- consume and find ------------------------------------------------------------------------------------------------


def test_consume_prints_all_there_is(run: Run, brokers: FakeBrokers) -> None:
    """Bodies only, in the order of each queue; without a group nothing is committed."""
    put(brokers, 3, 0)
    put(brokers, 2, 1)

    shown = run("message", "consume", "-t", "orders")

    assert shown.exit_code == 0
    assert sorted(shown.stdout.split()) == ["0-0", "0-1", "0-2", "1-0", "1-1"]
    assert not brokers.commits


def test_consume_as_a_group_goes_on_where_it_was(run: Run, brokers: FakeBrokers) -> None:
    """``--max`` stops it; the next call continues."""
    put(brokers, 5)
    words = ("message", "consume", "-t", "orders", "-g", "billing", "--queue", "0")

    assert run(*words, "--max", "2").stdout.split() == ["0-0", "0-1"]
    assert run(*words).stdout.split() == ["0-2", "0-3", "0-4"]
    assert run(*words).stdout == ""
    assert brokers.offsets["billing", "orders", 0] == 5


def test_consume_by_tag_and_time_as_json(run: Run, brokers: FakeBrokers) -> None:
    """Everything that is stored of a message."""
    put(brokers, 3, 0, TAGS="a", KEYS="k")
    put(brokers, 3, 1, TAGS="b")

    shown = run("message", "consume", "-t", "orders", "--tags", "a", "--from", "1700000000001", "--json")

    found = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [one["body"] for one in found] == ["0-1", "0-2"]
    assert (found[0]["tags"], found[0]["keys"], found[0]["queue_offset"]) == ("a", ["k"], 1)
    assert found[0]["born_host"] == "127.0.0.1:0"


def test_consume_shows_people_where_a_message_is(
    run: Run, brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no byte of it moves the cursor."""
    brokers.put(Message("orders", b"\x1b[2Jx", 1, {"TAGS": "a"}))
    monkeypatch.setattr("cluster.terminal.on_terminal", lambda: True)

    line = run("message", "consume", "-t", "orders").stdout

    assert "1:0" in line
    assert "\\x1b[2Jx" in line


def test_consume_follows_until_told_to_stop(run: Run, brokers: FakeBrokers) -> None:
    """New messages only; ``--max`` ends it here."""
    put(brokers, 3)
    brokers.offsets["billing", "orders", 0] = 1

    shown = run("message", "consume", "-t", "orders", "-g", "billing", "--alone", "--follow", "--max", "2")

    assert shown.stdout.split() == ["0-1", "0-2"]


def test_a_member_of_a_group_commits_what_it_printed(run: Run, brokers: FakeBrokers) -> None:
    """And nothing else; with ``--alone`` likewise, whoever else is a member."""
    put(brokers, 5)
    words = ("message", "consume", "-t", "orders", "-g", "billing")

    assert run(*words, "--max", "2").stdout.split() == ["0-0", "0-1"]
    assert brokers.offsets["billing", "orders", 0] == 2
    assert run(*words, "--alone", "--max", "1").stdout.split() == ["0-2"]
    assert run(*words).stdout.split() == ["0-3", "0-4"]
    assert brokers.offsets["billing", "orders", 0] == 5


# --- groups ----------------------------------------------------------------------------------------------------------


def test_consumer_progress(run: Run, brokers: FakeBrokers) -> None:
    """Every group, or every queue of one."""
    put(brokers, 5)
    brokers.offsets["billing", "orders", 0] = 3

    assert lines_of(run("consumer", "progress"))[1:] == [["billing", "1", "2"]]
    assert lines_of(run("consumer", "progress", "-g", "billing"))[1:] == [
        ["orders", "0", "3", "0", "5", "2"],
        ["orders", "1", "0", "0", "0"],
    ]
    assert json.loads(run("consumer", "progress", "--json").stdout) == [{"group": "billing", "topics": 1, "lag": 2}]
    assert json.loads(run("consumer", "progress", "-g", "billing", "--json").stdout)[0]["lag"] == 2
    assert json.loads(run("consumer", "progress", "-t", "other", "--json").stdout) == []
    assert run("consumer", "progress", "-g", "nobody").exit_code == 1


def test_groups_that_have_committed_nothing_do_not_end_the_list(run: Run, brokers: FakeBrokers) -> None:
    """As a broker has that was taken over from RocketMQ."""
    put(brokers, 5)
    brokers.registered = {"idle"}
    brokers.offsets["billing", "orders", 0] = 3

    assert lines_of(run("consumer", "progress"))[1:] == [["billing", "1", "2"], ["idle", "0", "0"]]


def test_consumer_delete(run: Run, brokers: FakeBrokers) -> None:
    """Asks first; a group that is not there is told."""
    brokers.offsets["billing", "orders", 0] = 5

    assert run("consumer", "delete", "billing", stdin=b"n\n").exit_code == 1
    assert brokers.offsets == {("billing", "orders", 0): 5}
    assert run("consumer", "delete", "billing", "--yes").exit_code == 0
    assert brokers.offsets == {}
    assert "billing does not exist" in run("consumer", "delete", "-g", "billing", "--yes").stderr
    assert "as the argument, or with -g" in run("consumer", "delete", "billing", "-g", "billing").stderr
    assert "as the argument, or with -g" in run("consumer", "delete").stderr


def test_consumer_reset_offset(run: Run, brokers: FakeBrokers) -> None:
    """To an end, a time, or an offset; back or forth."""
    put(brokers, 5)
    brokers.offsets["billing", "orders", 0] = 5
    words = ("consumer", "reset-offset", "-g", "billing", "-t", "orders")

    places = [
        run(*words, *rest, "--json").stdout
        for rest in (("--to", "first"), ("--to", "last"), ("--to", "1700000000002"), ("--queue", "0", "--offset", "1"))
    ]

    assert [json.loads(one)["0"] for one in places] == [0, 5, 2, 1]
    assert brokers.offsets["billing", "orders", 0] == 1
    assert lines_of(run(*words, "--to", "first", "--queue", "0")) == [["queue", "offset"], ["0", "0"]]


def test_a_dry_run_shows_what_a_reset_would_do(run: Run, brokers: FakeBrokers) -> None:
    """From where to where, and nothing is moved."""
    put(brokers, 5)
    brokers.offsets["billing", "orders", 0] = 3
    words = ("consumer", "reset-offset", "-g", "billing", "-t", "orders", "--dry-run")

    shown = lines_of(run(*words, "--to", "last", "--queue", "0"))

    assert shown == [["queue", "from", "to"], ["0", "3", "5"]]
    assert json.loads(run(*words, "--to", "first", "--json").stdout)["0"] == 0
    assert brokers.offsets["billing", "orders", 0] == 3


@pytest.mark.parametrize(("offset", "code"), [(1, 2), (2, 0), (5, 0), (6, 2)])
def test_a_queue_is_reset_to_any_of_its_offsets_and_its_end(
    run: Run, brokers: FakeBrokers, offset: int, code: int
) -> None:
    """The end is a place, too: whatever comes next. What has expired is none."""
    put(brokers, 5)
    brokers.queues["orders", 0].base = 2
    brokers.offsets["billing", "orders", 0] = 3

    words = ("consumer", "reset-offset", "-g", "billing", "-t", "orders", "--queue", "0", "--offset", str(offset))
    assert run(*words).exit_code == code
    assert brokers.offsets["billing", "orders", 0] == (3 if code else offset)


def test_a_reset_of_a_mistyped_name_or_place_changes_nothing(run: Run, brokers: FakeBrokers) -> None:
    """A group that nobody has is made only when that is asked for."""
    put(brokers, 5)
    brokers.offsets["billing", "orders", 0] = 5
    words = ("consumer", "reset-offset", "-t", "orders")
    before = dict(brokers.offsets)

    mistyped = run(*words, "-g", "biling", "--to", "last")
    no_queue = run(*words, "-g", "billing", "--to", "last", "--queue", "99")
    beyond = run(*words, "-g", "billing", "--queue", "0", "--offset", "99")

    assert mistyped.exit_code == 1
    assert "group biling does not exist (did you mean billing?): nothing was changed" in mistyped.stderr
    assert (no_queue.exit_code, "there is no queue 99" in no_queue.stderr) == (1, True)
    assert (beyond.exit_code, "has offsets 0 to 5, not 99" in beyond.stderr) == (2, True)
    assert brokers.offsets == before
    assert run(*words, "-g", "audit", "--to", "last", "--create").exit_code == 0
    assert brokers.offsets["audit", "orders", 0] == 5
