"""Values that administrators set: RocketMQ's file, written before they count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dledger.errors import ConfigError
from dledger.remoting.codes import RequestError
from dledger.store.fs import FileSystem
from rocketstore.nameserver.tables import NAME_CHARS_MAX, VALUE_CHARS_MAX, KvConfig


class _FullDisk(FileSystem):
    """Takes nothing while it is full."""

    def __init__(self) -> None:
        self.is_full = False

    def sync(self, fd: int) -> None:
        """Make data durable."""
        if self.is_full:
            raise OSError(28, "No space left on device")
        super().sync(fd)


def _open(path: Path, *, entries_max: int = 10, bytes_max: int = 1 << 20, fs: FileSystem | None = None) -> KvConfig:
    return KvConfig(path, entries_max=entries_max, bytes_max=bytes_max, fs=fs)


def test_values_are_read_back_and_the_file_is_rocketmqs(tmp_path: Path) -> None:
    """KVConfigSerializeWrapper's members, and nothing else in the directory."""
    path = tmp_path / "made" / "kvConfig.json"
    kv = _open(path)
    kv.put("n", "k", "v")
    kv.put("n", "Schlüssel", "\N{SNOWMAN}")
    kv.put("m", "k", "w")
    kv.delete("m", "k")
    kv.delete("m", "k")
    kv.delete("o", "k")

    assert json.loads(path.read_bytes()) == {"configTable": {"n": {"k": "v", "Schlüssel": "\N{SNOWMAN}"}}}
    assert list(path.parent.iterdir()) == [path]
    again = _open(path)
    assert (again.get("n", "k"), again.get("n", "x"), again.get("x", "k")) == ("v", None, None)
    assert (again.table("m"), again.table("x")) == (None, None)


def test_nothing_is_written_before_the_first_value(tmp_path: Path) -> None:
    """The default is below the home directory, where a name server that only routes needs nothing."""
    path = tmp_path / "made" / "kvConfig.json"
    kv = _open(path)

    assert not path.parent.exists()
    kv.put("n", "k", "v")
    assert path.exists()


def test_rocketmqs_own_file_is_read(tmp_path: Path) -> None:
    """As fastjson writes it."""
    path = tmp_path / "kvConfig.json"
    path.write_text('{"configTable":{"ORDER_TOPIC_CONFIG":{"T":"broker-a:4;broker-b:4"}}}')

    assert _open(path).get("ORDER_TOPIC_CONFIG", "T") == "broker-a:4;broker-b:4"


@pytest.mark.parametrize("content", [b"", b"{", b'{"configTable":{"n":["k"]}}', b"\xff", b'{"configTable":{"n":5}}'])
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    """And left as it is: the values are nowhere else."""
    path = tmp_path / "kvConfig.json"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"kvConfig\.json: damaged .*restore it .*move it aside"):
        _open(path)

    assert path.read_bytes() == content


def test_a_directory_that_cannot_be_used_is_a_wrong_setting(tmp_path: Path) -> None:
    """Told at the start."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "kvConfig.json").mkdir()

    for path in (tmp_path / "file" / "kvConfig.json", tmp_path / "kvConfig.json"):
        with pytest.raises(ConfigError, match="cannot be used"):
            _open(path)


def test_what_is_not_on_the_disk_does_not_count(tmp_path: Path) -> None:
    """A full disk refuses the change, and what was set before stays."""
    fs = _FullDisk()
    kv = _open(tmp_path / "kvConfig.json", fs=fs)
    kv.put("n", "k", "old")
    fs.is_full = True

    with pytest.raises(RequestError, match="cannot be written: No space left"):
        kv.put("n", "k", "new")
    with pytest.raises(RequestError, match="cannot be written"):
        kv.delete("n", "k")

    assert kv.get("n", "k") == "old"
    assert _open(tmp_path / "kvConfig.json").get("n", "k") == "old"


def test_it_does_not_grow_beyond_its_limits(tmp_path: Path) -> None:
    """Values, namespaces, bytes, and the length of each."""
    kv = _open(tmp_path / "kvConfig.json", entries_max=4, bytes_max=300)
    kv.put("n", "k", "v")
    kv.put("m", "k", "v")
    for namespace, key, value, why in (
        ("o", "k", "v", "kvEntriesMax"),
        ("n", "k", "v" * 300, "kvBytesMax"),
        ("n" * (NAME_CHARS_MAX + 1), "k", "v", "namespace has"),
        ("n", "k" * (NAME_CHARS_MAX + 1), "v", "key has"),
        ("n", "k", "v" * (VALUE_CHARS_MAX + 1), "value has"),
    ):
        with pytest.raises(RequestError, match=why):
            kv.put(namespace, key, value)

    kv.delete("n", "k")
    kv.put("n", "l", "v")
    assert (kv.table("n"), kv.table("m"), kv.table("o")) == ({"l": "v"}, {"k": "v"}, None)


def test_a_namespace_ends_with_its_last_value(tmp_path: Path) -> None:
    """Otherwise whoever sets and removes values in many namespaces uses up the limit for good."""
    kv = _open(tmp_path / "kvConfig.json", entries_max=4, bytes_max=300)
    for number in range(10):
        kv.put(f"n{number}", "k", "v")
        kv.delete(f"n{number}", "k")

    assert kv.table("n9") is None
    kv.put("m", "k", "v")
    assert (_open(tmp_path / "kvConfig.json").table("m"), len(kv)) == ({"k": "v"}, 1)


def test_empty_namespaces_of_rocketmqs_file_are_left_out(tmp_path: Path) -> None:
    """Its name server keeps them."""
    path = tmp_path / "kvConfig.json"
    path.write_bytes(b'{"configTable":{"empty":{},"n":{"k":"v"}}}')
    kv = _open(path)

    assert (kv.table("empty"), kv.table("n")) == (None, {"k": "v"})
