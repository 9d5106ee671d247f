"""Brokers inside a test: `InProcessBroker` on the test's own loop, `BackgroundBroker` on a thread of its own.

Each is a whole broker with its stores, its binary port and its HTTP port (any free ones), isolated from every other; with
`brokers=3` it is three of them over one pair of stores, each of which can be killed, paused and resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from braid.errors import ConfigError
from braid.runtime.clock import Clock, SystemClock
from braid.runtime.env import Runtime
from braid.testing.clock import ManualClock
from braid.testing.pausable import PausableClock
from braid.web.config import StandaloneConfig
from braid.web.node import BrokerNode
from braid.web.standalone import Standalone

T = TypeVar("T")
START_SECONDS = 30.0


class InProcessBroker:
    """A broker on the running loop.

        async with InProcessBroker() as broker:
            async with braid.connect(broker.service_url) as client: ...

    Stores are in memory, unless `durable` is set (a temporary directory) or `data_dir` names a directory that shall outlive the
    broker. With a `ManualClock` the broker's time stands still until `advance`. Several `brokers` are numbered from 0; the URLs
    below are those of broker 0.
    """

    def __init__(
        self,
        *,
        data_dir: Path | None = None,
        durable: bool = False,
        clock: Clock | None = None,
        config: StandaloneConfig | None = None,
        with_http: bool = True,
        brokers: int = 1,
    ) -> None:
        self.clock = clock or SystemClock()
        self._count = brokers
        self._clocks: dict[int, PausableClock] = {}
        self._data_dir = data_dir
        self._durable = durable or data_dir is not None
        self._given = config or StandaloneConfig()
        self._with_http = with_http
        self._stack = contextlib.AsyncExitStack()
        self.standalone: Standalone

    async def __aenter__(self) -> InProcessBroker:
        try:
            self.standalone = Standalone(
                self._config(), Runtime(clock=self.clock), with_http=self._with_http, runtime_of=self._runtime_of
            )
            await self._stack.enter_async_context(self.standalone)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def service_url(self) -> str:
        """`pulsar://host:port`, for clients."""
        return self.standalone.service_url

    @property
    def http_url(self) -> str:
        """`http://host:port`, for the admin API and metrics."""
        return self.standalone.http_url

    @property
    def nodes(self) -> list[BrokerNode]:
        """The brokers one by one."""
        return self.standalone.brokers

    @property
    def service_urls(self) -> str:
        """`pulsar://host:port,host:port`: all brokers that are up, for clients that know several."""
        return "pulsar://" + ",".join(node.service_url.removeprefix("pulsar://") for node in self.nodes if not node.is_down)

    async def add_broker(self) -> BrokerNode:
        """One more broker over the same stores."""
        return await self.standalone.add_broker()

    async def stop(self, number: int) -> None:
        """End a broker cleanly: its topics are closed and free for the others."""
        await self.nodes[number].stop()

    async def kill(self, number: int) -> None:
        """End a broker as a crash would: no clean-up; its session runs out."""
        await self.nodes[number].kill()

    def pause(self, number: int) -> None:
        """Stop a broker's timers, its heartbeat among them, while its sockets go on: once its session has run out it is a stale
        owner that still serves, which is harder on the others than one that does nothing."""
        self._pausable(number).pause()

    def resume(self, number: int) -> None:
        """Let a paused broker find out what it has missed."""
        self._pausable(number).resume()

    def _pausable(self, number: int) -> PausableClock:
        if number not in self._clocks:
            raise ConfigError(f"There is no broker {number} to be paused; only one of several (brokers=3) can be.")
        return self._clocks[number]

    def _runtime_of(self, number: int) -> Runtime:
        if self._count == 1:
            return self.standalone.runtime
        clock = self._clocks[number] = PausableClock(self.clock)
        return Runtime(clock=clock)

    async def advance(self, seconds: float) -> None:
        """Move the broker's time forward; only with a `ManualClock`."""
        if not isinstance(self.clock, ManualClock):
            raise ConfigError("This broker runs on the machine's clock; give it a ManualClock to move its time.")
        await self.clock.advance(seconds)

    def _config(self) -> StandaloneConfig:
        replace = msgspec.structs.replace
        given = self._given
        storage = replace(given.storage, metadata_backend="memory", ledger_backend="memory")
        if self._durable:
            path = self._data_dir or Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="braid-")))
            storage = replace(given.storage, data_dir=str(path))
        # Ports that a test did not choose itself are any free ones.
        broker = given.broker
        defaults = StandaloneConfig().broker
        if broker.port == defaults.port:
            broker = replace(broker, port=0)
        if broker.http_port == defaults.http_port:
            broker = replace(broker, http_port=0)
        if self._count != 1:
            broker = replace(broker, count=self._count)
        return replace(given, broker=broker, storage=storage)


class BackgroundBroker:
    """An `InProcessBroker` on a thread and loop of its own, for synchronous tests and for clients that block.

    with BackgroundBroker() as broker:
        pulsar.Client(broker.service_url) ...
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broker: InProcessBroker | None = None
        self._stop: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="braid-broker", daemon=True)

    def __enter__(self) -> BackgroundBroker:
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            raise TimeoutError(f"the broker did not start within {START_SECONDS:g} s")
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    @property
    def broker(self) -> InProcessBroker:
        """The broker itself; touch it only inside `run`."""
        if self._broker is None:
            raise RuntimeError("the broker is not running")
        return self._broker

    @property
    def service_url(self) -> str:
        """`pulsar://host:port`, for clients."""
        return self.broker.service_url

    @property
    def http_url(self) -> str:
        """`http://host:port`, for the admin API and metrics."""
        return self.broker.http_url

    @property
    def service_urls(self) -> str:
        """`pulsar://host:port,host:port`: all brokers that are up."""
        return self.broker.service_urls

    def kill(self, number: int) -> None:
        """End one of several brokers as a crash would."""
        self.run(self.broker.kill(number))

    def pause(self, number: int) -> None:
        """Stop the timers of one of several brokers; see `InProcessBroker.pause`."""
        self.run(_call(self.broker.pause, number))

    def resume(self, number: int) -> None:
        """Let a paused broker find out what it has missed."""
        self.run(_call(self.broker.resume, number))

    def advance(self, seconds: float) -> None:
        """Move the broker's time forward and return when everything due has happened."""
        self.run(self.broker.advance(seconds))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the broker's loop and return its result."""
        if self._loop is None:
            raise RuntimeError("the broker is not running")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that uses the broker
            self._failure = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with InProcessBroker(**self._options) as self._broker:
            self._loop = asyncio.get_running_loop()
            self._started.set()
            await self._stop.wait()


async def _call(work: Callable[[int], None], number: int) -> None:
    """On the broker's loop: its timers belong there."""
    work(number)
