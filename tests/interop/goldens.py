"""The golden files: stores that Java wrote, and what Java read back from them.

``python -m tests.interop.goldens`` writes them anew, which is needed only when the Java program's content changes.
"""

from __future__ import annotations

import json
import lzma
import shutil
import tempfile
from pathlib import Path

from tests.interop import java
from tests.interop.archive import pack, unpack

GOLDEN = Path(__file__).parent / "golden"
STORES = {"plain": "write-plain", "killed": "killed-plain", "dledger": "write-dledger"}
"""Directory of the archive to the Java program's command."""
LEDGER = "ledger"
"""A log of DLedger 0.4.3, without a message store."""


def write_golden(name: str, directory: Path) -> tuple[Path, list[str]]:
    """Have Java write the store ``name`` under ``directory``, and read a copy of it."""
    root = directory / name
    root.mkdir(parents=True)
    if name == LEDGER:
        java.run_ledger("write", root)
        for follower in ("n1", "n2"):  # they hold the same
            shutil.rmtree(root / f"dledger-{follower}")
        return root, java.run_ledger("read", copy_store(root, directory / f"{name}-read"))
    java.run_store(STORES[name], root)
    command = "read-dledger" if name == "dledger" else "read-plain"
    return root, java.run_store(command, copy_store(root, directory / f"{name}-read"))


def open_golden(name: str, directory: Path) -> tuple[Path, list[str]]:
    """Unpack the store ``name`` into ``directory``; gives its root and what Java read back."""
    lines = lzma.decompress((GOLDEN / f"{name}.jsonl.xz").read_bytes()).decode().splitlines()
    return unpack(GOLDEN / f"{name}.zip", directory / name), lines


def copy_store(source: Path, target: Path) -> Path:
    """A copy whose holes stay holes."""
    archive = target.with_suffix(".zip")
    pack(source, archive)
    unpack(archive, target)
    archive.unlink()
    return target


def main() -> None:
    """Write all golden files and the manifest."""
    java.build()
    GOLDEN.mkdir(exist_ok=True)
    manifest: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in (*STORES, LEDGER):
            root, lines = write_golden(name, Path(temporary))
            pack(root, GOLDEN / f"{name}.zip", without=("lock",))
            (GOLDEN / f"{name}.jsonl.xz").write_bytes(lzma.compress("\n".join(lines).encode()))
            manifest[name] = count(lines)
    (GOLDEN / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def count(lines: list[str]) -> dict[str, int]:
    """How many objects of each kind Java read."""
    counts: dict[str, int] = {}
    for line in lines:
        kind = json.loads(line).get("kind", "entry")
        counts[kind] = counts.get(kind, 0) + 1
    return counts


if __name__ == "__main__":
    main()
