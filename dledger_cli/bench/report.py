"""Reports a load: lines for people, one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dledger_cli.bench.load import LoadPlan
from dledger_cli.bench.meter import Measured, Recent

MB = 1_000_000


@dataclass(frozen=True, slots=True)
class LoadReport:
    """``what`` names the kind of load, ``where`` its target."""

    what: str
    where: Mapping[str, str]
    plan: LoadPlan
    size: int
    measured: Measured
    seconds: float
    interrupted: bool

    @property
    def records_per_s(self) -> float:
        """Acknowledged records per second."""
        return self.measured.acknowledged / self.seconds if self.seconds > 0 else 0.0


def second_line(at_s: float, took_s: float, size: int, recent: Recent, failed: int) -> str:
    """A line about the last ``took_s``, short enough for a narrow terminal."""
    rate = recent.records / took_s
    line = f"{at_s:5.0f} s  {rate:>9,.0f}/s  {rate * size / MB:>7.2f} MB/s"
    if recent.records:
        line += f"  avg {_ms(recent.average_s)}  max {_ms(recent.max_s)}"
    return line + (f"  {failed:,} failed" if failed else "")


def lines(report: LoadReport) -> Iterator[str]:
    """For people."""
    measured = report.measured
    yield f"records        {measured.acknowledged:,} of {report.size:,} bytes acknowledged in {report.seconds:.2f} s"
    yield f"rate           {report.records_per_s:,.0f} records/s, {report.records_per_s * report.size / MB:.2f} MB/s"
    if measured.average_s is not None and measured.max_s is not None:
        yield f"average        {_ms(measured.average_s)}"
        for percent, latency_s in measured.percentiles_s.items():
            yield f"p{percent:<13g} {_ms(latency_s)}"
        yield f"max            {_ms(measured.max_s)}"
    for one in measured.errors:
        outcome = "unknown outcome" if one.outcome == "unknown" else "not stored"
        yield f"failed         {one.count:,} {one.kind} ({outcome}), first: {one.first}"
    if report.interrupted:
        yield "interrupted: these are the figures until then"


def document(report: LoadReport) -> dict[str, object]:
    """For programs. Latencies are null if nothing was acknowledged."""
    plan, measured = report.plan, report.measured
    latencies = {"average": measured.average_s, "max": measured.max_s}
    latencies |= {f"p{percent:g}".replace(".", "_"): latency_s for percent, latency_s in measured.percentiles_s.items()}
    return {
        "load": report.what,
        **report.where,
        "size_bytes": report.size,
        "clients": plan.clients,
        "in_flight": plan.in_flight,
        "rate_limit_per_s": plan.rate,
        "seconds": report.seconds,
        "records": measured.acknowledged,
        "records_per_s": report.records_per_s,
        "mb_per_s": report.records_per_s * report.size / MB,
        "latency_ms": {name: None if one is None else one * 1000 for name, one in latencies.items()},
        "failed": measured.failed,
        "errors": [
            {"kind": one.kind, "outcome": one.outcome, "count": one.count, "first": one.first}
            for one in measured.errors
        ],
        "interrupted": report.interrupted,
    }


def _ms(seconds: float) -> str:
    milliseconds = seconds * 1000
    return f"{milliseconds:.2f} ms" if milliseconds < 100 else f"{milliseconds:,.0f} ms"
