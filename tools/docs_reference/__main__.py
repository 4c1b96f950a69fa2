"""``python -m tools.docs_reference [--check]``: write the generated documents, or list the stale ones."""

from __future__ import annotations

import sys
from typing import Final

from tools.docs_reference import configuration, metrics, requests
from tools.docs_reference.sections import DOCS

DOCUMENTS: Final = {
    "configuration.md": configuration.text,
    "monitoring.md": metrics.text,
    "rocketmq.md": requests.text,
}


def main(arguments: list[str]) -> int:
    """Write or check the documents; returns the exit code."""
    check = arguments == ["--check"]
    stale = []
    for name, text in DOCUMENTS.items():
        path, wanted = DOCS / name, text()
        if not path.exists() or path.read_text() != wanted:
            stale.append(f"docs/{name}")
            if not check:
                path.write_text(wanted)
    if check and stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run make docs\n")
        return 1
    sys.stdout.write(f"{'fresh' if check else 'written'}: {', '.join(stale) or 'everything is up to date'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
