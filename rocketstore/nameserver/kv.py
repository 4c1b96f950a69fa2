"""Values set by administrators, by namespace and key, in RocketMQ's ``kvConfig.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Final

from dledger.errors import ConfigError
from dledger.records import record
from dledger.remoting.codes import AnswerCode, RequestError
from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably
from rocketstore.remoting.body import Body

ORDER_TOPICS: Final = "ORDER_TOPIC_CONFIG"
"""RocketMQ's namespace of ordered topics: ``topic`` to ``broker:queues;broker:queues``."""
NAME_CHARS_MAX: Final = 1024
VALUE_CHARS_MAX: Final = 65_536
_FILE_BYTES_MAX: Final = 64 * 1024 * 1024

Table = Mapping[str, Mapping[str, str]]


@record(frozen=True, slots=True)
class KvFile(Body):
    """The file's content."""

    config_table: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class KvConfig:
    """Reads are from memory; a change is written to the file before it is visible. One thread changes, any may read.

    The constructor raises ``ConfigError`` if the file is damaged or cannot be used.
    """

    def __init__(self, path: Path, *, entries_max: int, bytes_max: int, fs: FileSystem | None = None) -> None:
        self._path = path
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._fs = fs or FileSystem()
        try:
            self._table: Table = _load(path)
        except OSError as error:
            raise ConfigError([f"{path}: cannot be used: {error.strerror}"]) from error

    def get(self, namespace: str, key: str) -> str | None:
        """Return a value, if it is set."""
        return self._table.get(namespace, {}).get(key)

    def __len__(self) -> int:
        """Return the number of values."""
        return sum(map(len, self._table.values()))

    def table(self, namespace: str) -> Mapping[str, str] | None:
        """Return a namespace's values, if it exists."""
        return self._table.get(namespace)

    def put(self, namespace: str, key: str, value: str) -> None:
        """Set a value durably. Raises ``RequestError``: a limit is exceeded, or the file cannot be written."""
        for what, text, limit in (
            ("namespace", namespace, NAME_CHARS_MAX),
            ("key", key, NAME_CHARS_MAX),
            ("value", value, VALUE_CHARS_MAX),
        ):
            if len(text) > limit:
                raise RequestError(f"the {what} has {len(text)} characters: at most {limit} are allowed")
        self._write({**self._table, namespace: {**self._table.get(namespace, {}), key: value}})

    def delete(self, namespace: str, key: str) -> None:
        """Remove a value durably, if it is set, and its namespace with the last one. Raises ``RequestError``."""
        if self.get(namespace, key) is None:
            return
        left = {one: value for one, value in self._table[namespace].items() if one != key}
        self._write(_without_empty({**self._table, namespace: left}))

    def _write(self, table: Table) -> None:
        entries = sum(map(len, table.values())) + len(table)
        if entries > self._entries_max:
            raise RequestError(f"more than {self._entries_max} values and namespaces (kvEntriesMax)")
        content = KvFile(table).encode()
        if len(content) > self._bytes_max:
            raise RequestError(f"all values together take more than {self._bytes_max} bytes (kvBytesMax)")
        try:
            make_dirs_durably(self._fs, self._path.parent)
            replace_durably(self._fs, self._path, content)
        except OSError as error:
            raise RequestError(f"{self._path} cannot be written: {error.strerror}", AnswerCode.SYSTEM_ERROR) from error
        self._table = table


def _without_empty(table: Table) -> Table:
    """No request removes an empty namespace, which counts towards the limit."""
    return {namespace: values for namespace, values in table.items() if values}


def _load(path: Path) -> Table:
    try:
        content = read_whole(path, _FILE_BYTES_MAX)
    except FileNotFoundError:
        return {}
    try:
        return _without_empty(KvFile.decode(content).config_table)  # RocketMQ keeps them
    except RequestError as error:
        raise ConfigError(
            [
                f"{path}: damaged ({error}): restore it from a copy or from another name server, or move it aside to "
                "start without the values set by administrators"
            ]
        ) from error
