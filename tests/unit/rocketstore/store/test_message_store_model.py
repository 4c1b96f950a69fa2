"""Hypothesis drives a whole store against a model of lists: puts, gets, keys, restarts, kills, lost files."""

from __future__ import annotations

import shutil
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rocketstore.config import KIB
from rocketstore.message.message import SYS_FLAG_PREPARED, Message
from rocketstore.message.record import decode_record
from rocketstore.store.message_store import MessageStore
from rocketstore.types import FlushDiskType, GetMessageStatus
from tests.support.memory_disk import new_directory
from tests.support.sweeps import fewer
from tests.unit.rocketstore.bench import FOREVER_MS, WAIT_S, make_store, small_config

TOPICS = ("A", "B")
QUEUES = (0, 1)
KEYS = ("x", "y", "z")
Place = tuple[str, int]


class StoreMachine(RuleBasedStateMachine):
    """A store and what must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = new_directory("message-store")
        self.lives = 0
        self.root = self.base / "0"
        self.model: dict[Place, list[bytes]] = {(topic, queue): [] for topic in TOPICS for queue in QUEUES}
        self.keyed: dict[tuple[str, str], list[bytes]] = {}
        self.number = 0
        self.store: MessageStore | None = None

    @initialize(kind=st.sampled_from(list(FlushDiskType)))
    def begin(self, kind: FlushDiskType) -> None:
        config = small_config(self.root, flush_disk_type=kind, mapped_file_size_commit_log=2 * KIB)
        self.config = replace(config, mapped_file_size_consume_queue=100, max_index_num=16, max_hash_slot_num=4)
        self.open()

    def open(self) -> None:
        self.store = make_store(replace(self.config, store_path_root_dir=self.root))
        self.store.load()
        self.store.start()

    @property
    def running(self) -> MessageStore:
        assert self.store is not None
        return self.store

    def message(self, topic: str, queue_id: int, key: str, size: int) -> Message:
        self.number += 1
        body = str(self.number).encode().ljust(size, b".")
        self.model[topic, queue_id].append(body)
        self.keyed.setdefault((topic, key), []).append(body)
        return Message(topic, body, queue_id, {"KEYS": f"{key} all", "TAGS": key})

    @rule(
        places=st.lists(
            st.tuples(st.sampled_from(TOPICS), st.sampled_from(QUEUES), st.sampled_from(KEYS), st.integers(1, 700)),
            min_size=1,
            max_size=6,
        )
    )
    def put(self, places: list[tuple[str, int, str, int]]) -> None:
        messages = [self.message(*place) for place in places]
        results = self.running.put_many(messages)
        expected = [len(self.model[message.topic, message.queue_id]) for message in messages]
        assert all(result.ok for result in results)
        for result, message, count in zip(results, messages, expected, strict=True):
            assert result.stored is not None
            assert self.model[message.topic, message.queue_id][result.stored.queue_offset] == message.body
            assert result.stored.queue_offset < count

    @rule()
    def put_prepared(self) -> None:
        assert self.running.put(Message("A", b"half", 0, sys_flag=SYS_FLAG_PREPARED)).ok

    @rule()
    def put_illegal(self) -> None:
        assert not self.running.put(Message("A", bytes(3 * KIB))).ok

    @rule()
    def flush(self) -> None:
        assert self.running.wait_dispatched(WAIT_S)
        self.running.flush()

    @rule()
    def restart(self) -> None:
        self.running.shutdown()
        assert not (self.root / "abort").exists()
        self.open()

    @rule(lost=st.sampled_from(["", "", "consumequeue", "consumequeue/A/0", "index", "checkpoint"]))
    def kill(self, lost: str) -> None:
        """The process is killed: what it wrote is there, as it is."""
        old = self.root
        self.lives += 1
        self.root = self.base / str(self.lives)
        shutil.copytree(old, self.root, ignore=shutil.ignore_patterns("*.tmp"))
        self.running.shutdown()
        shutil.rmtree(old)
        target = self.root / lost
        if lost and target.exists():
            target.unlink() if target.is_file() else shutil.rmtree(target)
        self.open()

    @rule(place=st.tuples(st.sampled_from(TOPICS), st.sampled_from(QUEUES)), tag=st.sampled_from(KEYS))
    def get_by_tag(self, place: Place, tag: str) -> None:
        store = self.running
        assert store.wait_dispatched(WAIT_S)
        found = store.get(*place, 0, max_count=32, matches_record=lambda one: decode_record(one).tags == tag)
        bodies = [decode_record(record).body for record in found.records]
        wanted = [body for body in self.model[place] if body in self.keyed.get((place[0], tag), [])]
        assert bodies == wanted[: len(bodies)]
        assert len(bodies) == len(wanted) or len(bodies) == 32

    @precondition(lambda self: self.store is not None)
    @invariant()
    def queues_hold_the_model(self) -> None:
        store = self.running
        assert store.wait_dispatched(WAIT_S)
        for (topic, queue_id), bodies in self.model.items():
            found: list[bytes] = []
            while True:
                result = store.get(topic, queue_id, len(found), max_count=32)
                if result.status is not GetMessageStatus.FOUND:
                    break
                for record in result.records:
                    message = decode_record(record)
                    assert message.queue_offset == len(found)
                    assert store.read_record(message.offset) == record
                    found.append(message.body)
                assert result.next_offset == len(found)
            assert found == bodies
            assert store.max_offset(topic, queue_id) == len(bodies)

    @precondition(lambda self: self.store is not None)
    @invariant()
    def keys_find_the_newest(self) -> None:
        store = self.running
        assert store.wait_dispatched(WAIT_S)
        for (topic, key), bodies in self.keyed.items():
            records = store.query(topic, key, 64, 0, FOREVER_MS)
            assert [decode_record(record).body for record in records] == bodies[-64:]

    def teardown(self) -> None:
        if self.store is not None:
            self.store.shutdown()
        shutil.rmtree(self.base)


TestStoreModel = StoreMachine.TestCase
TestStoreModel.settings = settings(
    max_examples=fewer(40, 4), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
