"""Who may change something with the console, how often, and what becomes of a change that fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dledger.errors import UnavailableError
from dledger_cli.console import app
from dledger_cli.console.catalog import Catalog
from dledger_cli.console.changes import BrokerChange, BrokerChanges, Done
from dledger_cli.console.control import NoControl
from dledger_cli.targets import CommandSecurity
from rocketstore.client import TopicInfo
from tests.unit.dledger_cli.console.group_pages import Broker, GroupPage, group_page_at, guarded_broker, plain_broker
from tests.unit.dledger_cli.console.support import request

ADMIN_ONLY = "requires an account with admin: true"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with plain_broker(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture
def group_page(broker: Broker) -> Iterator[GroupPage]:
    with group_page_at(broker) as made:
        yield made


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with guarded_broker(tmp_path_factory.mktemp("guarded")) as server:
        yield server


@pytest.mark.parametrize("change", list(BrokerChange))
def test_a_read_only_console_changes_nothing(broker: Broker, change: BrokerChange) -> None:
    """Nor does it offer to."""
    with group_page_at(broker, control=NoControl()) as group_page:
        reply = group_page.do(change, name="x", confirmed=True)

        assert (reply.status, reply.json()["error"]) == (
            403,
            "this console is read-only: it was started with --read-only",
        )
        assert group_page.session["actions"] == []


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"x_csrf_token": "guessed"}, "x-csrf-token"),
        ({"origin": "http://evil.example"}, "another site"),
        ({"sec_fetch_site": "cross-site"}, "another site"),
    ],
)
def test_other_sites_change_nothing(group_page: GroupPage, headers: dict[str, str], words: str) -> None:
    """Without the token that only the page knows, or with a foreign origin."""
    group_page.topic("safe")

    reply = group_page.post("delete-topic", {"name": "safe", "confirmed": True}, **headers)

    assert reply.status == 403
    assert words in str(reply.json()["error"])
    assert group_page.broker.about("safe").name == "safe"


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        ("send", {"topic": "T", "body": "x"}, "needs PUB on topic T"),
        (
            "put-topic",
            {"name": "T", "read_queues": 4, "write_queues": 4, "permission": "rw"},
            f"UPDATE_AND_CREATE_TOPIC {ADMIN_ONLY}",
        ),
        (
            "delete-topic",
            {"name": "T", "confirmed": True},
            f"DELETE_TOPIC_IN_BROKER {ADMIN_ONLY}",
        ),
        (
            "delete-group",
            {"name": "g", "confirmed": True},
            f"DELETE_SUBSCRIPTIONGROUP {ADMIN_ONLY}",
        ),
    ],
)
def test_the_brokers_refuse_what_the_consoles_account_may_not(
    guarded: Broker, change: str, fields: dict[str, Any], words: str
) -> None:
    """In their words; and that it was tried is an event."""
    alice = CommandSecurity(access_key="alice", secret_key="alice-secret")
    with group_page_at(guarded, alice) as group_page:
        reply = group_page.do(change, **fields)

        assert reply.status == 403
        assert words in str(reply.json()["error"])
        assert [text for kind, text in group_page.events() if kind == "refused" and words in text]
        assert group_page.broker.about("T") == TopicInfo("T", 2, 2)


def test_lists_of_clients_need_the_same_rights_as_elsewhere(guarded: Broker) -> None:
    """Delayed messages of all topics are for administrators; a signed request lists a group's members."""
    alice = CommandSecurity(access_key="alice", secret_key="alice-secret")
    with group_page_at(guarded, alice) as group_page:
        refused = request(f"{group_page.console.url}api/delayed?level=0&offset=-1")

        assert refused.status == 403
        assert "requires an account with admin: true" in str(refused.json()["error"])
        assert group_page.get("members?group=g")["members"] == []


def test_an_unknown_action_is_not_found(group_page: GroupPage) -> None:
    """And there is no other way to ask for one."""
    assert group_page.do("format-disk").status == 404


def test_changes_that_fail_leave_room_for_others(group_page: GroupPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many; what a broker says of them is shown as it is."""

    def fail(*_: object) -> Done:
        raise UnavailableError("no broker answers\u202e")

    with monkeypatch.context() as failing:
        failing.setattr(BrokerChanges, "carry_out", fail)
        assert {group_page.do("delete-topic", name="none").status for _ in range(2 * app.LOOKUPS_MAX)} == {502}

    assert group_page.do("delete-topic", name="none").status == 404
    assert ("refused", "delete topic: no broker answers\\u202e") in group_page.events()


def test_what_was_changed_is_looked_at_anew(group_page: GroupPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lists are looked at rarely otherwise; what was refused or asked about changed nothing."""
    nudges: list[None] = []
    monkeypatch.setattr(Catalog, "nudge", lambda _: nudges.append(None))
    group_page.topic("renewed")

    assert group_page.do("delete-topic", name="none").status == 404
    assert group_page.do("delete-topic", name="renewed").json()["ok"] is False
    assert nudges == []
    assert group_page.do("delete-topic", name="renewed", confirmed=True).status == 200
    assert nudges == [None]


def test_changes_are_limited_in_number(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that goes wild, or another that has the token, is slowed down. What is no request does not count."""
    monkeypatch.setattr(app, "CHANGES_MAX", 2)
    monkeypatch.setattr(app, "CHANGES_S", 3600.0)
    with group_page_at(broker) as group_page:
        asked = (b"{", b'{"name": "none"}', b'{"name": "a b"}', b'{"name": "none"}')
        statuses = [group_page.post("delete-topic", one).status for one in asked]

        assert statuses == [400, 404, 400, 429]
