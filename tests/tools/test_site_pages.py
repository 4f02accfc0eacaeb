"""The pages of the documentation site: links that are written for the repository lead to pages of the site."""

from __future__ import annotations

import pytest

pytest.importorskip("mkdocs", reason="the extra [docs] has it: make docs")

from tools.site_pages import site_text


@pytest.mark.parametrize(
    ("written", "root", "shown"),
    [
        ("[ours](docs/training.md#flags)", "", "[ours](training.md#flags)"),
        ("![ZB-H1](docs/schedules/zb-h1.svg)", "", "![ZB-H1](schedules/zb-h1.svg)"),
        ("[how we work](CONTRIBUTING.md)", "", "[how we work](CONTRIBUTING.md)"),
        ("[paper](https://arxiv.org/abs/2405.15362)", "", "[paper](https://arxiv.org/abs/2405.15362)"),
        ("[the lines](../README.md#train)", "../", "[the lines](index.md#train)"),
        ("[an example](../CONTRIBUTING.md#by-example)", "../", "[an example](CONTRIBUTING.md#by-example)"),
        ("[`zb_h1.py`](../megatron/zero_bubble/schedule/generators/zb_h1.py)", "../", "`zb_h1.py`"),
        ("[layouts](layouts.md)", "../", "[layouts](layouts.md)"),
        ("[below](#train)", "", "[below](#train)"),
        ("```\n[no link](../README.md)\n```", "../", "```\n[no link](../README.md)\n```"),
    ],
)
def test_links_of_the_repository_become_those_of_the_site(written: str, root: str, shown: str) -> None:
    assert site_text(written, root) == shown
