"""The command `braid pipeline`: what it accepts. Spark is imported when a pipeline runs, not before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from braid.errors import ConfigError

DEFAULT_URL = "pulsar://localhost:6650"

app = typer.Typer(
    name="pipeline",
    help="Spark pipelines from a file: read a topic, transform it, write a topic or Parquet, exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

File = Annotated[Path, typer.Argument(help="YAML with name, source, transform, sink, trigger, checkpoint and spark.")]
Url = Annotated[
    str, typer.Option("--url", envvar="BRAID_URL", help="Where the broker is, for what names no service.url in the file.")
]
Output = Annotated[str, typer.Option("--output", help="text or json.")]


@app.command(
    epilog="Example: braid pipeline run orders.yaml. Progress goes to standard error, the summary to standard output. "
    "Ctrl-C lets the running batch end and stops; a second one ends Spark at once. What a stopped or killed run has not "
    "committed is read again by the next one, and nothing is written twice."
)
def run(
    file: File,
    available_now: Annotated[
        bool, typer.Option("--available-now", help="Read what is there now and end, whatever the file's trigger says.")
    ] = False,
    dashboard: Annotated[
        Path | None, typer.Option("--dashboard", help="Keep a picture (SVG) of the run's progress in this file.")
    ] = None,
    url: Url = DEFAULT_URL,
    output: Output = "text",
) -> None:
    """Run a pipeline: until everything is read (availableNow), or until Ctrl-C."""
    from braid_spark.pipeline.runner import run_pipeline
    from braid_spark.pipeline.spec import load

    is_json = _is_json(output)
    run_pipeline(load(file), url=url, is_to_the_end=available_now, dashboard=dashboard, is_json=is_json)


@app.command(epilog="Example: braid pipeline check orders.yaml --plan. Without --plan neither Spark nor a broker is needed.")
def check(
    file: File,
    plan: Annotated[
        bool, typer.Option("--plan", help="Also start Spark, and let it judge the transform and show what reaches the sink.")
    ] = False,
    url: Url = DEFAULT_URL,
) -> None:
    """Check a pipeline's file without running it."""
    from braid_spark.pipeline.runner import check_pipeline
    from braid_spark.pipeline.spec import load

    check_pipeline(load(file), url=url, with_plan=plan)


def _is_json(output: str) -> bool:
    if output.lower() not in ("text", "json"):
        raise ConfigError(f"--output must be one of text, json, not {output!r}.")
    return output.lower() == "json"
