"""Trouble between a broker and the metadata store, shared by all handles of a world and turned up and down by its faults.

`FlakyMetadata` adds to `FaultyMetadata` what INV15 is tested with: each n-th notification of a watch is lost. The contents a
watch begins with are an answer, not a notification, and always arrive.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from braid.metadata.api import Event, Synced
from braid.testing.faulty_metadata import Faults, FaultyMetadata

USUAL_DELAY = 0.002
"""Seconds that a call takes at most when all is well."""


@dataclass
class Trouble(Faults):
    """How the store behaves at the moment."""

    delay: float = USUAL_DELAY
    drop_every: int = 0
    """Each n-th notification is lost, counted over all watches; 0 = none."""
    notifications: int = 0
    """So far."""


class FlakyMetadata(FaultyMetadata):
    """A `MetadataStore` whose calls meet trouble."""

    faults: Trouble

    async def _worsen(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        trouble = self.faults
        is_synced = False
        async for event in events:
            if not is_synced or isinstance(event, Synced):
                is_synced = is_synced or isinstance(event, Synced)
                yield event
                continue
            trouble.notifications += 1
            if trouble.drop_every and trouble.notifications % trouble.drop_every == 0:
                continue
            await self._wait(trouble.watch_lag)
            yield event
