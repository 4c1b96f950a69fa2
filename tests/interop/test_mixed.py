"""Groups that continue a plain log (mixed mode): each side opens what the other has taken over."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketstore.store.message_store import MessageStore
from tests.interop import content, java
from tests.interop.goldens import copy_store, open_golden
from tests.interop.reports import Report, assert_same, java_report, our_report
from tests.interop.stores import SEGMENT_BYTES, plain_store, replicated_store

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


def read_by_java(root: Path, copy: Path) -> Report:
    """What RocketMQ's group of one reads in a copy."""
    return java_report(java.run_store("read-dledger", copy_store(root, copy)))


def plain(whose: str, root: Path) -> Path:
    """A plain broker's directory, of either side; one of RocketMQ's was killed."""
    if whose == "ours":
        with plain_store(root) as store:
            content.put_all(store)
        return root
    return open_golden({"java's": "plain", "java's, killed": "killed"}[whose], root)[0]


def first_segment(root: Path) -> int:
    """Where the group's log begins."""
    return min(int(path.name) for path in (root / "dledger-n0" / "data").iterdir() if path.name.isdigit())


def old_end(root: Path) -> int:
    """Where the plain log's last file ends."""
    return max(int(path.name) for path in (root / "commitlog").iterdir() if path.name.isdigit()) + SEGMENT_BYTES


def ends_of(store: MessageStore) -> int:
    """How many messages there are."""
    return sum(store.max_offset(*key) for key in store.queues())


@pytest.mark.parametrize("whose", ["ours", "java's", "java's, killed"])
def test_rocketmq_opens_what_we_have_taken_over(tmp_path: Path, whose: str) -> None:
    """Both logs, with the same queues and keys; it goes on with them, and so do we after it."""
    root = plain(whose, tmp_path / "store")
    with replicated_store(root) as store:
        content.put_many(store, 40)
    assert first_segment(root) == old_end(root)

    report = read_by_java(root, tmp_path / "copy")
    with replicated_store(copy_store(root, tmp_path / "ours")) as store:
        assert_same(our_report(store, report), report)

    java.run_store("append-dledger", root)
    report = read_by_java(root, tmp_path / "appended")
    with replicated_store(root, import_unchecked=True) as store:
        assert_same(our_report(store, report), report)
        before = ends_of(store)
        content.put_many(store, 40)
        assert ends_of(store) >= before + 40


@pytest.mark.parametrize("whose", ["ours", "java's", "java's, killed"])
def test_we_open_what_rocketmq_has_taken_over(tmp_path: Path, whose: str) -> None:
    """Its log begins where ours would; queue offsets go on."""
    root = plain(whose, tmp_path / "store")
    java.run_store("append-dledger", root)
    assert first_segment(root) == old_end(root)

    report = read_by_java(root, tmp_path / "copy")
    with replicated_store(root, import_unchecked=True) as store:
        assert_same(our_report(store, report), report)
        content.put_many(store, 40)

    report = read_by_java(root, tmp_path / "again")
    with replicated_store(root, import_unchecked=True) as store:
        assert_same(our_report(store, report), report)
