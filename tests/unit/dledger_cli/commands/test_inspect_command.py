"""``dledger inspect`` on real directories: sound ones, damaged ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.core.noop_payload import Registration, encode_registration
from dledger.store.file_store import FileStore
from dledger.types import NOOP_CHANNEL, Magic, NodeId, Term
from dledger_cli.cli import main

ENTRIES = 40


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    """The store of a stopped node with some segments."""
    config = StoreConfig(base_dir=tmp_path, segment_bytes=1024, index_segment_bytes=640, warm_bytes=0)
    store = FileStore.open(config, cluster_id="c", group="g", node_id=NodeId("n0"), clock=Clock())
    try:
        store.append_as_leader(Term(1), [b"body %d" % number for number in range(ENTRIES)])
        store.flush()
    finally:
        store.close()
    return tmp_path


@pytest.fixture
def inspect() -> Callable[..., Result]:
    """Run ``dledger inspect``."""
    return lambda *words: CliRunner().invoke(main, ["inspect", *map(str, words)])


def segments(base_dir: Path) -> list[Path]:
    """The data files of n0."""
    return sorted((base_dir / "dledger-n0" / "data").iterdir())


def damage(path: Path, offset: int) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_sound_directory_is_summed_up(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """One row per file; the base directory of a single node will do."""
    shown = inspect(base_dir)

    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert lines[0].split() == ["file", "entries", "first", "index", "last", "index", "bytes", "first", "bad", "offset"]
    assert lines[1].startswith("data/00000000000000000000")
    assert lines[-1] == "no problems found"
    assert inspect(base_dir / "dledger-n0").output == shown.output


def test_the_summary_as_json_counts_every_entry(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """Data and index hold the same entries."""
    document = json.loads(inspect(base_dir, "--json").output)

    counts = {
        kind: sum(one["entries"] for one in document["files"] if one["kind"] == kind) for kind in ("data", "index")
    }
    assert document["ok"] is True
    assert document["problems"] == []
    assert counts == {"data": ENTRIES, "index": ENTRIES}


def test_a_flipped_bit_is_found_where_it_is(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """Exit code 1, the file and the offset of the entry."""
    damage(segments(base_dir)[1], 50)

    plain, document = inspect(base_dir), json.loads(inspect(base_dir, "--json").output)

    assert plain.exit_code == 1
    assert f"DAMAGED: {segments(base_dir)[1]}: offset 0:" in plain.output
    assert document["ok"] is False
    assert document["files"][1]["first_bad_offset"] == 0


def test_so_many_problems_are_listed_and_the_others_counted(
    base_dir: Path, inspect: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be one for each of thousands of millions of entries."""
    for path in sorted((base_dir / "dledger-n0" / "index").iterdir()):
        path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr("dledger_cli.commands.inspect.PROBLEMS_MAX", 3)

    plain, document = inspect(base_dir), json.loads(inspect(base_dir, "--json").output)

    assert plain.output.splitlines()[-1] == f"DAMAGED: {ENTRIES - 3} more problems are not listed"
    assert (len(document["problems"]), document["problem_count"]) == (3, ENTRIES)


def test_a_dump_shows_every_entry(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """As text and as JSON lines, blanks and the end included."""
    plain = inspect(base_dir, "--dump").output.splitlines()
    items = [json.loads(line) for line in inspect(base_dir, "--dump", "--json").output.splitlines()]

    assert "index 0 term 1 6 bytes  body 0" in plain[0]
    assert any("blank of" in line for line in plain)
    assert [one["index"] for one in items if one["type"] == "NORMAL"] == list(range(ENTRIES))
    assert {one["type"] for one in items} >= {"NORMAL", "BLANK", "END"}


def test_a_dump_shows_damage(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """And exits with 1."""
    damage(segments(base_dir)[0], 50)

    plain, items = inspect(base_dir, "--dump"), inspect(base_dir, "--dump", "--json")

    assert (plain.exit_code, items.exit_code) == (1, 1)
    assert "DAMAGED" in plain.output
    assert json.loads(items.output.splitlines()[0])["type"] == "PROBLEM"


def test_missing_index_files_are_said_to_be_missing(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """They are derived; the node makes them again."""
    for path in (base_dir / "dledger-n0" / "index").iterdir():
        path.unlink()

    shown = inspect(base_dir)

    assert shown.exit_code == 1
    assert "rebuilt when the node starts" in shown.output


def test_data_directories_can_be_elsewhere(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """``--data-dir`` as often as there are."""
    elsewhere = base_dir / "elsewhere"
    (base_dir / "dledger-n0" / "data").rename(elsewhere)

    shown = inspect(base_dir / "dledger-n0", "--data-dir", elsewhere)

    assert shown.exit_code == 0, shown.output


def test_a_directory_that_is_no_nodes_is_refused(tmp_path: Path, inspect: Callable[..., Result]) -> None:
    """With what it holds instead."""
    none = inspect(tmp_path)
    for name in ("dledger-n0", "dledger-n1"):
        (tmp_path / name).mkdir()
    two = inspect(tmp_path)

    assert (none.exit_code, two.exit_code) == (2, 2)
    assert "no dledger-… directory" in none.output
    assert "dledger-n0, dledger-n1" in two.output


def test_a_no_op_in_ordinary_form_is_shown_as_what_it_is(tmp_path: Path, inspect: Callable[..., Result]) -> None:
    """Magic 1 with the channel NOOP."""
    config = StoreConfig(base_dir=tmp_path, segment_bytes=1024, index_segment_bytes=640, warm_bytes=0)
    store = FileStore.open(config, cluster_id="c", group="g", node_id=NodeId("n0"), clock=Clock())
    store.append_as_leader(Term(1), [b"begins a term"], channel=NOOP_CHANNEL)
    store.close()

    shown = inspect(tmp_path, "--dump")

    assert shown.exit_code == 0, shown.output
    assert "index 0 term 1 NOOP 13 bytes  begins a term" in shown.output


def test_what_a_no_op_tells_of_producers_is_put_in_words(tmp_path: Path, inspect: Callable[..., Result]) -> None:
    """Instead of the bytes, which nobody can read."""
    config = StoreConfig(base_dir=tmp_path, segment_bytes=1024, index_segment_bytes=640, warm_bytes=0)
    store = FileStore.open(config, cluster_id="c", group="g", node_id=NodeId("n0"), clock=Clock())
    store.append_as_leader(Term(1), [encode_registration(Registration("orders", 7))], Magic.NOOP)
    store.close()

    plain, item = inspect(tmp_path, "--dump"), json.loads(inspect(tmp_path, "--dump", "--json").output.splitlines()[0])

    assert plain.output.splitlines()[0].endswith("producer orders from here on, slot 7")
    assert item["producers"] == "producer orders from here on, slot 7"


def test_a_directory_of_another_kind_with_a_nodes_prefix_is_no_node(
    tmp_path: Path, inspect: Callable[..., Result]
) -> None:
    """A demo's directory is called dledger-demo-…: it is named, not taken for a node."""
    (tmp_path / "dledger-demo-x" / "n0").mkdir(parents=True)

    shown = inspect(tmp_path)

    assert shown.exit_code == 2
    assert "is not a node's directory" in shown.output


def test_segments_that_are_elsewhere_must_be_named(base_dir: Path, inspect: Callable[..., Result]) -> None:
    """A node's directory without data/ says so in a sentence."""
    node_dir = base_dir / "dledger-n0"
    (node_dir / "data").rename(base_dir / "elsewhere")

    assert "--data-dir" in inspect(node_dir).output
    assert inspect(node_dir, "--data-dir", base_dir / "elsewhere").exit_code == 0
