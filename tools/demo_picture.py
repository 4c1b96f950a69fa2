"""The picture in README: a terminal in which ``dledger demo`` has just run. ``make screenshots``, or by itself.

The text is that of a real run; only the mark of each step and the leader get their colours here.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH: Final = 116
_STYLES: Final = ((r"^✓", "bold green"), (r"^.*\bLEADER\b.*$", "green"), (r"^node  .*$", "bold"), (r"^\$ .*$", "bold"))


def picture(lines: list[str]) -> str:
    """An SVG of these lines, without fonts from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for line in lines:
        text = Text(line)
        for pattern, style in _STYLES:
            text.highlight_regex(pattern, style)
        console.print(text)
    svg = console.export_svg(title="make demo", theme=MONOKAI, unique_id="demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def steps(told: str) -> list[str]:
    """The steps and the table, of all that a demo prints."""
    shown = [line.rstrip() for line in told.splitlines()]
    first = next(number for number, line in enumerate(shown) if line.startswith("✓"))
    last = max(number for number, line in enumerate(shown) if line.startswith("✓"))
    return shown[first : last + 1]


def main(file: Path) -> None:
    """Run the demo and write the picture. Raises ``CalledProcessError`` if the demo fails."""
    command = [sys.executable, "-m", "dledger_cli.entry", "demo"]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
    file.write_text(picture(["$ make demo", *steps(told)]), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
