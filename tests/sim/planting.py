"""What a planted bug is made of: patches of functions, most of them the product's own source with a piece exchanged."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from braid.testing.sim.limits import SECONDS

Patch = tuple[Any, str, Any]
"""Class or module, attribute, and what stands there instead."""


class Plant(NamedTuple):
    """A bug, where it shows, and which checkers may catch it."""

    title: str
    workload: str
    seed: int
    """A seed that catches it."""
    checkers: tuple[str, ...]
    apply: Callable[[], list[Patch]]
    seconds: float = SECONDS
    """What a run may take on the clock of the wall."""


def changed(owner: Any, name: str, old: str, new: str, *more: tuple[str, str], **names: Any) -> list[Patch]:
    """A method or function with a piece of its source exchanged, or several; they are written as in the source without its
    indentation inside a class."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    for before, after in ((old, new), *more):
        if source.count(before) != 1:
            raise AssertionError(f"cannot plant: {owner.__name__}.{name} does not contain {before!r} once")
        source = source.replace(before, after)
    scope = dict(function.__globals__, **names)
    exec(compile("from __future__ import annotations\n" + source, f"<planted {name}>", "exec"), scope)
    return [(owner, name, scope[name])]
