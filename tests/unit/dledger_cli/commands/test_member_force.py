"""``dledger member force``: one node goes on alone, and only after being asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dledger.clock import Clock
from dledger.config import StoreConfig
from dledger.store.file_store import FileStore
from dledger.store.identity import read_identity
from dledger.types import ClusterMember, Configuration, EntryId, HardState, LogIndex, MemberRole, NodeId, Standing, Term
from dledger_cli.cli import main

PEERS = "n0-h:1;n1-h:2;n2-h:3"
N1 = NodeId("n1")


def open_store(base_dir: Path, cluster_id: str = "c") -> FileStore:
    """The store of n1."""
    config = StoreConfig(base_dir=base_dir, segment_bytes=1024, index_segment_bytes=640, warm_bytes=0)
    return FileStore.open(config, cluster_id=cluster_id, group="g", node_id=N1, clock=Clock())


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    """The store of a stopped node with two entries, which remembers another member."""
    store = open_store(tmp_path)
    try:
        store.append_as_leader(Term(2), [b"a", b"b"])
        store.flush()
        store.hard_state.save(HardState(Term(3), NodeId("n0"), Standing.DOUBTFUL, "its disk was set back"))
        store.members.remember({NodeId("n0"): EntryId(Term(2), LogIndex(1))})
    finally:
        store.close()
    return tmp_path


def run(*words: object, answer: str = "") -> Result:
    return CliRunner().invoke(main, ["member", "force", *map(str, words)], input=answer)


def test_it_shows_what_may_be_lost_and_asks(base_dir: Path) -> None:
    """Nothing is changed without consent."""
    refused = run(base_dir, "--peers", PEERS, answer="n\n")

    assert refused.exit_code == 1
    assert "entries 0 to 1, the last of term 2" in refused.output
    assert "n0, n1, n2: only n1 stays" in refused.output
    identity = read_identity(base_dir / "dledger-n1")
    assert identity is not None
    assert identity.cluster_id == "c"
    store = open_store(base_dir)
    assert store.members.saved.configuration is None
    store.close()


def test_it_is_the_only_member_of_another_cluster(base_dir: Path) -> None:
    """Its vote counts, it waits for nobody, and who comes back from the old cluster is refused (M15)."""
    done = run(base_dir, "--peers", PEERS, "--cluster-id", "c2", answer="y\n")

    assert done.exit_code == 0, done.output
    assert "  cluster_id=c2\n  dLegerPeers=n1-h:2\n" in done.output
    store = open_store(base_dir, "c2")
    try:
        saved = store.members.saved
        own = ClusterMember(N1, "h", 2, number=1, uid=saved.uid)
        assert saved.configuration == Configuration((own,), LogIndex(2), Term(3), 3)
        assert saved.remembered == {}
        assert store.hard_state.load() == HardState(Term(3), NodeId("n0"), Standing.FULL)
        assert store.last.index == 1
    finally:
        store.close()


def test_changed_members_are_known_from_its_directory(base_dir: Path) -> None:
    """Whatever it was among them, it votes now; numbers are not given again."""
    store = open_store(base_dir)
    learner = ClusterMember(N1, "h", 9, MemberRole.LEARNER, 5, promote=True, replaces="n0")
    store.members.save_committed(Configuration((learner,), LogIndex(40), Term(1), 6), LogIndex(40))
    store.close()

    done = run(base_dir, "--cluster-id", "c2", "--yes")

    assert done.exit_code == 0, done.output
    store = open_store(base_dir, "c2")
    saved = store.members.saved.configuration
    store.close()
    assert saved is not None
    assert (saved.index, saved.next_number) == (41, 6)
    assert saved.members == (ClusterMember(N1, "h", 9, number=5, uid=saved.members[0].uid),)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "give --peers"),
        (["--peers", "n0-h:1;n2-h:2"], "n1 is not a member"),
        (["--peers", PEERS, "--cluster-id", "c"], "is the present one"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], why: str, base_dir: Path) -> None:
    """Before anything is asked or changed."""
    refused = run(base_dir, *words, "--yes")

    assert (refused.exit_code, why in refused.output) == (2, True), refused.output
    store = open_store(base_dir)
    store.close()


def test_a_new_name_is_made_up_if_none_is_given(base_dir: Path) -> None:
    """Different each time, so that two who do it become two clusters."""
    done = run(base_dir, "--peers", PEERS, "--yes")

    assert done.exit_code == 0, done.output
    identity = read_identity(base_dir / "dledger-n1")
    assert identity is not None
    assert identity.cluster_id.startswith("c-")
    assert f"cluster_id={identity.cluster_id}" in done.output
