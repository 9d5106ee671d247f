"""`make bench BEFORE=<commit>`: compare this tree with an earlier commit, and that commit with itself.

    python bench/compare.py BEFORE [--rounds N]

Each round starts a new broker of each of three sides, in changing order: the earlier commit, this tree, and the earlier commit
once more. The ratio of the last to the first is what this machine makes of no difference at all; a figure counts as slower only
if its median ratio is above the bound and outside the middle half of that. The exit code is 1 if one is.

The load generator is this tree's for all sides, and so are the installed dependencies.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
from bench.broker_process import ROOT, WORK, Process, fresh_dir, start_broker
from bench.jobs import EXCLUSIVE, SHARED, Job
from bench.report import machine_facts
from bench.scenarios.bench_run import Run
from bench.scenarios.delivery import backlog_job
from bench.scenarios.publish import publish_job
from bench.scenarios.transactions import TOPIC, Publishing
from bench.shapes import Shape

BOUND = 1.02
ROUNDS = 9
SIDES = ("before", "after", "again")
SMALL = Shape(batch=1, size=100, topics=1)
TRANSACTIONAL_MESSAGES = 20_000


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over all rounds: CPU microseconds of the broker per entry, by side."""

    name: str
    us: dict[str, list[float]]

    def ratios(self, side: str) -> list[float]:
        """Of a side to the earlier commit, round by round, in order of size."""
        return sorted(one / base for one, base in zip(self.us[side], self.us["before"], strict=True))

    @property
    def noise(self) -> tuple[float, float]:
        """The middle half of the earlier commit against itself."""
        found = self.ratios("again")
        cut = len(found) // 4
        return found[cut], found[-1 - cut]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios("after"))

    @property
    def is_slower(self) -> bool:
        return self.ratio > BOUND and self.ratio > self.noise[1]


def unpack(commit: str) -> Path:
    """The sources of a commit, in a folder of their own; raises SystemExit if there is no such commit."""
    try:
        name = _git("rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
        packed = _git("archive", name, "src")
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{commit!r} is not a commit of this repository: {error.stderr.decode().strip()}") from None
    folder = fresh_dir(f"sources-{name[:10]}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


Measure = Callable[[Run, Process], float]


def _publish(shape: Shape) -> Measure:
    return lambda run, broker: run.load(publish_job(run, shape, broker.port, broker.pid, f"p{shape.batch}-{shape.topics}")).us


def _tail(run: Run, broker: Process) -> float:
    job = publish_job(run, SMALL, broker.port, broker.pid, "tail")
    return run.load(msgspec.structs.replace(job, mode="tail", subscriptions=("tail",), kind=EXCLUSIVE)).us


def _drain(kind: int) -> Measure:
    def measure(run: Run, broker: Process) -> float:
        def job(mode: str, subscriptions: tuple[str, ...]) -> Job:
            made = backlog_job(run, SMALL, broker, mode, kind, subscriptions)
            return msgspec.structs.replace(made, prefix=f"drain-{kind}")

        run.load(job("subscribe", ("s",)))
        run.load(job("publish", ()))
        return run.load(job("drain", ("s",))).us

    return measure


def _transactions(run: Run, broker: Process) -> float:
    async def spend() -> float:
        async with Publishing.open(broker, TOPIC + "compared") as publishing:
            await publishing.spend(TRANSACTIONAL_MESSAGES // 4, 0)  # warms up
            return (await publishing.spend(TRANSACTIONAL_MESSAGES, 1)).us

    return asyncio.run(spend())


FIGURES: dict[str, Measure] = {
    "publish, 1 x 100 B": _publish(SMALL),
    "publish, 100 x 100 B": _publish(Shape(batch=100, size=100, topics=1)),
    "publish, 1 x 100 B, 100 topics": _publish(Shape(batch=1, size=100, topics=100)),
    "publish and deliver at the tail": _tail,
    "drain a backlog, Exclusive": _drain(EXCLUSIVE),
    "drain a backlog, Shared": _drain(SHARED),
    "publish in transactions of 1,000": _transactions,
}


def compare(run: Run, before: Path, rounds: int) -> list[Comparison]:
    sources = {"before": before, "after": ROOT / "src", "again": before}
    found = [Comparison(name=name, us={side: [] for side in SIDES}) for name in FIGURES]
    for number in range(rounds):
        turn = number % len(SIDES)
        for side in SIDES[turn:] + SIDES[:turn]:
            os.sync()  # what the last one wrote must not slow this one's disk
            environ = {"PYTHONPATH": str(sources[side])}
            with start_broker(fresh_dir("compare"), environ).wait_ready() as broker:
                for each in found:
                    run.progress(f"round {number + 1} of {rounds}, {side}: {each.name}")
                    each.us[side].append(FIGURES[each.name](run, broker))
        _show(found, number + 1, rounds)
    return found


def _show(found: list[Comparison], done: int, rounds: int) -> None:
    print(f"\n{done} of {rounds} rounds: broker CPU per entry, bound {BOUND}")
    print(f"  {'':<36}{'before us':>10}{'after us':>10}{'ratio':>8}   {'before against itself':<23}verdict")
    for each in found:
        before, after = (statistics.median(each.us[side]) for side in ("before", "after"))
        low, high = each.noise
        verdict = "SLOWER" if each.is_slower else "no difference" if low <= each.ratio <= high else "ok"
        print(f"  {each.name:<36}{before:>10.2f}{after:>10.2f}{each.ratio:>8.3f}   {f'{low:.3f} - {high:.3f}':<23}{verdict}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare this tree with an earlier commit on this machine.")
    parser.add_argument("before", help="the earlier commit")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"how often each side is measured (default {ROUNDS})")
    parser.add_argument("--output", type=Path, default=WORK / "compared.json", help="where the figures go")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    before = unpack(options.before)
    print(", ".join(f"{key} {value}" for key, value in machine_facts().items()))
    with Run(is_quick=True, is_unbatched=False) as run:
        try:
            found = compare(run, before, options.rounds)
        except (RuntimeError, OSError) as error:
            print(f"The comparison could not be made: {error}", file=sys.stderr)
            return 2
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    slower = [each.name for each in found if each.is_slower]
    names = f": {', '.join(slower)}" if slower else ""
    print(f"\n{len(slower)} of {len(found)} figures slower{names}; written to {options.output}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
