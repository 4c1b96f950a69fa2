"""A node that cannot read its file of the members: what it still knows at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger.config import Member, ServerConfig
from dledger.group_members import MemberRecords
from dledger.store.file_store import FileStore
from dledger.store.identity import MEMBERS_FILE
from dledger.types import HardState, NodeId, Standing, Term
from tests.support.members import put
from tests.unit.dledger.store.support import open_store, small_config

MEMBERS = tuple(Member(NodeId(f"n{number}"), "127.0.0.1", 20911 + number) for number in range(3))


def _without_file(directory: Path, standing: Standing) -> tuple[MemberRecords, FileStore]:
    """A log that says that n0 and n1 are the members, n0 with the uid 77; and no file any more."""
    settings = small_config(directory)
    store = open_store(settings)
    put(store, 1, "01", n0=77)
    store.hard_state.save(HardState(Term(1), standing=standing))
    store.close()
    for path in directory.rglob(MEMBERS_FILE):
        path.unlink()
    store = open_store(settings)
    return MemberRecords(ServerConfig(node_id=NodeId("n0"), members=MEMBERS, store=settings), store), store


def test_the_log_tells_the_uid_that_a_lost_file_held(tmp_path: Path) -> None:
    """M3: else the loss of a small file would look like that of the memory, and one that is alone would not lead."""
    records, store = _without_file(tmp_path, Standing.FULL)

    assert records.find().current.voters == ("n0", "n1")
    assert records.uid == 77
    store.close()


def test_the_log_tells_the_uid_of_a_memory_that_a_person_vouched_for(tmp_path: Path) -> None:
    """M11: ``dledger restore-vote`` takes the uid that the group would not believe."""
    settings = small_config(tmp_path)
    store = open_store(settings)
    put(store, 1, "01", n0=77)
    store.hard_state.save(HardState(Term(1), standing=Standing.FULL))
    store.members.vouch()
    store.close()
    store = open_store(settings)
    records = MemberRecords(ServerConfig(node_id=NodeId("n0"), members=MEMBERS, store=settings), store)
    assert records.uid == 0

    records.find()

    assert records.uid == 77
    store.close()


@pytest.mark.parametrize("standing", [Standing.BLANK, Standing.DOUBTFUL])
def test_one_without_standing_takes_no_configuration_from_its_log_alone(tmp_path: Path, standing: Standing) -> None:
    """M3, M10: it may have been catching up, through old ones."""
    records, store = _without_file(tmp_path, standing)

    assert records.find().current.members == ()
    assert records.uid != 77
    store.close()
