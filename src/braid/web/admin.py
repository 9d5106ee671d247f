"""What the REST handlers share: the broker they administer, names from paths, and bodies.

Owns the rules of REST input: a path part is percent-decoded exactly once, a body is bounded (by the application) and decoded
into a declared type, and everything that does not fit is a 4xx with a sentence, never a 500.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from litestar import Request
from litestar.params import FromPath

from braid.broker.server import BrokerServer
from braid.broker.service import BrokerService, check_served
from braid.broker.topic import Topic
from braid.errors import NotAllowed, Rejected, TopicNotFound
from braid.model.names import Domain, NamespaceName, TopicName, decode
from braid.web.rates import Rates

T = TypeVar("T")
Req = Request[Any, Any, Any]
Part = FromPath[str]
"""One part of a path, still percent-encoded."""
MAX_BODY_BYTES = 1 << 20
MAX_INT64 = (1 << 63) - 1


class BadRequest(Rejected):
    """A body or parameter that cannot be understood."""

    status = 400


class NotBuilt(Rejected):
    """A call of the admin API that this version does not have."""

    status = 501


class Admin:
    """One broker as its administrators see it."""

    def __init__(self, service: BrokerService, server: BrokerServer, is_writable: Callable[[], bool]) -> None:
        self.service = service
        self.server = server
        self.is_writable = is_writable
        """Whether storage takes writes at the moment."""
        self.http_url = ""
        self.loop_lag = 0.0
        self.rates = Rates(service.runtime.clock)

    @property
    def broker_id(self) -> str:
        """Host and HTTP port."""
        return self.http_url.removeprefix("http://")

    async def loaded(self, name: TopicName) -> Topic:
        """The topic, which must exist; 405 for the name of a partitioned topic itself."""
        if await self.partitions(name):
            raise NotAllowed(f"The topic {name} is partitioned; use its partitions, such as {name.partition(0)}.")
        return await self.service.topic(name, create=False)

    async def partitions(self, name: TopicName) -> list[TopicName]:
        """The partitions of a partitioned topic; empty for any other name."""
        check_served(name)
        record = None if name.is_partition else await self.service.namespaces.partitions(name)
        return [] if record is None else [name.partition(number) for number in range(record.partitions)]

    async def targets(self, name: TopicName, *, create: bool = False) -> list[Topic]:
        """The topics behind a name: its partitions, or itself."""
        names = await self.partitions(name) or [name]
        return [await self.service.topic(each, create=create) for each in names]

    async def check_exists(self, name: TopicName) -> None:
        if not await self.partitions(name) and not await self.service.logs.exists(name.managed_ledger_name):
            raise TopicNotFound(f"The topic {name} does not exist.")


def namespace_of(tenant: str, namespace: str) -> NamespaceName:
    """The namespace two path parts name."""
    name = NamespaceName.parse(f"{decode(tenant)}/{decode(namespace)}")
    TopicName.parse(f"{Domain.PERSISTENT}://{name}/t")  # too long for any topic is too long
    return name


def tenant_of(tenant: str) -> str:
    """The tenant a path part names."""
    return namespace_of(tenant, "default").tenant


def topic_of(tenant: str, namespace: str, topic: str) -> TopicName:
    """The persistent topic three path parts name."""
    return TopicName.parse(f"{Domain.PERSISTENT}://{decode(tenant)}/{decode(namespace)}/{decode(topic)}")


def number_of(text: str, what: str) -> int:
    """A non-negative 64-bit number in a path."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_INT64):
        raise BadRequest(f"{text[:40]!r} is no {what}; a number from 0 to {MAX_INT64} is expected.")
    return int(text)


async def body_of(request: Req, kind: type[T], default: T | None = None) -> T:
    """The request's body as JSON of type `kind`; an empty one is `default`, if there is one."""
    raw = await request.body()
    if not raw.strip():
        if default is None:
            raise BadRequest("The request needs a JSON body and has none.")
        return default
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body cannot be used: {error}.") from None


def convert(value: Any, kind: type[T], what: str) -> T:
    """A decoded JSON value as `kind`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{what} cannot be used: {error}.") from None


def flag(request: Req, name: str, default: bool = False) -> bool:
    """A boolean query parameter."""
    text: str | None = request.query_params.get(name)
    if text is None or text == "":
        return default
    if text.lower() not in ("true", "false"):
        raise BadRequest(f"The query parameter {name} must be true or false, not {text[:40]!r}.")
    return text.lower() == "true"
