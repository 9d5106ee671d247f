"""`AdminClient` without `await`, for scripts and notebooks' plain cells.

    with AdminClient("http://localhost:8080") as admin:
        admin.topics.create("orders")

Owns one thread with an event loop, on which the asynchronous client runs; every method here is the asynchronous one of the same
name, waited for. Refuses to be used inside a running event loop, which it would block.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from braid.client import admin, admin_namespaces, admin_topics
from braid.errors import Closed

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="braid-admin", daemon=True)
        self._thread.start()
        self._is_closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, waited for; Ctrl-C while waiting cancels it."""
        try:
            _refuse_in_a_loop()
            if self._is_closed:
                raise Closed("The admin client was closed.")
        except BaseException:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class _Blocking(Generic[A]):
    """One group of operations, waited for."""

    def __init__(self, inner: A, thread: _LoopThread) -> None:
        self._inner = inner
        self._thread = thread


def _wait(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[_Blocking[A], P], T]:
    """The same method, which returns when it is done."""

    @functools.wraps(method)
    def call(self: _Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._thread.run(method(self._inner, *args, **kwargs))

    return call


class Clusters(_Blocking[admin.Clusters]):
    """`AdminClient.clusters`."""

    list = _wait(admin.Clusters.list)
    get = _wait(admin.Clusters.get)
    create = _wait(admin.Clusters.create)
    update = _wait(admin.Clusters.update)
    delete = _wait(admin.Clusters.delete)


class Tenants(_Blocking[admin.Tenants]):
    """`AdminClient.tenants`."""

    list = _wait(admin.Tenants.list)
    get = _wait(admin.Tenants.get)
    create = _wait(admin.Tenants.create)
    update = _wait(admin.Tenants.update)
    delete = _wait(admin.Tenants.delete)


class Namespaces(_Blocking[admin_namespaces.Namespaces]):
    """`AdminClient.namespaces`."""

    list = _wait(admin_namespaces.Namespaces.list)
    create = _wait(admin_namespaces.Namespaces.create)
    delete = _wait(admin_namespaces.Namespaces.delete)
    policies = _wait(admin_namespaces.Namespaces.policies)
    unload = _wait(admin_namespaces.Namespaces.unload)
    topics = _wait(admin_namespaces.Namespaces.topics)
    permissions = _wait(admin_namespaces.Namespaces.permissions)
    grant = _wait(admin_namespaces.Namespaces.grant)
    revoke = _wait(admin_namespaces.Namespaces.revoke)
    retention = _wait(admin_namespaces.Namespaces.retention)
    set_retention = _wait(admin_namespaces.Namespaces.set_retention)
    remove_retention = _wait(admin_namespaces.Namespaces.remove_retention)
    deduplication = _wait(admin_namespaces.Namespaces.deduplication)
    set_deduplication = _wait(admin_namespaces.Namespaces.set_deduplication)
    remove_deduplication = _wait(admin_namespaces.Namespaces.remove_deduplication)
    auto_topics = _wait(admin_namespaces.Namespaces.auto_topics)
    set_auto_topics = _wait(admin_namespaces.Namespaces.set_auto_topics)
    remove_auto_topics = _wait(admin_namespaces.Namespaces.remove_auto_topics)
    auto_subscriptions = _wait(admin_namespaces.Namespaces.auto_subscriptions)
    set_auto_subscriptions = _wait(admin_namespaces.Namespaces.set_auto_subscriptions)
    remove_auto_subscriptions = _wait(admin_namespaces.Namespaces.remove_auto_subscriptions)
    schema_strategy = _wait(admin_namespaces.Namespaces.schema_strategy)
    set_schema_strategy = _wait(admin_namespaces.Namespaces.set_schema_strategy)
    properties = _wait(admin_namespaces.Namespaces.properties)
    set_properties = _wait(admin_namespaces.Namespaces.set_properties)
    remove_properties = _wait(admin_namespaces.Namespaces.remove_properties)
    clear_backlog = _wait(admin_namespaces.Namespaces.clear_backlog)
    unsubscribe = _wait(admin_namespaces.Namespaces.unsubscribe)


class Topics(_Blocking[admin_topics.Topics]):
    """`AdminClient.topics`."""

    list = _wait(admin_topics.Topics.list)
    partitioned = _wait(admin_topics.Topics.partitioned)
    create = _wait(admin_topics.Topics.create)
    delete = _wait(admin_topics.Topics.delete)
    partitions = _wait(admin_topics.Topics.partitions)
    grow = _wait(admin_topics.Topics.grow)
    stats = _wait(admin_topics.Topics.stats)
    partitioned_stats = _wait(admin_topics.Topics.partitioned_stats)
    internal_stats = _wait(admin_topics.Topics.internal_stats)
    partitioned_internal_stats = _wait(admin_topics.Topics.partitioned_internal_stats)
    lookup = _wait(admin_topics.Topics.lookup)
    bundle = _wait(admin_topics.Topics.bundle)
    unload = _wait(admin_topics.Topics.unload)
    terminate = _wait(admin_topics.Topics.terminate)
    terminate_partitions = _wait(admin_topics.Topics.terminate_partitions)
    create_missed_partitions = _wait(admin_topics.Topics.create_missed_partitions)
    trim = _wait(admin_topics.Topics.trim)
    truncate = _wait(admin_topics.Topics.truncate)
    last_message_id = _wait(admin_topics.Topics.last_message_id)
    message = _wait(admin_topics.Topics.message)
    permissions = _wait(admin_topics.Topics.permissions)
    grant = _wait(admin_topics.Topics.grant)
    revoke = _wait(admin_topics.Topics.revoke)
    properties = _wait(admin_topics.Topics.properties)
    set_properties = _wait(admin_topics.Topics.set_properties)
    remove_property = _wait(admin_topics.Topics.remove_property)


class Subscriptions(_Blocking[admin_topics.Subscriptions]):
    """`AdminClient.subscriptions`."""

    list = _wait(admin_topics.Subscriptions.list)
    create = _wait(admin_topics.Subscriptions.create)
    delete = _wait(admin_topics.Subscriptions.delete)
    skip = _wait(admin_topics.Subscriptions.skip)
    skip_all = _wait(admin_topics.Subscriptions.skip_all)
    reset = _wait(admin_topics.Subscriptions.reset)
    peek = _wait(admin_topics.Subscriptions.peek)
    expire = _wait(admin_topics.Subscriptions.expire)
    expire_all = _wait(admin_topics.Subscriptions.expire_all)
    properties = _wait(admin_topics.Subscriptions.properties)
    set_properties = _wait(admin_topics.Subscriptions.set_properties)


class Brokers(_Blocking[admin.Brokers]):
    """`AdminClient.brokers`."""

    list = _wait(admin.Brokers.list)
    leader = _wait(admin.Brokers.leader)
    health = _wait(admin.Brokers.health)
    ready = _wait(admin.Brokers.ready)
    version = _wait(admin.Brokers.version)
    owned = _wait(admin.Brokers.owned)
    configuration = _wait(admin.Brokers.configuration)
    topics = _wait(admin.Brokers.topics)
    load = _wait(admin.Brokers.load)
    drain = _wait(admin.Brokers.drain)
    undrain = _wait(admin.Brokers.undrain)


class Bundles(_Blocking[admin.Bundles]):
    """`AdminClient.bundles`."""

    list = _wait(admin.Bundles.list)
    unload = _wait(admin.Bundles.unload)
    transfer = _wait(admin.Bundles.transfer)
    split = _wait(admin.Bundles.split)


class AdminClient:
    """Administers a cluster over HTTP; `with` closes it. Safe to use from several threads."""

    def __init__(self, urls: str | Sequence[str] = "http://localhost:8080", *, timeout: float = admin.DEFAULT_TIMEOUT) -> None:
        _refuse_in_a_loop()
        self._is_closed = False
        self._inner = admin.AdminClient(urls, timeout=timeout)
        self._thread = thread = _LoopThread()
        self.clusters = Clusters(self._inner.clusters, thread)
        self.tenants = Tenants(self._inner.tenants, thread)
        self.namespaces = Namespaces(self._inner.namespaces, thread)
        self.topics = Topics(self._inner.topics, thread)
        self.subscriptions = Subscriptions(self._inner.subscriptions, thread)
        self.brokers = Brokers(self._inner.brokers, thread)
        self.bundles = Bundles(self._inner.bundles, thread)

    @property
    def urls(self) -> Sequence[str]:
        """The addresses that are asked."""
        return self._inner.urls

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end the thread. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.run(self._inner.close())
            self._thread.close()


def _refuse_in_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "The blocking AdminClient would stop the event loop that runs here; use braid.AdminClient with await instead."
    )
