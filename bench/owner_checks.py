"""What it costs a broker to compare its loaded logs with their records (`broker/log_owners.py`).

One broker in this process with stores in memory, ten thousand topics loaded and nothing else to do. Shown: CPU seconds of
one round, records read for each second, and the longest turn of the event loop, beside the same without the comparison.

    .venv/bin/python bench/owner_checks.py [--topics 10000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from braid.broker.config import BrokerConfig
from braid.broker.log_owners import LOOKED_AT_ONCE
from braid.model.names import TopicName
from braid.testing.broker import InProcessBroker
from braid.web.config import StandaloneConfig

TICK = 0.001
CREATED_AT_ONCE = 200


async def longest_turn(seconds: float) -> float:
    """How late a task that sleeps for a millisecond at a time is woken at worst."""
    longest, end = 0.0, time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await asyncio.sleep(TICK)
        longest = max(longest, time.perf_counter() - before - TICK)
    return longest


async def quiet(seconds: float) -> tuple[float, float]:
    """CPU seconds a second and the longest turn while nothing is asked of the broker."""
    began = time.process_time()
    longest = await longest_turn(seconds)
    return (time.process_time() - began) / seconds, longest


async def run(options: argparse.Namespace) -> None:
    period = options.seconds
    config = StandaloneConfig(broker=BrokerConfig(reconcile_seconds=period, balance=False))
    async with InProcessBroker(config=config) as broker:
        service: Any = broker.nodes[0].service
        for start in range(0, options.topics, CREATED_AT_ONCE):
            numbers = range(start, min(start + CREATED_AT_ONCE, options.topics))
            await asyncio.gather(*[service.topic(TopicName.parse(f"t-{number}"), create=True) for number in numbers])
        owners, reads = service._log_owners, 0
        honest = service.metadata.get

        async def counted(*args: Any, **named: Any) -> Any:
            nonlocal reads
            reads += 1
            return await honest(*args, **named)

        topics = list(service.topics.values())
        began = time.process_time()
        for _round in range(options.rounds):
            for start in range(0, len(topics), LOOKED_AT_ONCE):
                await owners.look(topics[start : start + LOOKED_AT_ONCE])
        cpu = (time.process_time() - began) / options.rounds
        service.metadata.get = counted
        with_it = await quiet(options.rounds * period)
        rate = reads / (options.rounds * period)
        [task] = [each for each in asyncio.all_tasks() if each.get_name() == "broker:owners"]
        task.cancel()
        without = await quiet(options.rounds * period)
    print(f"{len(topics)} topics, a round in {period:g} s")
    print(f"CPU of one round: {cpu * 1000:.0f} ms, {cpu / period * 100:.2f} % of a core; {rate:.0f} records read a second")
    for name, (used, longest) in (("with", with_it), ("without", without)):
        print(f"idle broker {name:8}: {used * 100:5.2f} % of a core, longest turn of the loop {longest * 1000:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="broker.reconcile_seconds")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
