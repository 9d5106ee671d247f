"""The end of checkpoint groups: their records go some time after their last member, for both kinds of topics.

Owns which groups end now, and that a topic at its limit of subscriptions looks for some before it refuses another one. Must not
remember anything: coordinators and plans are the leader's, which calls this in its turn.
"""

from __future__ import annotations

import logging

from braid.errors import BraidError, SubscriptionLimit
from braid.metadata.claims import StaleLeader
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.records import Initial, SubscriptionKind, SubscriptionMetadata
from braid.scalable.subscription_plans import SubscriptionPlans

log = logging.getLogger(__name__)


async def end_groups(
    plans: SubscriptionPlans, coordinators: dict[str, SubscriptionCoordinator], grace_seconds: float
) -> list[str]:
    """Remove the groups whose members left long ago, also from the coordinators; returns their names."""
    ended = []
    for name, coordinator in list(coordinators.items()):
        try:
            if await coordinator.end_if_empty(grace_seconds):
                await plans.delete(name)
                coordinators.pop(name, None)
                ended.append(name)
        except StaleLeader:
            raise
        except BraidError as error:  # its own concern; the next look tries again, or finishes what was begun
            log.info("the checkpoint group %s of %s could not be ended: %s", name, coordinator.topic, error)
    return ended


async def create_subscription(
    plans: SubscriptionPlans,
    coordinators: dict[str, SubscriptionCoordinator],
    grace_seconds: float,
    name: str,
    kind: SubscriptionKind,
    initial: Initial,
) -> SubscriptionMetadata:
    """As `SubscriptionPlans.create`; above the topic's limit, in the place of a group that has ended, if there is one."""
    try:
        return await plans.create(name, kind, initial)
    except SubscriptionLimit:
        if not await end_groups(plans, coordinators, grace_seconds):
            raise
        return await plans.create(name, kind, initial)
