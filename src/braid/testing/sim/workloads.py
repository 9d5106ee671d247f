"""The workloads by name."""

from __future__ import annotations

from braid.runtime.env import Random
from braid.testing.sim.groups import Groups
from braid.testing.sim.limits import SECONDS
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
    "W14": Groups,
    "W15": Recreated,
}


def run(workload: str, seed: int, *, seconds: float = SECONDS) -> Outcome:
    """Run one seed of a workload, for so long on the clock of the wall at most."""
    return run_seed(workload, seed, WORKLOADS[workload], seconds=seconds)
