"""A broker's directory after any damage: it starts with the messages that were put, or says which file is wrong.

Started as ``dledger broker`` does: from settings to the ``BrokerServer`` that they make, alone and in a group.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import event, given

from dledger.errors import DLedgerError
from dledger.store.durable_state import BOOT_RECORD_FILE
from dledger_cli.cli import main as command_line
from rocketstore.message.message import Message
from rocketstore.message.record import decode_record
from rocketstore.server import BrokerServer
from rocketstore.state.changes import TopicConfig
from rocketstore.types import BrokerRole, GetMessageStatus
from tests.fuzz.brokers import CONFIGS, SETTINGS
from tests.fuzz.damage import OF_CONTENT, Damage, damages, nothing_unexpected, struck
from tests.fuzz.shapes import fuzzed
from tests.support.waiting import wait_until

MESSAGES = 120
QUEUES = 3
COMMITTED = 11
DERIVED = frozenset({"consumequeue", "index", "index-sums", "checkpoint"})
FOREVER_MS = 1 << 60


@dataclass
class Written:
    """A directory, and what is in it."""

    kind: str
    root: Path
    bodies: dict[tuple[str, int], list[bytes]] = field(default_factory=dict)
    keys: dict[str, bytes] = field(default_factory=dict)

    def put(self, broker: BrokerServer, topic: str, count: int) -> None:
        """Messages by turns to each queue."""
        for number in range(count):
            body = f"{topic} {number} ".encode().ljust(150, b".")
            queue, key = number % QUEUES, f"{topic}{number}"
            result = broker.store.put(Message(topic, body, queue, {"KEYS": key, "TAGS": f"t{number % 2}"}))
            assert result.ok, result
            self.bodies.setdefault((topic, queue), []).append(body)
            self.keys[key] = body


@pytest.fixture(scope="module", params=[(kind, end) for kind in CONFIGS for end in ("stopped", "killed")], ids="-".join)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Several files of every sort, a deleted topic, delayed messages, a group's offsets."""
    kind, end = request.param
    root, live = (tmp_path_factory.mktemp("broker") / name for name in ("root", "live"))
    made = Written(kind, root)
    broker = BrokerServer(CONFIGS["plain" if kind == "plain" else "alone"](live)).start()
    try:
        wait_until(lambda: broker.store.role is not BrokerRole.SLAVE, "it is master")
        state = broker.state
        for topic, count in (("T", MESSAGES), ("D", 7)):
            assert state.wait(partial(state.put_topic, TopicConfig(topic, QUEUES, QUEUES))).ok
            made.put(broker, topic, count)
        for _ in range(3):
            assert broker.store.put(Message("T", b"later", 0, {"DELAY": "18"})).ok
        assert broker.store.wait_dispatched(60)
        assert state.wait(lambda done: state.commit_offsets("g", [("T", 0, COMMITTED)], done=done)).ok
        assert state.wait(lambda done: state.delete_topic("D", done)).ok
        assert broker.store.wait_dispatched(60)
        broker.store.flush()
        state.flush()
        if end == "killed":
            shutil.copytree(live, root)
    finally:
        broker.stop()
    if end == "stopped":
        shutil.copytree(live, root)
    (root / "dledger-n0" / BOOT_RECORD_FILE).unlink(missing_ok=True)  # it names the files that were copied
    return made


@dataclass
class Found:
    """What a start gave: where messages were read, and why nothing more was."""

    messages: set[tuple[str, int, int]] = field(default_factory=set)
    refusal: DLedgerError | None = None
    told: list[DLedgerError] = field(default_factory=list)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Errors of ours are an answer."""
        try:
            yield
        except DLedgerError as error:
            self.told.append(error)


def _found(written: Written, root: Path) -> Found:
    found = Found()
    try:
        broker = BrokerServer(CONFIGS[written.kind](root))
    except DLedgerError as error:
        found.refusal = error
        return found
    try:
        with found.telling():
            broker.start()
        _read(written, broker, found)
    finally:
        broker.stop(graceful=False)
    return found


def _read(written: Written, broker: BrokerServer, found: Found) -> None:
    store = broker.store
    for (topic, queue), bodies in written.bodies.items():
        at = max(0, store.min_offset(topic, queue))
        with found.telling():
            while (result := store.get(topic, queue, at, max_count=32)).status is GetMessageStatus.FOUND:
                assert at < result.next_offset <= len(bodies)
                for record in result.records:
                    message = decode_record(record)
                    assert (message.topic, message.queue_id) == (topic, queue)
                    assert at <= message.queue_offset < result.next_offset
                    assert message.body == bodies[message.queue_offset]
                    found.messages.add((topic, queue, message.queue_offset))
                at = result.next_offset
    for key, body in list(written.keys.items())[::10]:
        with found.telling():
            records = store.query(key[0], key, 4, 0, FOREVER_MS)
            assert [decode_record(record).body for record in records] in ([], [body])
    assert all(one.offset <= COMMITTED for one in broker.state.offsets("g"))


def test_a_damaged_directory_never_gives_other_messages(written: Written, tmp_path: Path) -> None:
    """Whatever was done to it: a refusal names the file, no message is another one, and the next start finds no less.

    Wrong contents of one file that is derived from the log hide nothing. (A queue whose first file is gone looks as if
    retention had been there: only `dledger verify` tells.)
    """
    copy = tmp_path / "copy"
    everything = {(*queue, at) for queue, bodies in written.bodies.items() for at in range(len(bodies))}

    @fuzzed(12)
    @given(damages())
    def run(strikes: list[Damage]) -> None:
        with nothing_unexpected(), struck(written.root, copy, ".", strikes) as changed:
            first = _found(written, copy)
            event("refused" if first.refusal else "started")
            assert first.refusal is None or str(copy) in str(first.refusal), "it does not say which file"
            if len(strikes) == 1 and strikes[0].kind in OF_CONTENT and changed[0].parts[0] in DERIVED:
                assert first.refusal or first.told or first.messages == everything
            if first.refusal is None:
                again = _found(written, copy)
                assert again.refusal is None or str(copy) in str(again.refusal)
                assert again.refusal or again.told or again.messages >= first.messages

    run()


def test_verify_says_something_about_any_broker(written: Written, tmp_path: Path) -> None:
    """In sentences: the command is for directories that are broken."""
    copy, conf = tmp_path / "copy", tmp_path / "broker.conf"
    conf.write_text("".join(f"{name} = {value}\n" for name, value in SETTINGS.items()))

    @fuzzed(5)
    @given(damages())
    def run(strikes: list[Damage]) -> None:
        with nothing_unexpected(), struck(written.root, copy, ".", strikes):
            result = CliRunner().invoke(command_line, ["verify", str(copy), "-c", str(conf)])
            assert isinstance(result.exception, SystemExit | None), result.exc_info
            assert result.exit_code in (0, 1, 2)

    run()
