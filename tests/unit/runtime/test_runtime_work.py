"""Threads and tasks: jobs run in order and report on the loop; a task has an owner that waits for it and sees it fail."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from braid.runtime.logs import LogOnce
from braid.runtime.tasks import Tasks
from braid.runtime.threads import InlineThreads, SystemThreads, Threads

KINDS: list[Threads] = [SystemThreads(), InlineThreads()]


@pytest.mark.parametrize("threads", KINDS, ids=["thread", "inline"])
async def test_jobs_run_in_order_and_report_on_the_loop(threads: Threads) -> None:
    worker = threads.worker("test")
    ran: list[int] = []
    reported: list[tuple[int, int]] = []
    home = threading.get_ident()
    done = asyncio.Event()

    def report(number: int, error: BaseException | None) -> None:
        assert error is None
        reported.append((number, threading.get_ident()))
        if number == 9:
            done.set()

    def job(number: int) -> int:
        ran.append(number)
        return number

    for number in range(10):
        worker.post(lambda number=number: job(number), report)  # type: ignore[misc]
    await done.wait()
    assert ran == list(range(10))
    assert reported == [(number, home) for number in range(10)]
    assert await worker.run(lambda: 42) == 42
    await worker.close()
    await worker.close()


@pytest.mark.parametrize("threads", KINDS, ids=["thread", "inline"])
async def test_a_failing_job_fails_its_caller_only(threads: Threads) -> None:
    worker = threads.worker("test")

    def fail() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        await worker.run(fail)
    assert await worker.run(lambda: 1) == 1
    await worker.close()


async def test_a_closed_worker_takes_no_jobs() -> None:
    worker = SystemThreads().worker("test")
    await worker.close()
    with pytest.raises(RuntimeError, match="closed"):
        await worker.run(lambda: 1)


async def test_closing_cancels_tasks_and_waits_for_them() -> None:
    tasks = Tasks("owner")
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    tasks.spawn(work(), "work")
    await asyncio.sleep(0)
    assert len(tasks) == 1
    await tasks.close()
    assert ended.is_set()
    assert len(tasks) == 0
    with pytest.raises(RuntimeError, match="owner is closed"):
        tasks.spawn(work(), "late")


async def test_a_failing_task_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    tasks = Tasks("owner", failures.append)

    async def fail() -> None:
        raise ValueError("a bug")

    task = tasks.spawn(fail(), "fail")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [str(failure) for failure in failures] == ["a bug"]
    assert "owner:fail" in caplog.text


def test_a_complaint_is_made_once_and_remembered_within_bounds(caplog: pytest.LogCaptureFixture) -> None:
    once = LogOnce(logging.getLogger("test"), limit=2)
    for key in ("a", "a", "b", "c", "a"):
        once.warning(key, "complaint %s", key)
    assert [record.getMessage() for record in caplog.records] == [f"complaint {key}" for key in ("a", "b", "c", "a")]
