"""Figures as plain numbers: scales, ticks, and where lines, points and labels lie. templates/charts.html draws them.

Lengths are in units of the drawing, whose origin is its upper left corner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 440, 290
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 46
LABEL_GAP = 14  # between the labels at the lines' ends
LETTER, LONGEST_LABEL = 8, 14  # a label's width a letter, and letters
MOST_POINTS = 60  # of a line; a pixel holds no more
FEW = 10  # positions that each get a tick
NUM_STYLES = 8  # colours and marks that the style sheet has
ROW, STRIP_LEFT, STRIP_BOTTOM, STRIP_SIDE = 34, 104, 46, 14

Point = tuple[float, float, str]  # x, y, and what a pointer on it is told


@dataclass(frozen=True)
class Series:
    """One line of a figure. `style`: which colour and mark, from 1."""

    label: str
    style: int
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Scale:
    """Numbers from `low` to `high` on the stretch from `start` to `end` of a drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


@dataclass(frozen=True)
class Tick:
    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Line:
    label: str
    style: int
    dashed: bool
    dots: list[Dot]
    label_y: float

    @property
    def path(self) -> str:
        return "M" + "L".join(f"{dot.x},{dot.y}" for dot in self.dots)


@dataclass(frozen=True)
class Chart:
    """Lines over an x and a y axis."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    right: int
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM

    @property
    def summary(self) -> str:
        """For who cannot see it."""
        return f"{self.title}: {self.y_label} over {self.x_label}; lines: {', '.join(s.label for s in self.lines)}"


@dataclass(frozen=True)
class Mark:
    x: float
    style: int
    text: str
    to: float | None = None  # the end of a range


@dataclass(frozen=True)
class Strip:
    """Marks on one axis, a row for each group."""

    title: str
    x_label: str
    rows: list[tuple[str, float, list[Mark]]]  # name, y, marks
    x_ticks: list[Tick]
    height: int
    width: int = WIDTH
    left: int = STRIP_LEFT
    right: int = WIDTH - STRIP_SIDE

    @property
    def summary(self) -> str:
        return f"{self.title}: {self.x_label} of {', '.join(name for name, _, _ in self.rows)}"

    @property
    def bottom(self) -> int:
        return self.height - STRIP_BOTTOM


def ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """At most `most` round numbers (1, 2 or 5 times a power of ten apart) from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    steps = [factor * power for factor in (1, 2, 5, 10, 20, 50)]
    if whole:
        steps = [max(round(step), 1) for step in steps]
    for step in steps:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        if last - first < most:
            break
    return [k * step for k in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Short: 12,000 as 12k."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{round(value, 10):,g}" if abs(value) >= 1000 else f"{round(value, 10):g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f}%"


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Evenly chosen points, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(k * (len(points) - 1) / (most - 1))] for k in range(most)]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places near the wanted ones, at least `gap` apart, in the same order, from `low` to `high` as far as they fit."""
    order = sorted(range(len(wanted)), key=lambda k: wanted[k])
    places = list(wanted)
    floor = low
    for k in order:
        places[k] = floor = max(places[k], floor)
        floor += gap
    ceiling = high
    for k in reversed(order):
        places[k] = min(places[k], ceiling)
        ceiling = places[k] - gap
    return [round(place, 1) for place in places]


def chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    shares: bool = False,
    from_zero: bool = True,
    y_range: tuple[float, float] | None = None,
) -> Chart | None:
    """Lay out lines over whole numbers; None without a point.

    `shares`: y is a share from 0 to 1, shown in percent. `y_range`: what the y axis has to hold at least, so that two
    figures have one scale.
    """
    drawn = [s for s in series if s.points]
    if not drawn:
        return None
    xs = [x for s in drawn for x, _, _ in s.points]
    ys = [y for s in drawn for _, y, _ in s.points] + ([0.0] if from_zero else []) + list(y_range or ())
    most = FEW if max(xs) - min(xs) < FEW else 6
    x_values, y_values = ticks(min(xs), max(xs), most, whole=True), ticks(min(ys), max(ys))
    x_values = [v for v in x_values if v <= max(xs)] or x_values
    labels = [s.label if len(s.label) <= LONGEST_LABEL else f"{s.label[: LONGEST_LABEL - 1]}…" for s in drawn]
    right = WIDTH - RIGHT - LETTER * max(map(len, labels))
    x = Scale(x_values[0], max(*xs, x_values[-1]), LEFT, right)
    y = Scale(y_values[0], y_values[-1], HEIGHT - BOTTOM, TOP)
    dots = [[Dot(x(a), y(b), text) for a, b, text in thin(s.points)] for s in drawn]
    label_ys = spread([line[-1].y for line in dots], LABEL_GAP, TOP + 4, HEIGHT - BOTTOM)
    return Chart(
        title,
        x_label,
        y_label,
        [Line(n, s.style, s.dashed, d, at) for n, s, d, at in zip(labels, drawn, dots, label_ys, strict=True)],
        [Tick(x(v), number(v)) for v in x_values],
        [Tick(y(v), percent(v) if shares else number(v)) for v in y_values],
        right,
    )


@dataclass(frozen=True)
class Value:
    """A mark of a strip: a number, or a range up to `to`."""

    at: float
    style: int
    text: str
    to: float | None = None


def strip(title: str, x_label: str, groups: dict[str, list[Value]], low: float) -> Strip:
    """Lay out rows of marks on an axis that begins at `low`."""
    highest = max(v.to or v.at for values in groups.values() for v in values)
    values = ticks(low, highest)
    x = Scale(values[0], values[-1], STRIP_LEFT, WIDTH - STRIP_SIDE)
    rows = [
        (name, ROW / 2 + k * ROW, [Mark(x(v.at), v.style, v.text, None if v.to is None else x(v.to)) for v in found])
        for k, (name, found) in enumerate(groups.items())
    ]
    return Strip(title, x_label, rows, [Tick(x(v), number(v)) for v in values], len(rows) * ROW + STRIP_BOTTOM)
