"""`TopicRetention`: how long the topics of this broker keep messages, and trimming them from time to time.

A policy of the topic itself wins over that of its namespace. A plain topic has it in the record of its log, so its owner knows
it (`ManagedLedger.policy`). That of a partitioned or scalable topic is in the topic's own record, and the logs of its parts
(partitions or segments) follow it: it is read when such a log is loaded, before anything of it is deleted (so that a policy
that keeps more counts at once, whichever broker set it), and each `broker.retention_check_seconds` (INV15: one that keeps less
counts then). Must not change any record.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from braid.errors import BraidError, InvariantBroken, TopicNotFound
from braid.model.names import Domain, TopicName
from braid.model.retention import RetentionPolicies

if TYPE_CHECKING:
    from braid.broker.namespaces import Namespaces
    from braid.broker.topic import Topic
    from braid.broker.topic_records import TopicRecords
    from braid.managedledger.log import ManagedLedger
    from braid.runtime.clock import Clock

log = logging.getLogger(__name__)
TRIMMED_AT_ONCE = 50
"""Topics that are looked at without a pause."""
MAX_TOLD = 10
"""Topics whose trim failed that the log names each time."""


class TopicRetention:
    """See the module."""

    def __init__(
        self, clock: Clock, topics: Mapping[str, Topic], namespaces: Namespaces, records: TopicRecords, *, seconds: float
    ) -> None:
        self._clock = clock
        self._topics = topics
        self._namespaces = namespaces
        self._records = records
        self._seconds = seconds
        self.unread_bytes = 0
        """Bytes of loaded topics that are kept only because no subscription has read them, at the last look."""

    async def run(self) -> None:
        """Trim everything, again and again, until cancelled."""
        while True:
            await self._clock.sleep(self._seconds)
            await self.trim()

    async def trim(self) -> None:
        """Trim the loaded topics and add up what they keep only because nobody has read it."""
        unread = failures = 0
        last: Exception | None = None
        known: dict[TopicName, RetentionPolicies | None] = {}  # of topics with parts, read once for all parts
        for number, topic in enumerate(list(self._topics.values()), 1):
            if number % TRIMMED_AT_ONCE == 0:
                await asyncio.sleep(0)  # clients come first
            if topic.is_closing:
                continue
            try:
                await self._follow(topic, known)
                topic.log.roll_if_needed()
                await topic.log.trim()
            except BraidError as error:
                failures, last = failures + 1, error
                if failures <= MAX_TOLD:
                    log.warning("trimming %s failed: %s", topic.name, error)
            except InvariantBroken:
                raise
            except Exception as error:  # or nothing would ever be trimmed again
                failures, last = failures + 1, error
                if failures <= MAX_TOLD:
                    log.exception("trimming %s failed in an unexpected way", topic.name)
            unread += topic.log.next_trim().unread_bytes
        self.unread_bytes = unread
        if failures > MAX_TOLD:
            log.warning("trimming %d more topics failed, the last one: %s", failures - MAX_TOLD, last)

    async def _follow(self, topic: Topic, known: dict[TopicName, RetentionPolicies | None]) -> None:
        if is_part(topic.name):
            whole = topic.name.parent if topic.name.domain is Domain.SEGMENT else topic.name.base
            if whole not in known:
                known[whole] = await self.of_part(topic.name)
            topic.log.policy = known[whole]

    async def of_part(self, name: TopicName) -> RetentionPolicies | None:
        """The policy of the topic that a segment or partition belongs to; None if it has none or is gone."""
        if name.domain is Domain.SEGMENT:
            found = await self._records.read(name)
            return None if found is None else found.retention_policies
        record = await self._namespaces.partitions(name.base, fresh=True)
        return None if record is None else record.retention_policies

    async def may_trim(self, name: TopicName, managed: ManagedLedger) -> bool:
        """Asked before anything of a segment or partition is deleted. A segment that a pending operation names is kept whole
        (INV7)."""
        if name.domain is not Domain.SEGMENT:
            managed.policy = await self.of_part(name)
            return True
        try:
            listed = await self._records.listed(name)
        except TopicNotFound:
            return False
        managed.policy = listed.record.retention_policies
        return not listed.is_pending


def is_part(name: TopicName) -> bool:
    """Whether the topic is a segment or, by its name, a partition."""
    return name.domain is Domain.SEGMENT or name.is_partition
