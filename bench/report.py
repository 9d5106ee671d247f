"""Figures with their targets: the table on standard output and the JSON file.

A mark is advice: `ok` within the target, `OVER` beyond it (`near` between the target and the most that is allowed), `-` where
there is none. Nothing here fails a run.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import msgspec


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured number."""

    group: str
    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    """The range over the slices or repetitions of the run."""
    target: float | None = None
    """Lower is better for all figures that have a target."""
    limit: float | None = None
    """At the very most."""
    note: str = ""

    @property
    def mark(self) -> str:
        if self.target is None:
            return "-"
        if self.value <= self.target:
            return "ok"
        return "near" if self.limit is not None and self.value <= self.limit else "OVER"


class Report(msgspec.Struct, kw_only=True):
    """All of a run."""

    machine: dict[str, str | int | float]
    options: str
    figures: list[Figure]
    failures: list[str]
    seconds: float = 0.0


def machine_facts() -> dict[str, str | int | float]:
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown"
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "cores": os.cpu_count() or 0,
        "cpu": model,
        "memory_mb": memory >> 10,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def show(figures: list[Figure], group: str = "") -> None:
    """The table of some figures; `group` is the one whose head has been shown already."""
    for figure in figures:
        if figure.group != group:
            group = figure.group
            print(f"\n{group}")
            print(f"  {'':<46}{'value':>10} {'unit':<11}{'range':<19}{'target':<23}mark")
        spread = "" if figure.low == figure.high else f"{_number(figure.low or 0)} .. {_number(figure.high or 0)}"
        target = "" if figure.target is None else f"<= {_number(figure.target)}"
        if figure.limit is not None:
            target += f" (most {_number(figure.limit)})"
        line = f"  {figure.name:<46}{_number(figure.value):>10} {figure.unit:<11}{spread:<19}{target:<23}{figure.mark}"
        print(f"{line}  {figure.note}" if figure.note else line)
    sys.stdout.flush()


def _number(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def save(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.to_builtins(report)
    for raw, figure in zip(data["figures"], report.figures, strict=True):
        raw["mark"] = figure.mark
    path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")
