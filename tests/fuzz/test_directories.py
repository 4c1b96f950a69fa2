"""A member's directory after any damage: it opens with the entries that were written, or says which file is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger.errors import DLedgerError
from dledger.store.verify import verify_node
from dledger.types import LogIndex
from tests.fuzz.shapes import fuzzed
from tests.store.support import abandon, fill, open_store, small_config

ENTRIES = 60
Damage = Callable[[Path], None]


def _files(node: Path) -> list[Path]:
    return sorted(path for path in node.rglob("*") if path.is_file())


@st.composite
def damage(draw: st.DrawFn) -> Damage:
    """Of one file, or of two: as disks, people and copying programs make it."""
    number, other = draw(st.integers(0, 99)), draw(st.integers(0, 99))
    at, length = draw(st.integers(0, 8191)), draw(st.integers(1, 1024))
    kind = draw(st.sampled_from(["turn", "zero", "cut", "remove", "swap", "copy", "grow", "sector", "empty"]))

    def strike(node: Path) -> None:
        files = _files(node)
        path, twin = files[number % len(files)], files[other % len(files)]
        content = bytearray(path.read_bytes())
        place = at % len(content) if content else 0
        match kind:
            case "turn" if content:
                content[place] ^= 1 << (at % 8)
            case "zero":
                content[place : place + length] = bytes(len(content[place : place + length]))
            case "cut":
                del content[place:]
            case "empty":
                content.clear()
            case "grow":
                content += bytes([at % 256]) * length
            case "sector":
                start = place - place % 512
                content[start : start + 512] = twin.read_bytes()[:512].ljust(512, b"\0")[: len(content) - start]
            case "remove":
                path.unlink()
                return
            case "swap":
                twin_content = twin.read_bytes()
                twin.write_bytes(content)
                content = bytearray(twin_content)
            case "copy":
                (path.parent / (path.name + "1")).write_bytes(content)
        path.write_bytes(content)

    return strike


@pytest.fixture(scope="module", params=["stopped", "killed"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[bytes]]:
    """A directory of several segments, and what is in it."""
    base = tmp_path_factory.mktemp("fuzz")
    store = open_store(small_config(base))
    bodies = fill(store, ENTRIES)
    store.flush()
    store.set_committed(LogIndex(ENTRIES - 6))
    store.sync_checkpoint()
    if request.param == "stopped":
        store.close()
    else:
        abandon(store)
    return base, bodies


def test_a_damaged_directory_never_gives_other_entries(written: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """Whatever was done to it: no error without a type, no entry that was not written, and a second start agrees."""
    base, bodies = written
    copy = tmp_path / "copy"

    @fuzzed(150)
    @given(st.lists(damage(), min_size=1, max_size=3))
    def run(strikes: list[Damage]) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy)
        for strike in strikes:
            strike(copy / "dledger-n0")
        first = _opened(copy, bodies)
        if first is not None:
            assert _opened(copy, bodies) == first, "a second start finds something else"

    run()


def _opened(base: Path, bodies: list[bytes]) -> tuple[int, int] | None:
    """Where its log begins and ends; None if it is refused."""
    try:
        store = open_store(small_config(base))
    except DLedgerError:
        return None
    try:
        begin, last = store.begin.index, store.last.index
        assert -1 <= begin <= last < len(bodies)
        for index in range(begin + 1, last + 1):
            try:
                body = store.read(LogIndex(index)).body
            except DLedgerError:
                continue
            assert body == bodies[index], f"entry {index} is not what was written"
        return begin, last
    finally:
        store.close()


def test_verify_says_something_about_any_directory(written: tuple[Path, list[bytes]], tmp_path: Path) -> None:
    """As text: the command is for directories that are broken."""
    base, _ = written
    copy = tmp_path / "copy"

    @fuzzed(60)
    @given(st.lists(damage(), min_size=1, max_size=3))
    def run(strikes: list[Damage]) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(base, copy)
        for strike in strikes:
            strike(copy / "dledger-n0")
        with suppress(DLedgerError):
            verify_node(copy / "dledger-n0")

    run()
