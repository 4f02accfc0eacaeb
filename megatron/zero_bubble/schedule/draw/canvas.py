"""The few SVG elements that the drawings are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape

FONT = "Helvetica, Arial, sans-serif"
INK = "#222222"
FAINT = "#dddddd"


def number(value: float, digits: int = 2) -> str:
    """At most `digits` decimals, none that are zero."""
    text = f"{float(value):.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    inner = f"<title>{escape(title)}</title></rect>" if title else "</rect>"
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" fill="{fill}">{inner}'
    )


def text(x: float, y: float, words: str, size: float = 12, anchor: str = "start", fill: str = INK) -> str:
    return (
        f'<text x="{number(x)}" y="{number(y)}" font-size="{number(size)}" text-anchor="{anchor}" fill="{fill}">'
        f"{escape(words)}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT) -> str:
    return f'<path d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}" stroke="{stroke}" fill="none"/>'


def path(points: Iterable[tuple[float, float]], stroke: str, title: str = "", width: float = 1.5) -> str:
    d = "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
    inner = f"<title>{escape(title)}</title>" if title else ""
    return f'<path d="{d}" stroke="{stroke}" stroke-width="{number(width)}" fill="none">{inner}</path>'


def ticks(largest: float, count: int) -> list[float]:
    """About `count` round numbers from 0 to `largest`."""
    if largest <= 0:
        return [0]
    rough = largest / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [i * step for i in range(int(largest / step * (1 + 1e-9)) + 1)]


def document(width: float, height: float, elements: Iterable[str]) -> str:
    """A whole SVG image."""
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    body = "\n".join(elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{body}\n</svg>\n'
    )
