"""Admin commands that are more than one call: many topics, several messages, a broker emptied step by step."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from braid.cli.admin_output import note
from braid.cli.progress import Steps
from braid.client.admin import AdminClient
from braid.client.admin_scalable_types import SegmentNode
from braid.client.admin_types import StoredMessage
from braid.errors import BraidError, ConfigError, DeadlineExceeded, NotFound, RequestError
from braid.model.names import TopicName
from braid.model.retention import NextTrim
from braid.runtime.clock import SystemClock

POLL_SECONDS = 0.5


class Changed(msgspec.Struct, frozen=True):
    """A layout that was changed."""

    into: list[SegmentNode]
    """What came of it; empty if that could not be seen any more."""


async def delete_topics(client: AdminClient, topics: Sequence[str], *, force: bool = False) -> None:
    """Delete topics one after the other; those that fail are told at the end and do not stop the others."""
    names = list(dict.fromkeys(str(TopicName.parse(each)) for each in topics))
    steps = Steps(SystemClock(), "deleted", len(names))
    failures: list[BraidError] = []
    for number, name in enumerate(names, 1):
        try:
            await client.topics.delete(name, force=force)
        except RequestError as error:
            failures.append(error)
            if len(names) > 1:
                note(f"{name}: {error.message}")
        except BraidError:
            if number > 1:
                note(f"{number - 1 - len(failures)} of {len(names)} topics were deleted before this:")
            raise
        steps.at(number)
    steps.end()
    if len(names) == 1 and failures:
        raise failures[0]
    if failures:
        raise RequestError(f"{len(failures)} of {len(names)} topics were not deleted; see above.")


async def create_topic(
    client: AdminClient, topic: str, *, partitions: int = 0, properties: Mapping[str, str] | None = None
) -> None:
    """Create a regular topic, and say how long it keeps what nobody reads."""
    await client.topics.create(topic, partitions=partitions, properties=properties)
    if not sys.stderr.isatty():  # a hint for people: scripts that look at errors get none
        return
    with suppress(BraidError):  # the topic is there all the same
        asked = client.topics.partitioned_stats if partitions else client.topics.stats
        _tell_unread(topic, (await asked(topic)).next_trim)


async def create_scalable_topic(
    client: AdminClient,
    topic: str,
    *,
    segments: int = 1,
    properties: Mapping[str, str] | None = None,
    routing: Literal["high16", "low16"] | None = None,
) -> None:
    """The same for a scalable one."""
    await client.scalable_topics.create(topic, segments=segments, properties=properties, routing=routing)
    if not sys.stderr.isatty():
        return
    with suppress(BraidError):
        for each in (await client.scalable_topics.get_stats(topic)).segments.values():
            _tell_unread(topic, each.next_trim)
            break


def _tell_unread(topic: str, found: NextTrim) -> None:
    if minutes := found.unread_minutes:
        days, rest = divmod(minutes, 24 * 60)
        time = "for ever" if minutes < 0 else f"for {minutes} minutes" if rest else f"for {days} days"
        note(f"{topic} has no subscription yet: messages are kept {time}, or as a retention policy says.")


async def peek(client: AdminClient, topic: str, subscription: str, *, position: int = 1, count: int = 1) -> list[StoredMessage]:
    """Up to `count` messages from `position` on; fewer if there are no more."""
    if count < 1:
        raise ConfigError(f"--count must be at least 1, not {count}.")
    found: list[StoredMessage] = []
    for number in range(position, position + count):
        try:
            found.append(await client.subscriptions.peek(topic, subscription, number))
        except NotFound:
            if not found:
                raise
            break
    return found


async def health(client: AdminClient, *, broker: str | None = None) -> str:
    """Whether a broker can work, and what should be looked at although it can."""
    answer = await client.brokers.health(broker=broker)
    with suppress(NotFound):  # an older broker has no warnings
        for text in await client.brokers.warnings(broker=broker):
            note(f"warning: {text}")
    return answer


async def drain(client: AdminClient, broker: str) -> None:
    """Let a broker give everything away, and say how far it is until it has nothing left."""
    clock = SystemClock()
    total = len(await client.brokers.owned(broker))
    steps = Steps(clock, "bundles given away:", total)

    async def watch() -> None:
        while True:
            await clock.sleep(POLL_SECONDS)
            with suppress(BraidError):  # only the progress is lost; how the drain ends is told by its own call
                steps.at(total - len(await client.brokers.owned(broker)))

    failure: BraidError | None = None
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        try:
            await client.brokers.drain(broker)
        except BraidError as error:
            failure = error
        watching.cancel()
    steps.end()
    if isinstance(failure, DeadlineExceeded):
        left = len(await client.brokers.owned(broker))
        raise DeadlineExceeded(
            f"{broker} still has {left} of {total} bundles and goes on giving them away; ask again, or give it more --timeout."
        )
    if failure is not None:
        raise failure


async def split_segment(client: AdminClient, topic: str, segment: int) -> Changed:
    """Split a segment and say what came of it: the next command needs that."""
    await client.scalable_topics.split_segment(topic, segment)
    return await _changed(client, topic, segment)


async def merge_segments(client: AdminClient, topic: str, segment: int, other: int) -> Changed:
    """Merge two segments and say what came of them."""
    await client.scalable_topics.merge_segments(topic, segment, other)
    return await _changed(client, topic, segment)


async def _changed(client: AdminClient, topic: str, parent: int) -> Changed:
    with suppress(BraidError):  # the change is done all the same
        segments = (await client.scalable_topics.get_metadata(topic)).segments
        if parent in segments:
            return Changed([segments[child] for child in segments[parent].child_ids if child in segments])
    return Changed([])
