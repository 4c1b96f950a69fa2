"""A slave's knowledge of its master, kept for the day on which somebody asks what is lost with that master.

A file in the store: the slave may be stopped or started anew when the master is gone.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Final

from dledger.errors import CorruptLogError
from dledger.records import record
from dledger.store.fs import FileSystem, keep_private, make_dirs_durably, replace_durably

MEMORY_FILE: Final = "haMaster.json"


@record(frozen=True, slots=True)
class KnownMaster:
    """The master that a slave followed last. Times are Unix time in ms; 0: never."""

    address: str = ""
    """For slaves."""
    end: int = 0
    """The end of its log, as far as it was heard."""
    own_end: int = 0
    """The end of the slave's log, when this was written."""
    heard_ms: int = 0
    """When it last said anything."""
    complete_ms: int = 0
    """When the slave last had everything that the master was known to have."""


class SlaveMemory:
    """The file."""

    def __init__(self, fs: FileSystem, config_dir: Path) -> None:
        self._fs = fs
        self._path = config_dir / MEMORY_FILE

    def read(self) -> KnownMaster:
        """Empty if there is none. Raises ``CorruptLogError``, ``OSError``."""
        try:
            found = json.loads(self._path.read_bytes())
            known = KnownMaster(**{one.name: found[one.name] for one in fields(KnownMaster)})
        except FileNotFoundError:
            return KnownMaster()
        except (ValueError, KeyError, TypeError) as error:
            advice = "Remove it: it is only needed to say what a promotion of this slave would lose"
            raise CorruptLogError(self._path, 0, "it does not say which master this slave had", advice) from error
        wanted = {"int": int, "str": str}
        if any(type(getattr(known, one.name)) is not wanted[str(one.type)] for one in fields(KnownMaster)):
            advice = "Remove it: it is only needed to say what a promotion of this slave would lose"
            raise CorruptLogError(self._path, 0, "it has values of other types", advice)
        return known

    def write(self, known: KnownMaster) -> None:
        """Replace it. Raises ``OSError``."""
        make_dirs_durably(self._fs, self._path.parent)
        keep_private(self._path.parent)
        replace_durably(self._fs, self._path, json.dumps(asdict(known)).encode())
