"""Functions that write the elements of an SVG drawing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

FONT = "Helvetica, Arial, sans-serif"
INK = "#222222"
FAINT = "#dddddd"
PAPER = "#ffffff"
LANE = "#f2f2f2"
STRONG = "#000000"
LABEL_INKS = ("#111111", "#fefefe")
"""Colours of labels on light operations and on dark operations; neither colour depends on the colour of the page."""

_IN_THE_DARK = {INK: "#e6edf3", FAINT: "#30363d", PAPER: "#0d1117", LANE: "#21262d", STRONG: "#ffffff"}
_STYLE = (
    "text{pointer-events:none}@media(prefers-color-scheme:dark){"
    + "".join(
        f'[fill="{light}"]{{fill:{dark}}}[stroke="{light}"]{{stroke:{dark}}}' for light, dark in _IN_THE_DARK.items()
    )
    + "}"
)
"""CSS that gives the drawing dark colours if the browser prefers dark pages. Programs without CSS draw a light page."""


def number(value: float, digits: int = 2) -> str:
    """A coordinate as text, with at most `digits` decimals and no trailing zeros."""
    text = f"{float(value):.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def figure(value: float) -> str:
    """A value as text, with six significant digits."""
    return f"{float(value):.6g}"


def clean(words: str) -> str:
    """Escape a text for XML; control characters become spaces."""
    return escape("".join(c if c.isprintable() else " " for c in words))


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", kind: str = "") -> str:
    inner = f"<title>{clean(title)}</title></rect>" if title else "</rect>"
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    attribute = f' class="{kind}"' if kind else ""
    return f'<rect{attribute} {place} fill="{fill}">{inner}'


def text(x: float, y: float, words: str, size: float = 12, anchor: str = "start", fill: str = INK) -> str:
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}"'
    return f'<text {place} fill="{fill}">{clean(words)}</text>'


def label(x: float, y: float, words: str, size: float, fill: str, squeezed_to: float | None = None) -> str:
    """A text centred at `x`, narrowed to a width of `squeezed_to` pixels if it is given."""
    place = f'x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="middle"'
    squeezed = "" if squeezed_to is None else f' textLength="{number(squeezed_to)}" lengthAdjust="spacingAndGlyphs"'
    return f'<text class="l" {place}{squeezed} fill="{fill}">{clean(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT) -> str:
    return f'<path d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" stroke="{stroke}" fill="none"/>'


def path(points: Iterable[tuple[float, float]], stroke: str, title: str, width: float) -> str:
    inner = f"<title>{clean(title)}</title>"
    return f'<path d="{corners(points)}" stroke="{stroke}" stroke-width="{number(width)}" fill="none">{inner}</path>'


def corners(points: Iterable[tuple[float, float]]) -> str:
    """The attribute `d` of an SVG path with straight lines between points."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)


def ticks(largest: float, count: int) -> list[float]:
    """About `count` round numbers from 0 to `largest`, for the ticks of an axis."""
    if largest <= 0:
        return [0]
    rough = largest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(largest / step * (1 + 1e-9)) + 1)]


def document(width: float, height: float, elements: Iterable[str], style: str = "") -> str:
    """A complete SVG image for light and dark pages; `style` is additional CSS."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    body = "\n".join(elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">\n<style>{_STYLE}{style}</style>\n'
        f'<rect width="100%" height="100%" fill="{PAPER}"/>\n{body}\n</svg>\n'
    )
