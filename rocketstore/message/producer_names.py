"""Validates producer names by the log's rule (``dledger``), before they are used."""

from __future__ import annotations

import re
from typing import Final

from dledger.errors import InvalidRequestError

PRODUCER_CHARS_MAX: Final = 128
SEQUENCE_MAX: Final = (1 << 63) - 1 - (1 << 32)
"""Leaves room for the number of messages without overflow."""
_NAME: Final = re.compile(rf"[A-Za-z0-9._/:-]{{1,{PRODUCER_CHARS_MAX}}}")


def check_producer_name(name: str) -> None:
    """Raises ``InvalidRequestError`` for an invalid producer name."""
    if _NAME.fullmatch(name) is None:
        shown = name if len(name) <= PRODUCER_CHARS_MAX else f"{name[:PRODUCER_CHARS_MAX]}..."
        raise InvalidRequestError(
            f"a producer's name must be 1 to {PRODUCER_CHARS_MAX} characters from A-Z, a-z, 0-9 and ._/:-, not "
            f"{shown!r}"
        )
