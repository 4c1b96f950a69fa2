"""The console of all groups over real HTTP: a real name server, brokers that are none, and one group with an inside."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dledger.errors import DLedgerError
from dledger_cli.console import group_page, overview
from dledger_cli.console.app import LOOKUPS_MAX
from dledger_cli.console.changes import BrokerChange
from dledger_cli.console.control import NoControl
from dledger_cli.console.fleet import Fleet
from dledger_cli.console.guard import ConsoleRules
from dledger_cli.console.overview import FleetPace
from dledger_cli.console.server import ConsoleServer, ListenAddress
from dledger_cli.targets import BrokerTarget, GroupTarget
from rocketstore.nameserver.server import NameServer
from tests.support.runtime_broker import RuntimeBroker, ours, runtime_broker
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.conftest import PACE
from tests.unit.dledger_cli.console.group_pages import Broker, plain_broker
from tests.unit.dledger_cli.console.support import Reply, request, stream
from tests.unit.rocketstore.nameserver.wire import calling, config_in, running

FAST = FleetPace(watched_s=0.05, unwatched_s=0.05, timeout_s=5.0)
TOKEN = "a token that is long enough"
MakeOverview = Callable[..., ConsoleServer]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NameServer]:
    """A name server that knows nobody."""
    with running(config_in(tmp_path)) as started:
        yield started


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[Broker]:
    """A plain broker of ours, which has not registered."""
    with plain_broker(tmp_path / "inside") as broker:
        broker.add_topic("orders", 2)
        yield broker


@pytest.fixture
def make(server: NameServer) -> Iterator[MakeOverview]:
    """A console over the name server."""
    with ExitStack() as stack:

        def made(*name_servers: str, pace: FleetPace = FAST, **options: Any) -> ConsoleServer:  # noqa: ANN401  # whichever a test names
            target = GroupTarget(("127.0.0.1:1",), "", 20.0)
            brokers = BrokerTarget(target.bootstrap, 20.0, name_servers=name_servers or (server.address,))
            console = ConsoleServer(target, brokers, place=ListenAddress(port=0), pace=PACE, fleet_pace=pace, **options)
            return stack.enter_context(console)

        yield made


@contextmanager
def joined(server: NameServer, **groups: Sequence[RuntimeBroker | str]) -> Iterator[None]:
    """Groups that have registered meanwhile, each with the topic T; the first broker is the master."""
    with calling(server) as caller:
        for name, brokers in groups.items():
            for broker_id, broker in enumerate(brokers):
                address = broker if isinstance(broker, str) else broker.address
                caller.register(broker_id, address, name=name, cluster="old" if name == "java" else "new")
        yield


def state(console: ConsoleServer, **scope: str) -> Any:  # noqa: ANN401  # JSON
    query = "&".join(f"{name}={value}" for name, value in scope.items())
    return request(f"{console.url}api/state?{query}").json()


def verdict(console: ConsoleServer, name: str) -> str:
    groups = {one["name"]: one for one in state(console)["groups"]}
    return str(groups[name]["verdict"]) if name in groups else ""


def test_all_groups_of_all_clusters_are_shown(make: MakeOverview, server: NameServer) -> None:
    """Ours with terms, RocketMQ's own with what they tell."""
    with ExitStack() as stack:
        members = {"n0": "", "n1": ""}
        a = [
            stack.enter_context(runtime_broker(ours(f"n{number}", role, 4, members)))
            for number, role in enumerate(("LEADER", "FOLLOWER"))
        ]
        java = [stack.enter_context(runtime_broker())]
        stack.enter_context(joined(server, a=a, java=java))
        console = make()
        wait_until(lambda: verdict(console, "a") == verdict(console, "java") == "serving", "all have answered")

        found = state(console)
        page = request(console.url)

    ours_, theirs = found["groups"]
    assert [(one["name"], one["cluster"], one["kind"], one["term"]) for one in (ours_, theirs)] == [
        ("a", "new", "ours", 4),
        ("java", "old", "rocketmq", 0),
    ]
    assert (ours_["puts"], ours_["gets"], theirs["gets"]) == (1.5, 14.5, 7.25)
    assert found["overall"] == {"level": "good", "title": "All 2 groups serve", "more": "Every broker answers."}
    assert b"/static/cluster.js" in page.body


def test_the_page_and_every_file_it_names_are_served(make: MakeOverview) -> None:
    """Ours only, and nothing inline."""
    console = make()
    page = request(console.url)
    named = set(re.findall(r'(?:src|href)="/static/([^"#]+)"', page.body.decode()))
    waiting, files = set(named), {}
    while waiting:
        name = waiting.pop()
        files[name] = request(f"{console.url}static/{name}")
        waiting |= {one.decode() for one in re.findall(rb'from "\./([a-z]+\.js)"', files[name].body)} - files.keys()

    assert {"cluster.css", "cards.js", "topics.js", "stream.js"} <= files.keys()
    assert {file.status for file in files.values()} == {200}
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son[a-z]+=", page.body.decode())


def test_an_open_page_gets_what_is_new(make: MakeOverview, server: NameServer) -> None:
    """The whole first, then a broker that died; without asking again by hand."""
    with runtime_broker() as one, runtime_broker() as two, joined(server, java=[one, two]):
        console = make()
        with stream(f"{console.url}api/events") as events:
            name, first = next(events)
            assert (name, first["names"]) == ("snapshot", ["java"]) or first["names"] == []
            assert next(events)[0] == "catalog"
            two.table = {}
            for name, update in events:
                groups: Any = update.get("groups", [])
                if name == "update" and any(group["verdict"] == "refuses to tell" for group in groups):
                    break


def test_one_that_is_slow_holds_up_nobody_and_is_not_asked_twice(make: MakeOverview, server: NameServer) -> None:
    """It has one request under way, however often the others are asked."""
    with runtime_broker() as slow, runtime_broker() as quick, joined(server, java=[quick, slow]):
        slow.silent = True
        console = make(pace=FleetPace(0.02, 0.02, timeout_s=60))
        wait_until(lambda: quick.asked > 20 and slow.asked > 0, "the quick one is asked again and again")

        assert slow.asked == 1
        assert verdict(console, "java") == "asking"


def test_without_a_page_hardly_anybody_is_asked(make: MakeOverview, server: NameServer) -> None:
    """A page that opens has everybody asked at once."""
    with runtime_broker() as broker, joined(server, java=[broker]):
        console = make(pace=FleetPace(watched_s=0.02, unwatched_s=600))
        wait_until(lambda: verdict(console, "java") == "serving", "it is asked once")
        assert broker.asked == 1

        with stream(f"{console.url}api/events") as events:
            wait_until(lambda: broker.asked > 5, "it is asked again and again")
            next(events)


def test_requests_per_second_are_bounded(
    monkeypatch: pytest.MonkeyPatch, make: MakeOverview, server: NameServer
) -> None:
    """With many brokers, each is asked less often: here one, at once a minute for all of them."""
    monkeypatch.setattr(overview, "ASKED_PER_S_MAX", 1 / 60)
    with runtime_broker() as broker, joined(server, java=[broker]):
        console = make()
        wait_until(lambda: verdict(console, "java") == "serving", "it is asked once")
        before = state(console)["registered_ms"]
        wait_until(lambda: state(console)["registered_ms"] > before + 500, "the name server is asked again and again")

        assert broker.asked == 1


def test_a_name_server_that_does_not_answer_is_told(make: MakeOverview, server: NameServer) -> None:
    """One of two is a warning; none is worse, and the page says so from the start."""
    with runtime_broker() as broker, joined(server, java=[broker]):
        half = make("127.0.0.1:1", server.address)
        none = make("127.0.0.1:1")
        wait_until(lambda: verdict(half, "java") == "serving", "it has answered")
        wait_until(lambda: state(none)["overall"]["level"] != "none", "it has been tried")
        wait_until(lambda: state(half)["overall"]["level"] == "warn", "it has been tried")

        assert state(half)["overall"]["more"] == "Name server 127.0.0.1:1 does not answer."
        assert [one["state"] for one in state(half)["name_servers"]] == ["silent", "answers"]
        assert "Connection refused" in state(half)["name_servers"][0]["error"]
        assert state(none)["overall"]["title"] == "No name server answers"


def test_brokers_elsewhere_are_not_asked_in_plaintext(make: MakeOverview, server: NameServer) -> None:
    """The name server names them; nobody has allowed it."""
    with joined(server, java=["192.0.2.7:10911"]):
        console = make()
        wait_until(lambda: verdict(console, "java") == "unreachable", "it is not even tried")

    assert "plaintext is for loopback addresses" in state(console)["groups"][0]["more"]


# --- topics ----------------------------------------------------------------------------------------------------------


def test_topics_and_their_queues_in_all_groups(make: MakeOverview, server: NameServer) -> None:
    """How many where, from the name server; their ends, from each master. Only while a page is open."""
    with runtime_broker() as a, runtime_broker() as b, joined(server, a=[a], b=[b]):
        console = make()
        wait_until(lambda: verdict(console, "b") == "serving", "all have answered")
        assert not state(console)["catalog"]["loaded"]

        with stream(f"{console.url}api/events") as events:
            next(found for name, found in events if name == "catalog" and found["counts"] == {"a": 1, "b": 1})
        rows: Any = request(f"{console.url}api/topics?search=t&sort=queues&descending=true").json()["rows"]
        assert [(one["name"], one["shares"]) for one in rows] == [("T", [["a", 4, 4, 6], ["b", 4, 4, 6]])]
        refused = request(f"{console.url}api/groups")
        assert (refused.status, refused.json()["error"]) == (400, "name the group: broker=NAME")

        b.table = {}
        found: Any = request(f"{console.url}api/topic?name=T").json()

    one, other = found["groups"]
    assert [(queue["queue"], queue["min_offset"], queue["max_offset"]) for queue in one["queues"]] == [
        (0, 1, 10),
        (1, 1, 11),
    ]
    assert (one["error"], other["error"], other["queues"]) == ("", f"{b.address}: SYSTEM_ERROR: no", [])


def test_a_topic_that_is_nowhere_or_has_no_master_says_so(make: MakeOverview, server: NameServer) -> None:
    """404, and a sentence beside the group's name."""
    with calling(server) as slave:
        with calling(server) as master:
            master.register(0, "127.0.0.1:1", name="headless")
            slave.register(1, "127.0.0.1:2", name="headless")
        console = make()
        wait_until(lambda: state(console)["name_servers"][0]["brokers"] == 1, "only the slave is known")

        found: Any = request(f"{console.url}api/topic?name=T").json()
        assert request(f"{console.url}api/topic?name=nowhere").status == 404
        assert request(f"{console.url}api/topic").status == 400

    assert [one["error"] for one in found["groups"]] == ["no master is registered"]


# --- looking into one group ------------------------------------------------------------------------------------------


def known(console: ConsoleServer, *names: str) -> None:
    wait_until(lambda: set(names) <= {one["name"] for one in state(console)["groups"]}, f"{names} have registered")


def test_one_group_can_be_looked_into(make: MakeOverview, server: NameServer, inside: Broker) -> None:
    """As by a console for that group alone: its page, its state, its events, its messages."""
    with joined(server, a=inside.addresses):
        console = make()
        known(console, "a")
        wait_until(lambda: state(console, broker="a")["group"]["kind"] == "broker", "it answers")

        assert b"/static/main.js" in request(f"{console.url}group?broker=a").body
        assert request(f"{console.url}api/session?broker=a").json()["actions"] == sorted(
            {"transfer", "replace", *BrokerChange}
        )
        assert request(f"{console.url}api/session").json()["actions"] == []
        topic: Any = request(f"{console.url}api/topic?name=orders&broker=a").json()
        assert len(topic["queues"]) == 2
        with stream(f"{console.url}api/events?broker=a") as events:
            assert next(events)[0] == "snapshot"
            assert request(f"{console.url}healthz").json()["pages"] == 1


def test_a_group_that_hangs_keeps_nobody_from_looking_into_another(
    make: MakeOverview, server: NameServer, inside: Broker
) -> None:
    """However many pages wait for its brokers, which accept connections and say nothing."""
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hanging = [f"127.0.0.1:{silent.getsockname()[1]}"]
        stack.enter_context(joined(server, a=inside.addresses, hangs=hanging))
        console = make()
        known(console, "a", "hangs")
        place = urlsplit(console.url)
        for _ in range(LOOKUPS_MAX):
            waiting = stack.enter_context(socket.create_connection((place.hostname, place.port)))
            waiting.sendall(f"GET /api/topic?name=T&broker=hangs HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        wait_until(lambda: request(f"{console.url}api/group?name=g&broker=hangs").status == 503, "all of them wait")

        assert request(f"{console.url}api/topic?name=orders&broker=a").status == 200
        assert request(f"{console.url}api/topic?name=T").status == 200


def refused(reply: Reply) -> tuple[int, object]:
    return reply.status, reply.json()["error"]


def test_what_cannot_be_looked_into_is_refused_with_a_reason(make: MakeOverview, server: NameServer) -> None:
    """A group that does not exist, one of RocketMQ's own brokers, all groups at once."""
    with runtime_broker() as broker, joined(server, java=[broker]):
        console = make()
        wait_until(lambda: verdict(console, "java") == "serving", "it has answered")

        for path in ("api/session?", "api/state?", "api/events?", "api/entries?index=0&", "api/topic?name=T&"):
            assert refused(request(f"{console.url}{path}broker=nobody")) == (
                404,
                "no brokers named nobody have registered",
            )
            status, why = refused(request(f"{console.url}{path}broker=java"))
            assert (status, "RocketMQ's own brokers" in str(why)) == (409, True)
        assert refused(request(f"{console.url}api/entries?index=0")) == (400, "name the group: broker=NAME")


def test_actions_are_about_one_group(make: MakeOverview, server: NameServer, inside: Broker) -> None:
    """And a console that is read-only stays so for each."""
    with joined(server, a=inside.addresses):
        console, reader = make(), make(control=NoControl())
        known(console, "a")
        known(reader, "a")

        assert act(console, "").status == 400
        assert act(console, "?broker=nobody").status == 404
        assert act(console, "?broker=a").status in (409, 502)  # a plain broker has no leader
        assert act(reader, "?broker=a").status == 403


def act(console: ConsoleServer, query: str) -> Reply:
    csrf = str(request(f"{console.url}api/session").json()["csrf"])
    return request(
        f"{console.url}api/act{query}", method="POST", headers={"x-csrf-token": csrf}, body={"action": "transfer"}
    )


def test_groups_looked_into_are_limited(
    monkeypatch: pytest.MonkeyPatch, make: MakeOverview, server: NameServer, inside: Broker, tmp_path: Path
) -> None:
    """One without a page makes room; if all have one, the next is refused with 503."""
    monkeypatch.setattr(group_page, "GROUP_PAGES_MAX", 1)
    with plain_broker(tmp_path / "other") as other, joined(server, a=inside.addresses, b=other.addresses):
        console = make()
        known(console, "a", "b")
        assert request(f"{console.url}api/state?broker=a").status == 200
        with stream(f"{console.url}api/events?broker=a") as events:
            next(events)
            assert request(f"{console.url}api/state?broker=b").status == 503
        wait_until(lambda: request(f"{console.url}api/state?broker=b").status == 200, "there is room")


def test_a_group_that_nobody_looks_into_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, make: MakeOverview, server: NameServer, inside: Broker
) -> None:
    """Its threads end; they are there again when somebody comes back."""
    monkeypatch.setattr(group_page, "IDLE_S", 0.0)
    monkeypatch.setattr(group_page, "LOOK_INTERVAL_S", 0.05)
    closed: list[group_page.GroupPage] = []
    close = group_page.GroupPage.close

    def closing(one: group_page.GroupPage) -> None:
        close(one)
        closed.append(one)

    monkeypatch.setattr(group_page.GroupPage, "close", closing)
    with joined(server, a=inside.addresses):
        console = make()
        known(console, "a")
        with stream(f"{console.url}api/events?broker=a") as events:
            for _ in range(4):
                next(events)
            assert not closed
        wait_until(lambda: len(closed) == 1, "its threads end")
        assert request(f"{console.url}api/state?broker=a").status == 200


# --- who may ask, and the end -----------------------------------------------------------------------------------------


def test_a_token_guards_everything_here_too(make: MakeOverview) -> None:
    """The page of all groups, of one, and what they ask."""
    console = make(rules=ConsoleRules(token=TOKEN, remote=True))

    assert request(console.url).headers["location"] == "/login"
    assert request(f"{console.url}group?broker=a").headers["location"] == "/login"
    for path in ("api/state", "api/events", "api/session", "api/topic?name=T", "api/state?broker=a"):
        assert request(f"{console.url}{path}").status == 401


def test_it_stops_with_pages_open(make: MakeOverview, server: NameServer, inside: Broker) -> None:
    """Of all groups, and of one."""
    with joined(server, a=inside.addresses):
        console = make()
        known(console, "a")
        with stream(f"{console.url}api/events") as all_, stream(f"{console.url}api/events?broker=a") as one:
            next(all_)
            next(one)
            console.stop()
            assert len(list(one)) + len(list(all_)) < 100
        assert console.wait(0) == 0


def test_a_page_that_is_not_kept_up_to_date_does_not_stay(
    monkeypatch: pytest.MonkeyPatch, make: MakeOverview, server: NameServer
) -> None:
    """What nobody expected ends the console with exit code 1, rather than showing old figures as if they were live."""

    def broken(*_: object) -> None:
        raise DLedgerError("nobody expected that")

    monkeypatch.setattr(Fleet, "answered", broken)
    with runtime_broker() as broker, joined(server, java=[broker]):
        console = make()

        assert console.wait(60) == 1
    assert console.fatal is not None
