"""Commands that find brokers by name servers: which addresses win, and what several groups of brokers mean."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster import cli
from rocketstore.message.ids import offset_message_id
from rocketstore.message.message import HostAddress, Message
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


def test_the_more_explicit_addresses_win(known: Known) -> None:
    """-b, --namesrv, DLEDGER_BROKER, DLEDGER_NAMESRV, in this order."""
    a = known.a.addresses[0]
    topics = ("topic", "list", "--json")
    both = (*topics, "-b", a, "--namesrv", NOWHERE)
    flag = (*topics, "--namesrv", known.server)

    flags = known.run(*both, environment={"DLEDGER_BROKER": NOWHERE, "DLEDGER_NAMESRV": NOWHERE})
    name_server = known.run(*flag, environment={"DLEDGER_BROKER": NOWHERE, "DLEDGER_NAMESRV": NOWHERE})
    broker = known.run(*topics, environment={"DLEDGER_BROKER": a, "DLEDGER_NAMESRV": NOWHERE})
    last = known.run(*topics, environment={"DLEDGER_NAMESRV": known.server})

    assert [len(json.loads(one.stdout)) for one in (flags, name_server, broker, last)] == [1, 3, 1, 3]


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


def test_a_topic_is_created_in_every_group_or_in_one(known: Known) -> None:
    """As mqadmin's updateTopic does for a cluster (-c) or a broker (-b)."""
    assert known.run("topic", "create", "new", "-q", "3").exit_code == 0
    assert known.run("topic", "create", "one", "--broker-name", "b").exit_code == 0

    assert set(known.a.topics) == {"orders", "new"}
    assert set(known.b.topics) == {"orders", "bills", "new", "one"}


def test_commands_about_a_topic_go_where_it_is(known: Known) -> None:
    """A row for each group's queue; without the name if only one group has it."""
    for brokers in (known.a, known.b):
        brokers.put(Message("orders", b"x", 0, {"KEYS": "k"}))

    assert [row[:4] for row in known.rows("topic", "status", "orders")] == [
        ["a", "0", "0", "1"],
        ["a", "1", "0", "0"],
        ["b", "0", "0", "1"],
    ]
    assert [row[:3] for row in known.rows("topic", "status", "bills")] == [["0", "0", "0"]]
    assert len(known.rows("topic", "route", "orders")) == 2
    assert len(known.rows("message", "query-by-key", "-t", "orders", "k")) == 2
    assert known.run("message", "print", "-t", "orders").stdout.split() == ["x", "x"]
    assert known.run("message", "print", "-t", "orders", "--broker-name", "b").stdout.split() == ["x"]
    assert known.run("topic", "delete", "orders", "--yes").exit_code == 0
    assert "orders" not in known.a.topics
    assert "orders" not in known.b.topics


def test_topics_are_listed_with_their_groups(known: Known) -> None:
    """The name is the first column."""
    assert known.rows("topic", "list") == [
        ["a", "orders", "2", "2", "rw"],
        ["b", "bills", "1", "1", "rw"],
        ["b", "orders", "1", "1", "rw"],
    ]
    assert known.rows("topic", "list", "--broker-name", "b")[0] == ["bills", "1", "1", "rw"]


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


def test_messages_go_to_all_groups_and_are_read_from_all(known: Known) -> None:
    """Four registered queues in each, of which the fake brokers have fewer: any is as good as another."""
    sent = known.run("message", "send", "-t", "orders", *"abcdefgh")

    assert sent.exit_code == 0, sent.output
    assert (len(known.a.bodies("orders")), len(known.b.bodies("orders"))) == (4, 4)
    assert sorted(known.run("message", "consume", "-t", "orders").stdout.split()) == list("abcdefgh")
    lines = known.run("message", "send", "-t", "orders", "--json", "-", stdin=b"i\nj\n")
    assert len(lines.stdout.splitlines()) == 2
    assert len(known.run("message", "consume", "-t", "orders", "-g", "billing", "--alone").stdout.split()) == 10
    assert sum(known.a.offsets.values()) + sum(known.b.offsets.values()) == 10
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


def test_an_id_names_its_broker(known: Known) -> None:
    """Only the group with this address is asked."""
    host, _, port = known.b.addresses[0].rpartition(":")
    assert host == "127.0.0.1"
    id_at_b = offset_message_id(HostAddress(b"\x7f\0\0\1", int(port)), 0)

    assert known.run("message", "query-by-id", id_at_b).exit_code == 1
    assert ("QueryById" in known.a.nodes[0].calls, "QueryById" in known.b.nodes[0].calls) == (False, True)
    elsewhere = known.run("message", "query-by-id", offset_message_id(HostAddress(b"\x7f\0\0\1", 1), 0))
    assert (elsewhere.exit_code, "--broker-name" in elsewhere.stderr) == (2, True)


@pytest.mark.parametrize(
    "words",
    [
        ("broker", "status"),
        ("consumer", "delete", "g", "--yes"),
        ("consumer", "reset-offset", "-g", "g", "-t", "orders", "--queue", "0", "--offset", "0"),
        ("message", "print", "-t", "orders", "--queue", "0"),
        ("message", "send", "-t", "orders", "--queue", "0", "x"),
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


def test_what_is_unknown_is_told(known: Known) -> None:
    """A name, with those that exist; a topic."""
    name = known.run("topic", "list", "--broker-name", "c")
    topic = known.run("topic", "status", "nope")

    assert (name.exit_code, topic.exit_code) == (1, 1)
    assert "no brokers named c have registered, only a, b" in name.stderr
    assert "topic nope does not exist" in topic.stderr


def test_clusters_are_not_mixed(known: Known, tmp_path: Path) -> None:
    """A topic for two clusters was probably meant for one."""
    with running(config_in(tmp_path / "other")) as server, calling(server) as caller:
        caller.register(0, known.a.addresses[0], name="a", cluster="east")
        caller.register(0, known.b.addresses[0], name="b", cluster="west")
        shown = known.run("topic", "create", "new", environment={"DLEDGER_NAMESRV": server.address})

    assert shown.exit_code == 2
    assert "a (cluster east), b (cluster west)" in shown.stderr


# --- one group -------------------------------------------------------------------------------------------------------


def test_a_single_group_needs_no_name(single: Known) -> None:
    """Nor need the name server know a topic before its brokers do."""
    single.b.add_topic("fresh", 1)

    assert single.run("message", "send", "-t", "fresh", "hello").exit_code == 0
    assert single.run("message", "consume", "-t", "fresh").stdout.split() == ["hello"]
    assert single.run("broker", "status").exit_code == 0
    assert single.rows("topic", "list")[0] == ["bills", "1", "1", "rw"]


def test_without_brokers_or_name_servers_it_says_so(tmp_path: Path, known: Known) -> None:
    """Exit code 1."""
    with running(config_in(tmp_path / "empty")) as server:
        empty = known.run("topic", "list", environment={"DLEDGER_NAMESRV": server.address})
    nobody = known.run("topic", "list", environment={"DLEDGER_NAMESRV": NOWHERE})

    assert (empty.exit_code, nobody.exit_code) == (1, 1)
    assert "no broker has registered" in empty.stderr
    assert f"cannot connect to {NOWHERE}" in nobody.stderr
