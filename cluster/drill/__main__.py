"""``python -m cluster.drill``: breaks a group on purpose and checks its messages."""

from __future__ import annotations

from pathlib import Path

import click

from dledger.command_line import flag_values
from dledger_cli import terminal


def _known(_context: click.Context, _parameter: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """``list`` may stand beside others; other names must exist."""
    from cluster.drill.drills import DRILLS

    unknown = [name for name in names if name not in DRILLS and name not in ("all", "list")]
    if unknown:
        raise click.BadParameter(f"unknown drill {unknown[0]!r}: choose from {', '.join(DRILLS)}, all, list")
    return names


def _list(as_json: bool) -> None:
    from cluster.drill.drills import DRILLS

    rows = [
        *((one.name, one.summary) for one in DRILLS.values()),
        ("all", "one at a time; isolation in both directions"),
    ]
    if as_json:
        terminal.print_json([{"drill": name, "summary": summary} for name, summary in rows])
    else:
        terminal.print_table(("drill", "what happens"), rows)


@click.command(
    short_help="Break a group on purpose and check what happened to its messages.",
    epilog="""\b
Examples:
  python -m cluster.drill list                                what there is
  python -m cluster.drill kill-leader
  python -m cluster.drill kill-leader --nodes 5 --rounds 3 --html report.html
  python -m cluster.drill isolate-leader --direction in
  python -m cluster.drill upgrade --on processes
  python -m cluster.drill all --on processes --json > drills.json

\b
Containers need Docker (tools/with-dockerd.sh starts it); otherwise the drills run on processes, with a note.
Exit code 0: nothing acknowledged was lost, doubled or moved, and the group recovered each time. 1: anything else.""",
)
@click.argument("names", nargs=-1, required=True, metavar="DRILL…", callback=_known)
@click.option("--nodes", type=click.Choice(["3", "5"]), default="3", show_default=True, help="How many brokers.")
@click.option(
    "--rounds", type=flag_values.Whole(1, 100), default=1, show_default=True, help="How many times to inject the fault."
)
@click.option(
    "--rate", type=flag_values.Number(10, 5000), default=500, show_default=True, help="Messages to send per second."
)
@click.option(
    "--direction",
    type=click.Choice(["out", "in"]),
    default="out",
    show_default=True,
    help="isolate-leader: drop packets from the leader, or packets to it.",
)
@click.option(
    "--on",
    "place",
    type=click.Choice(["auto", "containers", "processes"]),
    default="auto",
    show_default=True,
    help="Where the brokers run; auto: in containers if possible.",
)
@click.option(
    "--calm",
    "calm_s",
    type=flag_values.Seconds(0.2, 60),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Quiet time before, between and after the faults.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of tables.")
@click.option(
    "--html",
    "html_file",
    type=flag_values.NewFile(),
    metavar="FILE",
    help="Write a report with charts to one file.",
)
@click.option("--keep", is_flag=True, help="Keep the group's data and logs.")
def main(  # noqa: PLR0913
    names: tuple[str, ...],
    nodes: str,
    rounds: int,
    rate: float,
    direction: str,
    place: str,
    calm_s: float,
    as_json: bool,
    html_file: Path | None,
    keep: bool,
) -> None:
    """Start a group, inject faults while a producer and a consumer run, and read everything back from every node.

    Each drill reports a timeline, the time without service, and a verdict: acknowledged, lost, duplicated, out of
    order.
    """
    if "list" in names:
        _list(as_json)
        return
    from cluster.drill.context import DrillOptions
    from cluster.drill.main import DrillPlace, Reporting, run
    from cluster.drill.target import Direction, NotPossibleError

    options = DrillOptions(int(nodes), rounds, rate, Direction(direction), calm_s, keep)
    try:
        code = run(names, DrillPlace(place), options, Reporting(as_json, html_file))
    except NotPossibleError as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(code)


if __name__ == "__main__":
    main()
