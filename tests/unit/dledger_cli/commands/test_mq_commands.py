"""The broker's commands: what they print, where, and with which exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from dledger_cli import cli
from dledger_cli.commands import broker
from dledger_cli.targets import DEFAULT_BROKER
from dledger_cli.terminal import Moment, time_text
from rocketstore.client.aio.admin_requests import GroupInfo
from rocketstore.client.blocking import Admin
from rocketstore.client.blocking_consumer import Consumer
from rocketstore.message.message import Message
from rocketstore.remoting.topics import MessageQueue
from rocketstore.server import BrokerServer
from rocketstore.types import BrokerRole
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.commands.brokers_here import TIMEOUT_S, Here, one_broker, two_brokers
from tests.unit.rocketstore.test_server import plain

CONSUME = ("message", "consume", "-t", "orders")
RESET = ("consumer", "reset-offset", "-g", "billing", "-t", "orders")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Here]:
    """A broker with the topic ``orders`` of two queues."""
    with one_broker(tmp_path) as one:
        assert one.run("topic", "create", "orders", "-q", "2").exit_code == 0
        yield one


def put(here: Here, count: int, queue: int = 0) -> None:
    (broker,) = here.brokers
    here.put(broker, "orders", *(Message("orders", b"%d-%d" % (queue, one)) for one in range(count)), queue=queue)


def commit(here: Here, group: str, offset: int, queue: int = 0) -> None:
    (broker,) = here.brokers
    with Admin(here.brokers[broker].address, timeout_s=TIMEOUT_S) as admin:
        admin.set_offsets(group, {MessageQueue("orders", broker, queue): offset})


def committed(here: Here, group: str, queue: int = 0) -> int:
    """-1 if the group has no offset there."""
    (broker,) = here.brokers.values()
    return broker.state.offset(group, "orders", queue)


def lines_of(shown: Result) -> list[list[str]]:
    return [line.split() for line in shown.stdout.splitlines()]


def run(*words: str) -> Result:
    """``dledger`` with these words, which ask nobody."""
    return CliRunner().invoke(cli.main, list(words), prog_name="dledger")


def groups() -> list[tuple[str, str]]:
    return [
        (name, sub)
        for name in sorted(cli.COMMANDS)
        if isinstance(command := cli.main.get_command(click.Context(cli.main), name), click.Group)
        for sub in sorted(command.commands)
    ]


# --- help and usage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "name"), groups())
def test_every_command_has_help_with_examples(group: str, name: str) -> None:
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


def test_an_option_after_broker_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As RocketMQ's mqbroker is started: ``dledger broker -c FILE``."""
    started: list[tuple[object, ...]] = []

    @click.command()
    @click.option("-c", "--config")
    def start(config: str) -> None:
        started.append((config,))

    monkeypatch.setitem(broker.broker.commands, "start", start)

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
def test_wrong_usage_is_told(words: tuple[str, ...]) -> None:
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


def test_cluster_list_shows_every_broker(tmp_path: Path) -> None:
    """Of all names, with what each says of itself; as a table and as JSON."""
    with two_brokers(tmp_path) as here:
        shown, found = here.run("cluster", "list"), json.loads(here.run("cluster", "list", "--json").stdout)
        only = json.loads(here.run("cluster", "list", "--broker-name", "b", "--json").stdout)
        addresses = {name: one.address for name, one in here.brokers.items()}

    assert shown.exit_code == 0
    assert [row[1:5] for row in lines_of(shown)[1:]] == [
        ["a", "0", addresses["a"], "ASYNC_MASTER"],
        ["b", "0", addresses["b"], "ASYNC_MASTER"],
    ]
    assert [(one["broker_name"], one["reachable"], one["is_master"]) for one in found["brokers"]] == [
        ("a", True, True),
        ("b", True, True),
    ]
    assert found["master"] is None, "there are two"
    assert only["master"] == addresses["b"]


def test_broker_status(here: Here) -> None:
    """Of the master or of the one named; the store's own figures included."""
    (address,) = (one.address for one in here.brokers.values())
    shown = dict(row for row in lines_of(here.run("broker", "status")) if len(row) == 2)
    named = json.loads(here.run("broker", "status", "--node", address, "--json").stdout)
    gone = here.run("broker", "status", "--node", "127.0.0.1:1", "--timeout", "2")

    assert (shown["broker_name"], shown["role"], shown["brokerActive"]) == ("broker-a", "ASYNC_MASTER", "true")
    assert (shown["replicated"], shown["is_master"]) == ("false", "true")
    assert re.fullmatch(r"\d+\.\d\d", shown["put_tps"])
    assert (named["address"], named["is_master"], type(named["put_tps"])) == (address, True, float)
    assert named["runtime"]["bootTimestamp"] == str(named["boot_ms"])
    assert (gone.exit_code, "cannot connect to 127.0.0.1:1" in gone.stderr) == (1, True)


def test_a_slave_that_answers_is_shown_while_its_master_is_gone(tmp_path: Path) -> None:
    """Whoever looks for what is wrong wants to see what is left."""
    slave = plain(tmp_path / "slave", brokerRole=BrokerRole.SLAVE.value, brokerId="1", haMasterAddress="127.0.0.1:1")
    server = BrokerServer(slave)
    server.start()
    try:
        shown = CliRunner().invoke(cli.main, ["broker", "status", "-b", f"127.0.0.1:1,{server.address}", "--json"])
        listed = CliRunner().invoke(cli.main, ["cluster", "list", "-b", server.address])
    finally:
        server.stop()

    assert (json.loads(shown.stdout)["role"], json.loads(shown.stdout)["is_master"]) == ("SLAVE", False)
    assert (listed.exit_code, "no master: broker-a" in listed.stderr) == (1, True)


# --- consume and find ------------------------------------------------------------------------------------------------


def test_consume_prints_all_there_is(here: Here) -> None:
    """Bodies only, in the order of each queue; without a group nothing is committed."""
    put(here, 3, 0)
    put(here, 2, 1)

    shown = here.run(*CONSUME)

    assert shown.exit_code == 0
    assert sorted(shown.stdout.split()) == ["0-0", "0-1", "0-2", "1-0", "1-1"]
    assert here.rows("consumer", "progress") == []


def test_consume_as_a_group_goes_on_where_it_was(here: Here) -> None:
    """``--max`` stops it; the next call continues."""
    put(here, 5)
    words = (*CONSUME, "-g", "billing", "--queue", "0")

    assert here.run(*words, "--max", "2").stdout.split() == ["0-0", "0-1"]
    assert here.run(*words).stdout.split() == ["0-2", "0-3", "0-4"]
    assert here.run(*words).stdout == ""
    assert committed(here, "billing") == 5


def test_consume_by_tag_and_time_as_json(here: Here) -> None:
    """Everything that is stored of a message."""
    for queue, tags in enumerate("ab"):
        sent = (Message("orders", b"%d-%d" % (queue, number), tags=tags, keys="k") for number in range(3))
        here.put("broker-a", "orders", *sent, queue=queue)
    (whole,) = here.brokers.values()
    second_ms = json.loads(here.run(*CONSUME, "--queue", "0", "--json").stdout.splitlines()[1])["store_timestamp"]

    shown = here.run(*CONSUME, "--tags", "a", "--from", str(second_ms), "--json")

    found = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {"0-1", "0-2"} <= {one["body"] for one in found} <= {"0-0", "0-1", "0-2"}  # within the same millisecond
    assert (found[-1]["tags"], found[-1]["keys"], found[-1]["queue_offset"]) == ("a", ["k"], 2)
    assert found[-1]["store_host"] == whole.address


def test_consume_by_a_condition_on_properties(here: Here) -> None:
    """Instead of tags; a wrong one is refused with the place."""
    sent = [Message("orders", b"%d" % number, properties={"amount": str(number)}) for number in range(5)]
    here.put("broker-a", "orders", *sent, queue=0)
    assert sorted(here.run(*CONSUME, "--sql", "amount > 2").stdout.split()) == ["3", "4"]
    assert here.run("message", "print", "-t", "orders", "--sql", "amount BETWEEN 1 AND 2").stdout.split() == ["1", "2"]
    for words in (CONSUME, ("message", "print", "-t", "orders")):
        refused = here.run(*words, "--sql", "amount >")
        assert (refused.exit_code, "wrong at character 9" in refused.stderr) == (2, True), refused.output
        both = here.run(*words, "--sql", "amount > 1", "--tags", "a")
        assert (both.exit_code, "either --tags or --sql" in both.stderr) == (2, True)


def test_consume_shows_people_where_a_message_is(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no byte of it moves the cursor."""
    here.put("broker-a", "orders", Message("orders", b"\x1b[2Jx", tags="a"), queue=1)
    monkeypatch.setattr("dledger_cli.terminal.on_terminal", lambda: True)

    line = here.run(*CONSUME).stdout

    assert "1:0" in line
    assert "\\x1b[2Jx" in line


def test_consume_follows_until_told_to_stop(here: Here) -> None:
    """New messages only; ``--max`` ends it here."""
    put(here, 3)
    commit(here, "billing", 1)

    shown = here.run(*CONSUME, "-g", "billing", "--alone", "--follow", "--max", "2")

    assert shown.stdout.split() == ["0-1", "0-2"]


def test_a_member_of_a_group_commits_what_it_printed(here: Here) -> None:
    """And nothing else; with ``--alone`` likewise, whoever else is a member."""
    put(here, 5)
    words = (*CONSUME, "-g", "billing")

    assert here.run(*words, "--max", "2").stdout.split() == ["0-0", "0-1"]
    assert committed(here, "billing") == 2
    assert here.run(*words, "--alone", "--max", "1").stdout.split() == ["0-2"]
    assert here.run(*words).stdout.split() == ["0-3", "0-4"]
    assert committed(here, "billing") == 5


def test_a_queue_or_topic_that_is_not_there_is_told(here: Here) -> None:
    """Rather than waited for."""
    queue = here.run(*CONSUME, "--queue", "7")
    topic = here.run("message", "consume", "-t", "odrers", "--timeout", "3")

    assert (queue.exit_code, topic.exit_code) == (1, 1)
    assert "has no queues [7] that can be read" in queue.stderr
    assert "topic odrers does not exist" in topic.stderr


# --- groups ----------------------------------------------------------------------------------------------------------


def test_consumer_progress(here: Here) -> None:
    """Every group, or every queue of one."""
    put(here, 5)
    commit(here, "billing", 3)

    assert here.rows("consumer", "progress") == [["billing", "1", "2"]]
    first, second = here.rows("consumer", "progress", "-g", "billing")
    assert (first[:6], first[-1]) == (["orders", "0", "3", "0", "5", "2"], "s")
    assert 0 <= float(first[6]) < 3600
    assert second == ["orders", "1", "0", "0", "0", "0", "0.0", "s"]
    assert json.loads(here.run("consumer", "progress", "--json").stdout) == [
        {"group": "billing", "topics": 1, "lag": 2}
    ]
    told = json.loads(here.run("consumer", "progress", "-g", "billing", "--json").stdout)[0]
    assert told["lag"] == 2
    assert told["behind_ms"] >= 0
    assert here.rows("consumer", "progress", "-t", "orders") == [["billing", "1", "2"]]
    assert here.run("consumer", "progress", "-t", "other", "--json").exit_code == 1
    assert here.run("consumer", "progress", "-g", "nobody").exit_code == 1


def test_progress_counts_no_messages_that_have_expired(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody will consume them."""
    put(here, 5)
    commit(here, "billing", 1)
    (broker,) = here.brokers.values()
    monkeypatch.setattr(broker.store, "min_offset", lambda _topic, queue: 0 if queue else 3)

    assert here.rows("consumer", "progress", "-g", "billing")[0][:6] == ["orders", "0", "1", "3", "5", "2"]


def test_progress_tells_what_is_wrong_with_a_groups_consumers(here: Here) -> None:
    """Members that subscribe to different messages miss some; who looks at the lag wants to know."""
    (address,) = (one.address for one in here.brokers.values())

    def consumer(tags: str) -> Consumer:
        return Consumer(address, group="billing", topics={"orders": tags}, timeout_s=TIMEOUT_S)

    with consumer("a"), consumer("b"):
        wait_until(
            lambda: "DIFFERENT_SUBSCRIPTIONS billing" in here.run("consumer", "progress", "-g", "billing").stderr,
            "the broker has noticed",
        )


def test_groups_that_have_committed_nothing_do_not_end_the_list(here: Here) -> None:
    """As a broker has that was taken over from RocketMQ."""
    put(here, 5)
    (broker,) = here.brokers.values()
    with Admin(broker.address, timeout_s=TIMEOUT_S) as admin:
        admin.put_group(GroupInfo("idle"))
    commit(here, "billing", 3)

    assert here.rows("consumer", "progress") == [["billing", "1", "2"], ["idle", "0", "0"]]


def test_consumer_settings_are_changed_one_by_one(here: Here) -> None:
    """What is not named stays: an operator who makes a group ordered does not know of its retries."""
    (name,) = here.brokers
    assert here.run("consumer", "set", "-g", "billing", "--retries", "5", "--retry-delays", "1s,10s,1m").exit_code == 0
    assert here.run("consumer", "set", "-g", "billing", "--ordered").exit_code == 0
    assert here.run("consumer", "set", "-g", "billing", "-t", "orders", "--mode", "pop", "--share", "2").exit_code == 0
    (shown,) = json.loads(here.run("consumer", "settings", "-g", "billing", "--json").stdout)
    assert shown == {
        "group": "billing",
        "broker": name,
        "retries": 5,
        "ordered": True,
        "retry_delays": "1s,10s,1m",
        "consume_modes": [{"topic": "orders", "mode": "POP", "share_queues": 2}],
    }
    assert here.run("consumer", "set", "-g", "billing", "--unordered", "--retry-delays", "1s..5m*3").exit_code == 0
    assert here.rows("consumer", "settings") == [
        ["billing", name, "5", "no", "1s..5m*3", "orders:", "POP", "shared", "by", "2"]
    ]
    assert here.run("consumer", "set", "-g", "billing", "--retry-delays", "levels").exit_code == 0
    assert json.loads(here.run("consumer", "settings", "--json").stdout)[0]["retry_delays"] == "levels"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ([], "name what to change"),
        (["-t", "orders"], "named together"),
        (["-t", "orders", "--mode", "pull", "--share", "1"], "--share needs --mode pop"),
        (["--retry-delays", "soon"], "1s,10s,1m"),
        (["--retry-delays", "5m..1s"], "longest delay"),
    ],
)
def test_consumer_set_says_what_is_wrong(here: Here, wrong: list[str], told: str) -> None:
    found = here.run("consumer", "set", "-g", "billing", *wrong)
    assert (found.exit_code, told in found.stderr) == (2, True), found.stderr
    assert "billing does not exist" in here.run("consumer", "settings", "-g", "billing").stderr


def test_consumer_delete(here: Here) -> None:
    """Asks first; a group that is not there is told."""
    put(here, 5)
    commit(here, "billing", 5)

    assert here.run("consumer", "delete", "billing", stdin=b"n\n").exit_code == 1
    assert committed(here, "billing") == 5
    assert here.run("consumer", "delete", "billing", "--yes").exit_code == 0
    assert committed(here, "billing") == -1
    assert "billing does not exist" in here.run("consumer", "delete", "-g", "billing", "--yes").stderr
    assert "as the argument, or with -g" in here.run("consumer", "delete", "billing", "-g", "billing").stderr
    assert "as the argument, or with -g" in here.run("consumer", "delete").stderr


def test_consumer_reset_offset(here: Here) -> None:
    """To an end, or an offset; back or forth."""
    put(here, 5)
    commit(here, "billing", 5)

    places = [
        here.run(*RESET, *rest, "--json").stdout
        for rest in (("--to", "first"), ("--to", "last"), ("--to", "1h"), ("--queue", "0", "--offset", "1"))
    ]

    assert [json.loads(one)["0"] for one in places] == [0, 5, 0, 1]
    assert committed(here, "billing") == 1
    assert lines_of(here.run(*RESET, "--to", "first", "--queue", "0")) == [["queue", "offset"], ["0", "0"]]


def test_a_consumer_that_is_online_goes_where_its_group_is_reset_to(here: Here) -> None:
    """It is told, and does not commit its own position over the new one."""
    put(here, 3)
    (address,) = (one.address for one in here.brokers.values())
    with Consumer(address, group="billing", topics="orders", start="first", timeout_s=TIMEOUT_S) as consumer:
        messages = iter(consumer)
        assert [next(messages).body for _ in range(3)] == [b"0-0", b"0-1", b"0-2"]
        consumer.commit()

        assert here.run(*RESET, "--to", "first").exit_code == 0

        assert [next(messages).body for _ in range(3)] == [b"0-0", b"0-1", b"0-2"]


def test_a_dry_run_shows_what_a_reset_would_do(here: Here) -> None:
    """From where to where, and nothing is moved."""
    put(here, 5)
    commit(here, "billing", 3)

    shown = lines_of(here.run(*RESET, "--dry-run", "--to", "last", "--queue", "0"))

    assert shown == [["queue", "from", "to"], ["0", "3", "5"]]
    assert json.loads(here.run(*RESET, "--dry-run", "--to", "first", "--json").stdout)["0"] == 0
    assert committed(here, "billing") == 3


@pytest.mark.parametrize(("offset", "code"), [(1, 2), (2, 0), (5, 0), (6, 2)])
def test_a_queue_is_reset_to_any_of_its_offsets_and_its_end(
    here: Here, monkeypatch: pytest.MonkeyPatch, offset: int, code: int
) -> None:
    """The end is a place, too: whatever comes next. What has expired is none."""
    put(here, 5)
    commit(here, "billing", 3)
    (broker,) = here.brokers.values()
    monkeypatch.setattr(broker.store, "min_offset", lambda _topic, queue: 0 if queue else 2)

    assert here.run(*RESET, "--queue", "0", "--offset", str(offset)).exit_code == code
    assert committed(here, "billing") == (3 if code else offset)


def test_a_reset_of_a_mistyped_name_or_place_changes_nothing(here: Here) -> None:
    """A group that nobody has is made only when that is asked for."""
    put(here, 5)
    commit(here, "billing", 5)
    words = ("consumer", "reset-offset", "-t", "orders")

    mistyped = here.run(*words, "-g", "biling", "--to", "last")
    no_queue = here.run(*words, "-g", "billing", "--to", "last", "--queue", "99")
    beyond = here.run(*words, "-g", "billing", "--queue", "0", "--offset", "99")

    assert mistyped.exit_code == 1
    assert "group biling does not exist (did you mean billing?): nothing was changed" in mistyped.stderr
    assert (no_queue.exit_code, "there is no queue 99" in no_queue.stderr) == (1, True)
    assert (beyond.exit_code, "has offsets 0 to 5, not 99" in beyond.stderr) == (2, True)
    assert (committed(here, "billing"), committed(here, "biling")) == (5, -1)
    assert here.run(*words, "-g", "audit", "--to", "last", "--create").exit_code == 0
    assert committed(here, "audit") == 5
