"""Directories of sparse files in small archives: zip files whose members lack their trailing zeros."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

_SIZES = "sizes.json"
_EPOCH = (1980, 1, 1, 0, 0, 0)


def pack(directory: Path, archive: Path, *, without: tuple[str, ...] = ()) -> None:
    """Write all files of a directory, but those named, into an archive; the same files give the same bytes."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and path.name not in without)
    sizes = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}
    with zipfile.ZipFile(archive, "w") as out:
        _add(out, _SIZES, json.dumps(sizes, indent=1).encode())
        for name in sizes:
            _add(out, name, _without_trailing_zeros(directory / name))


def unpack(archive: Path, directory: Path) -> Path:
    """Make the files again, sparse; gives the directory."""
    with zipfile.ZipFile(archive) as source:
        for name, size in json.loads(source.read(_SIZES)).items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.write(source.read(name))
                file.truncate(size)
    return directory


def _add(out: zipfile.ZipFile, name: str, data: bytes) -> None:
    out.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_LZMA)


def _without_trailing_zeros(path: Path) -> bytes:
    """The content up to its last byte that is not zero. Reads large files backwards, a piece at a time."""
    end = path.stat().st_size
    with path.open("rb") as file:
        while end:
            start = max(0, end - (1 << 20))
            file.seek(start)
            kept = file.read(end - start).rstrip(b"\0")
            if kept:
                end = start + len(kept)
                break
            end = start
        file.seek(0)
        return file.read(end)
