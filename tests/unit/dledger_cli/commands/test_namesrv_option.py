"""Commands that find brokers by name servers: which addresses win, and what brokers of several names mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from dledger_cli import cli
from rocketstore.message.message import Message
from tests.unit.dledger_cli.commands.brokers_here import Here, two_brokers


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Here]:
    """``a`` and ``b``, which a name server knows: both have ``orders``, of two queues."""
    with two_brokers(tmp_path) as here:
        assert here.run("topic", "create", "orders", "-q", "2").exit_code == 0
        yield here


# --- precedence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("-b", "BROKER"), ()])
def test_cluster_list_asks_brokers_that_are_given(known: Here, words: tuple[str, ...]) -> None:
    """By an option, or by the environment: as for all other commands."""
    address = known.brokers["a"].address
    chosen = [address if word == "BROKER" else word for word in words]
    environment = known.environment | ({} if words else {"DLEDGER_BROKER": address})

    shown = CliRunner().invoke(cli.main, ["cluster", "list", "--json", *chosen], env=environment)

    assert json.loads(shown.stdout)["master"] == address


def test_a_name_needs_name_servers(known: Here) -> None:
    """It would choose nothing."""
    shown = known.run("topic", "list", "-b", known.brokers["a"].address, "--broker-name", "a")

    assert shown.exit_code == 2
    assert "--namesrv" in shown.stderr


# --- brokers of several names ----------------------------------------------------------------------------------------


def test_progress_is_that_of_all_brokers(known: Here) -> None:
    """Their lags add up; a reset moves all of them, or those of one name."""
    for broker in "ab":
        known.put(broker, "orders", *[Message("orders", b"x")] * 3)
    reset = ("consumer", "reset-offset", "-g", "billing", "-t", "orders", "--json")

    moved = known.run(*reset, "--to", "first", "--create")

    assert json.loads(moved.stdout) == {"a": {"0": 0, "1": 0}, "b": {"0": 0, "1": 0}}
    assert known.rows("consumer", "progress") == [["billing", "1", "6"]]
    assert known.rows("consumer", "progress", "--broker-name", "b") == [["billing", "1", "3"]]
    assert [row[:4] for row in known.rows("consumer", "progress", "-g", "billing")] == [
        [broker, "orders", queue, "0"] for broker in "ab" for queue in "01"
    ]
    assert known.run("consumer", "progress", "-g", "nobody").exit_code == 1
    assert json.loads(known.run(*reset, "--to", "last", "--broker-name", "a").stdout) == {"0": 3, "1": 0}
    assert known.rows("consumer", "progress") == [["billing", "1", "3"]]


def test_messages_are_read_from_all_brokers(known: Here) -> None:
    """And offsets are kept at each."""
    for broker, bodies in (("a", b"abcd"), ("b", b"efgh")):
        known.put(broker, "orders", *(Message("orders", bytes([body])) for body in bodies))

    assert sorted(known.run("message", "consume", "-t", "orders").stdout.split()) == list("abcdefgh")
    assert known.run("message", "consume", "-t", "orders", "--broker-name", "b").stdout.split() == list("efgh")
    assert len(known.run("message", "consume", "-t", "orders", "-g", "billing", "--alone").stdout.split()) == 8
    assert [one.state.offset("billing", "orders", 0) for one in known.brokers.values()] == [4, 4]


def test_members_of_a_group_share_the_queues_of_all_brokers(known: Here) -> None:
    """Not those of one alone: other members would divide others."""
    for broker in "ab":
        known.put(broker, "orders", Message("orders", b"x"))

    assert known.run("message", "consume", "-t", "orders", "-g", "billing").stdout.split() == ["x", "x"]
    assert [one.state.offset("billing", "orders", 0) for one in known.brokers.values()] == [1, 1]
    one = known.run("message", "consume", "-t", "orders", "-g", "billing", "--broker-name", "b")
    assert (one.exit_code, "omit --broker-name, or give --alone" in one.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("broker", "status"),
        ("consumer", "reset-offset", "-g", "g", "-t", "orders", "--queue", "0", "--offset", "0"),
        ("message", "print", "-t", "orders", "--queue", "0"),
        ("message", "consume", "-t", "orders", "--queue", "0"),
    ],
)
def test_what_concerns_one_broker_needs_its_name(known: Here, words: tuple[str, ...]) -> None:
    """The error lists the names."""
    shown = known.run(*words)

    assert shown.exit_code == 2
    assert "several groups of brokers: a, b; choose one with --broker-name" in shown.stderr


def test_a_chosen_broker_reports(known: Here) -> None:
    """By its name, or by its own address."""
    by_name = json.loads(known.run("broker", "status", "--broker-name", "b", "--json").stdout)
    by_address = json.loads(known.run("broker", "status", "--node", known.brokers["a"].address, "--json").stdout)

    assert (by_name["address"], by_address["address"]) == (known.brokers["b"].address, known.brokers["a"].address)
    assert (by_name["broker_name"], by_address["broker_name"]) == ("b", "a")


def test_a_group_is_deleted_at_all_brokers_or_at_those_of_one_name(known: Here) -> None:
    """Members share the queues of all of them, so usually it is one group."""
    for broker in "ab":
        known.put(broker, "orders", Message("orders", b"x"))
    reset = ("consumer", "reset-offset", "-g", "billing", "-t", "orders", "--to", "last", "--create")
    assert known.run(*reset).exit_code == 0

    assert known.run("consumer", "delete", "billing", "--broker-name", "a", "--yes").exit_code == 0
    assert [one.state.has_group("billing") for one in known.brokers.values()] == [False, True]
    assert known.run(*reset).exit_code == 0
    assert known.run("consumer", "delete", "billing", "--yes").exit_code == 0
    assert [one.state.has_group("billing") for one in known.brokers.values()] == [False, False]
