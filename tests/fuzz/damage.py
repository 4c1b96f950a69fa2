"""What disks, people and copying programs do to a directory."""

from __future__ import annotations

import logging
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hypothesis import strategies as st

from dledger.errors import DLedgerError

HUGE_BYTES: Final = 1 << 40
"""Of a file that somebody lengthened: nearly all of it a hole."""
_ADDRESS_SPACE_BYTES: Final = 8 << 30
"""More than a start needs for anything, less than a file takes that was lengthened to a terabyte."""
_TEXTS: Final = (
    b"",
    b"{",
    b"{}\n",
    b"[]",
    b"null",
    b"7",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"checksum":1,"state":{}}\n',
    b'{"T":{"0":Infinity}}',
    b'{"T":{"0":-1,"x":1}}',
    b'{"offsetTable":{"T@g":{"0":Infinity}},"topicConfigTable":{"T":{}},"subscriptionGroupTable":7}',
    b'{"offsetTable":{"1":1e999,"T@g":[]},"topicConfigTable":{"T":7},"subscriptionGroupTable":{"":1}}',
    b"00000000\n{}",
)
OF_CONTENT: Final = ("turn", "zero", "cut", "grow", "sector", "empty", "text")
_OF_FILES: Final = ("remove", "swap", "copy", "next", "folder", "link", "loop", "huge")
_OF_FOLDERS: Final = ("folder removed", "folder emptied", "file for folder", "folders swapped")


@dataclass(frozen=True, slots=True)
class Damage:
    """One stroke; ``number`` and ``other`` choose files (or directories) among those that are there."""

    kind: str
    number: int
    other: int
    at: int
    length: int
    text: bytes = b""

    def strike(self, root: Path) -> list[Path]:
        """Do it; returns what was changed."""
        if self.kind in _OF_FOLDERS:
            return self._strike_folder(root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        if not files:
            return []
        path, twin = files[self.number % len(files)], files[self.other % len(files)]
        if self.kind in OF_CONTENT:
            path.write_bytes(self._changed(_start_of(path), twin))
            return [path]
        match self.kind:
            case "remove":
                path.unlink()
            case "swap":
                content = _start_of(path)
                path.write_bytes(_start_of(twin))
                twin.write_bytes(content)
                return [path, twin]
            case "copy":
                made = path.with_name(path.name + "1")
                made.write_bytes(_start_of(path))
                return [made]
            case "next" if path.name.isdecimal():  # a segment under the name of another one
                made = path.with_name(f"{(int(path.name) + self.length * path.stat().st_size) % 10**20:020d}")
                made.write_bytes(_start_of(path))
                return [made]
            case "folder":
                path.unlink()
                path.mkdir()
            case "link":
                path.unlink()
                path.symlink_to(root / "nowhere" if twin == path else twin)
            case "loop":
                path.unlink()
                path.symlink_to(path)
            case "huge":
                with path.open("r+b") as file:
                    file.truncate(HUGE_BYTES)
        return [path]

    def _changed(self, content: bytes, twin: Path) -> bytes:
        data = bytearray(content)
        place = self.at % len(data) if data else 0
        match self.kind:
            case "turn" if data:
                data[place] ^= 1 << (self.length % 8)
            case "zero":
                data[place : place + self.length] = bytes(len(data[place : place + self.length]))
            case "cut":
                del data[place:]
            case "grow":
                data += bytes([self.at % 256]) * self.length
            case "sector":
                start = place - place % 512
                data[start : start + 512] = _start_of(twin)[:512].ljust(512, b"\0")[: len(data) - start]
            case "empty":
                data.clear()
            case "text":
                return self.text
        return bytes(data)

    def _strike_folder(self, root: Path) -> list[Path]:
        folders = sorted(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())
        if not folders:
            return []
        path, twin = folders[self.number % len(folders)], folders[self.other % len(folders)]
        match self.kind:
            case "folders swapped":
                if path != twin and path not in twin.parents and twin not in path.parents:
                    aside = path.with_name(path.name + "~")
                    path.rename(aside)
                    twin.rename(path)
                    aside.rename(twin)
                return [path, twin]
            case "folder emptied":
                shutil.rmtree(path)
                path.mkdir()
            case "folder removed":
                shutil.rmtree(path)
            case _:
                shutil.rmtree(path)
                path.write_bytes(b"no folder")
        return [path]


def _start_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 20)


def damages() -> st.SearchStrategy[list[Damage]]:
    """One to three strokes, most of them of contents."""
    kinds = st.one_of(*map(st.sampled_from, (OF_CONTENT, OF_CONTENT, _OF_FILES, _OF_FOLDERS)))
    numbers = st.integers(0, 99)
    one = st.builds(
        Damage, kinds, numbers, numbers, st.integers(0, 8191), st.integers(1, 1024), st.sampled_from(_TEXTS)
    )
    return st.lists(one, min_size=1, max_size=3)


@contextmanager
def struck(base: Path, copy: Path, part: str, strikes: Sequence[Damage]) -> Iterator[list[Path]]:
    """``base`` copied to ``copy``, its ``part`` damaged; gives what was changed, relative to that part."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(base, copy)
    root = copy / part
    yield [path.relative_to(root) for strike in strikes for path in strike.strike(root)]
    shutil.rmtree(copy, ignore_errors=True)


class _Told(logging.Handler):
    """Log records of exceptions that nobody expected."""

    def __init__(self) -> None:
        super().__init__()
        self.unexpected: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, DLedgerError | OSError):
            self.unexpected.append(f"{record.getMessage()}: {error!r}")


@contextmanager
def nothing_unexpected() -> Iterator[None]:
    """No exception is logged that is not the project's own, and nothing allocates what a huge file would take."""
    told = _Told()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    loggers = [logging.getLogger(name) for name in ("dledger", "rocketstore", "asyncio")]
    for one in loggers:
        one.addHandler(told)
    resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESS_SPACE_BYTES, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        for one in loggers:
            one.removeHandler(told)
    assert not told.unexpected
