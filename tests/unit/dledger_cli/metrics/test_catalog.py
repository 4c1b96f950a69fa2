"""The names of metrics keep Prometheus's conventions (https://prometheus.io/docs/practices/naming/)."""

from __future__ import annotations

import re

import pytest

from dledger_cli.metrics.catalog import SPECS, MetricKind, Spec
from dledger_cli.metrics.collectors import Families

UNITS = ("seconds", "bytes", "ratio", "info", "index", "entries", "messages", "total")
RESERVED = ("le", "quantile", "job", "instance")


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_a_name_says_unit_and_kind(spec: Spec) -> None:
    """Counters end in _total, base units only, no reserved label, a sentence of help."""
    assert re.fullmatch(r"(dledger|rocketmq)_[a-z]+(_[a-z]+)*", spec.name)
    assert (spec.kind is MetricKind.COUNTER) == spec.name.endswith("_total")
    assert not re.search(r"_(ms|millis|kb|mb|percent|time)(_|$)", spec.name)
    if spec.kind is MetricKind.HISTOGRAM:
        assert spec.name.endswith(UNITS)
    assert spec.meaning.endswith(".")
    assert not set(spec.all_labels) & set(RESERVED)
    assert len(set(spec.all_labels)) == len(spec.all_labels)


def test_nothing_that_is_not_in_the_catalog_can_be_told() -> None:
    """Else the table in docs/monitoring.md would lack it; nor can a metric be told as another kind."""
    families = Families("g", "n0")

    with pytest.raises(KeyError):
        families.gauge("dledger_unheard_of", 1)
    with pytest.raises(TypeError, match="dledger_term is a gauge, not a counter"):
        families.counter("dledger_term", 1)
    families.gauge("dledger_role", 1, "leader")
    with pytest.raises(TypeError, match="dledger_role is a gauge"):
        families.counter("dledger_role", 1, "leader")
