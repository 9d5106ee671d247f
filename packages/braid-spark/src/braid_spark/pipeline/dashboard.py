"""A picture of a query: totals, rows per second, lag over time and per segment, as one SVG without outside references.

Pure but for `write_picture`. Drawn by hand: it needs no package, and the documentation can show it as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from xml.sax.saxutils import escape

from braid_spark.pipeline.history import History

WIDTH, HEIGHT = 960, 440
MAX_BARS = 9
MAX_NAME = 60
_INK, _FAINT, _GRID, _PAPER, _CARD = "#1f2933", "#52606d", "#d5dbe1", "#f5f7fa", "#ffffff"
_RATE, _LAG = "#1f6feb", "#c2570c"
_FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"
_Point = tuple[float, float]


def write_picture(path: Path, history: History, now_ms: int) -> None:
    """Put the picture where a viewer sees the old one or the new one, never half of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(draw(history, now_ms))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def draw(history: History, now_ms: int) -> str:
    """The picture of how things stand."""
    last, lag = history.last, history.lag
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}' {_FONT}>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' rx='10' fill='{_PAPER}'/>",
        _text(24, 36, history.name[:MAX_NAME], size=20, weight=600),
        _text(WIDTH - 24, 36, f"{_clock(history.began_ms)} to {_clock(now_ms)} UTC", size=13, colour=_FAINT, anchor="end"),
    ]
    tiles = [
        ("rows", f"{history.rows:,}"),
        ("rows/s, last batch", "-" if last is None else f"{last.rows_per_second:,.0f}"),
        ("lag, messages", "-" if lag is None else f"{lag.total:,}"),
        ("last committed batch", "-" if last is None else f"{last.number:,} at {_clock(last.ended_ms)}"),
    ]
    width = (WIDTH - 48 - 3 * 12) / 4
    for number, (label, value) in enumerate(tiles):
        x = 24 + number * (width + 12)
        parts.append(_card(x, 54, width, 66))
        parts.append(_text(x + 14, 76, label, size=12, colour=_FAINT))
        parts.append(_text(x + 14, 105, value, size=19, weight=600))
    batches = list(history.batches)
    since = batches[0].ended_ms if batches else 0
    rates = [((each.ended_ms - since) / 1000, each.rows_per_second) for each in batches]
    lags = [((each.ended_ms - since) / 1000, float(each.lag.total)) for each in batches if each.lag is not None]
    parts += _chart(24, 136, 606, 134, "rows per second, by batch", rates, _RATE)
    parts += _chart(24, 284, 606, 134, "lag after each batch, messages", lags, _LAG)
    parts += _bars(642, 136, 294, 282, {} if lag is None else lag.segments)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _chart(x: float, y: float, width: float, height: float, title: str, points: Sequence[_Point], colour: str) -> list[str]:
    parts = [_card(x, y, width, height), _text(x + 14, y + 22, title, size=12, colour=_FAINT)]
    left, right, top, bottom = x + 64, x + width - 16, y + 34, y + height - 24
    ceiling = _round_up(max((value for _, value in points), default=0.0))
    end = max((at for at, _ in points), default=0.0)
    for share in (0.0, 0.5, 1.0):
        level = bottom - share * (bottom - top)
        parts.append(f"<line x1='{left}' y1='{level:.1f}' x2='{right}' y2='{level:.1f}' stroke='{_GRID}'/>")
        parts.append(_text(left - 8, level + 4, _short(ceiling * share), size=11, colour=_FAINT, anchor="end"))
    if not points:
        parts.append(_text((left + right) / 2, (top + bottom) / 2 + 4, "nothing yet", size=12, colour=_FAINT, anchor="middle"))
        return parts
    parts.append(_text(left, bottom + 16, "0 s", size=11, colour=_FAINT))
    parts.append(_text(right, bottom + 16, f"{end:,.0f} s", size=11, colour=_FAINT, anchor="end"))

    def place(point: _Point) -> str:
        across = point[0] / end if end else 1.0
        return f"{left + across * (right - left):.1f},{bottom - point[1] / ceiling * (bottom - top):.1f}"

    line = " ".join(map(place, points))
    first, final = place(points[0]).split(",")[0], place(points[-1]).split(",")[0]
    parts.append(f"<polygon points='{first},{bottom} {line} {final},{bottom}' fill='{colour}' fill-opacity='0.12'/>")
    parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2' stroke-linejoin='round'/>")
    at, level_at = place(points[-1]).split(",")
    parts.append(f"<circle cx='{at}' cy='{level_at}' r='3.5' fill='{colour}'/>")
    return parts


def _bars(x: float, y: float, width: float, height: float, segments: dict[str, int]) -> list[str]:
    parts = [_card(x, y, width, height), _text(x + 14, y + 22, "lag by segment", size=12, colour=_FAINT)]
    furthest = sorted(segments.items(), key=lambda each: (-each[1], each[0]))
    if not furthest:
        parts.append(_text(x + width / 2, y + height / 2, "nothing yet", size=12, colour=_FAINT, anchor="middle"))
    largest = max((count for _, count in furthest), default=0)
    for number, (name, count) in enumerate(furthest[:MAX_BARS]):
        level = y + 46 + number * 26
        topic, _, segment = name.rpartition(" ")
        shown = f"{topic.rpartition('/')[2][:22]} {segment}"
        parts.append(_text(x + 14, level, shown, size=12))
        parts.append(_text(x + width - 14, level, f"{count:,}", size=12, anchor="end"))
        long = (width - 28) * (count / largest if largest else 0)
        parts.append(f"<rect x='{x + 14}' y='{level + 5}' width='{max(long, 2):.1f}' height='5' rx='2' fill='{_LAG}'/>")
    if len(furthest) > MAX_BARS:
        parts.append(_text(x + 14, y + height - 10, f"and {len(furthest) - MAX_BARS:,} more", size=11, colour=_FAINT))
    return parts


def _text(x: float, y: float, text: str, *, size: int, colour: str = _INK, anchor: str = "start", weight: int = 400) -> str:
    shown = escape("".join(each if each.isprintable() else "?" for each in text))
    style = f"font-size='{size}' fill='{colour}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text x='{x:.0f}' y='{y:.0f}' {style}>{shown}</text>"


def _card(x: float, y: float, width: float, height: float) -> str:
    return f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='{height}' rx='8' fill='{_CARD}' stroke='{_GRID}'/>"


def _round_up(value: float) -> float:
    """A round number at or above `value`, for the top of an axis."""
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1.0, 2.0, 2.5, 5.0, 10.0) if step * size >= value)


def _short(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def _clock(milliseconds: int) -> str:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%H:%M:%S")
