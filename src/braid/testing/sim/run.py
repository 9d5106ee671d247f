"""One run: a seed and a workload give a history and a verdict. Equal seeds give equal histories, byte for byte.

A run has a limit of steps and one of wall-clock time: whatever spins fails its seed instead of hanging the whole suite.
"""

from __future__ import annotations

import gc
import logging
import zlib
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from braid.runtime.env import Random
from braid.testing.sim import loop as simloop
from braid.testing.sim.checkers import Violation
from braid.testing.sim.history import History
from braid.testing.sim.limits import SECONDS, WallClock
from braid.testing.sim.loop import MAX_STEPS, Deadlock, OutOfTime, SimLoop

MIN_OPERATIONS = 50
MIN_FAULTS = 1


class Workload(Protocol):
    """What a run does, and how it is judged."""

    history: History

    @property
    def faults(self) -> int:
        """How many there were."""
        ...

    async def run(self) -> None: ...

    def check(self) -> list[Violation]: ...


MakeWorkload: TypeAlias = Callable[[int, SimLoop, Random], Workload]
"""From seed, loop and randomness."""


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one seed."""

    seed: int
    workload: str
    operations: int
    faults: int
    steps: int
    virtual_seconds: float
    violations: list[Violation]
    history: History

    @property
    def counts(self) -> bool:
        """Whether enough happened for the run to mean anything."""
        return self.operations >= MIN_OPERATIONS and self.faults >= MIN_FAULTS

    @property
    def digest(self) -> str:
        return f"{zlib.crc32(self.history.lines()):08x}"


class _Remarks(logging.Handler):
    """Puts the product's log lines into the trace."""

    def __init__(self, history: History) -> None:
        super().__init__(logging.INFO)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{simloop.NODE.get()} {record.levelname} {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            text += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        self._history.remark(text)


def run_seed(workload: str, seed: int, make: MakeWorkload, *, seconds: float = SECONDS, max_steps: int = MAX_STEPS) -> Outcome:
    """Run one seed to its end; never raises because of what the product did. One that takes longer than `seconds` of wall-clock
    time, its checkers included, or more than `max_steps` steps has failed."""
    loop = SimLoop(Random(f"loop-{seed}"), max_steps)
    logger = logging.getLogger("braid")
    was_enabled, was_level, propagates = gc.isenabled(), logger.level, logger.propagate
    gc.disable()  # finalisers must not run at moments that depend on the machine's memory
    violations: list[Violation] = []
    subject: Any = None
    remarks: _Remarks | None = None

    async def main() -> None:
        nonlocal subject, remarks
        subject = make(seed, loop, Random(f"{workload}-{seed}"))
        remarks = _Remarks(subject.history)
        logger.addHandler(remarks)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        await subject.run()

    def end(verdict: str) -> None:
        loop.out_of_time = verdict

    def judge() -> None:
        try:
            loop.run_until_complete(main())
        except OutOfTime:
            return  # what there is of a history is nothing to judge by
        except Deadlock as error:
            violations.append(Violation("C18", f"{workload} seed {seed}: {error}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the verdict of this seed
            violations.append(Violation("run", f"{type(error).__name__}: {error}"))
        violations.extend(Violation("run", text) for text in loop.errors)
        violations.extend(subject.check())

    try:
        with WallClock(seconds, end) as limit:
            judge()
        if limit.verdict:
            violations.insert(0, Violation("limit", f"{workload} seed {seed}: {limit.verdict}"))
        history = subject.history
        operations = sum(1 for event in history.events if event.kind == "invoke" and event.op != "append")
        return Outcome(
            seed=seed,
            workload=workload,
            operations=operations,
            faults=subject.faults,
            steps=loop.steps,
            virtual_seconds=round(loop.time() - simloop.START, 3),
            violations=violations,
            history=history,
        )
    finally:
        if remarks is not None:
            logger.removeHandler(remarks)
        logger.setLevel(was_level)
        logger.propagate = propagates
        loop.abandon()
        loop.close()
        if was_enabled:
            gc.enable()
