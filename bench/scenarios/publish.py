"""Publishing: broker CPU per entry over all shapes, beside the floor, and what many topics cost.

Should saturate the broker's loop thread: about two thirds of the cost of a small entry is Python there, the rest is the
kernel's share of socket and journal and the journal thread. Large entries cost their copies and their checksum.
"""

from __future__ import annotations

import statistics

from bench.broker_process import fresh_dir, start_broker, start_floor
from bench.jobs import Job, Result
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.shapes import BATCHES, SIZES_OF_MESSAGES, TOPICS, Shape, all_shapes

GROUP = "Publish: broker CPU per entry, durable"
RATIO_GROUP = "Many topics: publish, 1 x 100 B, alternating runs"
TARGET_US, LIMIT_US = 15.0, 20.0
TOPICS_RATIO = 1.5


def shapes(run: Run) -> list[Shape]:
    if not run.is_quick:
        return all_shapes()
    return [Shape(batch=batch, size=100, topics=topics) for topics in TOPICS for batch in (1, 100)]


def publish_job(run: Run, shape: Shape, port: int, pid: int, prefix: str, *, is_floor: bool = False) -> Job:
    entries = shape.entries(30_000 if run.is_quick else 60_000, (32 if run.is_quick else 64) << 20)
    warm = shape.entries(entries // 5, 1 << 40)
    return Job(
        mode="publish", port=port, pid=pid, shape=shape, prefix=prefix, entries=entries, warm=warm, seconds=2, is_floor=is_floor
    )


def floors(run: Run, mode: str) -> dict[tuple[int, int], Result]:
    """The floor of each kind of entry; the number of topics makes no difference to it."""
    found = {}
    with start_floor(fresh_dir("floor")) as floor:
        for size in SIZES_OF_MESSAGES:
            for batch in BATCHES:
                shape = Shape(batch=batch, size=size, topics=1)
                job = publish_job(run, shape, floor.port, floor.pid, "", is_floor=True)
                if mode == "drain":
                    job = Job(mode=mode, port=job.port, pid=job.pid, shape=shape, entries=job.entries, is_floor=True)
                found[batch, size] = run.load(job)
    return found


def per_entry(group: str, name: str, result: Result, floor: Result, shape: Shape, targets: tuple[float, float]) -> Figure:
    """A figure of CPU per entry beside its floor."""
    low, high = result.interval
    rate = result.remark + (f" ({result.rate * shape.batch:,.0f} msg/s)" if shape.batch > 1 else "")
    return Figure(
        group=group,
        name=name,
        value=result.us,
        unit="us/entry",
        low=low,
        high=high,
        target=targets[0] if shape.is_small else None,
        limit=targets[1] if shape.is_small else None,
        note=f"{rate}; floor {floor.us:.2f} us, {floor.rate:,.0f}/s; {result.us / floor.us:.1f}x floor",
    )


def measure(run: Run) -> None:
    floor = floors(run, "publish")
    with start_broker(fresh_dir("publish")).wait_ready() as broker:
        for shape in shapes(run):
            result = run.load(publish_job(run, shape, broker.port, broker.pid, f"t{shape.topics}"))
            figure = per_entry(GROUP, shape.name, result, floor[shape.batch, shape.size], shape, (TARGET_US, LIMIT_US))
            run.add([figure])


def measure_topics(run: Run) -> None:
    """One topic and many in turn (A B B A ...), on one broker: the ratio of the medians."""
    costs: dict[int, list[float]] = {count: [] for count in TOPICS}
    rounds = 2 if run.is_quick else 3
    with start_broker(fresh_dir("topics")).wait_ready() as broker:
        for number in range(rounds + 1):
            for topics in TOPICS if number % 2 else reversed(TOPICS):
                shape = Shape(batch=1, size=100, topics=topics)
                result = run.load(publish_job(run, shape, broker.port, broker.pid, f"t{topics}"))
                if number:  # the first round warms up
                    costs[topics].append(result.us)
    middle = {topics: statistics.median(found) for topics, found in costs.items()}
    figures = [
        Figure(
            group=RATIO_GROUP,
            name="1 topic" if topics == 1 else f"{topics} topics",
            value=middle[topics],
            unit="us/entry",
            low=min(found),
            high=max(found),
        )
        for topics, found in costs.items()
    ]
    for topics in TOPICS[1:]:
        pairs = [many / one for many, one in zip(costs[topics], costs[1], strict=True)]
        figures.append(
            Figure(
                group=RATIO_GROUP,
                name=f"{topics} topics to one",
                value=middle[topics] / middle[1],
                unit="x",
                low=min(pairs),
                high=max(pairs),
                target=TOPICS_RATIO,
            )
        )
    run.add(figures)
