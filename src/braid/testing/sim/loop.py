"""`SimLoop`: an asyncio loop with virtual time, seeded schedules, and nodes that can be paused or die.

Owns which handle runs next. Task steps that are ready together run in an order drawn from the seed; plain callbacks keep their
places, because asyncio promises first in, first out for those. Time stands still while anything can run and then jumps to the
next timer. Every handle belongs to the node that was current when it was made (a context variable): handles of a paused node
wait, those of a dead one are dropped, which is what the end of a process looks like from inside. Uses private names of
`asyncio.BaseEventLoop`; a test pins them for each Python version. Must not know what runs on it.
"""

from __future__ import annotations

import asyncio
import heapq
import warnings
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any

from braid.runtime.env import Random

START = 1000.0
"""Monotonic time at the beginning of each run, in seconds."""
MAX_STEPS = 2_000_000
"""Handles run in one run, after which something is taken to spin."""
MAX_TURNS = 50_000
"""Turns of the loop without time moving on, after which it is taken for a livelock."""


class Deadlock(RuntimeError):
    """Nothing can run and no timer is left, or everything runs and time stands still."""


class Node:
    """A process or machine of the simulated world. A restarted process is a new node of the same name."""

    __slots__ = ("is_dead", "is_paused", "name", "parked")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_paused = False
        self.is_dead = False
        self.parked: list[asyncio.Handle] = []
        """What would have run meanwhile, while paused."""

    def __repr__(self) -> str:
        return self.name


WORLD = Node("world")
"""The node of everything that is not simulated: the network itself, faults, the run's own control."""
NODE: ContextVar[Node] = ContextVar("braid-sim-node", default=WORLD)


@contextmanager
def on(node: Node) -> Iterator[None]:
    """What is scheduled inside belongs to `node`."""
    token = NODE.set(node)
    try:
        yield
    finally:
        NODE.reset(token)


class SimTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, coro: Coroutine[Any, Any, Any], number: int, node: Node, **options: Any) -> None:
        self.number = number  # first: asyncio puts the task into a set at once
        self.node = node
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self.number


class SimFuture(asyncio.Future[Any]):
    """A future whose hash is its number; see `SimTask`."""

    number: int

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.BaseEventLoop):
    """Runs everything in one thread in an order that the seed decides."""

    _ready: Any
    _scheduled: Any
    _stopping: bool
    _timer_cancelled_count: int

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng
        self._now = START
        self._count = 0
        self._still = 0
        self._unfinished: dict[int, SimTask] = {}  # strong: a forgotten task must not be finalised at a moment gc picks
        self.steps = 0
        """Handles run so far."""
        self.errors: list[str] = []
        """Exceptions that escaped a callback."""
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self._now

    def create_future(self) -> SimFuture:
        future = SimFuture(loop=self)
        future.number = self._next_number()
        return future

    def tasks_of(self, node: Node) -> list[SimTask]:
        """Unfinished tasks of a node."""
        return [task for task in self._unfinished.values() if task.node is node]

    def unfinished(self) -> list[SimTask]:
        """Unfinished tasks of all nodes that live."""
        return [task for task in self._unfinished.values() if not task.node.is_dead]

    def resume(self, node: Node) -> None:
        """Let a paused node go on; what was due meanwhile is due now."""
        node.is_paused = False
        parked, node.parked = node.parked, []
        self._ready.extend(parked)

    def stacks(self) -> str:
        """Where each unfinished task of a living node waits."""
        lines = []
        for task in self.unfinished():
            lines.append(f"task {task.get_name()} of {task.node}:")
            lines += [f"  {frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}" for frame in _stack(task)]
        return "\n".join(lines)

    def abandon(self) -> None:
        """Forget everything that is scheduled and end every task without letting it act; call when the run is over."""
        for _round in range(5):  # closing one may start another
            self._ready.clear()
            self._scheduled.clear()
            unfinished, self._unfinished = list(self._unfinished.values()), {}
            for task in unfinished:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                try:
                    with warnings.catch_warnings():  # one that never began was never awaited
                        warnings.simplefilter("ignore", RuntimeWarning)
                        task.get_coro().close()
                except BaseException as error:  # noqa: BLE001 - its clean-up failed, in a world that is gone
                    self.errors.append(f"abandoned {task.get_name()}: {error}")

    # From asyncio.

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> SimTask:
        context = options.get("context")
        node = NODE.get() if context is None else _node_of(context)
        task = SimTask(coro, self._next_number(), node, loop=loop, **options)
        self._unfinished[task.number] = task
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._unfinished.pop(task.number, None)  # type: ignore[attr-defined]

    def _next_number(self) -> int:
        self._count += 1
        return self._count

    def _note_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "never retrieved" not in context["message"]:  # comes whenever memory is freed: not a fact about the run
            self.errors.append(f"{context['message']}: {type(error).__name__}: {error}" if error else context["message"])

    def _write_to_self(self) -> None:
        """There is no other thread to be woken by."""

    def _process_events(self, event_list: Any) -> None:
        """There are no real sockets."""

    def _run_once(self) -> None:
        self._take_due()
        batch = [handle for handle in self._ready if not handle._cancelled]
        self._ready.clear()
        self._shuffle_steps(batch)
        for handle in batch:
            node = _node_of(handle._context)
            if node.is_dead or handle._cancelled:
                continue
            if node.is_paused:
                node.parked.append(handle)
                continue
            self.steps += 1
            handle._run()
        if self.steps > MAX_STEPS:
            raise Deadlock(f"{MAX_STEPS} steps were not enough.\n{self.stacks()}")

    def _take_due(self) -> None:
        """Move due timers to the queue; with an empty queue, jump to the next one."""
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if self._ready or self._stopping:
            self._still += 1
            if self._still > MAX_TURNS:
                raise Deadlock(f"Time stands still after {MAX_TURNS} turns of the loop.\n{self.stacks()}")
        elif not scheduled:
            raise Deadlock(f"Nothing can run and no timer is left.\n{self.stacks()}")
        else:
            self._still = 0
            self._now = max(self._now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self._now:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._ready.append(handle)

    def _shuffle_steps(self, batch: list[Any]) -> None:
        """Permute the task steps among their places; callbacks stay where they are."""
        places = [at for at, handle in enumerate(batch) if isinstance(getattr(handle._callback, "__self__", None), SimTask)]
        if len(places) > 1:
            steps = [batch[at] for at in places]
            self._rng.shuffle(steps)
            for at, handle in zip(places, steps, strict=True):
                batch[at] = handle


def run(seed: int | str, main: Callable[[SimLoop], Coroutine[Any, Any, Any]]) -> Any:
    """Run `main(loop)` on a loop of its own and return its result; everything else is abandoned then."""
    loop = SimLoop(Random(f"loop-{seed}"))
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.abandon()
        loop.close()


def _node_of(context: Context) -> Node:
    return context.get(NODE, WORLD)


def _stack(task: SimTask) -> list[Any]:
    """Frames of a suspended task, innermost last, through the awaits of its coroutine."""
    frames = []
    waiting: Any = task.get_coro()
    while waiting is not None and getattr(waiting, "cr_frame", None) is not None:
        frames.append(waiting.cr_frame)
        waiting = waiting.cr_await
    return frames
