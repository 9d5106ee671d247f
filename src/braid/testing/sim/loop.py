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
from contextvars import Context, ContextVar, copy_context
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


class OutOfTime(Deadlock):
    """The run took longer than the clock of the wall allows."""


class Node:
    """A process or machine of the simulated world. A restarted process is a new node of the same name."""

    __slots__ = ("is_dead", "is_paused", "name", "parked")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_paused = False
        self.is_dead = False
        self.parked: list[SimHandle] = []
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


class SimHandle(asyncio.Handle):
    """A callback that waits for its turn. Lean: a run makes many thousands, and what asyncio does for debugging is left out."""

    __slots__ = ()
    _args: Any
    _callback: Any
    _cancelled: bool
    _context: Context

    def __init__(self, callback: Any, args: Any, loop: SimLoop, context: Context | None) -> None:
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = None
        self._source_traceback = None

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._callback = self._args = None  # what a callback holds must not live until its time


class SimTimer(SimHandle, asyncio.TimerHandle):
    """A callback that waits for its time; in the queue it stands behind that time, see `SimLoop.call_at`."""

    __slots__ = ()
    _when: float

    def __init__(self, when: float, callback: Any, args: Any, loop: SimLoop, context: Context | None) -> None:
        SimHandle.__init__(self, callback, args, loop, context)
        self._when = when

    def cancel(self) -> None:
        SimHandle.cancel(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __lt__(self, _other: object) -> bool:
        return False  # asked only about timers of the same moment, which are equal

    def __hash__(self) -> int:
        return hash(self._when)


class SimLoop(asyncio.BaseEventLoop):
    """Runs everything in one thread in an order that the seed decides."""

    _closed: bool
    _ready: list[SimHandle]
    _scheduled: list[tuple[float, SimTimer]]
    _stopping: bool

    def __init__(self, rng: Random, max_steps: int = MAX_STEPS) -> None:
        super().__init__()
        self._ready = []
        self._scheduled = []
        self._rng = rng
        self._max_steps = max_steps
        self._now = START
        self._count = 0
        self._still = 0
        self._unfinished: dict[int, SimTask] = {}  # strong: a forgotten task must not be finalised at a moment gc picks
        self.steps = 0
        """Handles run so far."""
        self.out_of_time = ""
        """Why the run must end at its next turn; written by another thread, see `limits.py`."""
        self.errors: list[str] = []
        """Exceptions that escaped a callback."""
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self._now

    def create_future(self) -> SimFuture:
        future = SimFuture(loop=self)
        self._count += 1
        future.number = self._count
        return future

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        handle = SimHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        timer = SimTimer(when, callback, args, self, context)
        heapq.heappush(self._scheduled, (when, timer))  # pairs: numbers are compared without a call into Python
        return timer

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
        """Run turn after turn until the loop is stopped."""
        while True:
            self._take_due()
            batch, self._ready = self._ready, []
            if len(batch) > 1:
                batch = [handle for handle in batch if not handle._cancelled]
                self._shuffle_steps(batch)
            for handle in batch:
                if handle._cancelled:
                    continue
                node = handle._context.get(NODE, WORLD)
                if node.is_dead:
                    continue
                if node.is_paused:
                    node.parked.append(handle)
                    continue
                self.steps += 1
                try:
                    handle._context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio does: one callback must not end the loop
                    what = getattr(handle._callback, "__qualname__", type(handle._callback).__name__)
                    self.call_exception_handler({"message": f"Exception in callback {what}", "exception": error})
            if self.steps > self._max_steps:
                raise Deadlock(f"{self._max_steps} steps were not enough; {_described(batch)}\n{self.stacks()}")
            if self.out_of_time:
                raise OutOfTime(self.out_of_time)
            if self._stopping:
                return

    def _take_due(self) -> None:
        """Move due timers to the queue; with an empty queue, jump to the next one."""
        scheduled = self._scheduled
        while scheduled and scheduled[0][1]._cancelled:
            heapq.heappop(scheduled)
        if self._ready or self._stopping:
            self._still += 1
            if self._still > MAX_TURNS:
                raise Deadlock(
                    f"Time stands still after {MAX_TURNS} turns of the loop; {_described(self._ready)}\n{self.stacks()}"
                )
        elif not scheduled:
            raise Deadlock(f"Nothing can run and no timer is left.\n{self.stacks()}")
        else:
            self._still = 0
            self._now = max(self._now, scheduled[0][0])
        now = self._now
        while scheduled and scheduled[0][0] <= now:
            self._ready.append(heapq.heappop(scheduled)[1])

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


def _described(batch: list[SimHandle]) -> str:
    """What runs in one turn, for a loop that turns without end."""
    owners = [getattr(handle._callback, "__self__", None) for handle in batch]
    names = sorted({owner.get_name() for owner in owners if isinstance(owner, SimTask)})
    return f"the last turn had {len(batch)} steps, of the tasks: {', '.join(names[:20]) or 'none'}."


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
