"""`make bench`: run the scenarios against real brokers, show a table, write the figures to a JSON file.

    python bench/run.py [--quick] [--only NAME ...] [--unbatched] [--output FILE]

Figures are for reading and comparing within one run; nothing fails because the machine is slow. The exit code is 1 only if a
scenario could not be run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.broker_process import WORK
from bench.report import Report, machine_facts, save, show
from bench.scenarios import (
    clients,
    cluster,
    delivery,
    latency,
    memory,
    publish,
    restart,
    scalable,
    spark_decode,
    spark_read,
    spark_sink,
    spark_write,
    transactions,
    turns,
)
from bench.scenarios.bench_run import Run

SCENARIOS = {
    "start": memory.measure_start,
    "idle": memory.measure_idle,
    "latency": latency.measure,
    "publish": publish.measure,
    "topics": publish.measure_topics,
    "delivery": delivery.measure,
    "memory": memory.measure,
    "restart": restart.measure,
    "cluster": cluster.measure,
    "scalable": scalable.measure,
    "transactions": transactions.measure,
    "turns": turns.measure,
    "spark-decode": spark_decode.measure,
    "spark-read": spark_read.measure,
    "spark-sink": spark_sink.measure,
    "spark-write": spark_write.measure,
    "clients": clients.measure,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a broker on this machine.")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and shorter runs, about a minute")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="run this scenario; may be repeated")
    parser.add_argument("--unbatched", action="store_true", help="measure memory with unbatched messages (minutes)")
    parser.add_argument("--output", type=Path, default=WORK / "latest.json", help="where the figures go")
    options = parser.parse_args()
    report = Report(machine=machine_facts(), options=" ".join(sys.argv[1:]), figures=[], failures=[])
    print(", ".join(f"{key} {value}" for key, value in report.machine.items()))
    started = time.perf_counter()
    with Run(is_quick=options.quick, is_unbatched=options.unbatched) as run:
        for name, measure in SCENARIOS.items():
            if options.only and name not in options.only:
                continue
            os.sync()  # what the last one wrote must not slow this one's disk
            begun = time.perf_counter()
            try:
                measure(run)
            except (RuntimeError, OSError) as error:
                run.failures.append(f"{name}: {error}")
                print(f"\n{name} could not be measured: {error}", file=sys.stderr)
            print(f"\n[{name}: {time.perf_counter() - begun:.0f} s]", flush=True)
    report.figures, report.failures = run.figures, run.failures
    report.seconds = round(time.perf_counter() - started, 1)
    save(report, options.output)
    _conclude(report, options.output)
    for folder in WORK.iterdir():
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if report.failures else 0


def _conclude(report: Report, output: Path) -> None:
    marks = [figure.mark for figure in report.figures]
    counts = f"{marks.count('ok')} within their targets, {marks.count('near')} near, {marks.count('OVER')} over"
    print(f"\n{len(marks)} figures in {report.seconds:.0f} s: {counts}; written to {output}")
    beyond = [figure for figure in report.figures if figure.mark in ("near", "OVER")]
    if beyond:
        print("\nBeyond their targets:")
        show(beyond)
    for failure in report.failures:
        print(f"NOT MEASURED {failure}")


if __name__ == "__main__":
    sys.exit(main())
