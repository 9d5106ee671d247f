"""The workloads by name."""

from __future__ import annotations

from braid.runtime.env import Random
from braid.testing.sim.loop import SimLoop
from braid.testing.sim.messaging import KeyedAppend, Queue
from braid.testing.sim.metadata import Metadata
from braid.testing.sim.newcomers import Newcomers
from braid.testing.sim.quick_transactions import QuickBank, SoughtLists
from braid.testing.sim.recreated import Recreated
from braid.testing.sim.run import MakeWorkload, Outcome, Workload, run_seed
from braid.testing.sim.scalable_topics import Checkpoints, KeyedSegments, LayoutChurn, SegmentQueue
from braid.testing.sim.transactions import Bank, ListAppend


def by_turns(regular: MakeWorkload, scalable: MakeWorkload) -> MakeWorkload:
    """Even seeds use regular topics, odd ones a scalable topic that splits and merges meanwhile."""

    def make(seed: int, loop: SimLoop, rng: Random) -> Workload:
        return (scalable if seed % 2 else regular)(seed, loop, rng)

    return make


WORKLOADS: dict[str, MakeWorkload] = {
    "W1": by_turns(KeyedAppend, KeyedSegments),
    "W2": by_turns(Queue, SegmentQueue),
    "W3": Checkpoints,
    "W4": ListAppend,
    "W5": Bank,
    "W6": LayoutChurn,
    "W9": Metadata,
    "W11": QuickBank,
    "W12": SoughtLists,
    "W13": Newcomers,
    "W15": Recreated,
}


def run(workload: str, seed: int) -> Outcome:
    """Run one seed of a workload."""
    return run_seed(workload, seed, WORKLOADS[workload])
