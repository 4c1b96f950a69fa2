"""What a container's shell makes of its environment before it starts the server."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from typing import Any


def as_started(container: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:  # Any: YAML
    """The variables of the server itself."""
    shell, flag, script = container["command"]
    assert (shell, flag) == ("sh", "-c")
    printing, count = re.subn(r"exec dledger .*", "exec env -0", script)
    assert count == 1
    given = {**environment, "PATH": os.environ["PATH"]}
    done = subprocess.run([shell, flag, printing], env=given, check=True, capture_output=True, text=True)
    found = dict(one.partition("=")[::2] for one in done.stdout.split("\0") if one)
    return {name: value for name, value in found.items() if name in environment or name.startswith("DLEDGER_")}
