"""The nouns of the command line and the options that all their commands have.

A noun's commands are made when one of them is wanted: `braid produce` does not pay for eighty commands it does not run.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

DEFAULT_URL = "http://localhost:8080"
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
NOUNS = {
    "topics": "Persistent topics: create, delete, look at and move them.",
    "scalable-topics": "Topics that split and merge while in use: create, look at, split, merge and delete them.",
    "subscriptions": "The subscriptions of a topic: where they stand, moving and removing them.",
    "transactions": "Transactions: those that are open and what they hold back; abort one that was left behind.",
    "sinks": "Sinks of exactly-once jobs: the batches they have, the run that writes to them; forget one.",
    "namespaces": "Namespaces (tenant/namespace) and their policies.",
    "tenants": "Tenants, who own namespaces.",
    "brokers": "The brokers of the cluster.",
    "bundles": "The parts of a namespace that brokers own.",
    "clusters": "The clusters that are known.",
    "segments": "Single segments of scalable topics, for repairs and to look closer.",
}
Url = Annotated[
    str, typer.Option("--url", envvar="BRAID_ADMIN_URL", help="Admin API of a broker; several are separated by commas.")
]
Output = Annotated[str, typer.Option("--output", help="text or json.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, max=86_400, help="Seconds for each call to be answered.")]


def group(noun: str) -> typer.Typer:
    """The group of commands of one noun."""

    class Noun(TyperGroup):
        """Makes its commands on demand."""

        def list_commands(self, ctx: Any) -> list[str]:
            from braid.cli.admin_commands import verbs

            return verbs(noun)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            from braid.cli.admin_commands import make

            return make(noun, cmd_name)

    return typer.Typer(
        name=noun, cls=Noun, help=NOUNS[noun], no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
    )
