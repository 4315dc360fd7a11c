"""Charts as SVG: lines over steps whose points are links, and small bars for tables.

Colours and sizes of text come from the stylesheet; every mark has a class and no style.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from localtrace.viewer.numbers import number, percent
from localtrace.viewer.safe_text import plain

WIDTH, HEIGHT = 480, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
_LINKS_MAX = 240
"""The number of places along x that are links; of more, those that stand out."""
_MARKED_MAX = 16
"""The number of points of a line up to which each is marked."""
_FORMATS: dict[str, Callable[[float | None], str]] = {"number": number, "percent": percent}
_Point = tuple[float, float]


def line(
    name: str,
    points: Iterable[Sequence[float | None]],
    colour: int = 0,
    *,
    dashed: bool = False,
    band: Sequence[Sequence[float | None]] | None = None,
) -> dict[str, Any]:
    """Return one line of a chart.

    Args:
        name: what it shows.
        points: x and y of each point; those that lack one of them are left out.
        colour: 0 to 7.
        dashed: whether it is drawn in dashes.
        band: x, low and high of an area around it.
    """
    known = [[x, y] for x, y in points if x is not None and y is not None]
    return {"name": name, "points": known, "colour": colour, "dashed": dashed, "band": band}


def chart_of(
    title: str,
    lines: Iterable[Mapping[str, Any]],
    links: Mapping[str, str] | None = None,
    form: str = "number",
    why: str = "nothing was recorded for it",
    x: str = "step",
    not_finite: int = 0,
) -> dict[str, Any]:
    """Return a chart as facts; those of its lines that have no points are left out.

    Args:
        title: what it shows.
        lines: see `line`.
        links: an address for each x, as text.
        form: number or percent.
        why: why no line has points, where none has.
        x: what stands along the lower axis.
        not_finite: how many values are in no point, as they are NaN or infinite.
    """
    lines = [line for line in lines if line["points"]]
    series = [line for line in lines if _finite(line["points"])]
    undrawn = sum(len(line["points"]) - len(_finite(line["points"])) for line in lines)
    if (undrawn or not_finite) and not series:
        why = "all its values are NaN or infinite"
    return {"title": title, "format": form, "series": series, "links": links or {},
            "undrawn": undrawn, "not_finite": not_finite, "x": x,
            "why": None if series else why}  # fmt: skip


def line_chart(chart: Mapping[str, Any]) -> Markup:
    """Return a chart as SVG.

    Args:
        chart: see `chart_of`.
    """
    series = chart["series"]
    if not series:
        return Markup("")
    frame = _Frame(series, chart["format"])
    parts = [
        *frame.axes(),
        *(frame.band(line) for line in series if line.get("band")),
        *(part for line in series for part in frame.line(line)),
        *frame.strips(series, chart["links"], chart["x"]),
    ]
    return _element("svg", parts, class_="chart", viewBox=f"0 0 {WIDTH} {HEIGHT}", role="group",
                    aria_label=plain(chart["title"]))  # fmt: skip


def bar(value: float | None, low: float | None, high: float | None) -> Markup:
    """Return a bar from zero to a value, on a scale that holds zero, low and high."""
    if value is None or not math.isfinite(value):
        return Markup("")
    least, most = min(0.0, low or 0.0), max(0.0, high or 0.0)
    span = (most - least) or 1.0
    start, end = sorted(100 * (place - least) / span for place in (0.0, value))
    inside = _element("rect", x=start, width=max(end - start, 1.0), height=4)
    kind = "negative" if value < 0 else "positive"
    return _element("svg", [inside], class_=f"bar {kind}", viewBox="0 0 100 4",
                    preserveAspectRatio="none", aria_hidden="true")  # fmt: skip


def _element(name: str, inside: Iterable[str] = (), **attributes: object) -> Markup:
    """Return an element of SVG; everything that is not Markup is escaped."""
    texts = {
        key.rstrip("_").replace("_", "-"): f"{value:.1f}" if isinstance(value, float) else value
        for key, value in attributes.items()
        if value is not None
    }
    written = Markup("").join(Markup(' {}="{}"').format(*item) for item in texts.items())
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, Markup("").join(inside))


class _Frame:
    """The place of a chart's values in the picture."""

    def __init__(self, series: Sequence[Mapping[str, Any]], form: str) -> None:
        points = [point for line in series for point in _finite(line["points"])]
        xs = [x for x, _ in points]
        bands = [end for line in series for row in line.get("band") or [] for end in row[1:]]
        ys = [*(y for _, y in points), *(end for end in bands if end is not None)]
        low, high = float(min(ys)), float(max(ys))
        if low == high:
            low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
        self.x_low, self.x_high = min(xs), max(xs)
        self.y_ticks = ticks(low, high)
        self.y_low, self.y_high = min(low, self.y_ticks[0]), max(high, self.y_ticks[-1])
        self.form = _FORMATS[form]

    def at_x(self, x: float) -> float:
        width = WIDTH - _LEFT - _RIGHT
        span = self.x_high - self.x_low
        return _LEFT + (width * (x - self.x_low) / span if span else width / 2)

    def at_y(self, y: float) -> float:
        share = (y - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    def path(self, points: Iterable[_Point]) -> str:
        return " ".join(f"{self.at_x(x):.1f},{self.at_y(y):.1f}" for x, y in points)

    def axes(self) -> Iterator[Markup]:
        texts = [self.form(tick) for tick in self.y_ticks]
        if len({*texts}) < len(texts):  # they differ in digits that are left out
            scale, unit = (100, "%") if self.form is percent else (1, "")
            texts = [f"{scale * tick:.6g}{unit}".replace("-", "−") for tick in self.y_ticks]
        for tick, text in zip(self.y_ticks, texts, strict=True):
            y = self.at_y(tick)
            yield _element("line", class_="grid", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y)
            yield _element("text", [text], class_="tick y", x=_LEFT - 6, y=y + 3.5)
        for tick in ticks(self.x_low, self.x_high, 8):
            if self.x_low <= tick <= self.x_high and tick == int(tick):
                x = self.at_x(tick)
                yield _element("text", [str(int(tick))], class_="tick x", x=x, y=HEIGHT - 7)

    def line(self, line: Mapping[str, Any]) -> Iterator[Markup]:
        points, colour = _finite(line["points"]), f"s{line['colour'] % 8}"
        if len(points) > 1:
            name = f"line {colour}{' dashed' if line['dashed'] else ''}"
            yield _element("polyline", class_=name, points=self.path(points))
        if len(points) <= _MARKED_MAX:  # what was measured is told apart from what is between
            for x, y in points:
                yield self.dot(f"point {colour}", x, y, 2.5)

    def dot(self, name: str, x: float, y: float, radius: float) -> Markup:
        return _element("circle", class_=name, cx=self.at_x(x), cy=self.at_y(y), r=radius)

    def band(self, line: Mapping[str, Any]) -> Markup:
        rows = [row for row in line["band"] if None not in row]
        upper = [(x, high) for x, _, high in rows]
        lower = [(x, low) for x, low, _ in reversed(rows)]
        name = f"band s{line['colour'] % 8}"
        return _element("polygon", class_=name, points=self.path(upper + lower))

    def strips(
        self, series: Sequence[Mapping[str, Any]], links: Mapping[str, str], axis: str
    ) -> Iterator[Markup]:
        """Yield a strip for each x: its points, what they say, and where they lead."""
        values: dict[float, list[tuple[Mapping[str, Any], float]]] = defaultdict(list)
        for line in series:
            for x, y in _finite(line["points"]):
                values[x].append((line, y))
        xs = _most_telling({x: here[0][1] for x, here in values.items()})
        edges = [self.at_x(x) for x in xs]
        for place, (x, at) in enumerate(zip(xs, edges, strict=True)):
            left = (edges[place - 1] + at) / 2 if place else at - 6
            right = (at + edges[place + 1]) / 2 if place + 1 < len(xs) else at + 6
            inside = [
                _element("rect", class_="hit", x=left, y=_TOP, width=max(right - left, 1.0),
                         height=HEIGHT - _TOP - _BOTTOM),
                _element("line", class_="cursor", x1=at, x2=at, y1=_TOP, y2=HEIGHT - _BOTTOM),
                *(self.dot(f"dot s{line['colour'] % 8}", x, y, 3.5) for line, y in values[x]),
            ]  # fmt: skip
            numbers = ", ".join(f"{line['name']} {self.form(y)}" for line, y in values[x])
            link = links.get(f"{x:.12g}")
            # One link of a chart takes the focus; the arrow keys go on from there (charts.js).
            yield _element("a" if link else "g", inside, class_="strip", href=link,
                           tabindex=-1 if place else 0,
                           aria_label=plain(f"{axis} {x:.12g}: {numbers}"))  # fmt: skip


def _most_telling(values: Mapping[float, float]) -> list[float]:
    """Return places along x, in order; of neighbours that are too many, the one that stands out."""
    xs = sorted(values)
    size = math.ceil(len(xs) / _LINKS_MAX)
    mean = sum(values.values()) / len(values)
    return [
        max(xs[at : at + size], key=lambda x: abs(values[x] - mean))
        for at in range(0, len(xs), size)
    ]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers, at most so many, from about low to high."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


_Y_MAX = 1e300
"""Larger values, among them the infinities, are not drawn."""


def _finite(points: Sequence[Sequence[float | None]]) -> list[_Point]:
    return [(x, y) for x, y in points if x is not None and y is not None and abs(y) < _Y_MAX]
