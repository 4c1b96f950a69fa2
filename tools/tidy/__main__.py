"""``python -m tools.tidy``: print the figures; with ``--by-file``, also how often each file is called."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tools.tidy.calls import ROOT, NotedCall, cost
from tools.tidy.census import ARGUMENTS_MAX, ATTRIBUTES_MAX, CAPTION_WORDS_MAX, LINES_MAX, LINES_MIN, take_census
from tools.tidy.operations import watch_appends, watch_sends

_REPETITIONS: Final = 100


def main(arguments: list[str]) -> int:
    """Print the figures; returns the exit code."""
    census = take_census(ROOT)
    doubled = f"  {', '.join(census.doubled_classes)}" if census.doubled_classes else ""
    _print("product files", census.files)
    _print(f"of fewer than {LINES_MIN} lines", census.short_files)
    _print(f"of more than {LINES_MAX} lines", f"{len(census.long_files)}  {', '.join(census.long_files)}")
    _print("product lines", census.lines)
    _print("lines of imports", f"{census.import_lines / census.lines:.1%}")
    _print(f"docstrings of at most {CAPTION_WORDS_MAX} words", census.captions)
    _print("modules and classes with words of our own", len(census.own_words))
    _print("public top-level functions and classes", census.public_names)
    _print("protocols", len(census.protocols))
    _print("class names in more than one module", f"{len(census.doubled_classes)}{doubled}")
    _print(
        f"classes of more than {ATTRIBUTES_MAX} attributes or {ARGUMENTS_MAX} arguments",
        f"{len(census.large_classes)}  {', '.join(census.large_classes)}",
    )
    logging.disable(logging.WARNING)
    with TemporaryDirectory() as directory:
        appends = watch_appends(Path(directory) / "group", _REPETITIONS)
        sends = watch_sends(Path(directory) / "broker", _REPETITIONS)
    watched = {
        "one append, leader's event loop": appends.of_leader("client-rpc"),
        "one append, all of the leader's threads": appends.of_leader(),
        "one send, until it is acknowledged": sends,
    }
    for what, calls in watched.items():
        spent = cost(calls)
        _print(what, f"{spent.calls} calls in {len(spent.files)} files")
        if "--by-file" in arguments:
            _print_files(calls)
    return 0


def _print(what: str, value: object) -> None:
    sys.stdout.write(f"{what:<50} {value}\n")


def _print_files(repetitions: list[list[NotedCall]]) -> None:
    counts = Counter((call.thread, call.file, call.function) for calls in repetitions for call in calls)
    for (thread, file, function), count in counts.most_common():
        if 2 * count >= len(repetitions):
            sys.stdout.write(f"  {count / len(repetitions):6.1f}  {thread:<32} {file}: {function}\n")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
