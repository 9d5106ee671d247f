"""Options of the SDK; every bound is here (INV17)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from braid.runtime.config import setting


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a `Client` and of everything made by it."""

    connect_timeout: Annotated[float, setting("Seconds to make a connection", ge=0.01, le=600)] = 10.0
    operation_timeout: Annotated[float, setting("Seconds for a request to be answered", ge=0.01, le=3600)] = 30.0
    send_timeout: Annotated[float, setting("Seconds for a message to be acknowledged", ge=0.01, le=3600)] = 60.0
    close_timeout: Annotated[
        float, setting("Seconds that closing a producer waits for what is not acknowledged yet", ge=0, le=3600)
    ] = 10.0
    transaction_timeout: Annotated[
        float, setting("Seconds after which a transaction is aborted that was begun without a timeout of its own", ge=0.001)
    ] = 60.0
    keep_alive_seconds: Annotated[float, setting("Period of PING on each connection", ge=0.1, le=3600)] = 30.0
    backoff_initial: Annotated[float, setting("First pause before connecting again, in seconds", ge=0.001, le=60)] = 0.1
    backoff_max: Annotated[float, setting("Longest pause before connecting again, in seconds", ge=0.001, le=3600)] = 10.0
    max_pending_messages: Annotated[
        int, setting("Messages of a producer not yet acknowledged; an entry of a block counts as one", ge=1, le=1_000_000)
    ] = 1000
    max_pending_bytes: Annotated[int, setting("Bytes of a producer not yet acknowledged", ge=1024, le=1 << 40)] = 64 << 20
    sealed_grace: Annotated[
        float, setting("Seconds for a sealed segment's owner to answer what it was sent", ge=0.01, le=60)
    ] = 2.0
    layout_check: Annotated[
        float, setting("Seconds after which a producer asks again for the layout a sealed segment must have", ge=0.05, le=60)
    ] = 1.0
    key_cache: Annotated[int, setting("Keys whose segment a producer remembers", ge=1, le=10_000_000)] = 100_000
    receiver_queue: Annotated[int, setting("Messages of a consumer received ahead", ge=1, le=1_000_000)] = 1000
    redelivery_delay: Annotated[float, setting("Seconds until a refused message comes again", ge=0, le=86_400)] = 1.0
    max_message_bytes: Annotated[int, setting("Largest payload accepted after decompression", ge=1024, le=1 << 31)] = 128 << 20
    max_chunked_messages: Annotated[int, setting("Unfinished chunked messages of a consumer", ge=1, le=10_000)] = 10
    batch_max_messages: Annotated[int, setting("Messages in one batch", ge=1, le=100_000)] = 1000
    batch_max_bytes: Annotated[int, setting("Bytes in one batch", ge=1, le=128 << 20)] = 128 << 10
    batch_delay: Annotated[float, setting("Seconds a batch waits for more; 0 = until the loop's next turn", ge=0, le=60)] = 0.0
    block_max_bytes: Annotated[int, setting("Bytes in one entry of a block, uncompressed", ge=1024, le=128 << 20)] = 1 << 20
    block_max_messages: Annotated[int, setting("Messages in one entry of a block", ge=1, le=1_000_000)] = 100_000
    release_wait: Annotated[
        float, setting("Seconds a stream consumer waits for acknowledgements of a segment it must give away", ge=0, le=86_400)
    ] = 60.0
    drained_check: Annotated[
        float,
        setting("Seconds after which a queue consumer looks again at a sealed segment it had read to its end", ge=1, le=86_400),
    ] = 60.0
