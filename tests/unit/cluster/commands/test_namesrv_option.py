"""Commands that find brokers by name servers: which addresses win, and what several groups of brokers mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster import cli
from rocketstore.message.message import Message
from tests.support.fake_broker import FakeBrokers, fake_brokers
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

NOWHERE = "127.0.0.1:1"


@dataclass(frozen=True)
class Known:
    """Two groups of brokers that a name server knows: both have ``orders``, and only ``b`` has ``bills``."""

    server: str
    a: FakeBrokers
    b: FakeBrokers

    def run(self, *words: str, stdin: bytes | None = None, environment: dict[str, str] | None = None) -> Result:
        """The command, with this name server unless the environment says otherwise."""
        chosen = environment or {"DLEDGER_NAMESRV": self.server}
        return CliRunner().invoke(cli.main, list(words), input=stdin, prog_name="dledger", env=chosen)

    def rows(self, *words: str) -> list[list[str]]:
        """What a command prints below its heading."""
        shown = self.run(*words)
        assert shown.exit_code == 0, shown.output
        return [line.split() for line in shown.stdout.splitlines()[1:]]


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Known]:
    with fake_brokers(1) as a, fake_brokers(1) as b, running(config_in(tmp_path)) as server, calling(server) as caller:
        a.add_topic("orders", 2)
        b.add_topic("orders", 1)
        b.add_topic("bills", 1)
        caller.register(0, a.addresses[0], name="a", topics=("orders",))
        caller.register(0, b.addresses[0], name="b", topics=("orders", "bills"))
        yield Known(server.address, a, b)


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Known]:
    """Only group ``b``."""
    with fake_brokers(1) as b, running(config_in(tmp_path)) as server, calling(server) as caller:
        b.add_topic("bills", 1)
        caller.register(0, b.addresses[0], name="b", topics=("bills",))
        yield Known(server.address, b, b)


# --- precedence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("-b", "BROKER"), ()])
def test_cluster_list_asks_brokers_that_are_given(known: Known, words: tuple[str, ...]) -> None:
    """By an option, or by the environment: as for all other commands."""
    address = known.a.addresses[0]
    chosen = [address if word == "BROKER" else word for word in words]
    environment = {"DLEDGER_NAMESRV": known.server} | ({} if words else {"DLEDGER_BROKER": address})

    shown = known.run("cluster", "list", "--json", *chosen, environment=environment)

    assert json.loads(shown.stdout)["master"] == address


def test_a_name_needs_name_servers(known: Known) -> None:
    """It would choose nothing."""
    shown = known.run("topic", "list", "-b", known.a.addresses[0], "--broker-name", "a")

    assert shown.exit_code == 2
    assert "--namesrv" in shown.stderr


# --- several groups --------------------------------------------------------------------------------------------------


def test_progress_is_that_of_all_groups(known: Known) -> None:
    """Their lags add up; a reset moves all of them."""
    for brokers in (known.a, known.b):
        for _ in range(3):
            brokers.put(Message("orders", b"x", 0))

    moved = known.run(
        "consumer", "reset-offset", "-g", "billing", "-t", "orders", "--to", "first", "--create", "--json"
    )

    assert json.loads(moved.stdout) == {"a": {"0": 0, "1": 0}, "b": {"0": 0}}
    assert known.rows("consumer", "progress") == [["billing", "1", "6"]]
    assert [row[:4] for row in known.rows("consumer", "progress", "-g", "billing")] == [
        ["a", "orders", "0", "0"],
        ["a", "orders", "1", "0"],
        ["b", "orders", "0", "0"],
    ]
    assert known.run("consumer", "progress", "-g", "nobody").exit_code == 1


def test_messages_are_read_from_all_groups(known: Known) -> None:
    """And offsets are kept at each; a load goes to all."""
    for brokers, bodies in ((known.a, b"abcd"), (known.b, b"efgh")):
        for body in bodies:
            brokers.put(Message("orders", bytes([body]), 0))

    assert sorted(known.run("message", "consume", "-t", "orders").stdout.split()) == list("abcdefgh")
    assert len(known.run("message", "consume", "-t", "orders", "-g", "billing", "--alone").stdout.split()) == 8
    assert sum(known.a.offsets.values()) + sum(known.b.offsets.values()) == 8
    measured = known.run("bench", "send", "-t", "orders", "--records", "20", "--json")
    assert measured.exit_code == 0, measured.output
    assert len(known.a.bodies("orders")) == len(known.b.bodies("orders"))


def test_members_of_a_group_share_the_queues_of_all_groups(known: Known) -> None:
    """Not those of one alone: other members would divide others."""
    for brokers in (known.a, known.b):
        brokers.put(Message("orders", b"x", 0))

    assert known.run("message", "consume", "-t", "orders", "-g", "billing").stdout.split() == ["x", "x"]
    assert (known.a.offsets["billing", "orders", 0], known.b.offsets["billing", "orders", 0]) == (1, 1)
    one = known.run("message", "consume", "-t", "orders", "-g", "billing", "--broker-name", "b")
    assert (one.exit_code, "omit --broker-name, or give --alone" in one.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("broker", "status"),
        ("consumer", "delete", "g", "--yes"),
        ("consumer", "reset-offset", "-g", "g", "-t", "orders", "--queue", "0", "--offset", "0"),
        ("message", "print", "-t", "orders", "--queue", "0"),
        ("message", "consume", "-t", "orders", "--queue", "0"),
    ],
)
def test_what_concerns_one_group_needs_its_name(known: Known, words: tuple[str, ...]) -> None:
    """The error lists the names."""
    shown = known.run(*words)

    assert shown.exit_code == 2
    assert "several groups of brokers: a, b; choose one with --broker-name" in shown.stderr


def test_a_chosen_broker_reports(known: Known) -> None:
    """By the group's name, or by its own address."""
    by_name = json.loads(known.run("broker", "status", "--broker-name", "b", "--json").stdout)
    by_address = json.loads(known.run("broker", "status", "--node", known.a.addresses[0], "--json").stdout)

    assert (by_name["address"], by_address["address"]) == (known.b.addresses[0], known.a.addresses[0])


# --- one group -------------------------------------------------------------------------------------------------------


def test_a_single_group_needs_no_name(single: Known) -> None:
    """Nor need the name server know a topic before its brokers do."""
    single.b.add_topic("fresh", 1)

    single.b.put(Message("fresh", b"hello"))
    assert single.run("message", "consume", "-t", "fresh").stdout.split() == ["hello"]
    assert single.run("broker", "status").exit_code == 0
