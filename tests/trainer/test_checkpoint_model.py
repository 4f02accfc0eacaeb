"""A checkpoint of another model, optimizer or schedule is refused by its flags, ours or Megatron-LM's."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import asdict, replace

import pytest

from megatron.zero_bubble.trainer.arguments import Arguments
from megatron.zero_bubble.trainer.checkpoint_flags import (
    check_model_shape,
    check_optimizer,
    check_schedule,
    has_same_ranks,
    reordered_data,
)
from megatron.zero_bubble.trainer.defaults import with_vocabulary
from tests.checked_flags import checked

PLAIN: dict[str, str | None] = {"--load": "folder"}
ONE_STAGE: dict[str, str | None] = {"--pipeline-model-parallel-size": "1"}
GROUPED = {**PLAIN, "--group-query-attention": None, "--num-query-groups": "2"}


def saved_by_us(args: Arguments) -> Namespace:
    return Namespace(**asdict(args))


def saved_by_megatron(args: Arguments) -> Namespace:
    """The arguments in a checkpoint of Megatron-LM: without shared heads its number of groups is 1."""
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


@pytest.mark.parametrize(
    ("flag", "value", "was"),
    [
        ("--rotary-base", "500000", 10000),
        ("--norm-epsilon", "1e-06", 1e-5),
        ("--window-size", "4,0", None),
        ("--rotary-seq-len-interpolation-factor", "2", None),
        ("--window-attn-skip-freq", "2", None),
        ("--no-rope-freq", "2", None),
        ("--softmax-type", "off-by-one", "vanilla"),
    ],
)
def test_a_model_that_computes_otherwise_is_only_for_finetuning(flag, value, was):
    changes = {**PLAIN, flag: value}
    line = refusal(check_model_shape, checked(changes), saved_by_us(checked(PLAIN)))
    assert re.fullmatch(rf"{flag} .*: the checkpoint in --load folder was saved with {was}", line)
    check_model_shape(checked({**changes, "--finetune": None}), saved_by_us(checked(PLAIN)))


LATENT = {"--multi-latent-attention": None, "--position-embedding-type": "rope"}
ROUTED = {"--pipeline-model-parallel-size": "1", "--num-experts": "4", "--disable-bias-linear": None}


@pytest.mark.parametrize(
    ("part", "flag", "value", "was"),
    [
        ({"--position-embedding-type": "rope", "--use-rope-scaling": None}, "--rope-scaling-factor", "4", "8.0"),
        (LATENT, "--rotary-scaling-factor", "40", "1.0"),
        (LATENT, "--mscale", "0.5", "1.0"),
        (LATENT, "--mscale-all-dim", "1", "0.0"),
        (LATENT, "--rope-type", "rope", "yarn"),
        (ROUTED, "--moe-router-topk", "1", "2"),
        (ROUTED, "--moe-router-score-function", "sigmoid", "softmax"),
        (ROUTED, "--moe-router-topk-scaling-factor", "2.5", "None"),
        (ROUTED, "--moe-router-num-groups", "2", "None"),
        (ROUTED, "--moe-router-group-topk", "1", "None"),
    ],
)
def test_a_part_of_a_model_that_computes_otherwise_is_only_for_finetuning(part, flag, value, was):
    known, name = checked({**PLAIN, **part}), flag.removeprefix("--").replace("-", "_")
    other = replace(known, **{name: getattr(checked({**PLAIN, **part, flag: value}), name)})
    assert refusal(check_model_shape, other, saved_by_us(known)).endswith(f"in --load folder was saved with {was}")
    check_model_shape(replace(other, finetune=True), saved_by_us(known))


def test_a_flag_may_give_the_default_of_megatron_core():
    for given, saved in ({}, {"--rope-type": "yarn"}), ({"--rope-type": "yarn"}, {}):
        check_model_shape(checked({**PLAIN, **LATENT, **given}), saved_by_us(checked({**PLAIN, **LATENT, **saved})))


def test_flags_of_parts_that_the_model_lacks_may_differ():
    saved = saved_by_megatron(checked(PLAIN))
    saved.rope_scaling_factor, saved.mscale, saved.moe_router_topk = 4.0, 0.5, 8
    check_model_shape(checked(PLAIN), saved)


LONGER = {"--seq-length": "64"}


def test_a_model_without_learned_positions_loads_for_longer_sequences():
    rope = {**PLAIN, "--position-embedding-type": "rope"}
    check_model_shape(checked({**rope, **LONGER}), saved_by_us(checked(rope)))
    line = refusal(check_model_shape, checked({**PLAIN, **LONGER}), saved_by_us(checked(PLAIN)))
    assert line == "--max-position-embeddings 64: the checkpoint in --load folder was saved with 32"


@pytest.mark.parametrize(
    ("rows", "remedy"),
    [
        (128, "with the same tokenizer, give --make-vocab-size-divisible-by 64"),
        (129, "--tensor-model-parallel-size must divide 129"),
    ],
)
def test_the_remedy_for_a_vocabulary_with_other_padding(rows, remedy):
    split = {**PLAIN, **ONE_STAGE, "--tensor-model-parallel-size": "2"}
    args, saved = checked(split), saved_by_us(checked(PLAIN))
    saved.padded_vocab_size = rows
    assert refusal(check_model_shape, with_vocabulary(args, 120), saved) == (
        "--make-vocab-size-divisible-by 128 x --tensor-model-parallel-size 2 pads the vocabulary to 256 rows, but the "
        f"checkpoint in --load folder has {rows}: {remedy}"
    )
    if rows == 128:
        follows = checked({**split, "--make-vocab-size-divisible-by": "64"})
        check_model_shape(with_vocabulary(follows, 120), saved)


def test_what_an_older_checkpoint_does_not_say_is_not_compared():
    check_model_shape(checked(PLAIN), Namespace(num_layers=8))
    with pytest.raises(ValueError, match=r"^--num-query-groups 4: .* was saved with 2"):
        check_model_shape(checked(PLAIN), Namespace(num_query_groups=2))


def refusal(check, *arguments) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        check(*arguments)
    return str(error.value)


DISTRIBUTED = {"--use-distributed-optimizer": None}
EXPERTS = {**ONE_STAGE, "--num-experts": "4", "--disable-bias-linear": None}
SPREAD = {**EXPERTS, "--expert-model-parallel-size": "2"}
FORMS = {
    "--optimizer adam in fp32": ({}, {"--clip-grad": "0"}),
    "--optimizer adam in bf16 or fp16": ({"--bf16": None}, {"--fp16": None}),
    "--optimizer adam --use-distributed-optimizer": (DISTRIBUTED, {**DISTRIBUTED, "--bf16": None}),
    "--optimizer adam --decoupled-lr in fp32": ({"--decoupled-lr": "0.1"}, {"--decoupled-lr": "0.2"}),
    "--optimizer adam --expert-model-parallel-size > 1 in fp32": (
        SPREAD,
        {**EXPERTS, "--expert-model-parallel-size": "4"},
    ),
    "--optimizer sgd in fp32": ({"--optimizer": "sgd"}, {"--optimizer": "sgd", "--adam-eps": "1e-7"}),
}
"""Flags whose optimizers consist of the same tensors in the same groups."""


@pytest.mark.parametrize("saved_by", [saved_by_us, saved_by_megatron])
def test_the_state_of_an_optimizer_needs_one_of_its_form(saved_by):
    for ours, ours_flags in FORMS.items():
        for theirs, theirs_flags in FORMS.items():
            for mine in ours_flags:
                for saved in theirs_flags:
                    arguments = checked({**PLAIN, **mine}), saved_by(checked({**PLAIN, **saved}))
                    if ours == theirs:
                        check_optimizer(*arguments)
                    else:
                        assert refusal(check_optimizer, *arguments) == (
                            f"--load folder: the optimizer's state was saved with {theirs}, and cannot be loaded with "
                            f"{ours}: give the flags of that run, or --no-load-optim"
                        )


@pytest.mark.parametrize(
    ("ours", "theirs", "is_same"),
    [
        (ONE_STAGE, ONE_STAGE, True),
        (ONE_STAGE, {**ONE_STAGE, "--tensor-model-parallel-size": "2"}, False),
        (EXPERTS, SPREAD, False),
        (SPREAD, EXPERTS, False),
        (SPREAD, SPREAD, True),
    ],
)
def test_random_states_are_for_ranks_of_the_same_sizes(ours, theirs, is_same):
    assert has_same_ranks(checked(ours), saved_by_us(checked(theirs))) is is_same


def test_the_first_version_had_adam_only():
    saved = saved_by_us(checked(PLAIN))
    del saved.optimizer, saved.sgd_momentum
    check_optimizer(checked(PLAIN), saved)
    assert "--optimizer adam in fp32" in refusal(check_optimizer, checked({**PLAIN, "--optimizer": "sgd"}), saved)


@pytest.mark.parametrize(
    ("optimizer", "flag", "was"),
    [("adam", "--adam-beta2 0.95", 0.999), ("adam", "--adam-eps 1e-05", 1e-8), ("sgd", "--sgd-momentum 0.5", 0.9)],
)
def test_what_the_state_brings_with_it_is_not_what_a_flag_says(optimizer, flag, was):
    name, value = flag.split()
    args = checked({**PLAIN, "--optimizer": optimizer, name: value})
    saved = saved_by_us(checked({**PLAIN, "--optimizer": optimizer}))
    assert refusal(check_optimizer, args, saved) == (
        f"{flag}: the optimizer's state in --load folder was saved with {was} and keeps this value: "
        f"give {name} {was}, or --no-load-optim"
    )


SCHEDULE = {"max_lr": 0.01, "min_lr": 0.0, "lr_decay_style": "linear", "lr_warmup_steps": 0, "lr_decay_steps": 64}
SCHEDULE |= {"decoupled_lr": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_lr": 0.005}, "--lr gives 0.01, the checkpoint has 0.005"),
        ({"lr_decay_style": "cosine"}, "--lr-decay-style gives linear, the checkpoint has cosine"),
        ({"lr_warmup_steps": 8}, "--lr-warmup-iters gives 0 samples, the checkpoint has 8 samples"),
        ({"decoupled_lr": 0.5}, "--decoupled-lr gives None, the checkpoint has 0.5"),
        ({"lr_decay_steps": 32}, "--train-iters gives 64 samples, the checkpoint has 32 samples"),
    ],
)
def test_another_learning_rate_schedule(change, said):
    check_schedule(checked(PLAIN), SCHEDULE, {**SCHEDULE, "num_steps": 8})
    assert refusal(check_schedule, checked(PLAIN), SCHEDULE, {**SCHEDULE, **change}) == (
        f"--load folder: the learning rate's schedule differs: {said}: give the flags of that run, "
        "--override-opt-param-scheduler to use the flags, or --use-checkpoint-opt-param-scheduler to use the "
        "checkpoint's schedule"
    )
    for flag in ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"):
        check_schedule(checked({**PLAIN, flag: None}), SCHEDULE, {**SCHEDULE, **change})


def test_the_flag_of_the_decay_is_named_where_it_was_given():
    line = refusal(check_schedule, checked({**PLAIN, "--lr-decay-iters": "4"}), SCHEDULE, {"lr_decay_steps": 32})
    assert "--lr-decay-iters gives 64 samples" in line


def test_a_constant_loss_scale_leaves_no_state_for_a_dynamic_one():
    saved = saved_by_us(checked({**PLAIN, "--fp16": None, "--loss-scale": "1024"}))
    assert refusal(check_optimizer, checked({**PLAIN, "--fp16": None}), saved) == (
        "--fp16: the optimizer's state in --load folder was saved with --loss-scale 1024.0 and holds no dynamic loss "
        "scale: give --loss-scale 1024.0, or --no-load-optim"
    )
    check_optimizer(checked({**PLAIN, "--fp16": None, "--loss-scale": "512"}), saved)
    check_optimizer(checked({**PLAIN, "--bf16": None}), saved)
    check_optimizer(
        checked({**PLAIN, "--fp16": None}), saved_by_us(checked({**PLAIN, "--bf16": None, "--loss-scale": "2"}))
    )


@pytest.mark.parametrize(
    ("changes", "was"),
    [
        ({}, None),
        ({"--lr": "0.1", "--eval-iters": "3"}, None),
        ({"--train-iters": "20"}, "--train-iters 10"),
        ({"--train-iters": "5", "--global-batch-size": "4"}, None),
        ({"--seed": "3"}, "--seed 1234"),
        ({"--split": "9,1"}, "--split 969,30,1"),
    ],
)
def test_another_order_of_the_data_is_told(changes, was):
    line = reordered_data(checked({**PLAIN, **changes}), saved_by_us(checked(PLAIN)))
    assert line == (was and f"  the order of the data may differ from the checkpoint's run, which had {was}")
