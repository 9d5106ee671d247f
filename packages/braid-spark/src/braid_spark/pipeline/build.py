"""From a checked pipeline to a query of Spark: the session, the source's frame, the transform, the writer.

Owns the defaults of a session that was not made by the user. Spark's own log goes to a file, so that the terminal belongs to
the pipeline.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from braid.errors import BraidError, ConfigError
from braid_spark.options import Options, parse
from braid_spark.pipeline.failures import PipelineFailed, is_java_gone, sentence
from braid_spark.pipeline.spec import FILE_FORMATS, Endpoint, Pipeline, nearest

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

FORMAT = "braid"
VIEW = "source"
"""The name under which a SQL transform finds the source."""


def open_session(pipeline: Pipeline, log: IO[bytes], held: Callable[[], AbstractContextManager[None]]) -> SparkSession:
    """A session of the pipeline's own; Spark writes its log to `log`. Inside `held` nothing interrupts: a Java that was started
    and could not say so would stay for ever."""
    try:
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession
    except ModuleNotFoundError as error:
        raise PipelineFailed(f"A pipeline needs the package {error.name}; install braidmq-spark.") from error
    from braid_spark.java import JavaNotFound, ensure_java

    try:
        ensure_java()
    except JavaNotFound as error:
        raise PipelineFailed(str(error)) from error
    _find_modules(pipeline)
    # Workers run the Python that runs this, unless it was said otherwise; PySpark by itself takes the first on the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):  # they print what is raised anyway
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    conf = SparkConf(loadDefaults=False).setAll(list(settings(pipeline).items()))
    gateway: Any = None
    try:
        # Not the process' own streams: what Spark's launcher prints is no result of the pipeline. A session of its own:
        # a signal for the pipeline's process group is for the pipeline to heed, which needs its Java to end well.
        launch: Any = launch_gateway
        with held():
            gateway = launch(conf, {"stdout": log, "stderr": log, "start_new_session": True})
        return SparkSession(SparkContext(conf=conf, gateway=gateway))
    except BaseException as error:
        if gateway is not None:
            end_java(gateway)
        if not isinstance(error, Exception):
            raise
        raise PipelineFailed(f"Spark does not start: {sentence(error)}") from error


def end_java(gateway: Any) -> None:
    """End Spark's Java, whatever it does, and with it the Python processes that it started."""
    # A stop that is under way wonders where Java is; the user, who wanted that, need not.
    warnings.filterwarnings("ignore", "Unable to cleanly shutdown Spark", RuntimeWarning)
    gateway.proc.kill()
    gateway.proc.wait()


def settings(pipeline: Pipeline) -> dict[str, str]:
    """Spark's settings: those of the file over what suits a session that runs one query."""
    conf = {
        "spark.app.name": pipeline.name,
        "spark.master": "local[*]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        **pipeline.conf,
    }
    if conf["spark.master"].startswith("local"):
        # Nobody else has to reach this driver, and there are no more tasks at a time than cores.
        conf.setdefault("spark.driver.host", "127.0.0.1")
        conf.setdefault("spark.driver.bindAddress", "127.0.0.1")
        conf.setdefault("spark.sql.shuffle.partitions", str(os.cpu_count() or 2))
    return conf


def build(spark: SparkSession, pipeline: Pipeline, url: str) -> DataFrame:
    """What reaches the sink; raises ConfigError for what the file says wrongly."""
    source = pipeline.source
    try:
        reader = spark.readStream.format(source.format).options(**with_url(source, url))
        if source.schema is not None:
            reader = reader.schema(source.schema)
        elif source.format in FILE_FORMATS:
            spark.conf.set("spark.sql.streaming.schemaInference", "true")
        frame = reader.load()
    except Exception as error:
        raise PipelineFailed(f"The source of {pipeline.name} cannot be read: {sentence(error)}") from error
    return _transform(frame, pipeline)


def start(frame: DataFrame, pipeline: Pipeline, url: str, *, is_to_the_end: bool) -> StreamingQuery:
    """The running query."""
    writer = frame.writeStream.queryName(pipeline.name).format(pipeline.sink.format)
    writer = writer.options(**with_url(pipeline.sink, url)).option("checkpointLocation", pipeline.checkpoint)
    if is_to_the_end:
        writer = writer.trigger(availableNow=True)
    elif pipeline.every_ms is not None:
        writer = writer.trigger(processingTime=f"{pipeline.every_ms} milliseconds")
    try:
        return writer.start()
    except Exception as error:
        raise PipelineFailed(f"The query {pipeline.name} does not start: {sentence(error)}") from error


def with_url(endpoint: Endpoint, url: str) -> dict[str, str]:
    """The options with the broker's address, if the file does not name it."""
    options = dict(endpoint.options)
    if endpoint.format == FORMAT and parse(options).service_url is None:
        options["service.url"] = url
    return options


def check_options(pipeline: Pipeline, url: str) -> None:
    """Judge the options of Braid's own source and sink by their table, which needs no Spark; raises ConfigError."""
    for side, endpoint in (("source", pipeline.source), ("sink", pipeline.sink)):
        if endpoint.format != FORMAT:
            continue
        try:
            options = parse(with_url(endpoint, url))
            if side == "source":
                options.for_reading().refuse_in_stream()
            else:
                options.for_writing()
        except ConfigError as error:
            words = set(re.findall(r"[\w.]+", error.message.lower()))
            line = next((f", line {at}" for name, at in endpoint.lines.items() if name.lower() in words), "")
            raise ConfigError(f"{pipeline.file}{line}: {side}: {error.message}") from error


def check_brokers(pipeline: Pipeline, url: str) -> None:
    """Ask the brokers at both ends of the pipeline before Spark takes its time to start; raises PipelineFailed."""
    from braid_spark.connections import Link
    from braid_spark.reader import check_topics

    def options(endpoint: Endpoint) -> Options:
        return parse(with_url(endpoint, url))

    what = f"The source of {pipeline.name} cannot be read"
    try:
        if pipeline.source.format == FORMAT:
            check_topics(options(pipeline.source).for_reading())
        what = f"The sink of {pipeline.name} cannot be written to"
        if pipeline.sink.format == FORMAT:
            sink = options(pipeline.sink)
            with Link(sink.url, sink.client) as link:
                link.connect()
    except BraidError as error:
        raise PipelineFailed(f"{what}: {sentence(error)}") from error


def check_function(pipeline: Pipeline) -> None:
    """Look for the function that `transform: python` names without running its module, which may want a session."""
    if pipeline.function is None:
        return
    _find_modules(pipeline)
    module_name, _, name = pipeline.function.partition(":")
    where = f"{pipeline.file}: python of transform"
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise _no_module(pipeline, module_name)
    if found.origin is None or not found.origin.endswith(".py"):
        return
    try:
        body = ast.parse(Path(found.origin).read_bytes()).body
    except SyntaxError as error:
        raise ConfigError(f"{where}: {found.origin}, line {error.lineno}: {error.msg}.") from error
    names = [each for statement in body for each in _bound(statement)]
    if name not in names and "*" not in names:
        raise ConfigError(f"{where}: the module {module_name!r} has no function {name!r}; {nearest(name, names)}")


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module may make."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return [each.asname or each.name for each in statement.names]
    return [each.id for each in ast.walk(statement) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]


def _no_module(pipeline: Pipeline, module_name: str) -> ConfigError:
    beside = pipeline.file.resolve().parent
    return ConfigError(
        f"{pipeline.file}: python of transform: there is no module {module_name!r}, neither in {beside} nor installed."
    )


def _function_of(pipeline: Pipeline) -> Any:
    """The function that `transform: python` names; raises ConfigError."""
    module_name, _, name = str(pipeline.function).partition(":")
    where = f"{pipeline.file}: python of transform"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and module_name.startswith(error.name):
            raise _no_module(pipeline, module_name) from error
        raise ConfigError(f"{where}: the module {module_name!r} needs {error.name!r}, which is not installed.") from error
    except Exception as error:
        raise ConfigError(f"{where}: the module {module_name!r} cannot be imported: {sentence(error)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [each for each in vars(module) if not each.startswith("_") and callable(vars(module)[each])]
        raise ConfigError(f"{where}: the module {module_name!r} has no function {name!r}; {nearest(name, known)}")
    return found


def _transform(frame: DataFrame, pipeline: Pipeline) -> DataFrame:
    from pyspark.sql import DataFrame as Frame

    made: Any = frame
    if pipeline.sql is not None:
        frame.createOrReplaceTempView(VIEW)
        try:
            made = frame.sparkSession.sql(pipeline.sql)
        except Exception as error:
            raise _spark_said(error, f"{pipeline.file}: sql of transform") from error
    elif pipeline.function is not None:
        function = _function_of(pipeline)
        try:
            made = function(frame)
        except Exception as error:
            raise _spark_said(error, f"{pipeline.file}: {pipeline.function} failed") from error
    if not isinstance(made, Frame):
        raise ConfigError(f"{pipeline.file}: {pipeline.function} must return a DataFrame, not {type(made).__name__}.")
    if not made.isStreaming:
        raise ConfigError(f"{pipeline.file}: the transform leaves the source out; select from {VIEW!r}.")
    return made


def _find_modules(pipeline: Pipeline) -> None:
    """Let modules beside the file be found, by this process and by Spark's workers, which see the environment."""
    beside = str(pipeline.file.resolve().parent)
    if beside not in sys.path:
        sys.path.insert(0, beside)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if beside not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([beside, *filter(None, known)])


def _spark_said(error: Exception, where: str) -> BraidError:
    if isinstance(error, BraidError):
        return error
    kind = PipelineFailed if is_java_gone(error) else ConfigError
    return kind(f"{where}: {sentence(error)}")


def log_file(pipeline: Pipeline) -> Path:
    """Where Spark's log of this run goes."""
    safe = "".join(each if each.isalnum() or each in "-_" else "-" for each in pipeline.name)[:40]
    handle, name = tempfile.mkstemp(prefix=f"braid-pipeline-{safe}-", suffix=".log")
    os.close(handle)
    return Path(name)
