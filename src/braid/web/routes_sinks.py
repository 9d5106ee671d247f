"""REST: sinks of exactly-once jobs: which batches they have, which run writes to them; removal.

Root `/admin/v3/sinks`. Everything is read from the records of the metadata store, so that any broker answers for the whole
cluster.
"""

from __future__ import annotations

import asyncio
from typing import Any

from braid.client.admin_sinks import DEFAULT_LIMIT, MAX_LIMIT
from braid.client.admin_transaction_types import SinkBatchInfo, SinkInfo
from braid.txn.sinks import SinkView, unknown
from braid.web.admin import Admin
from braid.web.calls import Ask, Calls, Query

SINK = "/sinks/{sink}"
AT_ONCE = 50
"""Sinks whose batches are looked up before others get a turn."""


def sink_calls(admin: Admin) -> Calls:
    """Calls about sinks."""
    calls = Calls("sinks", root="/admin/v3")
    transactions = admin.service.transactions
    limit = Query("limit", "How many, at most; the first by name", int, DEFAULT_LIMIT, least=1, most=MAX_LIMIT)

    @calls.get("/sinks", list[SinkInfo], query=(limit,))
    async def list_sinks(ask: Ask) -> Any:
        """Sinks of the cluster by name, each with the batches it has and the run that writes to it."""
        found = []
        for number, sink in enumerate(await transactions.store.sinks(ask.query["limit"]), 1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            found.append(shown(await transactions.sinks.view(sink)))
        return found

    @calls.get(SINK, SinkInfo)
    async def describe(ask: Ask) -> Any:
        """A sink: the last batch in its output, the one begun last, the run that has it and those that lost it."""
        name = ask.text("sink")
        view = await transactions.sinks.look(name)
        if view is None:
            raise unknown(name)
        return shown(view)

    @calls.delete(SINK)
    async def delete(ask: Ask) -> None:
        """Forget a sink and abort what is being written to it; a job that goes on writes again what it wrote before."""
        await transactions.sinks.delete(ask.text("sink"))

    return calls


def shown(view: SinkView) -> SinkInfo:
    """A sink in the words of the admin API."""
    value, current = view.sink.value, None
    if value.current is not None:
        state = "ABORTED" if view.header is None else view.header.value.state
        current = SinkBatchInfo(batch=value.current.batch, transaction=value.current.txn, state=state)
    return SinkInfo(
        sink=view.sink.name,
        last_batch=view.last,
        last_run=view.last_run,
        current=current,
        run=value.run,
        run_epoch=value.run_epoch,
        retired_runs=list(value.retired_runs),
        owner=value.owner,
        expires_ms=value.expires_ms,
    )
