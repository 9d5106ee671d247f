"""Plan steps: `async with step("seal-parent"):` names a point of a procedure whose order is its safety argument.

Owns the hook through which a test lists the steps of a plan at run time and crashes before and after each. Costs nothing when
nobody listens. A step is idempotent and resumes from records, never from memory; that is the plan's business.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

Moment = Literal["before", "after"]
StepHook = Callable[[str, Moment], Awaitable[None]]
_everywhere: list[StepHook] = []


@asynccontextmanager
async def step(name: str) -> AsyncIterator[None]:
    """One step of a plan, such as `split:seal-parent`."""
    for hook in tuple(_everywhere):
        await hook(name, "before")
    yield
    for hook in tuple(_everywhere):
        await hook(name, "after")


@contextmanager
def watching(hook: StepHook) -> Iterator[None]:
    """While this lasts, `hook` is awaited before and after every step of every plan; what it raises ends the plan there."""
    _everywhere.append(hook)
    try:
        yield
    finally:
        _everywhere.remove(hook)
