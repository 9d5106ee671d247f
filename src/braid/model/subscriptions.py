"""The rule for where a subscription begins in a segment that has no cursor of it yet (L-07). Pure, and stated here only: the
leader that repairs, the plan that makes a subscription and the owner that a consumer attaches to must agree."""

from __future__ import annotations

from typing import Literal

Initial = Literal["earliest", "latest"]


def cursor_start(initial: Initial, *, subscribed_at: int, created_at: int) -> Initial:
    """Where the cursor of a subscription begins in a segment, given the layout epochs at which both were made: a segment that
    is younger than the subscription is read whole, an older one from where the subscription wanted to begin.

    An unknown (negative) epoch of a subscription counts as the first one's: of the first layout's segments none is younger, and
    in a later one whatever came before the cursor is delivered rather than missed.
    """
    return "earliest" if created_at > max(subscribed_at, 0) else initial
