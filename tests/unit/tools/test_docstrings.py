"""Docstrings name their subject: no sentence begins with a clause such as "What arrived …" or "Whoever asks …"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tools.tidy.census import sources

ROOT: Final = Path(__file__).parents[3]
_CLAUSE: Final = re.compile(r"(?:^|[.;:]\s+|\n\s*\n\s*)((?:What|Who|Whom|Whoever|Whatever)\b[^.\n]*)")


def clauses(source: str) -> Iterator[str]:
    """The sentences of a module's docstrings, below fields, too, that begin with such a clause."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from (found[1] for found in _CLAUSE.finditer(node.value.value))


def test_a_clause_is_found_at_the_begin_of_a_sentence_only() -> None:
    """In docstrings of modules, functions and fields; not in other texts, nor in the middle of a sentence."""
    source = '''
"""Reads. What is lost comes again."""
text = "What is this?"
class One:
    field: int = 1
    """Who asks."""
    def run(self):
        """Says what it does.

        Whoever waits is told so.
        """
'''

    assert sorted(clauses(source)) == ["What is lost comes again", "Who asks", "Whoever waits is told so"]


def test_no_docstring_of_the_product_has_a_clause_for_a_subject() -> None:
    """Of all packages, without generated code."""
    found = [f"{path.relative_to(ROOT)}: {one}" for path in sources(ROOT) for one in clauses(path.read_text())]

    assert found == []
