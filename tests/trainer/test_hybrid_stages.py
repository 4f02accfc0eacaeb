"""A pattern that this trainer cannot build is refused in one line."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.mcore.decoder_models import HYBRID_RECOMPUTES, HYBRID_TAKES_STAGES
from megatron.zero_bubble.trainer.arguments import parse_arguments
from megatron.zero_bubble.trainer.checks import complete_and_check
from tests.launch import TINY_GPT

PATTERN = "--hybrid-layer-pattern"
EARLIER = pytest.mark.skipif(HYBRID_TAKES_STAGES, reason="its hybrid models have these layers")
LATER = pytest.mark.skipif(not HYBRID_TAKES_STAGES, reason="its hybrid models have no multi-token prediction")
OLDER = pytest.mark.skipif(HYBRID_RECOMPUTES, reason="its hybrid models recompute their layers")


def check(*flags: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    complete_and_check(
        parse_arguments([*TINY_GPT[2:], "--pipeline-model-parallel-size", "2", *flags]), environment, False
    )


def test_the_pattern_says_how_many_layers_there_are():
    args = parse_arguments([*TINY_GPT[2:], "--hybrid-override-pattern", "*-|*-*"])
    assert (args.num_layers, args.hybrid_layer_pattern) == (5, "*-|*-*")
    check(PATTERN, "*-|*-*")
    check(PATTERN, "*-*-", "--num-layers", "4", "--zero-bubble-schedule", "zb-v")
    check(PATTERN, "MM|*M-")


@LATER
def test_the_pattern_says_how_many_tokens_are_predicted_further() -> None:
    args = parse_arguments([*TINY_GPT[2:], PATTERN, "*-|*-/*-/*-"])
    assert (args.num_layers, args.mtp_num_layers) == (4, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((PATTERN, "*-X-"), r"no layer X; there are \* \(attention\), - \(an MLP\), E \(experts\), M \(Mamba\)"),
        ((PATTERN, "*-D-"), "no layer D"),
        ((PATTERN, "*-ME", "--num-experts", "4", "--mtp-num-layers", "1"), "but --mtp-num-layers is 1"),
        pytest.param((PATTERN, "*-G-"), r"has no layer G \(a gated delta net\)", marks=EARLIER),
        pytest.param(
            (PATTERN, "*-*-/*-"), "no multi-token prediction, which 0.17 and later versions have", marks=EARLIER
        ),
        pytest.param((PATTERN, "*-*-/*-/*"), "must be the same symbols, at least one", marks=LATER),
        pytest.param((PATTERN, "*-*-/*-/"), "must be the same symbols, at least one", marks=LATER),
        ((PATTERN, "*-*-", "--multi-latent-attention"), r"give --multi-latent-attention if it has a layer \+"),
        ((PATTERN, "*-*-", "--num-layers", "6"), "has 4 layers, but --num-layers is 6"),
        ((PATTERN, "*E*E"), "give --num-experts"),
        ((PATTERN, "*-*-", "--num-experts", "4"), "give --num-experts if it has a layer E, and only then"),
        ((PATTERN, "*-*-", "--context-parallel-size", "2"), "--context-parallel-size 2"),
        pytest.param(
            (PATTERN, "*-*-", "--zero-bubble", "--zero-bubble-recompute", "planned"), "does not recompute", marks=OLDER
        ),
        ((PATTERN, "*-*-", "--hybrid-override-pattern", "*-*-"), "are names of one flag"),
        ((PATTERN, "*|-|*-", "--zero-bubble-schedule", "zb-h1"), "has 3 stages, but 2 pipeline ranks"),
        ((PATTERN, "*-*", "--zero-bubble-schedule", "zb-h1"), "not a multiple of the 2 stages"),
    ],
)
def test_what_cannot_work_is_refused(flags: tuple[str, ...], message: str):
    with pytest.raises(ValueError, match=message) as error:
        check(*flags)
    assert "\n" not in str(error.value)
