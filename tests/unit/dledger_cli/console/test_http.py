"""The console over HTTP: what it serves, what it tells, what it refuses."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dledger.errors import ConfigError
from dledger.types import LogIndex
from dledger_cli.console import app, group_page
from dledger_cli.console.control import NoControl
from dledger_cli.console.guard import GUESSES_IN_ALL_MAX, GUESSES_MAX, GUESSES_S, SESSION_S, ConsoleRules, Guesses
from dledger_cli.console.server import ConsoleServer, ListenAddress
from rocketstore.message.message import Message
from tests.support.fake_group import FakeGroup
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.conftest import MakeConsole
from tests.unit.dledger_cli.console.group_pages import Broker
from tests.unit.dledger_cli.console.support import Reply, request, stream

TOKEN = "a token that nobody guesses"


def csrf_of(console: ConsoleServer) -> str:
    return str(request(f"{console.url}api/session").json()["csrf"])


def act(console: ConsoleServer, body: object, **headers: str) -> Reply:
    """A POST as the page sends it, with other headers if wanted."""
    sent = {"x-csrf-token": csrf_of(console), "content-type": "application/json"}
    sent |= {name.replace("_", "-"): text for name, text in headers.items()}
    return request(f"{console.url}api/act", method="POST", headers=sent, body=body)


def state(console: ConsoleServer) -> dict[str, Any]:
    return request(f"{console.url}api/state").json()


def states(console: ConsoleServer) -> dict[str, str]:
    return {one["node"]: one["state"] for one in state(console)["nodes"]}


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_and_every_file_it_names_are_served(shared_console: ConsoleServer) -> None:
    """And nothing of it comes from elsewhere."""
    page = request(shared_console.url)
    text = page.body.decode()
    named = set(re.findall(r'(?:src|href)="(/[^"#]+)"', text))
    files = {name: request(shared_console.url.rstrip("/") + name) for name in named}
    imported = {
        found.decode() for file in files.values() for found in re.findall(rb'from "\./([a-z]+\.js)"', file.body)
    }
    files |= {name: request(f"{shared_console.url}static/{name}") for name in imported}

    assert page.status == 200
    assert len(named) >= 4
    assert {file.status for file in files.values()} == {200}
    assert not re.search(
        rb"https?://(?!www\.w3\.org/2000/svg)", b"".join([page.body, *(f.body for f in files.values())])
    )


def test_pages_may_run_nothing_but_our_own_files(shared_console: ConsoleServer) -> None:
    """No inline code or style, no foreign origin, no frames, no markup from strings."""
    page = request(shared_console.url)
    policy = page.headers["content-security-policy"]

    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["x-frame-options"] == "DENY"
    text = page.body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son[a-z]+=", text)


def test_scripts_never_make_markup_of_strings() -> None:
    """What messages hold reaches the document as text nodes only."""
    forbidden = re.compile(
        rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|createContextualFragment"
    )
    files = app.load_files(Path(app.__file__).parent / "static")

    assert [name for name, (body, _, _) in files.items() if name.endswith(".js") and forbidden.search(body)] == []


def test_an_unchanged_file_is_not_sent_again(shared_console: ConsoleServer) -> None:
    """By its entity tag."""
    first = request(f"{shared_console.url}static/main.js")

    again = request(f"{shared_console.url}static/main.js", headers={"if-none-match": first.headers["etag"]})

    assert (again.status, again.body) == (304, b"")


def test_a_changed_file_has_another_tag(tmp_path: Path) -> None:
    """Otherwise browsers would go on with the page of the version before."""
    tags = []
    for words in ("before", "after"):
        (tmp_path / "page.js").write_text(words)
        tags.append(app.load_files(tmp_path)["page.js"][2])

    assert tags[0] != tags[1]


@pytest.mark.parametrize(
    "path", ["static/../app.py", "static/..%2fapp.py", "static/%2e%2e/app.py", "static/index.html", "x"]
)
def test_nothing_else_can_be_fetched(shared_console: ConsoleServer, path: str) -> None:
    """Only files that were there when it started, by their names."""
    assert request(f"{shared_console.url}{path}").status == 404


def test_health_needs_no_token(make_console: MakeConsole, log_group: FakeGroup) -> None:
    """For container health checks."""
    console = make_console(log_group.addresses, rules=ConsoleRules(token=TOKEN))

    assert request(f"{console.url}healthz").json() == {"status": "ok", "pages": 0}


# --- events ----------------------------------------------------------------------------------------------------------


def test_a_page_gets_everything_and_then_what_is_new(console: ConsoleServer, log_group: FakeGroup) -> None:
    """A change of leader arrives on the open stream, with the change and the event."""
    with stream(f"{console.url}api/events") as events:
        name, first = next(events)
        assert name == "snapshot"
        assert first["group"]["leader"] == "n0"  # type: ignore[index]  # JSON

        log_group.elect(1)

        for name, update in events:
            if name == "update" and update["group"]["leader"] == "n1":  # type: ignore[index]  # JSON
                break
        assert [one for one in update["changes"] if one[3] == "leader"]  # type: ignore[attr-defined]  # JSON


def test_a_node_that_goes_is_told_as_unreachable_and_its_return_too(
    console: ConsoleServer, log_group: FakeGroup
) -> None:
    """Without asking again by hand."""
    with stream(f"{console.url}api/events") as events:
        log_group.kill(2)
        wait_for(events, "n2", "unreachable")

        log_group.restart(2)
        wait_for(events, "n2", "follower")


def wait_for(events: Iterator[tuple[str, dict[str, Any]]], node: str, wanted: str) -> None:
    for name, update in events:
        if name != "catalog" and any(one["node"] == node and one["state"] == wanted for one in update["nodes"]):
            return
    raise AssertionError("the stream ended")


def test_pages_are_limited(console: ConsoleServer) -> None:
    """One more than allowed is refused with 503; once one is gone, there is room."""
    with ExitStack() as stack:
        pages = [stack.enter_context(stream(f"{console.url}api/events")) for _ in range(group_page.STREAMS_MAX)]
        for page in pages:
            next(page)

        assert request(f"{console.url}api/events").status == 503
        assert request(f"{console.url}healthz").json()["pages"] == group_page.STREAMS_MAX
    wait_until(lambda: request(f"{console.url}healthz").json()["pages"] == 0, "the pages are gone")


def test_stopping_ends_open_streams(make_console: MakeConsole, log_group: FakeGroup) -> None:
    """A page that is open does not keep the console alive."""
    before = set(threading.enumerate())
    console = make_console(log_group.addresses)
    with stream(f"{console.url}api/events") as events:
        next(events)
        console.stop()
        assert len(list(events)) < 100
    assert console.wait(0) == 0
    left = set(threading.enumerate()) - before
    assert not [one.name for one in left if one.name.startswith("dledger-console")]


# --- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "a:b:c"])
def test_a_foreign_host_name_is_refused(shared_console: ConsoleServer, host: str) -> None:
    """DNS rebinding: the browser would send the foreign name."""
    assert request(f"{shared_console.url}api/state", headers={"host": host}).status == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:9", "[::1]:8080"])
def test_names_of_this_machine_are_ours(shared_console: ConsoleServer, host: str) -> None:
    """At any port, for it may be forwarded."""
    assert request(f"{shared_console.url}api/state", headers={"host": host}).status == 200


def test_what_changes_something_needs_the_pages_own_token(console: ConsoleServer) -> None:
    """A form on another site cannot know it."""
    body = {"action": "transfer", "node": "n1"}

    assert request(f"{console.url}api/act", method="POST", body=body).status == 403
    assert act(console, body, x_csrf_token="guessed").status == 403
    assert act(console, body).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
    ],
)
def test_what_another_site_sends_is_refused_even_with_the_token(
    shared_console: ConsoleServer, headers: dict[str, str]
) -> None:
    """Browsers say where a request comes from."""
    assert act(shared_console, {"action": "transfer"}, **headers).status == 403


@pytest.mark.parametrize("body", [b"[" * 4000, b"{", b"\xff", b"[]", b'{"action": "fly"}'])
def test_what_is_no_action_is_refused_in_a_sentence(shared_console: ConsoleServer, body: bytes) -> None:
    """However deep it is nested."""
    assert act(shared_console, body).status == 400


def test_another_site_cannot_open_streams_either(shared_console: ConsoleServer) -> None:
    """They are limited, and could be used up."""
    assert request(f"{shared_console.url}api/events", headers={"sec-fetch-site": "cross-site"}).status == 403


def test_other_methods_are_refused(shared_console: ConsoleServer) -> None:
    """Also on paths that exist."""
    assert request(f"{shared_console.url}api/act", method="PUT").status == 405
    assert request(f"{shared_console.url}api/act").status == 405


def test_with_a_token_everything_but_health_and_the_way_in_is_closed(
    make_console: MakeConsole, log_group: FakeGroup
) -> None:
    """API answers 401, the page leads to the sign-in."""
    console = make_console(log_group.addresses, rules=ConsoleRules(token=TOKEN, remote=True))

    assert request(f"{console.url}api/state").status == 401
    assert request(f"{console.url}api/events").status == 401
    assert request(console.url).headers["location"] == "/login"
    assert request(f"{console.url}login").status == 200
    assert request(f"{console.url}api/state", headers={"authorization": "Bearer wrong"}).status == 401
    assert request(f"{console.url}api/state", headers={"authorization": f"Bearer {TOKEN}"}).status == 200


def test_signing_in_gives_a_cookie_that_is_not_the_token(make_console: MakeConsole, log_group: FakeGroup) -> None:
    """HttpOnly, SameSite=Strict; a wrong token gives none."""
    console = make_console(log_group.addresses, rules=ConsoleRules(token=TOKEN, remote=True))
    wrong = request(f"{console.url}login", method="POST", body=b"token=wrong")
    right = request(f"{console.url}login", method="POST", body=f"token={TOKEN.replace(' ', '+')}".encode())
    cookie = right.headers["set-cookie"]

    assert (wrong.status, wrong.headers["location"]) == (303, "/login?wrong=1")
    assert "set-cookie" not in wrong.headers
    assert (right.status, right.headers["location"]) == (303, "/")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert request(console.url, headers={"cookie": cookie.split(";")[0]}).status == 200
    assert request(console.url, headers={"cookie": "dledger-console=guessed"}).status == 303


def test_the_printed_address_signs_in_and_hides_the_token(make_console: MakeConsole, log_group: FakeGroup) -> None:
    """The token leaves the address bar at once."""
    console = make_console(log_group.addresses, rules=ConsoleRules(token="token-without-blanks", remote=True))

    opened = request(f"{console.url}?token=token-without-blanks")

    assert (opened.status, opened.headers["location"]) == (303, "/")
    assert "set-cookie" in opened.headers
    assert request(f"{console.url}?token=wrong").headers["location"] == "/login"


def test_whoever_guesses_at_the_token_must_wait(
    make_console: MakeConsole, log_group: FakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """However it is brought; then not even the right one is taken, and each guess was logged. Cookies go on."""
    console = make_console(log_group.addresses, rules=ConsoleRules(token=TOKEN, remote=True))
    body = f"token={TOKEN.replace(' ', '+')}".encode()
    cookie = request(f"{console.url}login", method="POST", body=body).headers["set-cookie"].split(";")[0]
    for _ in range(GUESSES_MAX - 2):
        request(f"{console.url}api/state", headers={"authorization": "Bearer wrong"})
    request(f"{console.url}?token=wrong")
    request(f"{console.url}login", method="POST", body=b"token=wrong")

    assert request(f"{console.url}login", method="POST", body=body).status == 429
    assert request(f"{console.url}api/state", headers={"authorization": f"Bearer {TOKEN}"}).status == 429
    assert request(f"{console.url}api/state", headers={"cookie": cookie}).status == 200
    assert caplog.text.count("a wrong token from 127.0.0.1") == GUESSES_MAX


def test_guesses_are_bounded_per_address_and_in_all_and_forgotten_after_a_minute() -> None:
    """One who guesses does not keep others out; very many do, for as long as they guess."""
    now = [0.0]
    guesses = Guesses(lambda: now[0])
    for _ in range(GUESSES_MAX):
        guesses.note("192.0.2.1")
    assert guesses.too_many("192.0.2.1")
    assert not guesses.too_many("192.0.2.2")

    for number in range(GUESSES_IN_ALL_MAX - GUESSES_MAX):
        guesses.note(f"198.51.100.{number}")
    assert guesses.too_many("192.0.2.2")

    now[0] = GUESSES_S
    assert not guesses.too_many("192.0.2.1")


def test_a_session_ends_at_the_server() -> None:
    """A stolen cookie is worth something for half a day, and a made-up one nothing."""
    rules = ConsoleRules(token=TOKEN)
    session = rules.session(1000)

    assert rules.knows_session(session, 1000)
    assert rules.knows_session(session, 1000 + SESSION_S - 1)
    assert not rules.knows_session(session, 1000 + SESSION_S)
    assert not rules.knows_session(session, 999)
    assert not rules.knows_session(session.replace("1000", "2000", 1), 2000)
    assert not any(rules.knows_session(one, 1000) for one in ("", ".", "1000", "1000.", "²." + session, "9" * 5000))


def test_remote_consoles_answer_to_addresses_and_to_names_that_were_allowed() -> None:
    """A name can be rebound, an address cannot."""
    rules = ConsoleRules(token=TOKEN, remote=True, hosts=frozenset({"console.example"}))

    assert rules.knows_host("192.0.2.7:8080")
    assert rules.knows_host("console.example")
    assert not rules.knows_host("other.example")
    assert not ConsoleRules().knows_host("192.0.2.7:8080")


# --- doing things ----------------------------------------------------------------------------------------------------


def test_a_transfer_says_what_came_of_it_and_is_listed(console: ConsoleServer) -> None:
    """The answer's sentence, and the same among the events."""
    told = act(console, {"action": "transfer", "node": "n1"})

    assert told.json()["ok"] is True
    assert str(told.json()["message"]).startswith("n1 leads now")
    assert state(console)["events"][-1]["kind"] == "action"


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        [],
        {"action": "format"},
        {"action": 7},
        {"action": "transfer", "node": 7},
        {"action": "transfer", "node": ""},
        {"action": "transfer", "node": "n1\x00"},
        {"action": "transfer", "node": "n" * 1000},
        {"action": "transfer", "more": 1},
        {"action": "kill"},
        b"x" * 10_000,
    ],
)
def test_nonsense_is_refused_with_a_reason(shared_console: ConsoleServer, body: object) -> None:
    """And nothing happens."""
    told = act(shared_console, body)

    assert told.status == 400
    assert told.json()["error"]


def test_processes_of_others_are_never_killed(shared_console: ConsoleServer) -> None:
    """Only a demo's shared_console has that button."""
    assert act(shared_console, {"action": "kill", "node": "n0"}).status == 403


def test_a_console_that_only_shows_has_no_actions(make_console: MakeConsole, log_group: FakeGroup) -> None:
    """``--read-only``."""
    console = make_console(log_group.addresses, control=NoControl())

    assert request(f"{console.url}api/session").json()["actions"] == []
    assert act(console, {"action": "transfer"}).status == 403


def test_a_failed_transfer_is_told(
    console: ConsoleServer, log_group: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an error for people, and among the events; a group that is gone has no leader."""
    monkeypatch.setattr("dledger_cli.console.control.TRANSFER_TIMEOUT_S", 0.3)
    for number in range(3):
        log_group.kill(number)
    wait_until(lambda: set(states(console).values()) == {"unreachable"}, "nobody answers")

    told = act(console, {"action": "transfer", "node": "n1"})

    assert told.status == 502
    assert told.json()["error"]
    assert state(console)["events"][-1]["kind"] == "refused"
    assert state(console)["group"]["leader"] == ""


# --- looking things up -----------------------------------------------------------------------------------------------


def test_entries_are_found_by_index_and_from_the_end(console: ConsoleServer, log_group: FakeGroup) -> None:
    """That one first, and those before it; the newest ones by a negative index, or by one that is not there yet."""
    for number in range(30):
        log_group.nodes[0].submit_append([b"entry %d" % number], lambda _: None)
    log_group.elect(0)

    newest = request(f"{console.url}api/entries?index=-1&count=5").json()
    third = request(f"{console.url}api/entry?index=3").json()

    assert [one["index"] for one in newest["entries"]] == [29, 28, 27, 26, 25]  # type: ignore[attr-defined]  # JSON
    for index, first, last in ((99, 29, 25), (29, 29, 25), (28, 28, 24), (4, 4, 0), (3, 3, 0), (0, 0, 0)):
        shown = [one["index"] for one in listed(console, f"entries?index={index}&count=5")["entries"]]
        assert shown == list(range(first, last - 1, -1))
    assert third["body"]["text"] == "entry 3"  # type: ignore[index]  # JSON
    assert request(f"{console.url}api/entry?index=999").status in (404, 502)


def test_the_newest_entries_are_read_where_they_are_known(console: ConsoleServer, log_group: FakeGroup) -> None:
    """A leader that was just elected knows less to be committed than the member that was asked for the end."""
    for number in range(30):
        log_group.nodes[0].submit_append([b"entry %d" % number], lambda _: None)
    log_group.elect(2)
    log_group.nodes[2].committed = LogIndex(10)

    newest = request(f"{console.url}api/entries?index=-1&count=5").json()

    assert [one["index"] for one in newest["entries"]] == [29, 28, 27, 26, 25]  # type: ignore[attr-defined]  # JSON


@pytest.mark.parametrize(("count", "entry_bytes"), [(30, 100_000), (100, 300_000), (3, 2_000_000), (30, 3)])
def test_the_newest_entries_are_the_newest_ones_also_where_they_are_large(
    console: ConsoleServer, log_group: FakeGroup, count: int, entry_bytes: int
) -> None:
    """What does not fit into an answer is the older ones."""
    for _ in range(count):
        log_group.nodes[0].submit_append([bytes(entry_bytes)], lambda _: None)
    log_group.elect(0)

    newest = request(f"{console.url}api/entries?index=-1&count=20").json()

    shown = [one["index"] for one in newest["entries"]]  # type: ignore[attr-defined]  # JSON
    assert shown == list(range(count - 1, count - 1 - len(shown), -1))
    assert len(shown) >= min(20, count, max(1, (1 << 20) // entry_bytes // 2))


def shown(console: ConsoleServer, query: str) -> list[str]:
    return [f"{one['queue']}:{one['offset']}" for one in listed(console, f"messages?{query}")["messages"]]


def test_a_topics_newest_messages_come_first_page_by_page(make_console: MakeConsole, broker: Broker) -> None:
    """Across its queues, or of one; what is sent meanwhile does not move the pages."""
    for number in range(7):
        broker.put(Message("orders", b"%d" % number), number % 2)
    console = make_console(broker.addresses)

    first = listed(console, "messages?by=time&topic=orders&count=3")
    broker.put(Message("orders", b"late"))
    second = listed(console, f"messages?by=time&topic=orders&count=3&after={first['next']}")
    third = listed(console, f"messages?by=time&topic=orders&count=3&after={second['next']}")

    bodies = [[one["preview"]["text"] for one in page["messages"]] for page in (first, second, third)]
    assert bodies == [["6", "5", "4"], ["3", "2", "1"], ["0"]]
    assert (third["next"], third["has_next"]) == ("", False)
    assert shown(console, "by=time&topic=orders&queue=1") == ["1:2", "1:1", "1:0"]
    assert request(f"{console.url}api/messages?by=time&topic=nobody").status == 404


def test_messages_of_a_time_come_in_either_order(make_console: MakeConsole, broker: Broker) -> None:
    """Page by page, with the same times for every page."""
    times = [broker.put(Message("orders", b"%d" % number), number % 2) for number in range(7)]
    console = make_console(broker.addresses)
    span = f"by=time&topic=orders&since_ms={times[1]}&before_ms={times[6]}"

    first = listed(console, f"messages?{span}&order=oldest&count=3")
    second = shown(console, f"{span}&order=oldest&count=3&after={first['next']}")

    assert [one["preview"]["text"] for one in first["messages"]] == ["1", "2", "3"]
    assert second == ["0:2", "1:2"]
    assert shown(console, span) == ["1:2", "0:2", "1:1", "0:1", "1:0"]
    assert shown(console, f"by=time&topic=orders&since_ms={times[5]}") == ["0:3", "1:2"]


@pytest.mark.parametrize(("count", "may_have_more"), [(63, False), (64, True), (80, True)])
def test_more_messages_with_a_key_than_are_shown_are_spoken_of(
    make_console: MakeConsole, broker: Broker, count: int, may_have_more: bool
) -> None:
    """The newest come first."""
    for number in range(count):
        broker.put(Message("orders", b"%d" % number, keys="k"))
    store = broker.server.store
    wait_until(lambda: store.index_end().offset == store.position_of("orders", 0, count - 1), "all are in the index")
    found = listed(make_console(broker.addresses), "messages?by=key&topic=orders&key=k")

    assert found["may_have_more"] is may_have_more
    shown_ = [int(one["preview"]["text"]) for one in found["messages"]]
    assert shown_ == list(range(count - 1, count - 1 - min(count, 64), -1))


def test_a_queues_messages_go_back_from_an_offset(make_console: MakeConsole, broker: Broker) -> None:
    """That one first; an offset beyond the end, or none, is the newest."""
    for number in range(7):
        broker.put(Message("orders", b"%d" % number), 1)
    console = make_console(broker.addresses)
    back = "by=offset&topic=orders&queue=1&count=3&offset"

    assert shown(console, f"{back}=4") == ["1:4", "1:3", "1:2"]
    assert shown(console, f"{back}=0") == ["1:0"]
    for newest in (-1, 6, 7, 99):
        assert shown(console, f"{back}={newest}") == ["1:6", "1:5", "1:4"]
    assert shown(console, "by=offset&topic=orders&queue=0&offset=-1") == []


@pytest.mark.parametrize(
    "query",
    [
        "messages?by=time&topic=orders&queue=x",
        "messages?by=time&topic=orders&after=-1.2",
        "messages?by=time&topic=orders&after=1--2",
        "messages?by=time&topic=orders&after=1-2..1-2",
        "messages?by=time&topic=orders&since_ms=-1",
        "messages?by=time&topic=orders&since_ms=5&before_ms=5",
        f"messages?by=time&topic=orders&after=0-{10**19}",
        f"messages?by=time&topic=orders&after={'1-1.' * 3001}",
        pytest.param(f"messages?by=time&topic=orders&after=0-{'1' * 5000}", id="more-digits-than-python-converts"),
        "messages?by=time",
        "entries?index=x",
        "entries?index=-2",
        "entries?index=99999999999999999999",
        "entries?index=0&count=0",
        "entries?index=0&count=1000",
        "entries",
        "messages?by=magic",
        "messages?by=key&topic=t",
        f"messages?by=id&id={'x' * 2000}",
        "message?topic=t&queue=70000&offset=0",
    ],
)
def test_queries_that_make_no_sense_are_refused(shared_broker_console: ConsoleServer, query: str) -> None:
    """Before the broker is asked, which answers others."""
    sensible = "messages?by=time&topic=orders&after=0-1.1-2&since_ms=5&before_ms=6"
    assert request(f"{shared_broker_console.url}api/{sensible}").status == 200

    assert request(f"{shared_broker_console.url}api/{query}").status == 400


# --- lists -----------------------------------------------------------------------------------------------------------


def listed(console: ConsoleServer, query: str) -> dict[str, Any]:
    return request(f"{console.url}api/{query}").json()


def test_a_page_is_told_how_many_there_are_and_asks_for_those_it_shows(
    make_console: MakeConsole, broker: Broker
) -> None:
    """However many there are, an event has no list, and an answer no more than a page."""
    for number in range(60):
        broker.add_topic(f"topic-{number:02}", 1)
        broker.commit(f"group-{number:02}", f"topic-{number:02}", 0, 0)
    broker.put(Message("topic-42", b"x"))
    console = make_console(broker.addresses)

    with stream(f"{console.url}api/events") as events:
        for name, told in events:
            if name == "catalog" and told["loaded"]:
                break
        assert told.keys() == {"loaded", "error", "seen_ms", "version", "totals"}
        assert told["totals"] == {"topics": 61, "groups": 60}
        wait_until(lambda: listed(console, "topics")["unseen"] == 0, "all were looked at")
        wait_until(lambda: listed(console, "groups")["unseen"] == 0, "groups, too")

    first = listed(console, "topics")
    assert [one["name"] for one in first["rows"]][:2] == ["orders", "topic-00"]
    assert (len(first["rows"]), first["total"], first["pages"]) == (25, 61, 3)
    assert listed(console, "topics?sort=messages&descending=true")["rows"][0]["name"] == "topic-42"
    found = listed(console, "topics?search=TOPIC-4&page=9")
    assert (len(found["rows"]), found["matching"], found["page"]) == (10, 10, 0)
    assert listed(console, "groups?sort=lag&descending=true")["rows"][0] == {
        "name": "group-42",
        "topics": ["topic-42"],
        "all_topics": 1,
        "lag": 1,
        "seen_ms": listed(console, "groups?search=group-42")["rows"][0]["seen_ms"],
    }


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("topics?sort=lag", "sort must be one of name, queues, messages, newest, permission"),
        ("groups?sort=messages", "sort must be one of name, topics, lag"),
        ("topics?page=-1", "page must be a whole number from 0 to 2,000"),
        ("groups?descending=1", "descending must be true or false"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(shared_console: ConsoleServer, query: str, words: str) -> None:
    """With what is possible."""
    answer = request(f"{shared_console.url}api/{query}")

    assert answer.status == 400
    assert words in str(answer.json()["error"])


def test_lists_are_told_while_no_broker_answers(make_console: MakeConsole, broker: Broker) -> None:
    """Also while every lookup waits: they need no broker."""
    console = make_console(broker.addresses)
    with stream(f"{console.url}api/events") as events:
        for name, told in events:
            if name == "catalog" and told["loaded"]:
                break
        broker.stop()
        for name, told in events:
            if name == "catalog" and told["error"]:
                break
        assert told["loaded"]
        assert told["seen_ms"]

    assert [one["name"] for one in listed(console, "topics")["rows"]] == ["orders"]


def test_a_plain_broker_is_shown_with_its_topics(make_console: MakeConsole, broker: Broker) -> None:
    """No log service there: the broker's own word is enough."""
    console = make_console(broker.addresses)

    with stream(f"{console.url}api/events"):
        wait_until(lambda: [one["name"] for one in listed(console, "topics")["rows"]] == ["orders"], "its topic")
    assert state(console)["group"]["kind"] == "broker"


def test_a_console_that_cannot_listen_says_so() -> None:
    """A port that is taken, in words."""
    from dledger_cli.targets import BrokerTarget, GroupTarget

    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = ListenAddress(port=taken.getsockname()[1])
        server = ConsoleServer(GroupTarget(("127.0.0.1:1",), "", 1.0), BrokerTarget(("127.0.0.1:1",), 1.0), place=place)
        with pytest.raises(ConfigError, match="cannot listen"):
            server.start()
        server.stop()
