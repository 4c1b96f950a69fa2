"""Parts of the binary bodies of our requests: a text is its length in one byte, and ASCII."""

from __future__ import annotations


def encode_text(text: str) -> bytes:
    """Raises ``ValueError`` for more than 255 characters, or others than ASCII."""
    encoded = text.encode("ascii")
    return bytes((len(encoded),)) + encoded


def read_text(data: bytes, at: int) -> tuple[str, int]:
    """The text there, and where it ends. Raises ``IndexError`` and ``UnicodeDecodeError``."""
    found, end = cut(data, at + 1, data[at])
    return found.decode("ascii"), end


def cut(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    """So many bytes, and where they end. Raises ``IndexError`` if there are fewer."""
    end = at + size
    if size < 0 or end > len(data):
        raise IndexError(f"{size} bytes at {at} of {len(data)}")
    return data[at:end], end
