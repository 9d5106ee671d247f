"""Delivery: broker CPU per entry for readers at the tail, of a backlog in the cache, and of a backlog on disk after a restart.

Should saturate the broker's loop thread. Exclusive consumers acknowledge cumulatively, every hundred entries; Shared ones
individually, a hundred ids in a command. Tail runs publish at the same time: the cost of publishing, from a run without
subscription on the same broker, is taken off.
"""

from __future__ import annotations

from bench.broker_process import Process, forget_page_cache, fresh_dir, start_broker
from bench.jobs import EXCLUSIVE, SHARED, Job, Result
from bench.report import Figure
from bench.scenarios.bench_run import Run
from bench.scenarios.publish import floors, per_entry, publish_job
from bench.shapes import BATCHES, SIZES_OF_MESSAGES, TOPICS, Shape

TARGETS = (12.0, 18.0)
CACHE_BYTES = 256 << 20
"""Larger than the default, so that a backlog of large entries is long enough to be measured."""
BACKLOG_BYTES = 128 << 20
KINDS = {EXCLUSIVE: "Exclusive", SHARED: "Shared"}


def shapes(run: Run, topics: int) -> list[Shape]:
    if run.is_quick:
        return [Shape(batch=1, size=100, topics=topics)] if topics != 100 else []
    return [Shape(batch=batch, size=size, topics=topics) for size in SIZES_OF_MESSAGES for batch in BATCHES]


def backlog_job(run: Run, shape: Shape, broker: Process, mode: str, kind: int, subscriptions: tuple[str, ...]) -> Job:
    entries = shape.entries(20_000 if run.is_quick else 100_000, BACKLOG_BYTES)
    prefix = f"backlog-{shape.topics}-{shape.size}-{shape.batch}"
    return Job(
        mode=mode,
        port=broker.port,
        pid=broker.pid,
        shape=shape,
        prefix=prefix,
        entries=entries,
        seconds=60,
        subscriptions=subscriptions,
        kind=kind,
    )


def measure(run: Run) -> None:
    floor = floors(run, "drain")
    for topics in TOPICS:
        wanted = shapes(run, topics)
        if wanted:
            _measure_topics(run, wanted, topics, floor)


def _measure_topics(run: Run, wanted: list[Shape], topics: int, floor: dict[tuple[int, int], Result]) -> None:
    data = fresh_dir(f"delivery-{topics}")
    settings = {"BRAID__MANAGED_LEDGER__CACHE_BYTES": str(CACHE_BYTES)}

    def figure(what: str, kind: int, shape: Shape, result: Result) -> Figure:
        group = f"Delivery, {what}: broker CPU per entry"
        name = f"{KINDS[kind]}, {shape.name}"
        return per_entry(group, name, result, floor[shape.batch, shape.size], shape, TARGETS)

    tails, cached, cold = [], [], []
    with start_broker(data, settings).wait_ready() as broker:
        for shape in wanted:
            tails += _tail(run, shape, broker)
        for shape in wanted:
            for kind in KINDS:
                run.load(backlog_job(run, shape, broker, "subscribe", kind, (f"cache-{kind}", f"cold-{kind}")))
            run.load(backlog_job(run, shape, broker, "publish", EXCLUSIVE, ()))
            for kind in KINDS:
                result = run.load(backlog_job(run, shape, broker, "drain", kind, (f"cache-{kind}",)))
                cached.append(figure("backlog in the cache", kind, shape, result))
    run.add(tails)
    run.add(cached)
    forget_page_cache(data)
    with start_broker(data, settings).wait_ready() as broker:
        for shape in wanted:
            for kind in KINDS:
                result = run.load(backlog_job(run, shape, broker, "drain", kind, (f"cold-{kind}",)))
                cold.append(figure("cold backlog after a restart", kind, shape, result))
    run.add(cold)


def _tail(run: Run, shape: Shape, broker: Process) -> list[Figure]:
    figures = []
    alone = run.load(publish_job(run, shape, broker.port, broker.pid, f"alone-{shape.topics}"))
    for kind, kind_name in KINDS.items():
        job = publish_job(run, shape, broker.port, broker.pid, f"tail-{kind}-{shape.topics}-{shape.size}-{shape.batch}")
        limit = max(shape.topics, job.entries // 2)
        both = run.load(
            Job(
                mode="tail",
                port=job.port,
                pid=job.pid,
                shape=shape,
                prefix=job.prefix,
                entries=limit,
                warm=job.warm,
                seconds=job.seconds,
                subscriptions=("tail",),
                kind=kind,
            )
        )
        low, high = both.interval
        figures.append(
            Figure(
                group="Delivery at the tail: broker CPU per entry beyond publishing",
                name=f"{kind_name}, {shape.name}",
                value=both.us - alone.us,
                unit="us/entry",
                low=low - alone.us,
                high=high - alone.us,
                target=TARGETS[0] if shape.is_small else None,
                limit=TARGETS[1] if shape.is_small else None,
                note=f"{both.rate:,.0f} entries/s; both {both.us:.1f} us, publishing alone {alone.us:.1f} us",
            )
        )
    return figures
