"""`PolicyWatch`: policies are changed at any broker and followed by the loaded topics of all.

Owns noticing: a watch as the hint, and a comparison of versions every `broker.reconcile_seconds` (INV15). Applying is the
service's work.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from braid.broker.namespaces import NAMESPACES, namespace_of_key
from braid.errors import BraidError, Closed, InvariantBroken, Rejected, StoreError
from braid.metadata.api import Put
from braid.model.names import NamespaceName
from braid.runtime.tasks import Tasks

if TYPE_CHECKING:
    from braid.broker.service import BrokerService

log = logging.getLogger(__name__)
RETRY_SECONDS = 0.5
LOOKED_AT_ONCE = 64
"""Namespaces that are compared without a pause."""


class PolicyWatch:
    """See the module."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._versions: dict[NamespaceName, int] = {}
        """Of the policies that the loaded topics of a namespace follow."""

    def start(self, tasks: Tasks) -> None:
        tasks.spawn(self._follow(), "policies")
        tasks.spawn(self._compare_loop(), "compare policies")

    def applied(self, namespace: NamespaceName, version: int) -> None:
        """The namespace's topics follow this version now."""
        self._versions[namespace] = version

    async def _follow(self) -> None:
        while True:
            try:
                async with self._service.metadata.watch(NAMESPACES, recursive=True) as events:
                    async for event in events:
                        if isinstance(event, Put):
                            await self._look_at(event.record.key)
            except Closed:
                return
            except StoreError as error:
                log.info("the watch on namespaces ended and is set up again: %s", error)
            except InvariantBroken:
                raise
            except Exception:
                log.exception("the watch on namespaces failed and is set up again")
            await self._service.runtime.clock.sleep(RETRY_SECONDS)

    async def _compare_loop(self) -> None:
        while True:
            await self._service.runtime.clock.sleep(self._service.config.reconcile_seconds)
            await self.compare()

    async def compare(self) -> None:
        """Look at the policies of every namespace that has a loaded topic."""
        # Not a set: a seeded run looks at them in the same order every time.
        for number, namespace in enumerate({topic.name.namespace: None for topic in self._service.topics.values()}, 1):
            if number % LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # clients come first
            await self._apply(namespace)

    async def _look_at(self, key: str) -> None:
        try:
            namespace = namespace_of_key(key)
        except Rejected as error:  # somebody else's record; the watch goes on
            log.warning("policies are passed over: %s", error)
            return
        await self._look(namespace)

    async def _look(self, namespace: NamespaceName) -> None:
        """Apply what is new, if any topic of the namespace is loaded here."""
        if not any(topic.name.namespace == namespace for topic in self._service.topics.values()):
            self._versions.pop(namespace, None)
            return
        await self._apply(namespace)

    async def _apply(self, namespace: NamespaceName) -> None:
        try:
            if (await self._service.namespaces.policies(namespace)).version != self._versions.get(namespace):
                await self._service.policies_changed(namespace)
        except BraidError as error:
            log.warning("the policies of %s cannot be applied now, it is tried again: %s", namespace, error)
        except InvariantBroken:
            raise
        except Exception:  # its own concern, or no namespace would be looked at any more
            log.exception("the policies of %s could not be applied, it is tried again", namespace)
