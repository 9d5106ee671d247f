"""Settings of scalable topics, section `[scalable_topics]`; every bound a client can feel is here (INV17)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from braid.runtime.config import setting


class ScalableConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[scalable_topics]`."""

    enabled: Annotated[
        bool,
        setting(
            "Whether topic:// names, commands 70-78 and their admin calls work",
            alias="scalableTopicsEnabled, scalableTopicEnabled",
        ),
    ] = True
    default_routing: Annotated[
        Literal["high16", "low16"],
        setting("Half of a key's hash that chooses the segment in new topics; low16 for Pulsar 5.0.0-M1 clients"),
    ] = "high16"
    max_segments_per_topic: Annotated[int, setting("Active and sealed segments of one topic", ge=1, le=65_536)] = 1024
    operation_wait_seconds: Annotated[
        float, setting("How long a layout operation waits for the one before it", ge=0.1, le=3600)
    ] = 30.0
    consumer_grace_seconds: Annotated[
        float,
        setting(
            "How long a stream consumer keeps its segments after its connection was lost",
            ge=0,
            le=86_400,
            alias="scalableTopicConsumerSessionGracePeriodSeconds",
        ),
    ] = 60.0
    handover_seconds: Annotated[
        float,
        setting(
            "How long a member of a checkpoint group may take to say where it stopped in a segment that is taken from it; if "
            "consumer_grace_seconds is longer, that counts",
            ge=0,
            le=86_400,
        ),
    ] = 60.0
    group_grace_seconds: Annotated[
        float,
        setting("How long a checkpoint group without members is remembered, with its positions", ge=0, le=31_536_000),
    ] = 3600.0
    drain_poll_seconds: Annotated[
        float, setting("Longest pause between two looks whether a sealed segment is drained", ge=0.01, le=600)
    ] = 5.0
    reconcile_seconds: Annotated[
        float, setting("How often layouts and registrations are compared with the metadata store", ge=0.1, le=3600)
    ] = 5.0
    prune_seconds: Annotated[
        float, setting("How often a leader looks for sealed segments that retention no longer keeps", ge=0.1, le=86_400)
    ] = 60.0
    adopt_seconds: Annotated[
        float, setting("How often a broker looks for topics of its bundles that have no controller", ge=0.1, le=86_400)
    ] = 30.0
    idle_seconds: Annotated[
        float,
        setting(
            "How long a controller keeps a topic that has no clients, no calls and nothing to be looked after; the next use "
            "makes a new one. 0 = for ever",
            ge=0,
            le=86_400,
        ),
    ] = 600.0
    max_consumers_per_subscription: Annotated[int, setting("Registered stream consumers", ge=1, le=1_000_000)] = 1000
    max_subscriptions_per_topic: Annotated[int, setting("Subscriptions of a scalable topic", ge=1, le=1_000_000)] = 1000
    max_watches_per_connection: Annotated[
        int, setting("Layout and namespace watches of one client connection", ge=1, le=1_000_000)
    ] = 10_000
