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
    given = [one for one in lines if one["points"]]
    series = [one for one in given if _finite(one["points"])]
    undrawn = sum(len(one["points"]) - len(_finite(one["points"])) for one in given)
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
    frame = _Frame.around(series, chart["format"])
    parts = [
        Markup('<svg class="chart" viewBox="0 0 {} {}" role="group" aria-label="{}">').format(
            WIDTH, HEIGHT, plain(chart["title"])
        ),
        *frame.axes(),
        *(frame.band(one) for one in series if one.get("band")),
        *(part for one in series for part in frame.line(one)),
        *frame.links(series, chart["links"], chart["x"]),
        Markup("</svg>"),
    ]
    return Markup("").join(parts)


def bar(value: float | None, low: float | None, high: float | None) -> Markup:
    """Return a bar from zero to a value, on a scale that holds zero, low and high."""
    if value is None or not math.isfinite(value):
        return Markup("")
    least, most = min(0.0, low or 0.0), max(0.0, high or 0.0)
    span = (most - least) or 1.0
    start, end = sorted(100 * (one - least) / span for one in (0.0, value))
    kind = "negative" if value < 0 else "positive"
    return Markup(
        '<svg class="bar {}" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        '<rect x="{:.1f}" width="{:.1f}" height="4"/></svg>'
    ).format(kind, start, max(end - start, 1.0))


class _Frame:
    """The place of a chart's values in the picture."""

    def __init__(self, x: _Point, y: _Point, form: str) -> None:
        self.x_low, self.x_high = x
        self.y_ticks = ticks(*y)
        self.y_low, self.y_high = min(y[0], self.y_ticks[0]), max(y[1], self.y_ticks[-1])
        self.form = _FORMATS[form]

    @classmethod
    def around(cls, series: Sequence[Mapping[str, Any]], form: str) -> _Frame:
        points = [point for one in series for point in _finite(one["points"])]
        # A band may go beyond what is possible, such as mean and deviation of shares: the points
        # count, and as much of the band as is near them.
        ys = [y for _, y in points]
        bands = [end for one in series for row in one.get("band") or [] for end in row[1:]]
        low = min([*ys, *(end for end in bands if end is not None)])
        high = max([*ys, *(end for end in bands if end is not None)])
        if low == high:
            low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
        xs = [x for x, _ in points]
        return cls((min(xs), max(xs)), (low, high), form)

    def at_x(self, x: float) -> float:
        width = WIDTH - _LEFT - _RIGHT
        span = self.x_high - self.x_low
        return _LEFT + (width * (x - self.x_low) / span if span else width / 2)

    def at_y(self, y: float) -> float:
        share = (y - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * share

    def axes(self) -> Iterator[Markup]:
        texts = [self.form(tick) for tick in self.y_ticks]
        if len({*texts}) < len(texts):  # they differ in digits that are left out
            scale, unit = (100, "%") if self.form is percent else (1, "")
            texts = [f"{scale * tick:.6g}{unit}".replace("-", "−") for tick in self.y_ticks]
        for tick, text in zip(self.y_ticks, texts, strict=True):
            y = self.at_y(tick)
            yield Markup('<line class="grid" x1="{}" x2="{}" y1="{:.1f}" y2="{:.1f}"/>').format(
                _LEFT, WIDTH - _RIGHT, y, y
            )
            yield Markup('<text class="tick y" x="{}" y="{:.1f}">{}</text>').format(
                _LEFT - 6, y + 3.5, text
            )
        for tick in ticks(self.x_low, self.x_high, 8):
            if self.x_low <= tick <= self.x_high and tick == int(tick):
                yield Markup('<text class="tick x" x="{:.1f}" y="{}">{}</text>').format(
                    self.at_x(tick), HEIGHT - 7, int(tick)
                )

    def line(self, one: Mapping[str, Any]) -> Iterator[Markup]:
        places = [(self.at_x(x), self.at_y(y)) for x, y in _finite(one["points"])]
        colour = f"s{one['colour'] % 8}"
        if len(places) > 1:
            name = f"line {colour}{' dashed' if one['dashed'] else ''}"
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
            yield Markup('<polyline class="{}" points="{}"/>').format(name, path)
        if len(places) <= _MARKED_MAX:  # what was measured is told apart from what is between
            for x, y in places:
                yield Markup('<circle class="point {}" cx="{:.1f}" cy="{:.1f}" r="2.5"/>').format(
                    colour, x, y
                )

    def band(self, one: Mapping[str, Any]) -> Markup:
        rows = [row for row in one["band"] if None not in row]
        upper = [(x, high) for x, _, high in rows]
        lower = [(x, low) for x, low, _ in reversed(rows)]
        path = " ".join(f"{self.at_x(x):.1f},{self.at_y(y):.1f}" for x, y in upper + lower)
        return Markup('<polygon class="band s{}" points="{}"/>').format(one["colour"] % 8, path)

    def links(
        self, series: Sequence[Mapping[str, Any]], links: Mapping[str, str], of: str
    ) -> Iterator[Markup]:
        """Yield a strip for each x: its points, what they say, and where they lead."""
        values: dict[float, list[tuple[Mapping[str, Any], float]]] = defaultdict(list)
        for one in series:
            for x, y in _finite(one["points"]):
                values[x].append((one, y))
        xs = _most_telling({x: here[0][1] for x, here in values.items()})
        edges = [self.at_x(x) for x in xs]
        for place, x in enumerate(xs):
            left = (edges[place - 1] + edges[place]) / 2 if place else edges[0] - 6
            right = (edges[place] + edges[place + 1]) / 2 if place + 1 < len(xs) else edges[-1] + 6
            said = ", ".join(f"{one['name']} {self.form(y)}" for one, y in values[x])
            text = f"{x:.12g}"
            yield self._strip(left, right, edges[place], values[x], plain(f"{of} {text}: {said}"),
                              links.get(text), is_first=place == 0)  # fmt: skip

    def _strip(
        self,
        left: float,
        right: float,
        at: float,
        values: Sequence[tuple[Mapping[str, Any], float]],
        label: str,
        link: str | None,
        is_first: bool,
    ) -> Markup:
        dots = Markup("").join(
            Markup('<circle class="dot s{}" cx="{:.1f}" cy="{:.1f}" r="3.5"/>').format(
                one["colour"] % 8, at, self.at_y(y)
            )
            for one, y in values
        )
        inside = Markup(
            '<rect class="hit" x="{:.1f}" y="{}" width="{:.1f}" height="{}"/>'
            '<line class="cursor" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>{}'
        ).format(left, _TOP, max(right - left, 1), HEIGHT - _TOP - _BOTTOM, at, at, _TOP,
                 HEIGHT - _BOTTOM, dots)  # fmt: skip
        # One link of a chart takes the focus; the arrow keys go on from there (charts.js).
        focus = 0 if is_first else -1
        if link is None:
            return Markup('<g class="strip" tabindex="{}" aria-label="{}">{}</g>').format(
                focus, label, inside
            )
        return Markup('<a class="strip" href="{}" tabindex="{}" aria-label="{}">{}</a>').format(
            link, focus, label, inside
        )


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
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    found = [first * step]
    while found[-1] < high - step * 1e-9:
        found.append((first + len(found)) * step)
    return [round(one, 12) for one in found]


_Y_MAX = 1e300
"""Larger values, among them the infinities, are not drawn."""


def _finite(points: Sequence[Sequence[float | None]]) -> list[_Point]:
    return [(x, y) for x, y in points if x is not None and y is not None and abs(y) < _Y_MAX]
