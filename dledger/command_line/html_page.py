"""Frame, style, tables and pictures of all reports: one HTML file each, which needs no network and no other file.

Colours follow the reader's light or dark theme. Every picture can be saved as SVG or PNG; without the script for that,
the page is complete. A report adds what only it has: styles, and a script. The page's policy allows nothing else to run
or to be fetched, whatever a log contains.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Final

_REPLACEMENT: Final = 0xFFFD
_SHOWN_AS: Final = {
    **dict.fromkeys((*range(0x80, 0xA0), *range(0xD800, 0xE000), 0xFFFE, 0xFFFF), _REPLACEMENT),
    **dict.fromkeys((0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)), _REPLACEMENT),
    **{code: 0x2400 + code for code in range(0x20) if code not in b"\t\n"},
    0x7F: 0x2421,
}
"""Signs for characters that no XML may have, as a saved picture is, that are invisible, or that reorder text."""


def document(title: str, css: str, body: Iterable[str], script: str = "") -> str:
    """The whole file. ``body``: elements; empty ones are left out."""
    style, scripts = _own_file("css") + css, [_own_file("js"), *([script] if script else [])]
    whole = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, scripts)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(filter(None, body))
        + f"\n</main>\n{''.join(f'<script>{one}</script>{chr(10)}' for one in scripts)}</body>\n</html>\n"
    )
    return whole.translate(_SHOWN_AS)


def _own_file(ending: str) -> str:
    return resources.files("dledger.command_line").joinpath(f"html_page.{ending}").read_text(encoding="utf-8")


def _policy(style: str, scripts: Iterable[str]) -> str:
    """Only what the page was written with; ``data:`` is for the picture that becomes a PNG."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {' '.join(map(_hash, scripts))}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write(text: str, path: Path) -> None:
    """Write a document, whole or not at all; what is not a file, such as /dev/stdout, is written directly."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    half = path.with_name(f".{secrets.token_hex(8)}.tmp")  # nobody can have prepared it, as a link to another file
    try:
        with half.open("x", encoding="utf-8") as file:
            file.write(text)
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def paragraph(words: str, kind: str = "quiet") -> str:
    """A paragraph; nothing for an empty text."""
    return f'<p class="{kind}">{escape(words)}</p>' if words else ""


def facts(parts: Iterable[tuple[str, str]]) -> str:
    """Names and texts below each other; texts may be long. Nothing if there are none."""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in parts)
    return f'<dl class="facts">{listed}</dl>' if listed else ""


def banner(words: str, kind: str = "bad", items: Sequence[str] = ()) -> str:
    """The most important message, and its parts."""
    listed = f"<ul>{''.join(f'<li>{escape(one)}</li>' for one in items)}</ul>" if items else ""
    return f'<div class="banner {kind}" role="status">{escape(words)}{listed}</div>'


def tile(name: str, value: str, kind: str = "") -> str:
    """One figure, for ``tiles``."""
    return f'<div class="{f"tile {kind}".strip()}"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def tiles(parts: Iterable[str]) -> str:
    """Figures side by side."""
    return f'<div class="tiles">{"".join(parts)}</div>'


def table(columns: Sequence[tuple[str, bool]], rows: Iterable[str]) -> str:
    """``columns``: a name, and whether it holds numbers. ``rows``: made by ``row``."""
    head = "".join(f'<th scope="col"{_kind(is_number)}>{escape(name)}</th>' for name, is_number in columns)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def row(cells: Iterable[str], kind: str = "") -> str:
    return f"<tr{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{''.join(cells)}</tr>"


def cell(words: str, *, is_number: bool = False, is_time: bool = False) -> str:
    """One cell of a row."""
    return f"<td{_kind(is_number) or (_TIME if is_time else '')}>{escape(words)}</td>"


def picture(drawn: str, beside: str = "") -> str:
    """A chart made by ``svg``, with buttons that save it. ``beside``: what its script needs."""
    return (
        f'<figure class="picture"><div class="scroll"><div class="plot">{drawn}{beside}</div></div>'
        '<p class="save" hidden="hidden">Save this picture: <button type="button" data-as="svg">SVG</button>'
        '<button type="button" data-as="png">PNG</button></p></figure>'
    )


_TIME: Final = ' class="time"'


def _kind(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
