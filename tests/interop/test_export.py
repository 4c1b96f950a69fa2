"""Exports of group members, ours and RocketMQ's, opened by RocketMQ 4.9.8 as plain stores."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dledger.store.verify import verify_node
from rocketstore.types import HIDDEN_TOPICS
from rocketstore.upgrade.export import export_member
from tests.interop import content, java
from tests.interop.goldens import copy_store, open_golden
from tests.interop.reports import Report, assert_same, java_report, our_report
from tests.interop.stores import plain_store, replicated_store, store_config
from tests.interop.test_java import index_entries, queue_files
from tests.unit.rocketstore.export.expiring import OLD, make_expired
from tests.unit.rocketstore.export.members import in_place, messages_in

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    java.build()


def export(root: Path, target: Path) -> Path:
    """Export the only member below the root."""
    export_member(replace(store_config(root), enable_dledger_commit_log=True), verify_node(root / "dledger-n0"), target)
    return target


def read_by_java(root: Path, copy: Path) -> Report:
    """What RocketMQ reads in a copy, as a plain store."""
    return java_report(java.run_store("read-plain", copy_store(root, copy)))


@pytest.mark.parametrize("whose", ["ours", "java's"])
def test_rocketmq_serves_an_exported_member_and_goes_on(tmp_path: Path, whose: str) -> None:
    """All that was in its queues, where it was; and so do we again afterwards."""
    root = tmp_path / "member"
    if whose == "java's":
        root, _ = open_golden("dledger", root)
    with replicated_store(root, import_unchecked=True) as store:
        if whose == "ours":
            content.put_all(store)
        content.put_many(store, 30)
        ends = {key: store.max_offset(*key) for key in store.queues() if key[0] not in HIDDEN_TOPICS}
        before = messages_in(store)
    exported = export(root, tmp_path / "plain")

    report = read_by_java(exported, tmp_path / "copy")

    assert {queue: last for queue, (_, last) in report.bounds.items()} == ends
    with plain_store(exported) as store:
        assert_same(our_report(store, report), report)
        after = messages_in(store)
        assert {place: in_place(one) for place, one in after.items()} == {
            place: in_place(one) for place, one in before.items()
        }
    java.run_store("append-plain", exported)
    report = read_by_java(exported, tmp_path / "appended")
    with plain_store(exported) as store:
        assert_same(our_report(store, report), report)
        assert len(messages_in(store)) > len(after)


def test_rocketmq_builds_the_same_queues_and_index_from_it(tmp_path: Path) -> None:
    """Byte for byte: nothing of them is of our own."""
    with replicated_store(tmp_path / "member") as store:
        content.put_all(store)
    exported = export(tmp_path / "member", tmp_path / "plain")
    rebuilt = copy_store(exported, tmp_path / "rebuilt")
    for derived in ("consumequeue", "index"):
        shutil.rmtree(rebuilt / derived)

    java.run_store("read-plain", rebuilt)

    assert {name: data for name, data in queue_files(rebuilt).items() if any(data)} == queue_files(exported)
    assert index_entries(rebuilt) == index_entries(exported)


def test_rocketmq_recovers_an_export_that_was_killed(tmp_path: Path) -> None:
    """Its abnormal recovery trusts checkpoint and queue files less."""
    with replicated_store(tmp_path / "member") as store:
        content.put_all(store)
    exported = export(tmp_path / "member", tmp_path / "plain")
    java.run_store("kill-plain", exported)

    report = read_by_java(exported, tmp_path / "copy")

    with plain_store(exported) as store:
        assert_same(our_report(store, report), report)


def test_rocketmq_counts_on_in_queues_whose_messages_have_expired(tmp_path: Path) -> None:
    """It knows a queue's end by the last unit; at 0 it would give the offsets of consumed messages out again."""
    config = replace(store_config(tmp_path / "member"), enable_dledger_commit_log=True)
    make_expired(config, "Later")
    exported = export(config.store_path_root_dir, tmp_path / "plain")

    report = read_by_java(exported, tmp_path / "copy")

    assert (report.bounds["Later", 0][1], report.got["Later", 0]) == (OLD, [])
    java.run_store("append-plain", exported)
    report = read_by_java(exported, tmp_path / "appended")
    assert [number for number, _, _ in report.got["Later", 0]] == list(range(OLD, OLD + 15))
    with plain_store(exported) as store:
        assert our_report(store, report).got == report.got
