"""What the console changes at brokers: over HTTP, at a whole broker in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cluster.broker_target import BrokerTarget
from cluster.connection import GroupTarget
from cluster.console import app
from cluster.console.changes import BODY_BYTES_MAX, BrokerChange
from cluster.console.control import NoControl
from cluster.console.server import ConsoleServer, ListenAddress
from cluster.security_options import CommandSecurity
from dledger.client.security import ClientSecurity
from dledger.config import AccessConfig
from rocketstore.broker.server import BrokerServer
from rocketstore.client import Admin, GroupConsumer, GroupOptions, Producer, TopicInfo
from rocketstore.client.errors import NotFoundError
from rocketstore.message.message import Message
from rocketstore.remoting.frame import encode
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.cluster.console.support import Reply, request
from tests.unit.rocketstore.broker.test_server import plain
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN

RULES = """accounts:
- accessKey: root
  secretKey: root-secret
  admin: true
- accessKey: alice
  secretKey: alice-secret
  defaultTopicPerm: SUB
  defaultGroupPerm: SUB
"""


@dataclass
class Desk:
    """A console, and an administrator's client for what it is about."""

    console: ConsoleServer
    admin: Admin
    address: str

    @property
    def session(self) -> dict[str, Any]:
        return request(f"{self.console.url}api/session").json()

    def do(self, change: str, **fields: object) -> Reply:
        """As the page asks for it."""
        return self.post(change, fields)

    def post(self, change: str, body: object, **headers: str) -> Reply:
        sent = {"x-csrf-token": self.session["csrf"], "content-type": "application/json"}
        sent |= {name.replace("_", "-"): text for name, text in headers.items()}
        return request(f"{self.console.url}api/do/{change}", method="POST", headers=sent, body=body)

    def get(self, path: str) -> dict[str, Any]:
        reply = request(f"{self.console.url}api/{path}")
        assert reply.status == 200, reply.body
        return reply.json()

    def events(self) -> list[tuple[str, str]]:
        """What happened: kinds and words."""
        return [(one["kind"], one["text"]) for one in self.get("state")["events"]]

    def topic(self, name: str, queues: int = 2, messages: Mapping[int, int] | None = None) -> None:
        """Create it, if it is not there, with so many messages in each queue."""
        self.admin.put_topic(TopicInfo(name, queues, queues))
        with Producer([self.address], timeout_s=20) as producer:
            for queue_id, count in (messages or {}).items():
                for number in range(self._end(name, queue_id), count):
                    producer.send(Message(name, b"%d" % number), queue_id=queue_id)
        wait_until(lambda: all(self._end(name, one) == count for one, count in (messages or {}).items()), "dispatch")

    def _end(self, topic: str, queue_id: int) -> int:
        return self.admin.queue_range(topic, queue_id).max_offset


def console_at(address: str, security: CommandSecurity | None = None, **options: Any) -> ConsoleServer:  # noqa: ANN401
    target = GroupTarget((address,), "", 20.0)
    brokers = BrokerTarget(target.bootstrap, 20.0)
    if security is not None:
        target, brokers = replace(target, security=security), replace(brokers, security=security)
    return ConsoleServer(target, brokers, place=ListenAddress(port=0), **options)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerServer]:
    server = BrokerServer(plain(tmp_path_factory.mktemp("broker"))).start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def desk(broker: BrokerServer) -> Iterator[Desk]:
    """A console of its own: the number of changes is limited."""
    address = f"127.0.0.1:{broker.port}"
    with Admin([address], timeout_s=20) as admin, console_at(address) as console:
        yield Desk(console, admin, address)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker with access control; ``T`` has two queues."""
    root = tmp_path_factory.mktemp("guarded")
    rules = root / "plain_acl.yml"
    rules.write_text(RULES)
    rules.chmod(0o600)
    server = BrokerServer(replace(plain(root), access=AccessConfig(acl_enable=True, acl_file=rules))).start()
    try:
        address = f"127.0.0.1:{server.port}"
        with Admin(
            [address], timeout_s=20, security=ClientSecurity(access_key="root", secret_key="root-secret")
        ) as admin:
            admin.put_topic(TopicInfo("T", 2, 2))
        yield address
    finally:
        server.stop()


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_message_is_sent_with_all_that_the_form_has(desk: Desk) -> None:
    """It is stored in the queue that was chosen, and the answer and the event say where."""
    desk.topic("sent")

    reply = desk.do("send", topic="sent", body="hello ☕\n", tags="new", keys=" order-1  order-2 ", queue=1)

    found = reply.json()
    assert (reply.status, found["queue"], found["offset"]) == (200, 1, 0)
    stored = desk.admin.message_by_id(str(found["message_id"]))
    assert (stored.body, stored.tags, stored.keys) == ("hello ☕\n".encode(), "new", ["order-1", "order-2"])
    assert stored.unique_key == found["unique_key"]
    assert ("action", found["message"]) in desk.events()


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"topic": ""}, "topic", "topic is missing"),
        ({"topic": "a b"}, "topic", "characters other than"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "topic", "reserved for the broker"),
        ({"topic": 7}, "topic", "must be a text"),
        ({"queue": 2}, "queue", "has 2 queues, numbered from 0"),
        ({"queue": -1}, "queue", "whole number from 0 to 1,023"),
        ({"queue": True}, "queue", "whole number"),
        ({"queue": 1.0}, "queue", "whole number"),
        ({"delay_level": 19}, "delay_level", "from 0 to 18"),
        ({"tags": "a\x01b"}, "tags", "control characters"),
        ({"tags": "t" * 257}, "tags", "at most 256"),
        ({"keys": "k" * 1025}, "keys", "at most 1,024"),
        ({"body": "é" * (BODY_BYTES_MAX // 2 + 1)}, "body", "can be sent here"),
        ({"body": "\ud800"}, "body", "half a character"),
        ({"bodies": ["x"]}, "", "unknown field 'bodies'"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_sent(desk: Desk, fields: dict[str, object], field: str, words: str) -> None:
    """The page shows the words beside it. What was never tried is no event."""
    desk.topic("strict")

    asked = json.dumps({"topic": "strict", "body": "x", **fields}, ensure_ascii="\ud800" in fields.values())
    reply = desk.post("send", asked.encode())

    assert reply.status == 400
    assert words in str(reply.json()["error"])
    assert reply.json().get("field", "") == field
    assert [one.max_offset for one in desk.admin.queue_ranges("strict")] == [0, 0]
    assert not [text for kind, text in desk.events() if kind in ("action", "refused")]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"send"', b"[" * 2000, b"\xff"])
def test_what_is_no_object_is_refused(desk: Desk, body: bytes) -> None:
    """However it is broken."""
    reply = desk.post("send", body)

    assert (reply.status, reply.json()["error"]) == (400, "the body must be a JSON object")


@pytest.mark.parametrize("change", list(BrokerChange))
def test_requests_are_bounded(desk: Desk, change: BrokerChange) -> None:
    """Nothing longer than its kind needs is read to its end."""
    reply = desk.post(change, b'{"x": "' + b"x" * change.bytes_max + b'"}')

    assert (reply.status, reply.json()["error"]) == (413, f"the request is longer than {change.bytes_max:,} bytes")


def test_a_delayed_message_waits_and_is_listed(desk: Desk) -> None:
    """By its level: how many, when the next one is due, and which topic and queue each is for."""
    desk.topic("later", 1)
    before = desk.get("delayed?level=17&offset=-1")["levels"][16]
    sent = desk.do("send", topic="later", body="tea", keys="k", delay_level=17).json()

    def count() -> int:
        return int(desk.get("delayed?level=17&offset=-1")["levels"][16]["count"])

    wait_until(lambda: count() > before["count"], "it waits")
    found = desk.get("delayed?level=17&offset=-1")
    (one,) = [one for one in found["messages"] if one["unique_key"] == sent["unique_key"]]
    assert (one["to_topic"], one["to_queue"], one["preview"]["text"], one["keys"]) == ("later", "0", "tea", "k")
    assert one["due_ms"] == one["stored_ms"] + 3_600_000 == found["levels"][16]["next_due_ms"]
    assert [one["level"] for one in found["levels"]] == list(range(1, 19))
    assert sent["delay_level"] == 17
    assert request(f"{desk.console.url}api/delayed?level=19&offset=-1").status == 400


# --- topics ----------------------------------------------------------------------------------------------------------


def test_topics_are_created_once_and_changed_later(desk: Desk) -> None:
    """Creating one that exists is a mistake in its name; changing one that does not, too."""
    shape = {"read_queues": 4, "write_queues": 3, "permission": "r"}

    missing = desk.do("put-topic", name="made", **shape)
    created = desk.do("put-topic", name="made", create=True, **shape)
    again = desk.do("put-topic", name="made", create=True, **shape)
    changed = desk.do("put-topic", name="made", read_queues=5, write_queues=5, permission="none")

    assert missing.status == 404
    assert created.json()["message"] == "created topic made: 3 write queues, 4 read queues, r"
    assert (again.status, again.json()["field"]) == (400, "name")
    assert changed.status == 200
    assert desk.admin.topic("made") == TopicInfo("made", 5, 5, 0)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"read_queues": 0}, "read_queues"),
        ({"write_queues": 1025}, "write_queues"),
        ({"write_queues": None}, "write_queues"),
        ({"permission": "x"}, "permission"),
        ({"permission": ["r"]}, "permission"),
        ({"create": "yes"}, "create"),
        ({"name": "n" * 128}, "name"),
        ({"name": "BROKER_STATE_TOPIC_XXXX\n"}, "name"),
    ],
)
def test_a_wrong_shape_of_a_topic_is_refused(desk: Desk, fields: dict[str, object], field: str) -> None:
    """Before anything is done."""
    before = desk.admin.topics()

    usual = {"name": "shape", "create": True, "read_queues": 1, "write_queues": 1, "permission": "rw"}
    reply = desk.do("put-topic", **{**usual, **fields})

    assert (reply.status, reply.json()["field"]) == (400, field)
    assert desk.admin.topics() == before


def test_shrinking_a_topic_is_asked_about_first(desk: Desk) -> None:
    """The question names the queues and counts their messages; nothing changes before the answer."""
    desk.topic("shrunk", 3, {0: 1, 2: 2})
    fewer: dict[str, Any] = {"name": "shrunk", "read_queues": 2, "write_queues": 1, "permission": "rw"}

    asked = desk.do("put-topic", **fewer)
    kept = desk.admin.topic("shrunk")
    done = desk.do("put-topic", **fewer, confirmed=True)

    assert (asked.json()["ok"], kept) == (False, TopicInfo("shrunk", 3, 3))
    assert asked.json()["confirm"] == {
        "title": "Shrink topic shrunk?",
        "text": "Queues 1 to 2 get no new messages any more. Queue 2 cannot be read any more, with 2 messages in it, "
        "consumed or not.",
        "yes": "Shrink shrunk",
    }
    assert done.status == 200
    assert desk.admin.topic("shrunk") == TopicInfo("shrunk", 2, 1)


def test_deleting_a_topic_is_asked_about_first(desk: Desk) -> None:
    """The question says how many messages and whose offsets would be lost."""
    desk.topic("dropped", 2, {0: 2, 1: 1})
    desk.admin.set_offsets("of-dropped", "dropped", {0: 1})

    asked = desk.do("delete-topic", name="dropped")
    kept = desk.admin.topic("dropped")
    done = desk.do("delete-topic", name="dropped", confirmed=True)

    assert kept.name == "dropped"
    assert asked.json()["confirm"] == {
        "title": "Delete topic dropped and its messages?",
        "text": "Its 3 messages can no longer be read. of-dropped loses its offsets in it.",
        "yes": "Delete dropped",
    }
    assert (done.status, desk.do("delete-topic", name="dropped").status) == (200, 404)
    assert ("action", "deleted topic dropped") in desk.events()
    with pytest.raises(NotFoundError):
        desk.admin.topic("dropped")


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_reset_shows_first_what_it_would_do(desk: Desk) -> None:
    """From where to where in every queue; looking changes nothing, and what was shown is what is done."""
    desk.topic("turned", 2, {0: 3, 1: 2})
    desk.admin.set_offsets("turner", "turned", {0: 3})

    plan = desk.get("reset-plan?group=turner&topic=turned&to=first")
    before = desk.admin.offsets("turner")
    done = desk.do("reset-offsets", group="turner", topic="turned", places={"0": 0, "1": 0})

    assert [(one["queue"], one["from"], one["to"]) for one in plan["rows"]] == [(0, 3, 0), (1, -1, 0)]
    assert plan["members"] == 0
    assert before == {("turned", 0): 3}
    assert done.json()["message"] == "reset turner in turned: queue 0 to 0, queue 1 to 0"
    assert desk.admin.offsets("turner") == {("turned", 0): 0, ("turned", 1): 0}


def test_a_reset_goes_to_the_end_and_to_a_time(desk: Desk) -> None:
    """The end skips what is there; a time begins with the first message stored then or later, or with the last one."""
    desk.topic("timed", 1, {0: 2})
    begin = desk.admin.messages("timed", 0, 0)[0][0].store_timestamp

    last = desk.get("reset-plan?group=timer&topic=timed&to=last")["rows"]
    of_begin = desk.get(f"reset-plan?group=timer&topic=timed&to={begin}")["rows"]
    of_now = desk.get(f"reset-plan?group=timer&topic=timed&to={int(time.time() * 1000) + 60_000}")["rows"]

    assert [rows[0]["to"] for rows in (last, of_begin, of_now)] == [2, 0, 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"places": {"0": 4}}, "now has offsets 0 to 3, not 4: look again"),
        ({"places": {"0": -1}}, "whole number"),
        ({"places": {"0": 1 << 63}}, "whole number"),
        ({"places": {"2": 0}}, "has 2 read queues: there is no queue 2"),
        ({"places": {"x": 0}}, "whole number"),
        ({"places": {}}, "offsets of 1 to"),
        ({"places": [0]}, "offsets of 1 to"),
        ({"places": {str(one): 0 for one in range(1025)}}, "offsets of 1 to 1,024 queues"),
        ({"group": "a b"}, "the group 'a b' has characters other than"),
        ({"topic": "nowhere"}, "does not exist"),
    ],
)
def test_a_reset_to_nowhere_moves_no_queue(desk: Desk, fields: dict[str, object], words: str) -> None:
    """Not even those queues whose offsets are possible."""
    desk.topic("bounds", 2, {0: 3})

    usual = {"group": "bounded", "topic": "bounds", "places": {"1": 0, "0": 1}}
    reply = desk.do("reset-offsets", **{**usual, **fields})

    assert reply.status in (400, 404)
    assert words in str(reply.json()["error"])
    assert desk.admin.offsets("bounded") == {}


def test_members_are_shown_with_their_queues(desk: Desk) -> None:
    """Who they are, what they subscribe to, how far each queue is behind, and that a reset finds them running."""
    desk.topic("shared", 4, {0: 1})
    options = GroupOptions(start="first", timeout_s=20)
    with GroupConsumer([desk.address], group="team", options=options) as one:
        one.subscribe("shared", "a || b")
        one.start()
        wait_until(lambda: desk.get("members?group=team")["all_members"] == 1, "it is a member")

        found = desk.get("members?group=team")
        everybody = desk.get("clients?first=0&wanted=tea")
        plan = desk.get("reset-plan?group=team&topic=shared&to=last")
        asked = desk.do("delete-group", name="team")

    (member,) = found["members"]
    assert member["language"] == "python"
    assert member["address"].startswith("127.0.0.1:")
    assert found["subscriptions"] == ["%RETRY%team", "shared (a || b)"]
    rows = [one for one in found["rows"] if one["topic"] == "shared"]
    assert [(one["queue"], one["member"], one["lag"]) for one in rows] == [
        (number, member["id"], int(number == 0)) for number in range(4)
    ]
    assert [(one["group"], one["id"], one["topics"]) for one in everybody["consumers"]] == [
        ("team", member["id"], ["shared (a || b)"])
    ]
    assert desk.get("clients?first=0&wanted=nobody")["consumers"] == []
    assert plan["members"] == 1
    assert "1 consumer is connected. Stop its consumers first" in str(asked.json()["confirm"])


def test_queues_are_shown_at_the_members_that_have_them(desk: Desk) -> None:
    """As the members themselves divide them."""
    desk.topic("divided", 5)
    options = GroupOptions(start="first", timeout_s=20)
    with ExitStack() as stack:
        members = [stack.enter_context(GroupConsumer([desk.address], group="pair", options=options)) for _ in range(2)]
        for one in members:
            one.subscribe("divided")
            one.start()

        def own(one: GroupConsumer) -> set[int]:
            return {queue.queue_id for queue in one.queues if queue.topic == "divided"}

        wait_until(lambda: sorted(len(own(one)) for one in members) == [2, 3], "they share the queues")

        found = desk.get("members?group=pair")

        rows = [(one["queue"], one["member"]) for one in found["rows"] if one["topic"] == "divided"]
        shown = {one["id"]: {queue for queue, member in rows if member == one["id"]} for one in found["members"]}
        assert shown == {one.client_id: own(one) for one in members}


def test_rocketmqs_clients_are_listed_with_their_versions(desk: Desk, broker: BrokerServer) -> None:
    """A Java client's own heartbeat (F18): it is a consumer and a producer."""
    beat = GOLDEN["F18"].frame
    with RemotingSocket(broker.port) as java:
        java.socket.sendall(encode(beat))
        assert java.answer_to(beat.opaque).code == 0

        found = desk.get("clients?first=0&wanted=ProbePush")
        producers = desk.get("clients?first=0&wanted=CLIENT_INNER")["producers"]

    (consumer,) = found["consumers"]
    assert (consumer["group"], consumer["language"], consumer["version"]) == ("ProbePush", "java", "4.9.8")
    assert consumer["topics"] == ["ProbeTopic (TagA || TagB || TagD)"]
    assert [(one["group"], one["id"]) for one in producers] == [("CLIENT_INNER_PRODUCER", consumer["id"])]


def test_deleting_a_group_is_asked_about_first(desk: Desk) -> None:
    """The question names the topics in which it has offsets."""
    desk.topic("read", 1)
    desk.admin.set_offsets("reader", "read", {0: 0})

    asked = desk.do("delete-group", name="reader")
    kept = desk.admin.offsets("reader")
    done = desk.do("delete-group", name="reader", confirmed=True)

    assert (asked.json()["ok"], kept) == (False, {("read", 0): 0})
    words = "Its offsets in read are lost. Stop its consumers first, or their next commit creates it again."
    assert asked.json()["confirm"]["text"] == words  # type: ignore[index]  # JSON
    assert (done.status, desk.admin.offsets("reader")) == (200, {})
    assert desk.do("delete-group", name="reader").status == 404


def test_a_dead_letter_is_shown_and_sent_again_once(desk: Desk) -> None:
    """It stays a dead letter; its copy is for this group only, and carries the same body."""
    desk.topic("mail", 1, {0: 1})
    assert desk.get("dead-letters?group=post&before=-1")["messages"] == []
    letter = desk.admin.messages("mail", 0, 0)[0][0].decode()
    desk.admin.send_back("post", "mail", letter.offset, delay_level=-1, retries_max=0)
    wait_until(lambda: desk.get("dead-letters?group=post&before=-1")["max_offset"] == 1, "it is dead")

    (dead,) = desk.get("dead-letters?group=post&before=-1")["messages"]
    done = desk.do("resend", group="post", offset=0)

    desk.admin.set_offsets("post", "mail", {0: 1})
    assert desk.get("group?name=post")["dead_letters"] == 1
    assert (dead["origin"], dead["offset"], dead["deliveries"], dead["preview"]["text"]) == ("mail", 0, 1, "0")
    assert done.json()["message"] == "dead letter 0 of post goes to its consumers again, once"
    wait_until(lambda: "%RETRY%post" in {one.name for one in desk.admin.topics()}, "the retry topic")
    wait_until(lambda: desk.admin.queue_range("%RETRY%post", 0).max_offset == 1, "the copy, after a second")
    copy = desk.admin.messages("%RETRY%post", 0, 0)[0][0].decode()
    assert (copy.body, copy.properties["RETRY_TOPIC"]) == (b"0", "mail")
    assert len(desk.get("dead-letters?group=post&before=-1")["messages"]) == 1
    assert desk.do("resend", group="post", offset=1).status == 404


def test_dead_letters_come_in_pages_newest_first(desk: Desk) -> None:
    """Each page ends where the next one begins."""
    desk.topic("bulk", 1, {0: 25})
    for letter in desk.admin.messages("bulk", 0, 0, max_messages=25)[0]:
        position = letter.decode().offset
        desk.admin.send_back("bulky", "bulk", position, delay_level=-1, retries_max=0)
    wait_until(lambda: desk.get("dead-letters?group=bulky&before=-1")["max_offset"] == 25, "all are dead")

    newest = desk.get("dead-letters?group=bulky&before=-1")
    older = desk.get(f"dead-letters?group=bulky&before={newest['first']}")

    assert [one["offset"] for one in newest["messages"]] == list(range(24, 4, -1))
    assert [one["offset"] for one in older["messages"]] == [4, 3, 2, 1, 0]


# --- who may ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", list(BrokerChange))
def test_a_read_only_console_changes_nothing(broker: BrokerServer, change: BrokerChange) -> None:
    """Nor does it offer to."""
    address = f"127.0.0.1:{broker.port}"
    with Admin([address], timeout_s=20) as admin, console_at(address, control=NoControl()) as console:
        desk = Desk(console, admin, address)

        reply = desk.do(change, name="x", confirmed=True)

        assert (reply.status, reply.json()["error"]) == (
            403,
            "this console is read-only: it was started with --read-only",
        )
        assert desk.session["actions"] == []


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"x_csrf_token": "guessed"}, "x-csrf-token"),
        ({"origin": "http://evil.example"}, "another site"),
        ({"sec_fetch_site": "cross-site"}, "another site"),
    ],
)
def test_other_sites_change_nothing(desk: Desk, headers: dict[str, str], words: str) -> None:
    """Without the token that only the page knows, or with a foreign origin."""
    desk.topic("safe")

    reply = desk.post("delete-topic", {"name": "safe", "confirmed": True}, **headers)

    assert reply.status == 403
    assert words in str(reply.json()["error"])
    assert desk.admin.topic("safe").name == "safe"


@pytest.mark.parametrize(
    ("change", "fields", "words"),
    [
        ("send", {"topic": "T", "body": "x"}, "needs PUB on topic T"),
        (
            "put-topic",
            {"name": "T", "read_queues": 4, "write_queues": 4, "permission": "rw"},
            "PutTopic requires an account with admin: true",
        ),
        ("delete-topic", {"name": "T", "confirmed": True}, "DeleteTopic requires an account with admin: true"),
        ("delete-group", {"name": "g", "confirmed": True}, "DeleteGroup requires an account with admin: true"),
    ],
)
def test_the_brokers_refuse_what_the_consoles_account_may_not(
    guarded: str, change: str, fields: dict[str, Any], words: str
) -> None:
    """In their words; and that it was tried is an event."""
    alice = CommandSecurity(access_key="alice", secret_key="alice-secret")
    root = ClientSecurity(access_key="root", secret_key="root-secret")
    with Admin([guarded], timeout_s=20, security=root) as admin, console_at(guarded, alice) as console:
        desk = Desk(console, admin, guarded)

        reply = desk.do(change, **fields)

        assert reply.status == 403
        assert words in str(reply.json()["error"])
        assert [text for kind, text in desk.events() if kind == "refused" and words in text]
        assert admin.topic("T") == TopicInfo("T", 2, 2)


def test_lists_of_clients_need_the_same_rights_as_elsewhere(guarded: str) -> None:
    """Delayed messages of all topics are for administrators; a signed request lists a group's members."""
    alice = CommandSecurity(access_key="alice", secret_key="alice-secret")
    root = ClientSecurity(access_key="root", secret_key="root-secret")
    with Admin([guarded], timeout_s=20, security=root) as admin, console_at(guarded, alice) as console:
        desk = Desk(console, admin, guarded)

        refused = request(f"{console.url}api/delayed?level=0&offset=-1")

        assert refused.status == 403
        assert "Delayed requires an account with admin: true" in str(refused.json()["error"])
        assert desk.get("members?group=g")["members"] == []


def test_an_unknown_action_is_not_found(desk: Desk) -> None:
    """And there is no other way to ask for one."""
    assert desk.do("format-disk").status == 404


def test_changes_are_limited_in_number(broker: BrokerServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that goes wild, or another that has the token, is slowed down. What is no request does not count."""
    monkeypatch.setattr(app, "CHANGES_MAX", 2)
    monkeypatch.setattr(app, "CHANGES_S", 3600.0)
    address = f"127.0.0.1:{broker.port}"
    with Admin([address], timeout_s=20) as admin, console_at(address) as console:
        desk = Desk(console, admin, address)

        asked = (b"{", b'{"name": "none"}', b'{"name": "a b"}', b'{"name": "none"}')
        statuses = [desk.post("delete-topic", one).status for one in asked]

        assert statuses == [400, 404, 400, 429]
