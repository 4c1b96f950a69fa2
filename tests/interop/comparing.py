"""What mqadmin prints of two clusters, so that only differences of the clusters' own remain."""

from __future__ import annotations

import re
from typing import Final

from tests.interop.whole_clusters import WholeCluster

_REPLACED: Final = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b[0-9A-F]{32,56}\b", "ID"),
        (r"\b\d+\.\d+\.\d+\.\d+@\d+(?:#\d+)?", "CLIENT"),
        (r"\b127\.0\.0\.1:\d+", "ADDRESS"),
        (r"\b\d{4}-\d\d-\d\d[ #]\d\d:\d\d:\d\d(?:[,:]\d{3})?", "TIME"),
        (r"\b(?:1[78]\d{11}|20\d{12}(?:\d{3})?)\b", "TIME"),
        (r"(?:\$\$Lambda\S*)?@[0-9a-f]{5,8}\b", "@OBJECT"),
        (r"\bV\d+_\d+_\d+\b|\bversion=\d+", "VERSION"),
        (r"\b(commitLogOffset=|physicOffset=|CommitLog Offset: *)\d+", r"\1POSITION"),
        (r"\b(\d+\.\d+\.\d+\.\d+)\b", "IP"),
        (r"\b\d+\.\d+\b", "NUMBER"),
        (r"\brt=\d+ms|\b(true|false)[ \t]+\d+(?=\s)|\bspentTimeMills=\d+", r"\1 DURATION"),
        (r"(?s)DESC: .*?(?=\n\t|\n[^\s]*Exception|\s+BROKER: |$)", "DESC: REASON"),  # each has words of its own
        (r"\bBROKER: .*", ""),  # any of those asked
        (r"(?m)^\t(?:at |\.\.\. \d+ more).*\n", ""),  # where an error comes from
        (r"\n(?:See http|For more information).*", ""),  # the clients' advice
        (r"[ \t]+", " "),
    )
)


def comparable(printed: str, cluster: WholeCluster) -> list[str]:
    """The lines, sorted, with names in place of addresses, times, ids, versions and rates."""
    for group, addresses in cluster.brokers.items():
        for broker_id, address in addresses.items():
            printed = re.sub(rf"\b{re.escape(address)}\b", f"{group}/{broker_id}", printed)
    printed = printed.replace(cluster.name_server, "NAMESERVER").replace(str(cluster.directory), "DIRECTORY")
    for pattern, replacement in _REPLACED:
        printed = pattern.sub(replacement, printed)
    return sorted(line.strip() for line in printed.splitlines() if line.strip())
