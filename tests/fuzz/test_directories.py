"""A member's directory after any damage: it opens with the entries that were written, or says which file is wrong."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given

from dledger.errors import DLedgerError
from dledger.store.verify import verify_node
from dledger.types import LogIndex
from tests.fuzz.damage import Damage, damages, nothing_unexpected, struck
from tests.fuzz.shapes import fuzzed
from tests.unit.dledger.store.support import abandon, fill, open_store, small_config

ENTRIES = 60


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
    @given(damages())
    def run(strikes: list[Damage]) -> None:
        with nothing_unexpected(), struck(base, copy, "dledger-n0", strikes):
            first = _opened(copy, bodies)
            if first is not None:
                assert _opened(copy, bodies) == first, "a second start finds something else"

    run()


def _opened(base: Path, bodies: list[bytes]) -> tuple[int, int] | None:
    """Where its log begins and ends; None if it is refused."""
    try:
        store = open_store(small_config(base))
    except DLedgerError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert str(base) in told, f"it does not say which file: {told}"
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
    @given(damages())
    def run(strikes: list[Damage]) -> None:
        with nothing_unexpected(), struck(base, copy, "dledger-n0", strikes), suppress(DLedgerError, OSError):
            verify_node(copy / "dledger-n0")

    run()
