"""The answers that the playground's page asks for."""

from __future__ import annotations

import json

from megatron.zero_bubble.cli.playground.answers import answer


def ask(what, **arguments):
    return json.loads(answer(json.dumps({"what": what, **arguments})))
