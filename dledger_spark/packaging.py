"""``python -m dledger_spark.packaging dledger.zip``: packs the packages that Spark's workers need, for ``--py-files``.

Pure Python only: numpy, pyarrow, grpcio, protobuf and crc32c must be installed where the workers run.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Final

PACKAGES: Final = ("dledger", "rocketstore", "dledger_spark", "pyspark_dledger")
_ROOT: Final = Path(__file__).parents[1]
_EARLIEST: Final = (1980, 1, 1, 0, 0, 0)


def write_zip(path: Path) -> int:
    """Write the archive, reproducibly; returns the number of files in it."""
    half = path.with_name(f".{path.name}.tmp")
    files = sorted(file for name in PACKAGES for file in (_ROOT / name).rglob("*.py"))
    with zipfile.ZipFile(half, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.relative_to(_ROOT).as_posix(), _EARLIEST)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, file.read_bytes())
    half.replace(path)
    return len(files)


def main(arguments: list[str]) -> int:
    """Write the archive; returns the exit code."""
    if len(arguments) != 1 or not arguments[0].endswith(".zip"):
        sys.stderr.write("usage: python -m dledger_spark.packaging FILE.zip\n")
        return 2
    count = write_zip(Path(arguments[0]))
    sys.stdout.write(f"{arguments[0]}: {count} modules, for spark-submit --py-files {arguments[0]}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
