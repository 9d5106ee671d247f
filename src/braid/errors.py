"""The error tree: one class per thing that can go wrong, with its wire code, HTTP status and retry advice.

Owns the mapping between Braid's errors, Pulsar's `ServerError` numbers and HTTP statuses. Imports nothing from Braid.
A message is a full sentence that names the object and the remedy; the numbers ride along as attributes.

    BraidError
    ├── ProtocolError              the peer broke the wire contract; the connection is closed
    ├── TransportError             ConnectFailed · ConnectionLost                              BACKOFF
    ├── DeadlineExceeded           also a TimeoutError                                         BACKOFF
    ├── RequestError               the other side understood and said no
    │   ├── NotFound               TopicNotFound · SubscriptionNotFound · ConsumerNotFound · TransactionNotFound · ...
    │   ├── Conflict               AlreadyExists · ProducerBusy · ProducerFenced · ConsumerBusy · TransactionConflict · ...
    │   ├── Rejected               InvalidTopicName · InvalidArgument · NotAllowed · TooLarge · ChecksumMismatch · ...
    │   ├── Denied                 Unauthenticated · Forbidden
    │   └── Unavailable            NotReady · Overloaded · StorageUnavailable · QuotaExceeded  BACKOFF
    ├── StoreError                 metadata store: Conflict is `VersionConflict` · OutcomeUnknown · SessionLost · ...
    ├── LedgerError                ledger store: LedgerFenced · LedgerClosed · LedgerNotFound · LedgerLost · ...
    ├── ConfigError                names the key, the value, the file
    └── Closed                     use after close

    InvariantBroken(AssertionError)  not a BraidError: a bug; never caught, ends the process or the simulation
"""

from __future__ import annotations

import re
from enum import Enum
from typing import ClassVar, NoReturn


class Advice(Enum):
    """What a caller may do after an error."""

    NEVER = "never"
    BACKOFF = "backoff"
    REFRESH = "refresh"


class BraidError(Exception):
    """Base of everything Braid raises on purpose."""

    code: ClassVar[int] = 0
    """Pulsar `ServerError` number sent on the wire."""
    status: ClassVar[int] = 500
    """HTTP status of the admin API."""
    advice: ClassVar[Advice] = Advice.NEVER

    @property
    def message(self) -> str:
        """The sentence shown to users."""
        return str(self)


class ProtocolError(BraidError):
    """The peer sent bytes that break the protocol; its connection is closed."""

    status = 400


class TransportError(BraidError):
    """The link failed; whether the request was applied is unknown."""

    status = 503
    advice = Advice.BACKOFF


class ConnectFailed(TransportError):
    """No connection could be made."""


class ConnectionLost(TransportError):
    """The connection ended while requests were under way."""


class DeadlineExceeded(BraidError, TimeoutError):
    """The caller's deadline passed."""

    status = 504
    advice = Advice.BACKOFF


class RequestError(BraidError):
    """The other side understood the request and refused it."""

    status = 400
    http_status: int | None = None
    """Status of the HTTP answer this error was made from; None if it did not come over HTTP."""


class UnknownFailure(RequestError):
    """A failure without a better name."""

    code = 0
    status = 500


class MetadataFailure(RequestError):
    """A request refused for a reason Pulsar reports as `MetadataError`."""

    code = 1
    status = 412


class NotFound(RequestError):
    """The named object does not exist."""

    status = 404


class TopicNotFound(NotFound):
    """No such topic, namespace, tenant or schema."""

    code = 11


class SubscriptionNotFound(NotFound):
    code = 12


class ConsumerNotFound(NotFound):
    code = 13


class TransactionCoordinatorNotFound(NotFound):
    """No transaction coordinator has this number."""

    code = 20


class TransactionNotFound(NotFound):
    """No such transaction, or it ended and is forgotten, or it is somebody else's."""

    code = 24


class SinkNotFound(NotFound):
    """Nothing is known of this sink: no batch was ever begun in it, or it was forgotten."""


class Conflict(RequestError):
    """The request contradicts the present state."""

    status = 409


class AlreadyExists(Conflict):
    """The object to create is already there."""


class ConsumerBusy(Conflict):
    code = 5


class TopicTerminated(Conflict):
    """The topic takes no more messages."""

    code = 15


class ProducerBusy(Conflict):
    code = 16


class ConsumerAssignFailed(Conflict):
    code = 19


class InvalidTransactionStatus(Conflict):
    """The transaction was decided otherwise before: what is committed cannot be aborted, and the other way round."""

    code = 21


class TransactionConflict(Conflict):
    """A send or acknowledgment inside a transaction that is over, or of what is acknowledged already; it had no effect."""

    code = 23


class KindConflict(Conflict):
    """A subscription of another kind of consumers has the name; one of the wanted kind needs another name."""


class ConsumerDisplaced(ConsumerAssignFailed):
    """Another consumer took this one's name over; the newest connection wins. Use another name, or close the other consumer."""


class CheckpointOutdated(Conflict):
    """A checkpoint of an earlier incarnation of the topic, or of data that retention has removed before it was read."""


class IncarnationMismatch(Conflict):
    """The topic was deleted and created again since the position that is asked for was noted; nothing was read."""


class DataLost(Conflict):
    """Messages of the range that is asked for are not stored any more; nothing was read."""

    def __init__(self, message: str = "", low: int = 0) -> None:
        super().__init__(message)
        self.low = low
        """Index of the first message from there on that is kept."""


class ProducerFenced(Conflict):
    """Exclusive access to the topic was lost for good."""

    code = 25


class SinkFenced(ProducerFenced):
    """A later run of the job has the sink; this one may write no more batches to it."""


class Rejected(RequestError):
    """The request itself is wrong; sending it again will not help."""


class ChecksumMismatch(Rejected):
    code = 9


class UnsupportedVersion(Rejected):
    code = 10


class InvalidTopicName(Rejected):
    code = 17
    status = 412


class IncompatibleSchema(Rejected):
    code = 18
    status = 409


class NotAllowed(Rejected):
    """A feature that is off, not built, or forbidden by policy."""

    code = 22
    status = 405


class SubscriptionLimit(NotAllowed):
    """A topic has as many subscriptions as it may have."""

    status = 412


class InvalidArgument(Rejected):
    """A value outside its documented range."""

    status = 412


class CheckpointInvalid(InvalidArgument):
    """Bytes that are no checkpoint, or one of another topic."""


class PreconditionFailed(Rejected):
    """An administrator's request that does not fit: a bad name or value, or an object that is still in use."""

    status = 412


class TooLarge(Rejected):
    """A message, frame or value above its limit."""

    status = 413


class Denied(RequestError):
    """The role may not do this."""


class Unauthenticated(Denied):
    code = 3
    status = 401


class Forbidden(Denied):
    code = 4
    status = 403


class Unavailable(RequestError):
    """Not now; the same request may succeed later."""

    status = 503
    advice = Advice.BACKOFF


class StorageUnavailable(Unavailable):
    """The storage below could not take or give the data."""

    code = 2


class NotReady(Unavailable):
    """The broker does not serve this object at the moment; look it up again."""

    code = 6
    advice = Advice.REFRESH


class LedElsewhere(NotReady):
    """Another broker leads the topic, or nobody does at the moment; ask that one."""

    def __init__(self, message: str = "", broker_id: str | None = None) -> None:
        super().__init__(message)
        self.broker_id = broker_id
        """Of the leader, if there is one."""


class QuotaHeld(Unavailable):
    code = 7
    status = 429


class QuotaExceeded(Unavailable):
    code = 8
    status = 429


class StorageFull(QuotaExceeded, StorageUnavailable):
    """The disk is nearly full: nothing was stored. The producers of every client show the number of an exceeded quota at once:
    what waits in them fails, and they come back by themselves. That of other storage trouble they answer by silent retries."""

    status = StorageUnavailable.status


class Overloaded(Unavailable):
    """Too many requests under way."""

    code = 14
    status = 429


class StoreError(BraidError):
    """Base of metadata-store errors."""

    code = 1
    status = 503


class VersionConflict(StoreError):
    """The expected version did not hold; nothing changed."""

    status = 409


class StoreUnavailable(StoreError):
    """Certainly not applied; retry freely."""

    advice = Advice.BACKOFF


class OutcomeUnknown(StoreError):
    """Sent, no verdict. Read again before deciding."""


class SessionLost(StoreError):
    """The session that owned the ephemeral record is gone."""


class ValueTooLarge(StoreError):
    """Refused locally, before it can hurt the store."""

    status = 413


class StoreMismatch(StoreError):
    """The store on disk is not the one the rest of the data describes."""


class LedgerError(BraidError):
    """Base of ledger-store errors."""

    code = 2
    status = 503


class LedgerFenced(LedgerError):
    """Another owner opened this ledger for recovery; this writer is done."""


class LedgerClosed(LedgerError):
    """The ledger takes no more entries."""


class LedgerExists(LedgerError):
    """A ledger with the given id is already there."""

    status = 409


class LedgerNotFound(LedgerError):
    status = 404


class LedgerLost(LedgerError):
    """A record names a ledger that its store does not know. Trying again does not help: somebody has to put the data back, or
    give it up. Clients are told NotAllowed, which none of them repeats."""

    code = 22
    status = 500


class EntryNotFound(LedgerError):
    """The entry lies beyond the last confirmed one."""

    status = 404


class EntryCorrupt(LedgerError):
    """A stored entry fails its checksum; it is never skipped silently."""


class LedgerStoreReadOnly(LedgerError):
    """Out of space: nothing was written, the store resumes by itself once there is room."""

    code = StorageFull.code
    status = StorageFull.status
    advice = Advice.BACKOFF


class LedgerOverloaded(LedgerError):
    """Too many bytes wait for the disk; this entry was not taken, the writer stays usable."""

    advice = Advice.BACKOFF


class LedgerStoreFailed(LedgerError):
    """The disk reported an error after which nothing can be trusted; the process must end and start anew."""


class DataDirectoryBusy(BraidError):
    """Another process holds the data directory."""


class ConfigError(BraidError):
    """A setting that cannot be used; names the key, the value and where it came from."""

    status = 400


class Closed(BraidError):
    """The object was closed."""

    status = 503


class InvariantBroken(AssertionError):
    """A bug: an invariant of the architecture does not hold. Never caught; ends the process or the simulation."""


def invariant(holds: bool, invariant_id: str, text: str) -> None:
    """Assert an architecture invariant; stays on under `python -O`."""
    if not holds:
        broken(invariant_id, text)


def broken(invariant_id: str, text: str) -> NoReturn:
    """Report that an invariant does not hold."""
    raise InvariantBroken(f"{invariant_id}: {text}")


def _by_code() -> dict[int, type[BraidError]]:
    """One class per wire code; the class that introduces a code in its own body owns it."""
    found: dict[int, type[BraidError]] = {}
    pending: list[type[BraidError]] = [RequestError]
    while pending:
        cls = pending.pop()
        pending.extend(cls.__subclasses__())
        if "code" in vars(cls):
            if cls.code in found:
                raise InvariantBroken(f"wire code {cls.code} belongs to {found[cls.code].__name__} and {cls.__name__}")
            found[cls.code] = cls
    return found


BY_CODE: dict[int, type[BraidError]] = _by_code()


_MARKED = re.compile(r"\[(IncarnationMismatch|DataLost)(?: low=(\d{1,20}))?\] ")
"""What the text of an error begins with that has no number of its own and must be told apart all the same."""


def wire_text(error: BraidError) -> str:
    """The text that goes with an error's number to a peer that is Braid."""
    if isinstance(error, DataLost):
        return f"[DataLost low={error.low}] {error.message}"
    return f"[IncarnationMismatch] {error.message}" if isinstance(error, IncarnationMismatch) else error.message


def from_code(code: int, message: str) -> BraidError:
    """The error a peer reported by number, and by the mark of `wire_text` where that is not enough."""
    if (marked := _MARKED.match(message)) is not None:
        text = message[marked.end() :]
        return DataLost(text, int(marked[2] or 0)) if marked[1] == "DataLost" else IncarnationMismatch(text)
    return BY_CODE.get(code, UnknownFailure)(message)


BY_STATUS: dict[int, type[RequestError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: NotAllowed,
    409: Conflict,
    412: PreconditionFailed,
    413: TooLarge,
    429: Overloaded,
    500: UnknownFailure,
    501: NotAllowed,
}


def without_frames(error: BaseException) -> None:
    """Take from an error what it went through, before it is kept: its traceback, and that of every error it came from, keeps
    alive all variables of the frames in it, payloads included."""
    error.__traceback__ = error.__cause__ = error.__context__ = None


def from_status(status: int, message: str) -> RequestError:
    """The error an HTTP answer reports; its exact status stays with it."""
    error = BY_STATUS.get(status, Rejected if status < 500 else Unavailable)(message)
    error.http_status = status
    return error
