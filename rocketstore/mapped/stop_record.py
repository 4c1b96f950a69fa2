"""Small JSON files that a clean stop leaves for the next start, which trusts them only if they are whole.

The first line is the CRC32 of the rest, eight hexadecimal digits.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from dledger.store.fs import FileSystem, make_dirs_durably, read_whole, replace_durably

_CRC_BYTES: Final = 9
"""Eight hexadecimal digits and a line feed."""

_T = TypeVar("_T")
_log = logging.getLogger("rocketstore")


def write_stop_record(fs: FileSystem, path: Path, content: object) -> None:
    """Replace the file durably. Raises ``OSError``."""
    text = json.dumps(content, separators=(",", ":")).encode()
    make_dirs_durably(fs, path.parent)
    replace_durably(fs, path, b"%08x\n" % zlib.crc32(text) + text)


def read_stop_record(path: Path, parse: Callable[[Any], _T]) -> _T | None:  # Any: JSON, which ``parse`` checks
    """The content as parsed; None if there is none, if it is not whole, or if ``parse`` finds it wrong."""
    try:
        data = read_whole(path)
        if data[:_CRC_BYTES] != b"%08x\n" % zlib.crc32(data[_CRC_BYTES:]):
            return None
        return parse(json.loads(data[_CRC_BYTES:]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        _log.warning("%s cannot be read, so the files that it describes are: %s", path, error)
        return None
