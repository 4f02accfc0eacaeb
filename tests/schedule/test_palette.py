"""The colours of operations can be told apart, by colour-blind eyes too."""

from __future__ import annotations

from itertools import combinations

import pytest

from megatron.zero_bubble.schedule.kinds import KINDS

SIGHT = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
"""What eyes make of linear red, green and blue (Machado, Oliveira and Fernandes 2009, severity 1)."""
CLEARLY = 12
"""Distance in CIE Lab between colours that nobody takes for each other; 2.3 can just be told apart."""


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """CIE Lab of a colour #rrggbb as such eyes see it."""
    channels = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear, strict=True)))) for row in SIGHT[sight]
    )
    x, y, z = (
        value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116
        for value in (
            (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
            0.2126 * red + 0.7152 * green + 0.0722 * blue,
            (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
        )
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
def test_no_two_kinds_have_colours_that_look_alike(sight):
    colours = {kind: facts.colour for kind, facts in KINDS.items() if facts.colour and not facts.pairs_with}
    for (one, first), (other, second) in combinations(colours.items(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen(first, sight), seen(second, sight), strict=True)) ** 0.5
        assert distance > CLEARLY, f"{one} and {other} look alike"
