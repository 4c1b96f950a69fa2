"""The captured frames by name."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from dledger.remoting.frame import Frame, HeaderForm, decode


class Golden(NamedTuple):
    """One frame: what it is, and its bytes."""

    direction: str
    description: str
    data: bytes

    @property
    def frame(self) -> Frame:
        """As it decodes."""
        return decode(memoryview(self.data))


def _read() -> dict[str, Golden]:
    found: dict[str, Golden] = {}
    for line in (Path(__file__).parent / "golden" / "frames.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            name, direction, description, digits = line.split(" | ")
            found[name] = Golden(direction, description, bytes.fromhex(digits))
    return found


GOLDEN: Final = _read()
BINARY: Final = frozenset(name for name, one in GOLDEN.items() if one.data[4] == HeaderForm.BINARY)
CPP: Final = frozenset({"F74", "F76", "F78", "F79", "F80"})
GO: Final = frozenset({"F81", "F83", "F84", "F86", "F87", "F88"})
