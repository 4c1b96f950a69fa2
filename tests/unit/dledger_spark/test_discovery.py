"""Spark looks for ``pyspark_*`` among the top-level modules that the path shows: installed is not enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_spark_finds_the_format_whatever_the_directory(tmp_path: Path) -> None:
    """An editable install through a finder can be imported but not listed: then only the project's root would do."""
    look = "import pkgutil; print('pyspark_dledger' in {one.name for one in pkgutil.iter_modules()})"

    found = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "True"
