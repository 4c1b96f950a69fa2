"""What the console changes at brokers: over HTTP, at a whole broker in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from dledger.remoting.frame import encode
from dledger_cli.console import changes
from dledger_cli.console.changes import BODY_BYTES_MAX, BrokerChange, BrokerChanges, ClientLists
from dledger_cli.console.listing import Fields
from dledger_cli.targets import BrokerTarget
from rocketstore.client import Admin, Consumer, Message, MessageQueue, NotFoundError, TopicInfo
from tests.support.remoting import RemotingSocket
from tests.support.waiting import wait_until
from tests.unit.dledger_cli.console.group_pages import Broker, GroupPage, group_page_at, plain_broker
from tests.unit.dledger_cli.console.support import request
from tests.unit.rocketstore.remoting.golden_frames import GOLDEN


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with plain_broker(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture
def group_page(broker: Broker) -> Iterator[GroupPage]:
    with group_page_at(broker) as made:
        yield made


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_message_is_sent_with_all_that_the_form_has(group_page: GroupPage) -> None:
    """It is stored in the queue that was chosen, and the answer and the event say where."""
    group_page.topic("sent")

    reply = group_page.do("send", topic="sent", body="hello ☕\n", tags="new", keys=" order-1  order-2 ", queue=1)

    found = reply.json()
    assert (reply.status, found["queue"], found["offset"]) == (200, 1, 0)
    stored = group_page.admin.message_by_id(str(found["offset_message_id"]))
    assert (stored.body, stored.tags, stored.keys) == ("hello ☕\n".encode(), "new", ["order-1", "order-2"])
    assert stored.unique_key == found["message_id"]
    assert ("action", found["message"]) in group_page.events()


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
def test_a_wrong_field_is_named_and_nothing_sent(
    group_page: GroupPage, fields: dict[str, object], field: str, words: str
) -> None:
    """The page shows the words beside it. What was never tried is no event."""
    group_page.topic("strict")

    asked = json.dumps({"topic": "strict", "body": "x", **fields}, ensure_ascii="\ud800" in fields.values())
    reply = group_page.post("send", asked.encode())

    assert reply.status == 400
    assert words in str(reply.json()["error"])
    assert reply.json().get("field", "") == field
    assert [one.max_offset for one in group_page.admin.queue_ranges("strict")] == [0, 0]
    assert not [text for kind, text in group_page.events() if kind in ("action", "refused")]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"send"', b"[" * 2000, b"\xff"])
def test_what_is_no_object_is_refused(group_page: GroupPage, body: bytes) -> None:
    """However it is broken."""
    reply = group_page.post("send", body)

    assert (reply.status, reply.json()["error"]) == (400, "the body must be a JSON object")


@pytest.mark.parametrize("change", list(BrokerChange))
def test_requests_are_bounded(group_page: GroupPage, change: BrokerChange) -> None:
    """Nothing longer than its kind needs is read to its end."""
    reply = group_page.post(change, b'{"x": "' + b"x" * change.bytes_max + b'"}')

    assert (reply.status, reply.json()["error"]) == (413, f"the request is longer than {change.bytes_max:,} bytes")


def test_a_delayed_message_waits_and_is_listed(group_page: GroupPage) -> None:
    """By its level: how many, when the next one is due, and which topic and queue each is for."""
    group_page.topic("later", 1)
    before = group_page.get("delayed?level=17&offset=-1")["levels"][16]
    sent = group_page.do("send", topic="later", body="tea", keys="k", delay_level=17).json()

    def count() -> int:
        return int(group_page.get("delayed?level=17&offset=-1")["levels"][16]["count"])

    wait_until(lambda: count() > before["count"], "it waits")
    found = group_page.get("delayed?level=17&offset=-1")
    (one,) = [one for one in found["messages"] if one["message_id"] == sent["message_id"]]
    assert (one["to_topic"], one["to_queue"], one["preview"]["text"], one["keys"]) == ("later", "0", "tea", "k")
    assert one["due_ms"] == one["stored_ms"] + 3_600_000 == found["levels"][16]["next_due_ms"]
    assert [one["level"] for one in found["levels"]] == list(range(1, 19))
    assert sent["delay_level"] == 17
    assert request(f"{group_page.console.url}api/delayed?level=19&offset=-1").status == 404


# --- topics ----------------------------------------------------------------------------------------------------------


def test_topics_are_created_once_and_changed_later(group_page: GroupPage) -> None:
    """Creating one that exists is a mistake in its name; changing one that does not, too."""
    shape = {"read_queues": 4, "write_queues": 3, "permission": "r"}

    missing = group_page.do("put-topic", name="made", **shape)
    created = group_page.do("put-topic", name="made", create=True, **shape)
    again = group_page.do("put-topic", name="made", create=True, **shape)
    changed = group_page.do("put-topic", name="made", read_queues=5, write_queues=5, permission="none")

    assert missing.status == 404
    assert created.json()["message"] == "created topic made: 3 write queues, 4 read queues, r"
    assert (again.status, again.json()["field"]) == (400, "name")
    assert changed.status == 200
    assert group_page.broker.about("made") == TopicInfo("made", 5, 5, 0)


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
def test_a_wrong_shape_of_a_topic_is_refused(group_page: GroupPage, fields: dict[str, object], field: str) -> None:
    """Before anything is done."""
    before = group_page.admin.topics()

    usual = {"name": "shape", "create": True, "read_queues": 1, "write_queues": 1, "permission": "rw"}
    reply = group_page.do("put-topic", **{**usual, **fields})

    assert (reply.status, reply.json()["field"]) == (400, field)
    assert group_page.admin.topics() == before


@pytest.mark.parametrize(("word", "permission"), [("rw", 6), ("r", 4), ("w", 2), ("none", 0)])
def test_a_topic_gets_the_permission_of_the_form(group_page: GroupPage, word: str, permission: int) -> None:
    """As RocketMQ numbers them: 4 to read and 2 to write."""
    group_page.topic("permitted")

    done = group_page.do("put-topic", name="permitted", read_queues=2, write_queues=2, permission=word)

    assert (done.status, group_page.broker.about("permitted").permission) == (200, permission)


def test_shrinking_a_topic_is_asked_about_first(group_page: GroupPage) -> None:
    """The question names the queues and counts their messages; nothing changes before the answer."""
    group_page.topic("shrunk", 3, {0: 1, 1: 1, 2: 2})
    fewer: dict[str, Any] = {"name": "shrunk", "read_queues": 2, "write_queues": 1, "permission": "rw"}

    asked = group_page.do("put-topic", **fewer)
    kept = group_page.broker.about("shrunk")
    done = group_page.do("put-topic", **fewer, confirmed=True)

    assert (asked.json()["ok"], kept) == (False, TopicInfo("shrunk", 3, 3))
    assert asked.json()["confirm"] == {
        "title": "Shrink topic shrunk?",
        "text": "Queues 1 to 2 get no new messages any more. Queue 2 cannot be read any more, with 2 messages in it, "
        "consumed or not.",
        "yes": "Shrink shrunk",
    }
    assert done.status == 200
    assert group_page.broker.about("shrunk") == TopicInfo("shrunk", 2, 1)


def test_deleting_a_topic_is_asked_about_first(group_page: GroupPage) -> None:
    """The question says how many messages and whose offsets would be lost."""
    group_page.topic("dropped", 2, {0: 2, 1: 1})
    group_page.broker.commit("of-dropped", "dropped", 0, 1)

    asked = group_page.do("delete-topic", name="dropped")
    kept = group_page.broker.about("dropped")
    done = group_page.do("delete-topic", name="dropped", confirmed=True)

    assert kept.name == "dropped"
    assert asked.json()["confirm"] == {
        "title": "Delete topic dropped and its messages?",
        "text": "Its 3 messages can no longer be read. of-dropped loses its offsets in it.",
        "yes": "Delete dropped",
    }
    assert (done.status, group_page.do("delete-topic", name="dropped").status) == (200, 404)
    assert ("action", "deleted topic dropped") in group_page.events()
    assert "dropped" not in {one.name for one in group_page.admin.topics()}


@pytest.mark.parametrize(
    "shape", [TopicInfo("shrinks", 3, 1), TopicInfo("grows", 1, 3), TopicInfo("write-only", 3, 3, 2)], ids=str
)
def test_deleting_a_topic_counts_what_is_in_all_its_queues(group_page: GroupPage, shape: TopicInfo) -> None:
    """Queues that get no new messages have old ones, those that are not read yet have new ones; or none may be read."""
    group_page.topic(shape.name, 3, {0: 1, 2: 2})
    group_page.admin.put_topic(shape)

    asked: Any = group_page.do("delete-topic", name=shape.name).json()
    opened = group_page.get(f"topic?name={shape.name}")

    assert asked["confirm"]["text"] == "Its 3 messages can no longer be read."
    assert [one["max_offset"] for one in opened["queues"]] == [1, 0, 2]
    assert opened["all_queues"] == 3


# --- groups ----------------------------------------------------------------------------------------------------------


def test_a_reset_shows_first_what_it_would_do(group_page: GroupPage) -> None:
    """From where to where in every queue; looking changes nothing, and what was shown is what is done."""
    group_page.topic("turned", 2, {0: 3, 1: 2})
    group_page.broker.commit("turner", "turned", 0, 3)

    plan = group_page.get("reset-plan?group=turner&topic=turned&to=first")
    before = group_page.broker.offsets("turner")
    done = group_page.do("reset-offsets", group="turner", topic="turned", places={"0": 0, "1": 0})

    assert [(one["queue"], one["from"], one["to"]) for one in plan["rows"]] == [(0, 3, 0), (1, 0, 0)]
    assert plan["members"] == 0
    assert before == {("turned", 0): 3}
    assert done.json()["message"] == "reset turner in turned: queue 0 to 0, queue 1 to 0"
    assert group_page.broker.offsets("turner") == {("turned", 0): 0, ("turned", 1): 0}


def test_a_reset_goes_to_the_end_and_to_a_time(group_page: GroupPage) -> None:
    """The end skips what is there; a time begins with the first message stored then or later, or is the end."""
    group_page.topic("timed", 1, {0: 2})
    begin = group_page.broker.server.store.store_time("timed", 0, 0)

    last = group_page.get("reset-plan?group=timer&topic=timed&to=last")["rows"]
    of_begin = group_page.get(f"reset-plan?group=timer&topic=timed&to={begin}")["rows"]
    of_now = group_page.get(f"reset-plan?group=timer&topic=timed&to={int(time.time() * 1000) + 60_000}")["rows"]

    assert [rows[0]["to"] for rows in (last, of_begin, of_now)] == [2, 0, 2]


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
def test_a_reset_to_nowhere_moves_no_queue(group_page: GroupPage, fields: dict[str, object], words: str) -> None:
    """Not even those queues whose offsets are possible."""
    group_page.topic("bounds", 2, {0: 3})

    usual = {"group": "bounded", "topic": "bounds", "places": {"1": 0, "0": 1}}
    reply = group_page.do("reset-offsets", **{**usual, **fields})

    assert reply.status in (400, 404)
    assert words in str(reply.json()["error"])
    assert group_page.broker.offsets("bounded") == {}


def joined(group_page: GroupPage, group: str, topic: str, tags: str = "*") -> Consumer:
    return Consumer(group_page.address, group=group, topics={topic: tags}, start="first", timeout_s=60)


def test_members_are_shown_with_their_queues(group_page: GroupPage) -> None:
    """Who they are, what they subscribe to, how far each queue is behind, and that a reset finds them running."""
    group_page.topic("shared", 4, {0: 1})
    with joined(group_page, "team", "shared", "a || b"):
        wait_until(lambda: group_page.get("members?group=team")["all_members"] == 1, "it is a member")

        found = group_page.get("members?group=team")
        everybody = group_page.get("clients?first=0&wanted=tea")
        plan = group_page.get("reset-plan?group=team&topic=shared&to=last")
        asked = group_page.do("delete-group", name="team")

    (member,) = found["members"]
    assert member["language"] == "python"
    assert member["address"].startswith("127.0.0.1:")
    assert found["subscriptions"] == ["shared (a || b)"]
    rows = [one for one in found["rows"] if one["topic"] == "shared"]
    assert [(one["queue"], one["member"], one["lag"]) for one in rows] == [
        (number, member["id"], int(number == 0)) for number in range(4)
    ]
    assert [(one["group"], one["id"], one["topics"]) for one in everybody["consumers"]] == [
        ("team", member["id"], ["shared (a || b)"])
    ]
    assert group_page.get("clients?first=0&wanted=nobody")["consumers"] == []
    assert plan["members"] == 1
    assert "1 consumer is connected. Stop its consumers first" in str(asked.json()["confirm"])


def is_joined(group_page: GroupPage, group: str) -> bool:
    return bool(group_page.get(f"members?group={group}")["all_members"] == 1)


def test_clients_come_in_pages_of_groups(group_page: GroupPage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group costs a request, so a page asks about few of many."""
    monkeypatch.setattr(changes, "GROUPS_PER_PAGE", 1)
    group_page.topic("paged", 1)
    with ExitStack() as stack:
        for group in ("paged-a", "paged-b"):
            group_page.broker.commit(group, "paged", 0, 0)
            stack.enter_context(joined(group_page, group, "paged"))

        for group in ("paged-a", "paged-b"):
            wait_until(partial(is_joined, group_page, group), "it is a member")

        pages = [group_page.get(f"clients?first={first}&wanted=paged-") for first in (0, 1, 2)]

    assert [[one["group"] for one in page["consumers"]] for page in pages] == [["paged-a"], ["paged-b"], []]
    assert {(page["groups"], page["per_page"]) for page in pages} == {(2, 1)}


def test_queues_are_shown_at_the_members_that_have_them(group_page: GroupPage) -> None:
    """As the members themselves divide them."""
    group_page.topic("divided", 5)
    with ExitStack() as stack:
        members = [stack.enter_context(joined(group_page, "pair", "divided")) for _ in range(2)]

        def own(one: Consumer) -> set[int]:
            return {queue.queue_id for queue in one.queues if queue.topic == "divided"}

        wait_until(lambda: sorted(len(own(one)) for one in members) == [2, 3], "they share the queues")

        found = group_page.get("members?group=pair")

        rows = [(one["queue"], one["member"]) for one in found["rows"] if one["topic"] == "divided"]
        shown = {one["id"]: {queue for queue, member in rows if member == one["id"]} for one in found["members"]}
        assert shown == {one.client_id: own(one) for one in members}


def test_queues_that_are_only_written_are_nobodys(group_page: GroupPage) -> None:
    """Members divide those that are read."""
    group_page.topic("growing", 4)
    group_page.admin.put_topic(TopicInfo("growing", 2, 4))
    with joined(group_page, "grown", "growing") as one:
        wait_until(partial(is_joined, group_page, "grown"), "it is a member")

        rows = [row for row in group_page.get("members?group=grown")["rows"] if row["topic"] == "growing"]

    assert [(row["queue"], row["member"] == one.client_id) for row in rows] == [
        (0, True),
        (1, True),
        (2, False),
        (3, False),
    ]


def test_rocketmqs_clients_are_listed_with_their_versions(group_page: GroupPage, broker: Broker) -> None:
    """A Java client's own heartbeat (F18): it is a consumer and a producer."""
    beat = GOLDEN["F18"].frame
    with RemotingSocket(broker.server.port) as java:
        java.socket.sendall(encode(beat))
        assert java.answer_to(beat.opaque).code == 0

        found = group_page.get("clients?first=0&wanted=ProbePush")
        producers = group_page.get("clients?first=0&wanted=CLIENT_INNER")["producers"]
        assert group_page.get("clients?first=0&wanted=nobody")["producers"] == []

    (consumer,) = found["consumers"]
    assert (consumer["group"], consumer["language"], consumer["version"]) == ("ProbePush", "java", "4.9.8")
    assert consumer["topics"] == ["ProbeTopic (TagA || TagB || TagD)"]
    assert [(one["group"], one["id"]) for one in producers] == [("CLIENT_INNER_PRODUCER", consumer["id"])]


def test_deleting_a_group_is_asked_about_first(group_page: GroupPage) -> None:
    """The question names the topics in which it has offsets."""
    group_page.topic("read", 1)
    group_page.broker.commit("reader", "read", 0, 0)

    asked = group_page.do("delete-group", name="reader")
    kept = group_page.broker.offsets("reader")
    done = group_page.do("delete-group", name="reader", confirmed=True)

    assert (asked.json()["ok"], kept) == (False, {("read", 0): 0})
    words = (
        "Its offsets in read are lost; what it has to try again and its dead letters are deleted. "
        "Stop its consumers first, or their next commit creates it again."
    )
    assert asked.json()["confirm"]["text"] == words  # type: ignore[index]  # JSON
    assert (done.status, group_page.broker.offsets("reader")) == (200, {})
    assert group_page.do("delete-group", name="reader").status == 404


def test_a_dead_letter_is_shown_and_sent_again_once(group_page: GroupPage) -> None:
    """It stays a dead letter; its copy is for this group only, and carries the same body."""
    group_page.topic("mail", 1, {0: 1})
    assert group_page.get("dead-letters?group=post&before=-1")["messages"] == []
    group_page.broker.bury("post", "mail", 0, 0)
    wait_until(lambda: group_page.get("dead-letters?group=post&before=-1")["max_offset"] == 1, "it is dead")

    (dead,) = group_page.get("dead-letters?group=post&before=-1")["messages"]
    done = group_page.do("resend", group="post", offset=0)

    group_page.broker.commit("post", "mail", 0, 1)
    assert group_page.get("group?name=post")["dead_letters"] == 1
    assert (dead["origin"], dead["offset"], dead["deliveries"], dead["preview"]["text"]) == ("mail", 0, 1, "0")
    assert done.json()["message"] == "dead letter 0 of post goes to its consumers again, once"
    wait_until(lambda: group_page.broker.server.store.max_offset("%RETRY%post", 0) == 1, "the copy, after a second")
    copy = group_page.admin.messages(group_page.broker.queue("%RETRY%post", 0), 0)[0][0]
    assert (copy.body, copy.properties["RETRY_TOPIC"]) == (b"0", "mail")
    assert len(group_page.get("dead-letters?group=post&before=-1")["messages"]) == 1
    assert group_page.do("resend", group="post", offset=1).status == 404


def test_a_dead_letter_that_expired_meanwhile_sends_no_other(group_page: GroupPage) -> None:
    """Brokers answer with the first message that is still there."""
    sent: list[int] = []

    class Expired(Admin):
        def __init__(self) -> None:
            pass

        def topic(self, name: str) -> list[TopicInfo]:
            return [TopicInfo(name, 1, 1, broker="b")]

        def messages(self, queue: MessageQueue, *_: object, **__: object) -> tuple[list[Message], int]:
            return [Message(queue.topic, b"x", queue_offset=7, offset=70)], 8

        def send_back(self, group: str, topic: str, position: int, **_: object) -> None:
            sent.append(position)

    made = BrokerChanges(BrokerTarget((group_page.address,), 20.0), Expired(), ClientLists(group_page.admin))
    with pytest.raises(NotFoundError, match="dead letter 3 of g no longer exists"):
        made.carry_out(BrokerChange.RESEND, Fields(b'{"group": "g", "offset": 3}', ("group", "offset")))
    assert sent == []
    made.carry_out(BrokerChange.RESEND, Fields(b'{"group": "g", "offset": 7}', ("group", "offset")))

    assert sent == [70]


def test_dead_letters_come_in_pages_newest_first(group_page: GroupPage) -> None:
    """Each page ends where the next one begins."""
    group_page.topic("bulk", 1, {0: 25})
    for offset in range(25):
        group_page.broker.bury("bulky", "bulk", 0, offset)
    wait_until(lambda: group_page.get("dead-letters?group=bulky&before=-1")["max_offset"] == 25, "all are dead")

    newest = group_page.get("dead-letters?group=bulky&before=-1")
    older = group_page.get(f"dead-letters?group=bulky&before={newest['first']}")

    assert [one["offset"] for one in newest["messages"]] == list(range(24, 4, -1))
    assert [one["offset"] for one in older["messages"]] == [4, 3, 2, 1, 0]
