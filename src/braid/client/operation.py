"""`Operation`: one call of the admin API as data. Pure."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")
Method = Literal["GET", "PUT", "POST", "DELETE"]
ROOT = "/admin/v2"


class Operation(msgspec.Struct, Generic[T], frozen=True):
    """One call of the admin API."""

    noun: str
    verb: str
    method: Method
    path: str
    reply: type[T]
    """What comes back as JSON; `str` also as plain text, `bytes` as it is, NoneType for nothing."""
    summary: str
    example: str = ""
    """Arguments of an example on the command line."""
    query: tuple[str, ...] = ()
    body: Any = None
    """Type of the body; None = there is none."""
    is_destructive: bool = False
    """Data or positions are lost: the command line asks first."""
    may_repeat: bool = False
    """Doing it twice is the same as once and answers the same: it may be sent again when the answer was lost."""
    member: str = ""
    """Name of the method of `AdminClient.<noun>`, if it is not the verb."""

    @property
    def is_repeatable(self) -> bool:
        return self.may_repeat or self.method == "GET"

    @property
    def group(self) -> str:
        """Name of the noun as an attribute of `AdminClient`."""
        return self.noun.replace("-", "_")

    @property
    def method_name(self) -> str:
        """Name of the method behind the verb."""
        return self.member or self.verb.replace("-", "_")

    @property
    def name(self) -> str:
        """`noun verb`, as on the command line."""
        return f"{self.noun} {self.verb}"
