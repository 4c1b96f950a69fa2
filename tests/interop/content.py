"""Messages of every kind that a store treats in a way of its own, put into our stores for Java to read."""

from __future__ import annotations

import socket

from rocketstore.message.message import HostAddress, Message
from rocketstore.store.message_store import MessageStore
from tests.interop.stores import WAIT_S

BORN_4 = HostAddress(socket.inet_aton("10.20.30.40"), 54321)
BORN_6 = HostAddress(socket.inet_pton(socket.AF_INET6, "1050::5:600:300c:326b"), 65535)
STORE_4 = HostAddress(socket.inet_aton("127.0.0.1"), 10911)
STORE_6 = HostAddress(socket.inet_pton(socket.AF_INET6, "::1"), 10911)
TAGS = ("TagA", "polygenelubricants", "\u4e2d\u6587", "\U0001f680tag", "Aa", "BB", "x" * 300, "")


def put_all(store: MessageStore) -> None:
    """Everything; some 250 messages in several files of each kind."""
    put(store, *_tags(), *_hosts(), *_transactions(), *_delays(), *_bodies(), *_keys(), *_properties())
    for _ in range(2):
        results = store.put_many(_batch())
        assert all(result.ok for result in results), results
    put_many(store, 150)
    put_many(store, 30, topic="%RETRY%group-1", queues=1)
    put_many(store, 3, topic="L" * 127, queues=1)


def put_many(store: MessageStore, count: int, *, topic: str = "TopicTest", queues: int = 4) -> None:
    """Ordinary messages with tags and keys, to queues by turns."""
    put(
        store,
        *(
            Message(
                topic,
                b"message %d " % i + b"b" * (i % 97),
                i % queues,
                {"TAGS": "TagA" if i % 3 else "TagB"} | ({"KEYS": f"order-{i % 10} item-{i}"} if i % 2 else {}),
                born_timestamp=1_690_000_000_000 + i,
                born_host=BORN_4,
                store_host=STORE_4,
            )
            for i in range(count)
        ),
    )


def put(store: MessageStore, *messages: Message) -> None:
    """One after the other, until everything is dispatched."""
    for message in messages:
        result = store.put(message)
        assert result.ok, (message, result)
    assert store.wait_dispatched(WAIT_S)


def _tags() -> list[Message]:
    return [Message("TopicTest", b"tagged", 0, {"TAGS": tag} if tag else {}) for tag in TAGS]


def _hosts() -> list[Message]:
    return [
        Message("Hosts", b"from", 1, {"TAGS": "hosts", "KEYS": "host-key"}, born_host=born, store_host=store)
        for born in (BORN_4, BORN_6)
        for store in (STORE_4, STORE_6)
    ]


def _transactions() -> list[Message]:
    return [
        Message("Transactions", b"type", 0, {"KEYS": f"tx-{kind} tx"}, sys_flag=kind, prepared_offset=kind and 1024)
        for kind in (0x4, 0x8, 0xC, 0)
    ]


def _delays() -> list[Message]:
    delayed = [
        Message("Delayed", b"level", 3, {"DELAY": str(level), "TAGS": "later", "KEYS": "delayed"})
        for level in (16, 17, 18, 18, 99)
    ]
    prepared = Message("Delayed", b"a prepared message is not delayed", 3, {"DELAY": "16"}, sys_flag=0x4)
    committed = Message("Delayed", b"a committed one is", 3, {"DELAY": "16"}, sys_flag=0x8)
    return [*delayed, prepared, committed]


def _bodies() -> list[Message]:
    sizes = (0, 1, 4095, 9000, 7200, 12000, 15000, 16000)
    flags = Message(
        "Bodies", b"flags", 15, flag=-2, sys_flag=0x301, reconsume_times=16, born_timestamp=-1, born_host=BORN_6
    )
    return [*(Message("Bodies", bytes([size % 251]) * size) for size in sizes), flags]


def _keys() -> list[Message]:
    every = ("k1 k2", "k1", "Aa", "BB", "two  blanks", "\u952e \U0001f511", "same same")
    return [
        Message("Keys", b"keys", 2, {"KEYS": keys, "UNIQ_KEY": f"7F00000100002A9F0000{number:012X}"})
        for number, keys in enumerate(every)
    ]


def _properties() -> list[Message]:
    many = {f"name-{i}": f"value \u00e9\u4e2d {i}" for i in range(60)}
    odd = {"inner": "a\x01b", "\u00e9t\u00e9": "\U0001f680", "WAIT": "false"}
    return [Message("Properties", b"properties", 0, each) for each in (many, odd, {"large": "p" * 7000}, {})]


def _batch() -> list[Message]:
    return [
        Message("Batches", b"item %d" % i, 1, {"TAGS": "TagB", "KEYS": f"batch-key-{i}"}, flag=i, born_host=BORN_6)
        for i in range(6)
    ]
