"""Names for people: which topic a log belongs to. Pure."""

from __future__ import annotations

from braid.errors import InvalidTopicName
from braid.model.names import TopicName


def topic_of(log_name: str) -> str:
    """The topic whose log has this name, for people."""
    try:
        return str(TopicName.from_managed_ledger_name(log_name))
    except InvalidTopicName:
        return log_name
