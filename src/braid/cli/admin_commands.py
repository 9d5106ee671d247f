"""The commands `braid <noun> <verb>`, made from the operations of the admin API and the methods of `AdminClient`.

A command's name, help and example come from its `Operation`, its arguments and options from the signature of the method: what
the method takes by position is an argument, what it takes by keyword is an option. A few verbs do more than one call and are
written out in `admin_work`. Owns asking before something is destroyed, and how a failure of the admin API is told.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Annotated, Any, get_type_hints

import typer
import typer.main

from braid.cli import admin_work
from braid.cli.admin_groups import DEFAULT_URL, HELP_OPTIONS, Output, Timeout, Url
from braid.cli.admin_output import done, note, show
from braid.cli.admin_spellings import further_option, merge, spellings
from braid.cli.admin_values import age_of, end_of, message_id_of, moment_of, pairs_of, start_of, target_of
from braid.client import admin, admin_namespaces, admin_scalable, admin_sinks, admin_topics, admin_transactions
from braid.client.admin import AdminClient
from braid.client.operations import OPERATIONS, Operation, operations_of
from braid.errors import ConfigError, ConnectFailed, NotFound
from braid.runtime.clock import SystemClock

Work = Callable[..., Awaitable[Any]]
Parameters = list[inspect.Parameter]
CLASSES: dict[str, type] = {
    "clusters": admin.Clusters,
    "tenants": admin.Tenants,
    "namespaces": admin_namespaces.Namespaces,
    "topics": admin_topics.Topics,
    "subscriptions": admin_topics.Subscriptions,
    "brokers": admin.Brokers,
    "bundles": admin.Bundles,
    "scalable-topics": admin_scalable.ScalableTopics,
    "segments": admin_scalable.Segments,
    "transactions": admin_transactions.Transactions,
    "sinks": admin_sinks.Sinks,
}
HELP = {
    "topic": "Topic, such as orders or persistent://tenant/namespace/orders.",
    "topics": "Topics, such as orders or persistent://tenant/namespace/orders.",
    "namespace": "Namespace, such as tenant/namespace.",
    "tenant": "Name of the tenant.",
    "cluster": "Name of the cluster.",
    "clusters": "Cluster the tenant may use; may be repeated. None: all.",
    "subscription": "Name of the subscription.",
    "bundle": "Bundle, such as 0x00000000_0x40000000.",
    "broker": "Id of the broker: host:port of its admin API.",
    "role": "Name of the role.",
    "actions": "produce, consume, functions, sources, sinks or packages; may be repeated.",
    "admin_roles": "Role that may administer the tenant; may be repeated.",
    "partitions": "Number of partitions; 0 is a plain topic.",
    "properties": "Property as key=value; may be repeated.",
    "key": "Name of the property.",
    "force": "Even if it is in use: clients are disconnected; a namespace goes with its topics.",
    "at": "Where it begins: earliest, latest, or a message id such as 7:42.",
    "to": "earliest, latest, a message id (7:42), an age (90m, 12h, 2d), or a time (2026-01-31T12:00:00Z).",
    "excluded": "Go behind the message, not to it.",
    "count": "How many.",
    "position": "Which message; 1 is the next one.",
    "seconds": "Age in seconds.",
    "message_id": "Message id as ledger:entry, such as 7:42.",
    "bundles": "Number of bundles; the broker's setting if not given.",
    "minutes": "Time in minutes; -1 is no limit.",
    "megabytes": "Size in megabytes; -1 is no limit.",
    "applied": "What holds for the topic, whoever says so.",
    "disable": "Switch it off.",
    "per_partition": "Also show each partition.",
    "strategy": "BACKWARD, FORWARD, FULL, each also _TRANSITIVE; ALWAYS_COMPATIBLE, ALWAYS_INCOMPATIBLE or UNDEFINED.",
    "service_url": "Address of the cluster's admin API.",
    "broker_service_url": "Address of the cluster's brokers, pulsar://host:port.",
    "unload": "Give the halves away at once.",
    "segments": "Number of segments it begins with.",
    "segment": "Id of the segment.",
    "other": "Id of the neighbour.",
    "routing": "high16 or low16 (clients of Pulsar 5.0.0-M1); the broker's setting if not given.",
    "kind": "stream, queue or checkpoint.",
    "transaction": "Id of the transaction, such as 3_1048576; (3,1048576) and 3:1048576 are understood too.",
    "sink": "Name of the sink, as the job gives it; <query id>/<topic> if it gives none.",
    "min_age": "Only those that are at least this old: 30s, 5m, 2h, 1d.",
    "limit": "How many, at most; the oldest.",
    "subscriptions": "Subscription it has from the start; may be repeated.",
}
HELP_OF = {
    "sinks": {"limit": "How many, at most; the first by name."},
    "scalable-topics": {
        "topic": "Scalable topic, such as orders or topic://tenant/namespace/orders.",
        "at": "Where it begins: earliest or latest.",
        "to": "earliest, an age (90m, 12h, 2d), or a time (2026-01-31T12:00:00Z).",
        "force": "Even if it is in use: clients are disconnected.",
        "consumer": "Name of the consumer, as stats show it.",
        "properties": "Property as key=value; may be repeated, or several separated by commas.",
    },
    "segments": {
        "segment": "Segment, such as segment://tenant/namespace/orders/0000-7fff-0.",
        "at": "Where cursors begin: earliest or latest.",
        "to": "earliest, an age (90m, 12h, 2d), or a time (2026-01-31T12:00:00Z).",
        "force": "Even if it is in use (clients are disconnected), active, or not yet read to its end.",
    },
}
"""What a parameter means with certain nouns."""
REPEATED = {
    "properties": "--property",
    "actions": "--action",
    "admin_roles": "--admin-role",
    "clusters": "--cluster",
    "subscriptions": "--subscription",
}
"""Options that may be given several times."""
SPECIAL: Mapping[tuple[str, str], Work] = {
    ("topics", "create"): admin_work.create_topic,
    ("topics", "delete"): admin_work.delete_topics,
    ("subscriptions", "peek"): admin_work.peek,
    ("brokers", "drain"): admin_work.drain,
    ("brokers", "health"): admin_work.health,
    ("scalable-topics", "create"): admin_work.create_scalable_topic,
    ("scalable-topics", "split-segment"): admin_work.split_segment,
    ("scalable-topics", "merge-segments"): admin_work.merge_segments,
}
"""Commands that are more than one method of `AdminClient`; they take the client first."""
NOTHING = {"transactions list": "open transactions"}
"""What an empty list has none of, if that is not all things of the noun."""
LISTINGS = {
    "scalable topic": "braid scalable-topics list TENANT/NAMESPACE",
    "topic topic://": "braid scalable-topics list TENANT/NAMESPACE",
    "topic segment://": "braid scalable-topics get-metadata TOPIC",
    "topic ": "braid topics list TENANT/NAMESPACE",
    "partitioned topic": "braid topics partitioned TENANT/NAMESPACE",
    "subscription": "braid subscriptions list TOPIC",
    "namespace": "braid namespaces list TENANT",
    "tenant": "braid tenants list",
    "cluster": "braid clusters list",
    "transaction": "braid transactions list",
    "sink": "braid sinks list",
}
"""Where to look when the broker says that something of this kind does not exist; the first that fits."""


def verbs(noun: str) -> list[str]:
    """The commands of a noun, in the order of the table."""
    return list(dict.fromkeys([*(each.verb for each in OPERATIONS if each.noun == noun), *EXTRAS.get(noun, {})]))


def make(noun: str, verb: str) -> Any:
    """The command behind a noun and verb; None if there is none."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    if (extra := EXTRAS.get(noun, {}).get(verb)) is not None:
        single.command(verb, epilog=f"Example: braid {noun} {verb} orders --watch", context_settings=HELP_OPTIONS)(extra)
        return typer.main.get_command(single)
    found = operations_of(noun, verb)
    if not found:
        return None
    operation = found[0]
    example = f"Example: braid {operation.name} {operation.example}".rstrip()
    single.command(verb, help=operation.summary, epilog=example, context_settings=HELP_OPTIONS)(_command(operation))
    return typer.main.get_command(single)


def _dag(
    topic: Annotated[str, typer.Argument(help=HELP_OF["scalable-topics"]["topic"])],
    watch: Annotated[bool, typer.Option("--watch", help="Look again and again; Ctrl-C ends it.")] = False,
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")] = 2.0,
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows", min=1, max=100_000, help="Segments in the table, at most; 100, or what the screen has room for."
        ),
    ] = None,
    url: Url = DEFAULT_URL,
    output: Output = "text",
    timeout: Timeout = 30.0,
) -> None:
    """Draw the segments of a scalable topic: how they came from each other, their load, and what holds subscriptions up."""
    from braid.cli.dag import DagOptions, run

    run(
        DagOptions(
            topic=topic,
            is_watching=watch,
            interval=interval,
            rows=rows,
            url=url,
            is_json=_is_json(output),
            timeout=timeout,
        )
    )


EXTRAS: Mapping[str, Mapping[str, Callable[..., None]]] = {"scalable-topics": {"dag": _dag}}
"""Commands that are no operation: by noun and verb."""


def _command(operation: Operation[Any]) -> Callable[..., None]:
    """A function with the signature that the command line shall have."""
    work = SPECIAL.get((operation.noun, operation.verb)) or getattr(CLASSES[operation.noun], operation.method_name)
    is_special = (operation.noun, operation.verb) in SPECIAL
    own = list(inspect.signature(work).parameters.values())[1:]
    hints = get_type_hints(work)

    further = spellings(operation.noun, operation.verb)
    defaults = {each.name: each.default for each in own if each.default is not each.empty}

    def command(**given: Any) -> None:
        url, output, timeout = given.pop("url"), given.pop("output"), given.pop("timeout")
        is_json = _is_json(output)
        is_sure = given.pop("yes", True)
        values = merge(given, further, defaults)
        named = {name: value for name, value in values.items() if name not in defaults or value}
        if operation.is_destructive:
            _confirm(operation, named, is_sure)
        arguments = {name: _value(operation.noun, name, value) for name, value in values.items()}

        async def run() -> Any:
            async with AdminClient(url, timeout=timeout) as client:
                target = client if is_special else getattr(client, operation.group)
                positional = [arguments.pop(each.name) for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
                return await work(target, *positional, **arguments)

        result = _run(run())
        if isinstance(result, admin_work.Changed):
            done(operation.name, {**named, "into": result.into}, is_json=is_json)
        elif result is None and hints["return"] in (None, type(None)):
            done(operation.name, named, is_json=is_json)
        elif result is None and not is_json:
            whose = "broker's setting" if operation.noun == "namespaces" else "namespace's policy"
            note(f"Not set: the {whose} applies.")
        elif result in ([], {}) and not is_json:
            kind = NOTHING.get(operation.name, operation.noun)
            note(f"No {kind} found." if operation.verb == "list" else "Nothing found.")
        else:
            show(result, is_json=is_json)

    parameters = [each for one in own for each in _parameters(operation.noun, one, hints[one.name], further)]
    parameters += [_sure(further.get("yes", ()))] if operation.is_destructive else []
    parameters += [_option("url", Url, DEFAULT_URL), _option("output", Output, "text"), _option("timeout", Timeout, 30.0)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__ = f"{operation.group}_{operation.method_name}"
    return command


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sure(flags: tuple[str, ...]) -> inspect.Parameter:
    """Not to be asked; Pulsar calls that force."""
    option = typer.Option("--yes", "-y", *flags, help="Do not ask; needed when nobody can be asked.")
    return _option("yes", Annotated[bool, option], False)


def _parameters(noun: str, given: inspect.Parameter, hint: Any, further: Mapping[str, tuple[str, ...]]) -> Parameters:
    """The argument or option for a parameter of a method, and the option for Pulsar's name of it."""
    kind, is_many = _kind(given.name, hint)
    text = HELP_OF.get(noun, {}).get(given.name) or HELP[given.name]
    default = ... if given.default is given.empty else given.default
    if is_many and default in (None, ()):
        default = []
    flags = further.get(given.name, ())
    made = []
    options: dict[str, Any] = {"help": text}
    if flags and not is_many and kind is not bool:  # what can be given in two ways is known to be missing only afterwards
        own = _flag(given.name) if given.kind is given.KEYWORD_ONLY else f"the argument {given.name}"
        made.append(further_option(given.name, kind, flags, own))
        options["show_default"] = False if default is ... else str(default)
        kind, default, flags = kind | None, None, ()
    info: Any
    if given.kind is given.POSITIONAL_OR_KEYWORD:
        info = typer.Argument(default, **options)
    else:
        flag = _flag(given.name)
        info = typer.Option(default, f"{flag}/--no-{flag[2:]}" if default is True else flag, *flags, **options)
    return [inspect.Parameter(given.name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=kind), *made]


def _flag(name: str) -> str:
    return REPEATED.get(name, f"--{name.replace('_', '-')}")


def _kind(name: str, hint: Any) -> tuple[Any, bool]:
    """The type on the command line, and whether there can be several values."""
    if name in REPEATED or name == "topics":
        return list[str], True
    if hint in (str, int, bool, int | None, str | None):
        return hint, False
    return str, False


def _value(noun: str, name: str, value: Any) -> Any:
    """What the method takes, from what the user wrote."""
    is_scalable = noun in ("scalable-topics", "segments")
    if name == "properties":
        return pairs_of(value, may_be_joined=is_scalable)
    if name == "at":
        return end_of(value) if is_scalable else start_of(value)
    if name == "min_age":
        return None if value is None else age_of(value)
    if name == "kind":
        return value.lower()
    if name == "to":
        now_ms = SystemClock().now_ms()
        return moment_of(value, now_ms) if is_scalable else target_of(value, now_ms)
    return message_id_of(value) if name == "message_id" else value


def _is_json(output: str) -> bool:
    if output not in ("text", "json"):
        raise ConfigError(f"--output must be one of text, json, not {output!r}.")
    return output == "json"


def _confirm(operation: Operation[Any], values: Mapping[str, Any], is_sure: bool) -> None:
    """Ask before something is lost; refuse if nobody can be asked."""
    if is_sure:
        return
    told = [value for value in values.values() if value is not True]
    named = " ".join(" ".join(value) if isinstance(value, list) else str(value) for value in told)
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"braid {operation.name} {named}: this cannot be undone; add --yes to do it without being asked.")
    try:
        is_sure = typer.confirm(f"{operation.summary} This cannot be undone: {named}. Go on?", err=True)
    except typer.Abort:  # Ctrl-C, or the end of what can be read
        note("\nNothing was done.")
        raise KeyboardInterrupt from None
    if not is_sure:
        note("Nothing was done.")
        raise typer.Exit(1)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run the calls of a command; errors say what a user of the command line can do."""
    try:
        return asyncio.run(work)
    except ConnectFailed as error:
        raise ConnectFailed(f"{error.message} (--url or BRAID_ADMIN_URL)") from error
    except NotFound as error:
        listing = next((LISTINGS[what] for what in LISTINGS if error.message.startswith(f"The {what}")), None)
        if listing is None or "does not exist" not in error.message or "braid scalable-topics" in error.message:
            raise
        raise NotFound(f"{error.message.rstrip('.')}. `{listing}` shows what there is.") from error
