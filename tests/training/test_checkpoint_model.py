"""A checkpoint of another model is refused by its flags, ours or Megatron-LM's."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

import pytest

from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.checkpoint import check_model_shape
from tests.training.test_checks import checked

PLAIN: dict[str, str | None] = {"--load": "folder"}
GROUPED = {**PLAIN, "--group-query-attention": None, "--num-query-groups": "2"}


def saved_by_us(args: Arguments) -> Namespace:
    return Namespace(**asdict(args))


def saved_by_megatron(args: Arguments) -> Namespace:
    """Megatron-LM leaves the number of groups at its default where heads share nothing."""
    groups = args.num_query_groups if args.group_query_attention else 1
    return Namespace(**{**asdict(args), "num_query_groups": groups})


@pytest.mark.parametrize("saved_by", [saved_by_us, saved_by_megatron])
@pytest.mark.parametrize("changes", [PLAIN, GROUPED])
def test_a_checkpoint_of_the_same_model_loads(changes, saved_by):
    args = checked(changes)
    check_model_shape(args, saved_by(args))


@pytest.mark.parametrize("saved_by", [saved_by_us, saved_by_megatron])
@pytest.mark.parametrize(("ours", "theirs", "groups"), [(PLAIN, GROUPED, (4, 2)), (GROUPED, PLAIN, (2, 4))])
def test_heads_that_share_otherwise_are_another_model(ours, theirs, groups, saved_by):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        check_model_shape(checked(ours), saved_by(checked(theirs)))
    was, is_now = groups[1], groups[0]
    assert str(error.value) == f"--num-query-groups {is_now}: the checkpoint in --load folder was saved with {was}"


def test_what_an_older_checkpoint_does_not_say_is_not_compared():
    check_model_shape(checked(PLAIN), Namespace(num_layers=8))
    with pytest.raises(ValueError, match=r"^--num-query-groups 4: .* was saved with 2"):
        check_model_shape(checked(PLAIN), Namespace(num_query_groups=2))
