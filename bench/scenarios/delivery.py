"""Delivery: broker CPU per entry for readers at the tail, of a backlog in the cache, and of a backlog on disk after a restart.

Should saturate the broker's loop thread. Exclusive consumers acknowledge cumulatively, every hundred entries; Shared ones
individually, a hundred ids in a command. Tail runs publish at the same time: the cost of publishing, from a run without
subscription on the same broker, is taken off.
"""

from __future__ import annotations

import msgspec
from bench.broker_process import Process, forget_page_cache, fresh_dir, start_broker
from bench.jobs import EXCLUSIVE, SHARED, Job, Result
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.scenarios.publish import floors, per_entry, publish_job
from bench.shapes import BATCHES, SIZES_OF_MESSAGES, TOPICS, Shape

TARGETS = (12.0, 18.0)
CACHE_BYTES = 256 << 20
"""Larger than the default, so that a backlog of large entries is long enough to be measured."""
BACKLOG_BYTES = 32 << 20
KINDS = {EXCLUSIVE: "Exclusive", SHARED: "Shared"}


def shapes(run: Run, topics: int) -> list[Shape]:
    if run.is_quick:
        return [Shape(batch=1, size=100, topics=topics)] if topics != 100 else []
    found = [Shape(batch=batch, size=size, topics=topics) for size in SIZES_OF_MESSAGES for batch in BATCHES]
    return [shape for shape in found if shape.entry_bytes * shape.topics <= CACHE_BYTES]


def backlog_job(run: Run, shape: Shape, broker: Process, mode: str, kind: int, subscriptions: tuple[str, ...]) -> Job:
    entries = shape.entries(20_000 if run.is_quick else 50_000, BACKLOG_BYTES)
    return Job(
        mode=mode,
        port=broker.port,
        pid=broker.pid,
        shape=shape,
        prefix="backlog",
        entries=entries,
        seconds=60,
        subscriptions=subscriptions,
        kind=kind,
    )


def measure(run: Run) -> None:
    """Every shape on a broker of its own: what an earlier one left in memory or on disk must not count for the next."""
    floor = floors(run, "drain")
    found: list[Figure] = []
    wanted = [shape for topics in TOPICS for shape in shapes(run, topics)]
    for number, shape in enumerate(wanted, 1):
        run.progress(f"delivery {number} of {len(wanted)}: {shape.name}")
        found += _measure_shape(run, shape, floor[shape.batch, shape.size])
    groups = dict.fromkeys(figure.group for figure in found)
    run.add([figure for group in groups for figure in found if figure.group == group])


def _measure_shape(run: Run, shape: Shape, floor: Result) -> list[Figure]:
    data = fresh_dir("delivery")
    settings = {"BRAID__MANAGED_LEDGER__CACHE_BYTES": str(CACHE_BYTES)}

    def drain(broker: Process, what: str, kind: int, subscription: str) -> Figure:
        result = run.load(backlog_job(run, shape, broker, "drain", kind, (subscription,)))
        group = f"Delivery, {what}: broker CPU per entry"
        return per_entry(group, f"{KINDS[kind]}, {shape.name}", result, floor, shape, TARGETS)

    with start_broker(data, settings).wait_ready() as broker:
        figures = _tail(run, shape, broker)
        for kind in KINDS:
            run.load(backlog_job(run, shape, broker, "subscribe", kind, (f"cache-{kind}", f"cold-{kind}")))
        run.load(backlog_job(run, shape, broker, "publish", EXCLUSIVE, ()))
        figures += [drain(broker, "backlog in the cache", kind, f"cache-{kind}") for kind in KINDS]
    forget_page_cache(data)
    with start_broker(data, settings).wait_ready() as broker:
        figures += [drain(broker, "cold backlog after a restart", kind, f"cold-{kind}") for kind in KINDS]
    return figures


def _tail(run: Run, shape: Shape, broker: Process) -> list[Figure]:
    figures = []
    alone = run.load(_shorter(publish_job(run, shape, broker.port, broker.pid, "alone")))
    for kind, kind_name in KINDS.items():
        job = _shorter(publish_job(run, shape, broker.port, broker.pid, f"tail-{kind}"))
        both = run.load(msgspec.structs.replace(job, mode="tail", subscriptions=("tail",), kind=kind))
        figures.append(_tail_figure(f"{kind_name}, {shape.name}", shape, both, alone))
    return figures


def _shorter(job: Job) -> Job:
    """Half of a publishing run: there are many."""
    return msgspec.structs.replace(job, entries=max(job.shape.topics, job.entries // 2))


def _tail_figure(name: str, shape: Shape, both: Result, alone: Result) -> Figure:
    """What delivery adds. With large entries it is lost in the noise of writing them, so that both are shown together."""
    low, high = both.interval
    note = f"{both.remark}; both {both.us:.1f} us, publishing alone {alone.us:.1f} us"
    if not shape.is_small:
        group = "Delivery at the tail, large entries: broker CPU per entry, publishing and delivery together"
        return Figure(group=group, name=name, value=both.us, unit="us/entry", low=low, high=high, note=note)
    return Figure(
        group="Delivery at the tail: broker CPU per entry beyond publishing",
        name=name,
        value=both.us - alone.us,
        unit="us/entry",
        low=low - alone.us,
        high=high - alone.us,
        target=TARGETS[0],
        limit=TARGETS[1],
        note=note,
    )
