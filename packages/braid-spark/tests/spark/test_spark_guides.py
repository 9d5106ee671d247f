"""The guides of Spark hold: their Python runs as it stands, page by page, and their pipeline files are sound."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from braid.testing.broker import BackgroundBroker
from braid_spark.pipeline import build
from braid_spark.pipeline.spec import parse

DOCS = Path(__file__).resolve().parents[4] / "docs"
PAGES = sorted((DOCS / "guides").glob("spark-*.md"))
URL, ADMIN_URL = "pulsar://localhost:6650", "http://localhost:8080"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def test_all_guides_are_here() -> None:
    assert [page.stem for page in PAGES] == [
        "spark-backfill",
        "spark-cluster",
        "spark-exactly-once",
        "spark-first-pipeline",
        "spark-operations",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_programs_run(
    page: Path, spark: SparkSession, broker: BackgroundBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", arguments(broker, tmp_path))
    names: dict[str, object] = {"__name__": "__main__"}
    programs = blocks(page, "python")
    assert programs
    for program in programs:
        text = program.replace(URL, broker.service_url).replace(ADMIN_URL, broker.http_url)
        text = text.replace('"state/', f'"{tmp_path}/state/')  # Java has a working directory of its own
        exec(compile(text, page.name, "exec"), names)


def arguments(broker: BackgroundBroker, directory: Path) -> list[str]:
    """Of the script in the guide to clusters."""
    topic = "topic://public/default"
    return [
        "copy_orders.py",
        broker.service_url,
        f"{topic}/cluster-orders",
        f"{topic}/cluster-copied",
        str(directory / "state"),
    ]


@pytest.fixture(autouse=True, scope="module")
def orders(broker: BackgroundBroker) -> None:
    """What the script in the guide to clusters reads."""
    from braid.client.blocking import connect

    with connect(broker.service_url) as client, client.producer("topic://public/default/cluster-orders") as producer:
        producer.send(b"{}", key="a")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_files_are_sound(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        pipeline = parse(text.encode(), tmp_path / "pipeline.yaml")
        build.check_options(pipeline, URL)


PROMISES = {"spark_orders.py": "400 orders became 400 invoices, one each; those of 8 customers are in order"}


@pytest.mark.parametrize("name", sorted(path.name for path in (DOCS.parent / "examples").glob("spark_*.py")))
def test_the_examples_run(
    name: str,
    spark: SparkSession,
    broker: BackgroundBroker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", [name, broker.service_url, broker.http_url])
    runpy.run_path(str(DOCS.parent / "examples" / name), run_name="__main__")
    assert PROMISES[name] in capsys.readouterr().out


def test_the_example_of_a_pipeline_is_sound() -> None:
    file = DOCS.parent / "examples" / "revenue.yaml"
    build.check_options(parse(file.read_bytes(), file), URL)


def test_the_picture_is_drawn_by_the_code_of_today() -> None:
    """The picture in the guide has the parts that a picture has now."""
    from braid_spark.pipeline.dashboard import draw
    from braid_spark.pipeline.history import History

    def fixed(picture: str) -> list[str]:
        return [word for word in re.findall(r">([^<>]+)</text>", picture) if not re.search(r"\d", word) and len(word) > 1]

    shown = fixed((DOCS / "guides" / "images" / "pipeline.svg").read_text())
    assert {word for word in fixed(draw(History("x", 0), 0)) if word != "nothing yet"} <= set(shown)
