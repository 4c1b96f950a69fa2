"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plant:
    """One method and what it is replaced by."""

    owner: object
    name: str
    replacement: object
