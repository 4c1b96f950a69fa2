"""Properties of finding the future members of a group, and of what they must agree on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.store.fs import FileSystem
from rocketstore.store.directory import StoreDirectory
from rocketstore.upgrade.compare import find_members, in_use, setting_problems, state_differences
from tests.unit.rocketstore.upgrade.support import bodies, copied, write_broker


def conf(path: Path, root: Path, **changes: str) -> Path:
    """A member's conf file."""
    settings = {
        "storePathRootDir": str(root),
        "brokerName": "broker-a",
        "listenPort": "10911",
        "enableDLegerCommitLog": "true",
        "dLegerGroup": "broker-a",
        "dLegerPeers": "n0-127.0.0.1:40911;n1-127.0.0.1:40912",
        "dLegerSelfId": "n0",
        **changes,
    }
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return path


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    """Two brokers."""
    one = write_broker(tmp_path / "a", bodies(3))
    return one, copied(one, "b")


def problems_of(*roots: Path) -> str:
    """Why these are refused."""
    with pytest.raises(ConfigError) as refused:
        find_members(roots, ())
    return "\n".join(refused.value.problems)


def test_directories_are_named_by_their_last_part_if_that_tells_them_apart(
    tmp_path: Path, roots: tuple[Path, Path]
) -> None:
    """Otherwise by their paths."""
    assert [one.name for one in find_members(roots, ())] == ["a", "b"]
    other = write_broker(tmp_path / "other" / "a", bodies(3))
    assert [one.name for one in find_members((roots[0], other), ())] == [str(roots[0]), str(other)]


def test_what_is_not_a_brokers_directory_is_refused(tmp_path: Path, roots: tuple[Path, Path]) -> None:
    """With what it is instead; an empty directory is a member to be."""
    member, node, strange, empty = (tmp_path / name for name in ("m", "n", "s", "e"))
    (member / "dledger-n0" / "data").mkdir(parents=True)
    (member / "dledger-n0" / "data" / f"{0:020d}").write_bytes(b"x")
    (node / "data").mkdir(parents=True)
    (node / "index").mkdir()
    (strange / "etc").mkdir(parents=True)
    empty.mkdir()
    (tmp_path / "file").write_text("")

    assert "holds a group member's log and no plain one" in problems_of(roots[0], member)
    assert "is a group member's log, not a plain broker's root" in problems_of(roots[0], node)
    assert "is not a broker's directory" in problems_of(roots[0], strange)
    assert "holds log files itself" in problems_of(roots[0], roots[1] / "commitlog")
    assert "is given 2 times" in problems_of(roots[0], tmp_path / "b" / ".." / "a")
    assert "is not a directory" in problems_of(roots[0], tmp_path / "file", tmp_path / "missing")
    assert len(find_members((roots[0], empty), ())) == 2


def test_conf_files_name_the_directories_or_belong_to_them(tmp_path: Path, roots: tuple[Path, Path]) -> None:
    """By ``storePathRootDir``, whatever their order; a root that is mounted elsewhere takes the conf file in its place,
    with the log's directory moved, too.
    """
    one = conf(tmp_path / "a.conf", roots[0])
    two = conf(tmp_path / "b.conf", roots[1], dLegerSelfId="n1")
    moved = conf(tmp_path / "c.conf", Path("/elsewhere"), storePathCommitLog="/elsewhere/commitlog", dLegerSelfId="n1")

    assert [one.root for one in find_members((), (one, two))] == list(roots)
    assert [one.conf_file for one in find_members(roots, (two, one))] == [one, two]
    assert find_members(roots, (one, moved))[1].log_dirs == (roots[1] / "commitlog",)
    with pytest.raises(ConfigError, match="2 directories, but 1 conf files"):
        find_members(roots, (one,))
    (tmp_path / "bad.conf").write_text("storePathRootDir=/x\nlistenPort=abc\n")
    with pytest.raises(ConfigError, match=r"bad\.conf"):
        find_members(roots, (one, tmp_path / "bad.conf"))


def test_a_log_is_not_compared_with_itself(tmp_path: Path, roots: tuple[Path, Path]) -> None:
    """Conf files of several machines may name the same path, which is another directory on each of them."""
    (tmp_path / "log").mkdir()
    confs = [
        conf(tmp_path / f"{root.name}.conf", root, storePathCommitLog=str(tmp_path / "log"), dLegerSelfId=own)
        for root, own in zip(roots, ("n0", "n1"), strict=True)
    ]

    with pytest.raises(ConfigError, match=r"log is where a and b both write their log"):
        find_members((), confs)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"messageDelayLevel": "1s 2s"}, "messageDelayLevel must be the same on all members"),
        ({"brokerName": "broker-b"}, "brokerName must be the same on all members"),
        ({"brokerClusterName": "other"}, "brokerClusterName must be the same on all members"),
        ({"mappedFileSizeCommitLog": "65536"}, "mappedFileSizeCommitLog must be the same on all members"),
        ({"dLegerGroup": "g"}, "dLegerGroup must be the same on all members"),
        ({"dLegerPeers": "n0-127.0.0.1:40911;n1-127.0.0.1:40913"}, "dLegerPeers must be the same on all members"),
        ({"dLegerSelfId": "n0"}, "both have dLegerSelfId=n0"),
        ({"enableDLegerCommitLog": "false"}, "enableDLegerCommitLog must be the same on all members"),
    ],
)
def test_settings_must_agree(tmp_path: Path, roots: tuple[Path, Path], changes: dict[str, str], said: str) -> None:
    """The contradiction is named with both files; the order of peers is none."""
    one = conf(tmp_path / "a.conf", roots[0])
    same = {"dLegerSelfId": "n1", "dLegerPeers": "n1-127.0.0.1:40912;n0-127.0.0.1:40911"}
    two = conf(tmp_path / "b.conf", roots[1], **same)
    assert setting_problems(find_members((), (one, two))) == []

    conf(two, roots[1], **{**same, **changes})

    found = setting_problems(find_members((), (one, two)))
    assert any(said in one for one in found), found
    assert all(str(two) in one for one in found)


def state(root: Path, **files: object) -> None:
    """Write a broker's state files."""
    (root / "config").mkdir(exist_ok=True)
    for name, content in files.items():
        (root / "config" / f"{name}.json").write_text(json.dumps(content))


def test_differing_topics_groups_and_offsets_are_named(roots: tuple[Path, Path]) -> None:
    """One sentence for each file; equal ones are not mentioned, and a backup stands for a missing file."""
    topic = {"topicName": "t", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6}
    state(
        roots[0],
        topics={"topicConfigTable": {"t": topic, "u": {**topic, "topicName": "u"}}},
        consumerOffset={"offsetTable": {"t@g": {"0": 10, "1": 5}}},
        delayOffset={"offsetTable": {"1": 3}},
    )
    state(
        roots[1],
        topics={"topicConfigTable": {"t": {**topic, "perm": 4}}},
        consumerOffset={"offsetTable": {"t@g": {"0": 7, "1": 6}}},
        delayOffset={"offsetTable": {"1": 3}},
    )
    (roots[1] / "config" / "delayOffset.json").rename(roots[1] / "config" / "delayOffset.json.bak")
    one, two = find_members(roots, ())

    assert state_differences(two, one) == [
        "b: config/topics.json is not as on a: it lacks u; differs for t",
        "b: config/consumerOffset.json is not as on a: it is behind for group g, t-0; is ahead for group g, t-1",
    ]
    assert state_differences(one, one) == []


def test_an_unreadable_state_file_is_named(roots: tuple[Path, Path]) -> None:
    """It is not taken for an empty one."""
    state(roots[1])
    (roots[1] / "config" / "topics.json").write_text("{")
    one, two = find_members(roots, ())

    (found,) = state_differences(two, one)

    assert "topics.json" in found


def test_a_broker_that_runs_is_noticed_and_not_disturbed(roots: tuple[Path, Path]) -> None:
    """While it holds its directory, and no longer."""
    assert not in_use(roots[0])
    held = StoreDirectory(roots[0], FileSystem())
    assert in_use(roots[0])
    held.release()
    assert not in_use(roots[0])
    StoreDirectory(roots[0], FileSystem()).release()
