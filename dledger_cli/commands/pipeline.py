"""``dledger pipeline``: Spark jobs over the log, loaded on demand."""

from __future__ import annotations

from importlib import import_module

import click


class _Jobs(click.Group):
    """Finds its commands in ``dledger_spark.jobs``, which takes longer to import than most commands take to run."""

    def list_commands(self, _context: click.Context) -> list[str]:
        from dledger_spark.jobs import JOBS

        return list(JOBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        command = import_module(f"dledger_spark.jobs.{name}").command
        assert isinstance(command, click.Command)
        return command


@click.group(
    cls=_Jobs,
    short_help="Run a Spark job over the log.",
    epilog="""\b
Examples:
  dledger pipeline stats /var/lib/broker/dledger-n0
  dledger pipeline audit /backup/n0 /backup/n1 /backup/n2
  dledger pipeline export -b 127.0.0.1:10911 -g broker-a --help

\b
Needs Spark (the extra spark: pip install '.[spark]' in a clone) and Java 17 or newer. A job runs on this machine, with
all its processors, unless --master names a cluster; each is also a program for spark-submit, see docs/pipeline.md.""",
)
def pipeline() -> None:
    """Spark jobs for logs too large for one machine."""
