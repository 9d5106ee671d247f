"""`LogOwners`: does this broker still own the logs it has loaded?

A log belongs to whoever opened it last (INV2). An owner that writes learns from its next write that it has a successor; one
that only reads would serve an outdated copy for ever: a log that others sealed is not sealed there, what they appended is not
delivered, what they acknowledged is delivered again. So the owner token of each loaded log is compared with the log's record,
once in `broker.reconcile_seconds`; a log is looked at within two such periods after it changed hands (INV15). A copy found
stale is dropped, its clients look the topic up again, and the next use loads it anew.

A store that cannot be reached says nothing about owners: nothing is dropped then, and the next round asks again. Neither does a
record that cannot be read: that topic stays as it is, and the others are compared all the same.

The looks are spread over the period, a few at a time, because a broker has ten thousand topics and clients come first. Their
own time is part of the period, so the bound holds as long as the store answers those few within their share of it. Must
not know bundles and locks: those tell whom to ask, not who may write.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from braid.broker.topic import Topic
from braid.errors import BraidError, InvariantBroken, LedgerFenced, StoreMismatch
from braid.runtime.clock import Clock

log = logging.getLogger(__name__)
LOOKED_AT_ONCE: Final = 64
"""Logs that are looked at without a pause."""
CONCURRENT: Final = 16
"""Records asked for at the same time, of a store that takes time to answer; each of them costs a task."""


class LogOwners:
    """See the module."""

    def __init__(self, clock: Clock, topics: Mapping[str, Topic], lost: Callable[[Topic], None], *, seconds: float) -> None:
        self._clock = clock
        self._topics = topics
        self._lost = lost
        self._seconds = seconds
        self._unreadable: set[str] = set()
        """Topics whose record could not be read at the last look, so that each is told of once."""
        self._failures = 0
        """Topics of this round whose look failed in a way that nobody has foreseen."""

    async def run(self) -> None:
        """Look at everything, again and again, until cancelled."""
        due = self._clock.monotonic()
        while True:
            topics = list(self._topics.values())
            self._unreadable &= self._topics.keys()
            if self._failures > 1:
                log.error("%d topics could not be looked at in the last round", self._failures)
            self._failures = 0
            starts = range(0, max(len(topics), 1), LOOKED_AT_ONCE)
            for start in starts:
                due += self._seconds / len(starts)
                await self._clock.sleep(max(0.0, due - self._clock.monotonic()))
                await self.look(topics[start : start + LOOKED_AT_ONCE])
            due = max(due, self._clock.monotonic())

    async def look(self, topics: Iterable[Topic]) -> None:
        """Compare these with their records and drop those that are another owner's."""
        waiting = iter([topic for topic in topics if not topic.is_closing])
        async with asyncio.TaskGroup() as group:
            for _number in range(CONCURRENT):
                group.create_task(self._look_at_each(waiting))

    async def _look_at_each(self, waiting: Iterator[Topic]) -> None:
        for topic in waiting:
            try:
                if not await self._look_at(topic):
                    for _left in waiting:  # no use in asking for the others now
                        pass
            except InvariantBroken:
                raise
            except Exception:  # or no topic would ever be looked at again
                self._failures += 1
                if self._failures == 1:  # it may be the same with every topic
                    log.exception("whether %s still belongs to this broker could not be looked at, later again", topic.name)

    async def _look_at(self, topic: Topic) -> bool:
        """Compare one; False if the store does not answer."""
        name = str(topic.name)
        try:
            await topic.log.check_owner()
        except LedgerFenced:
            log.warning("%s was taken over by another owner and is dropped here", name)
        except StoreMismatch as error:
            if name not in self._unreadable:
                self._unreadable.add(name)
                log.warning("whether %s still belongs to this broker cannot be told: %s", name, error)
            return True
        except BraidError as error:
            log.info("whether %s still belongs to this broker is unknown: %s", name, error)
            return False
        self._unreadable.discard(name)
        if topic.log.is_fenced:  # and the log does not say so twice
            self._lost(topic)
        return True
