"""The workloads by name."""

from __future__ import annotations

from braid.testing.sim.messaging import KeyedAppend, Queue
from braid.testing.sim.metadata import Metadata
from braid.testing.sim.run import MakeWorkload, Outcome, run_seed

WORKLOADS: dict[str, MakeWorkload] = {"W1": KeyedAppend, "W2": Queue, "W9": Metadata}


def run(workload: str, seed: int) -> Outcome:
    """Run one seed of a workload."""
    return run_seed(workload, seed, WORKLOADS[workload])
