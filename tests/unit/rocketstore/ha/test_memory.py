"""What a slave keeps of its master on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.errors import CorruptLogError
from dledger.store.fs import FileSystem
from rocketstore.ha.promotion import MEMORY_FILE, KnownMaster, SlaveMemory

KNOWN = KnownMaster("m:10912", 1000, 900, 1_700_000_000_000, 1_699_999_999_000)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Nothing before the first time."""
    memory = SlaveMemory(FileSystem(), tmp_path / "config")
    assert memory.read() == KnownMaster()
    memory.write(KNOWN)
    assert memory.read() == KNOWN


_NUMBER_AS_ADDRESS = '{"address": 1, "end": 1, "own_end": 1, "heard_ms": 1, "complete_ms": 1}'


@pytest.mark.parametrize("content", ["", "{}", "[]", _NUMBER_AS_ADDRESS])
def test_what_it_cannot_be_is_refused(tmp_path: Path, content: str) -> None:
    """It names the file, and what to do."""
    (tmp_path / MEMORY_FILE).write_text(content)
    with pytest.raises(CorruptLogError, match="Remove it"):
        SlaveMemory(FileSystem(), tmp_path).read()
