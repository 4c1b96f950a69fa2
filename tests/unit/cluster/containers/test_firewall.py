"""What is undone of an engine's packet filter."""

from __future__ import annotations

import shlex

from cluster.containers.firewall import undoing

RULES = """
-P INPUT ACCEPT
-P FORWARD ACCEPT
-N DOCKER
-N DOCKER-ISOLATION-STAGE-1
-N DOCKER-USER
-N MINE
-A FORWARD -j DOCKER-USER
-A FORWARD -j DOCKER-ISOLATION-STAGE-1
-A FORWARD -j MINE
-A INPUT -s 10.0.0.7/32 -m comment --comment "not DOCKER" -j DROP
-A DOCKER-ISOLATION-STAGE-1 -j RETURN
-A DOCKER-USER -j RETURN
-A MINE -j RETURN
"""


def test_only_the_engines_chains_go() -> None:
    """First what leads to them, then what is in them, then they themselves; other rules stay."""
    commands = undoing([shlex.split(line) for line in RULES.strip().splitlines()])

    assert [" ".join(command) for command in commands] == [
        "-D FORWARD -j DOCKER-USER",
        "-D FORWARD -j DOCKER-ISOLATION-STAGE-1",
        "-F DOCKER",
        "-F DOCKER-ISOLATION-STAGE-1",
        "-F DOCKER-USER",
        "-X DOCKER",
        "-X DOCKER-ISOLATION-STAGE-1",
        "-X DOCKER-USER",
    ]
