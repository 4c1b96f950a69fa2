"""Random SQL conditions and properties, and what RocketMQ's own filter says to them.

``python -m tests.interop.sql_cases`` writes ``golden/sql.tsv.xz`` anew: lines of verdict (T, F, N: unknown or an error,
R: refused), expression, and properties. What this project decides otherwise on purpose is not generated: a rest after a
complete condition, and comments at the end, which RocketMQ takes for such a rest.
"""

from __future__ import annotations

import lzma
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tests.interop import java
from tests.interop.rocketmq import command, environment_in

SQL_GOLDEN: Final = Path(__file__).parent / "golden" / "sql.tsv.xz"
GOLDEN_CASES: Final = 8000
_NAMES: Final = ("a", "b", "c")
_VALUES: Final = (
    *("1", "2", "1.0", "2.5", "x", "y", "true", "false", "TRUE", "", "-1", "1e1", " 1", "it's", "99999999999", "NaN"),
    *(
        "2147483648",
        "007",
        "9223372036854775808",
        "Infinity",
        "1d",
        "0x1p3",
        "-0",
        "-0.0",
        "+1",
        "1L",
        ".5",
        "5.",
        "0x10",
    ),
    *("-9223372036854775808", "1e400", "-Infinity", "2 ", "\N{ARABIC-INDIC DIGIT ONE}", "\N{FULLWIDTH DIGIT TWO}"),
    *("\N{MATHEMATICAL BOLD DIGIT ONE}", "1_0", "--1", "NaNd", "0X.8P1f", "\N{LATIN SMALL LETTER E WITH ACUTE}"),
)
_INTEGERS: Final = ("1", "2", "0", "10", "1L", "99999999999", "2147483647", "2147483648")
_FLOATS: Final = ("1.0", "2.5", ".5", "1e1", "1.", "1E-3", "1e400")
_STRINGS: Final = ("'x'", "'\N{LATIN SMALL LETTER E WITH ACUTE}'", "'y'", "'1'", "'true'", "'it''s'", "''")


class Sentences:
    """Random expressions, from the loosest operators inwards."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def line(self) -> str:
        """An expression and some properties, separated by tabs."""
        parts = [self._or(2)]
        for name in _NAMES:
            if self._random.random() < 0.75:
                parts += [name, self._random.choice(_VALUES)]
        return "\t".join(parts)

    def _or(self, depth: int) -> str:
        return " OR ".join(self._and(depth) for _ in range(self._random.choice((1, 1, 1, 2))))

    def _and(self, depth: int) -> str:
        return " AND ".join(self._equality(depth) for _ in range(self._random.choice((1, 1, 2))))

    def _equality(self, depth: int) -> str:
        found = self._comparison(depth)
        for _ in range(self._random.choice((0, 0, 0, 1, 1, 2))):
            if self._random.random() < 0.75:
                found += f" {self._random.choice(('=', '<>'))} {self._comparison(depth)}"
            else:
                found += f" {self._random.choice(('IS NULL', 'IS NOT NULL', 'is null'))}"
        return found

    def _comparison(self, depth: int) -> str:
        left = self._unary(depth)
        for _ in range(self._random.choice((1, 1, 1, 1, 2))):
            left = self._compared(left, depth)
        return left

    def _compared(self, left: str, depth: int) -> str:
        kind = self._random.random()
        if kind < 0.35:
            return left
        if kind < 0.7:
            return f"{left} {self._random.choice(('<', '<=', '>', '>='))} {self._unary(depth)}"
        negated = self._random.choice(("", "NOT "))
        if kind < 0.8:
            return f"{left} {negated}BETWEEN {self._unary(depth)} AND {self._unary(depth)}"
        if kind < 0.9:
            wanted = ", ".join(self._random.choice(_STRINGS) for _ in range(self._random.randint(1, 3)))
            return f"{self._random.choice(_NAMES)} {negated}IN ({wanted})"
        test = self._random.choice(("CONTAINS", "STARTSWITH", "ENDSWITH"))
        return f"{left} {negated}{test} {self._random.choice(_STRINGS)}"

    def _unary(self, depth: int) -> str:
        if self._random.random() < 0.85:
            return self._primary(depth)
        return self._random.choice(("NOT ", "- ", "+")) + self._unary(depth)

    def _primary(self, depth: int) -> str:
        kind = self._random.random()
        if kind < 0.55:
            return self._random.choice(_NAMES)
        if kind < 0.68:
            return self._random.choice(_INTEGERS)
        if kind < 0.76:
            return self._random.choice(_FLOATS)
        if kind < 0.84:
            return self._random.choice(_STRINGS)
        if kind < 0.90:
            return self._random.choice(("TRUE", "FALSE", "true"))
        if kind < 0.91:
            return "NULL"
        return f"({self._or(depth - 1)})" if depth > 0 else self._random.choice(_NAMES)


def verdicts(lines: list[str]) -> list[str]:
    """What RocketMQ 5.5's filter says to each line; ``java.build()`` first."""
    with tempfile.TemporaryDirectory() as directory:
        told = subprocess.run(
            command("rocketmq5", "interop.SqlMain", Path(directory)),
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=240,
            env=environment_in(Path(directory)),
            check=True,
        ).stdout
    return [line.removeprefix("> ") for line in told.splitlines() if line.startswith("> ")]


def golden_cases() -> list[tuple[str, str, dict[str, str]]]:
    """The recorded verdicts, expressions and properties."""
    rows = [line.split("\t") for line in lzma.decompress(SQL_GOLDEN.read_bytes()).decode().splitlines()]
    return [(row[0], row[1], properties_of(row[2:])) for row in rows]


def properties_of(parts: list[str]) -> dict[str, str]:
    """Properties from name, value, name, value."""
    return dict(zip(parts[::2], parts[1::2], strict=True))


def main() -> None:
    """Write the golden file."""
    java.build()
    sentences = Sentences(seed=0)
    cases: list[str] = []
    refused_max = GOLDEN_CASES // 4
    while len(cases) < GOLDEN_CASES:
        lines = [sentences.line() for _ in range(GOLDEN_CASES)]
        for verdict, line in zip(verdicts(lines), lines, strict=True):
            if verdict != "R" or refused_max > 0:
                refused_max -= verdict == "R"
                cases.append(f"{verdict}\t{line}\n")
    SQL_GOLDEN.write_bytes(lzma.compress("".join(cases[:GOLDEN_CASES]).encode()))


if __name__ == "__main__":
    main()
