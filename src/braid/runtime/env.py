"""`Runtime`: the bundle of ports that a component takes its world from.

Made once by a composition root (the CLI, the test kit, later the simulator) and handed down by constructor arguments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from random import Random

from braid.runtime.clock import Clock, SystemClock
from braid.runtime.files import FileSystem, SystemFiles
from braid.runtime.loop_watch import LoopTurns
from braid.runtime.network import Network, SystemNetwork
from braid.runtime.slow import SlowOperations
from braid.runtime.threads import SystemThreads, Threads

__all__ = ["Random", "Runtime"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, randomness, threads, files and sockets."""

    clock: Clock = field(default_factory=SystemClock)
    random: random.Random = field(default_factory=random.SystemRandom)
    threads: Threads = field(default_factory=SystemThreads)
    files: FileSystem = field(default_factory=SystemFiles)
    network: Network = field(default_factory=SystemNetwork)
    turns: LoopTurns = field(default_factory=LoopTurns)
    """What a watch of the loop has seen, if there is one."""
    slow: SlowOperations = field(init=False)
    """Where components report what took long."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slow", SlowOperations(self.clock))

    def token(self, bits: int = 64) -> str:
        """A random identifier in lower-case hex."""
        return f"{self.random.getrandbits(bits):0{bits // 4}x}"
