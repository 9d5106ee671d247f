"""`OpenProducers`: the producers of one task attempt, by topic; so many of them are open at the same time and no more.

Owns which producer gives way: the one that was not used for longest, once everything it was handed is stored. For a topic that
comes up again a new one is opened. Each has a name that was never used before, also because a topic and a partition of it may
be named side by side: whatever a broker remembers of another one, it takes no row of the new one for a duplicate. Must not know
rows or transactions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

from braid.client.blocks import Block
from braid.client.producer import Producer
from braid.client.transactions import Joinable
from braid.errors import BraidError
from braid_spark.connections import Link, patiently

log = logging.getLogger(__name__)

MAX_OPEN: Final = 64


class OpenProducers:
    """Used by one thread."""

    def __init__(self, link: Link, options: Mapping[str, Any], name: Callable[[], str | None]) -> None:
        """`name` says what producers are called; None: as the broker likes."""
        self._link = link
        self._options = options
        self._name = name
        self._open: OrderedDict[str, Producer] = OrderedDict()
        self._opened = 0
        self._sent: dict[str, list[asyncio.Future[None]]] = {}
        """By topic: of what was handed over and may not be stored yet. Belongs to the loop."""

    @property
    def topics(self) -> Collection[str]:
        """Those with an open producer."""
        return self._open.keys()

    def send(self, topic: str, block: Block, txn: Joinable | None) -> None:
        """Hand a block over; waits while too much is on its way. Raises if something handed over before was refused: the rest
        would be of no use."""
        producer = self._producer(topic)
        self._link.run(lambda: self._hand_over(topic, producer, block, txn))

    def drain(self) -> None:
        """Everything handed over is stored; raises the first reason why not."""
        self._link.run(lambda: self._stored(list(self._sent)))

    def close(self) -> None:
        """End all. Never raises: who wants to know whether everything is stored has asked before."""
        while self._open:
            topic, producer = self._open.popitem()
            self._end(topic, producer)

    def _producer(self, topic: str) -> Producer:
        producer = self._open.get(topic)
        if producer is not None:
            self._open.move_to_end(topic)
            return producer
        while len(self._open) >= MAX_OPEN:
            oldest = next(iter(self._open))
            self._link.run(partial(self._stored, [oldest]))
            self._end(oldest, self._open.pop(oldest))
        self._opened += 1
        name = self._name()
        if name is not None and self._opened > 1:
            name = f"{name}-{self._opened}"

        async def opened() -> Producer:
            return await self._link.client.producer(topic, name=name, deduplication=True, **self._options)

        producer = self._open[topic] = patiently(self._link, opened)
        return producer

    def _end(self, topic: str, producer: Producer) -> None:
        try:
            self._link.run(producer.close)
        except BraidError as error:
            log.info("the producer for %s could not be closed: %s", topic, error)

    async def _hand_over(self, topic: str, producer: Producer, block: Block, txn: Joinable | None) -> None:
        for each, sent in self._sent.items():
            waiting = []
            for answer in sent:
                if not answer.done():
                    waiting.append(answer)
                elif (error := answer.exception()) is not None:
                    raise error
            self._sent[each] = waiting
        self._sent.setdefault(topic, []).append(await producer.send_block(block, txn=txn))

    async def _stored(self, topics: Collection[str]) -> None:
        sent = [answer for topic in topics for answer in self._sent.pop(topic, ())]
        for answer in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
