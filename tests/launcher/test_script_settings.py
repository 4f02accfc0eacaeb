"""Settings of a Megatron-LM script that do not work with zero bubble are refused in one line."""

from __future__ import annotations

import contextlib
import inspect
import re
from argparse import Namespace
from unittest import mock

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.launcher import script_choice
from megatron.zero_bubble.launcher.command_line import LaunchFlags
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.run import Run
from megatron.zero_bubble.launcher.script_choice import refuse_restarts, settle_layout, validate_arguments
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.start_up import SessionError
from tests.launcher.script_flags import script_arguments


@pytest.mark.parametrize(
    ("schedule", "changed", "words"),
    [
        ("zb-v", {"num_layers_per_virtual_pipeline_stage": 1}, ["zb-v", "--num-layers-per-virtual-pipeline-stage 1"]),
        ("zb-v", {"virtual_pipeline_model_parallel_size": None}, ["--num-virtual-stages-per-pipeline-rank 2"]),
        ("zb-v", {"num_layers": 12}, ["--num-layers 12", "8 stages"]),
        ("zb-h1", {"virtual_pipeline_model_parallel_size": 2}, ["zb-h1", "2"]),
        ("zb-h1", {"pipeline_model_parallel_size": 1}, ["--pipeline-model-parallel-size", "zb-h1"]),
        ("zb-h1", {"use_megatron_fsdp": True}, ["--use-megatron-fsdp", "zb-h1"]),
        ("zb-h1", {"fine_grained_activation_offloading": True}, ["--fine-grained-activation-offloading", "W may need"]),
        ("zb-h1", {"moe_paged_stash": True}, ["--moe-paged-stash", "own order"]),
        ("zb-h1", {"cuda_graph_impl": "local"}, ["--cuda-graph-impl local", "zb-h1", "B and W together"]),
        ("zb-h1", {"transformer_impl": "transformer_engine"}, ["--transformer-impl transformer_engine", "use local"]),
        ("zb-h1", {"tp_comm_overlap": True}, ["--tp-comm-overlap", "zb-h1"]),
        ("zb-h1", {"sft": True, "transformer_impl": "local"}, ["--sft", "transformer_engine", "--spec"]),
        (
            "zb-h1",
            {"dataloader_inter_document_masking": True, "transformer_impl": "local"},
            ["--dataloader-inter-document-masking", "transformer_engine", "--spec"],
        ),
        ("zb-h3", {}, ["zb-h3", "zb-h1, zb-h2"]),
        ("file:no/such/file.json", {}, ["no/such/file.json"]),
    ],
)
def test_flags_that_contradict_the_script_s(schedule: str, changed: dict[str, object], words: list[str]) -> None:
    if schedule == "zb-v":
        changed = {"virtual_pipeline_model_parallel_size": 2, **changed}
    with pytest.raises(SessionError) as error:
        Run(script_arguments(**changed), LaunchFlags(zero_bubble_schedule=schedule))
    assert all(word in str(error.value) for word in words)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "changed", "line"),
    [
        (
            {"post_validation": True},
            {"moe_expert_rank_capacity_factor": 1.5},
            "--zero-bubble-post-validation does not work with --moe-expert-rank-capacity-factor 1.5: it runs steps "
            "again, and so does post-validation",
        ),
        (
            {"post_validation": True},
            {"overlap_param_gather_with_optimizer_step": True},
            "--zero-bubble-post-validation does not work with --overlap-param-gather-with-optimizer-step: parameters "
            "are sent to the replicas before their step is validated; --overlap-param-gather alone works",
        ),
        (
            {"post_validation": True},
            {"fp16": True},
            "--zero-bubble-post-validation under the launcher does not work with --fp16: the script gets the result "
            "of a step before it is known whether the step is skipped; use --bf16",
        ),
        (
            {"vocabulary_parallel": "on"},
            {"logit_dtype": torch.float32},
            "--zero-bubble-vocabulary-parallel on does not work with --output-logit-dtype torch.float32: the shards "
            "compute logits in the type of the model",
        ),
        (
            {"schedule": "zb-v"},
            {"heterogeneous_layers_config_path": "blocks.json"},
            "a V placement (zb-v, v-half, v-min) does not work with --heterogeneous-layers-config-path blocks.json: "
            "in a V, stages take their layers in another order; use a linear schedule",
        ),
        (
            {"schedule": "zb-v"},
            {"iterations_to_skip": [3]},
            "a V placement (zb-v, v-half, v-min) does not work with --iterations-to-skip 3: Megatron-LM skips "
            "iterations of one model chunk a rank; use a linear schedule",
        ),
        *(
            (
                settings,
                {"iterations_to_skip": [3], **changed},
                f"{flag} does not work with --iterations-to-skip 3, which Megatron-LM supports with one model chunk a "
                "rank only: leave one of them out",
            )
            for settings, changed, flag in (
                ({"schedule": "interleaved-1f1b"}, {}, "--zero-bubble-schedule interleaved-1f1b"),
                ({"schedule": None, "placement": "interleaved"}, {}, "--zero-bubble-placement interleaved"),
                ({}, {"num_virtual_stages_per_pipeline_rank": 2}, "--num-virtual-stages-per-pipeline-rank 2"),
                ({}, {"num_layers_per_virtual_pipeline_stage": 1}, "--num-layers-per-virtual-pipeline-stage 1"),
                (
                    {},
                    {"pipeline_model_parallel_layout": "Et|t|t|t|t|t|t|tL"},
                    "--pipeline-model-parallel-layout Et|t|t|t|t|t|t|tL",
                ),
            )
        ),
        *(
            (
                {"schedule": "interleaved-1f1b"},
                {name: True},
                f"--zero-bubble-schedule interleaved-1f1b does not work with --{name.replace('_', '-')}, which "
                "Megatron-LM supports with one model chunk a rank only: leave one of them out",
            )
            for name in ("multiple_validation_sets", "full_validation")
        ),
        (
            {},
            {"moe_paged_stash": True},
            "--moe-paged-stash does not work with --zero-bubble-schedule zb-h1: it needs megatron-core's own order of "
            "operations",
        ),
        (
            {},
            {"overlap_moe_expert_parallel_comm": True, "ep_overlap_early_attn_memory_release": True},
            "--ep-overlap-early-attn-memory-release does not work with --zero-bubble-schedule zb-h1: it needs "
            "megatron-core's own order of operations",
        ),
        (
            {"post_validation": True},
            {"rerun_mode": "report_stats"},
            "--zero-bubble-post-validation does not work with --rerun-mode report_stats: it takes every step twice; "
            "use disabled",
        ),
        ({"seed_by_layer": True}, {"rerun_mode": "report_stats"}, None),
        (
            {},
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"], "add_bias_linear": True},
            "--recompute-modules core_attn mlp does not work with --zero-bubble-schedule zb-h1: megatron-core hangs "
            "with biases; leave mlp out, or add --disable-bias-linear",
        ),
        ({}, {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "add_bias_linear": False}, None),
        ({}, {"moe_expert_rank_capacity_factor": 1.5, "fp16": True, "logit_dtype": torch.float32}, None),
        ({"post_validation": True}, {"optimizer": "muon", "fp8": "e4m3", "fp8_recipe": "mxfp8"}, None),
        (
            {"post_validation": True},
            {"timing_log_level": 1, "barrier_with_L1_time": True},
            "--zero-bubble-post-validation does not work with --timing-log-level 1: its timers make every step wait "
            "for all ranks; use 0",
        ),
        ({"post_validation": True}, {"timing_log_level": 1, "barrier_with_L1_time": False}, None),
    ],
)
def test_settings_are_refused_before_megatron_lm_validates_them(
    settings: dict[str, str], changed: dict[str, object], line: str | None
) -> None:
    """It prints them all then. Before, no rank has a group of processes."""
    flags = LaunchFlags(**{f"zero_bubble_{name}": value for name, value in {"schedule": "zb-h1", **settings}.items()})
    validated: list[Namespace] = []

    def validate(args: Namespace) -> None:
        validated.append(args)

    call = Call(validate, inspect.signature(validate).bind(script_arguments(**{"add_bias_linear": False, **changed})))
    with pytest.raises(SessionError) if line else contextlib.nullcontext() as error:
        validate_arguments(flags, call)
    assert (error is None) == bool(validated)
    if error is not None:
        assert str(error.value) == line


@pytest.mark.parametrize(
    ("ends", "layout"),
    [
        ({"decoder_first_pipeline_num_layers": 1}, "Et*1|t*1|t*1|t*1|t*1|t*1|t*1|t*1L"),
        ({"decoder_last_pipeline_num_layers": 8, "num_layers": 15}, "Et*1|t*1|t*1|t*1|t*1|t*1|t*1|t*8L"),
        ({"account_for_loss_in_pipeline_split": True, "num_layers": 15}, "Et*2|t*2|t*2|t*2|t*2|t*2|t*2|t*1L"),
        ({}, None),
    ],
)
def test_in_a_v_megatron_lm_gets_the_layers_of_the_ends_as_a_layout(
    ends: dict[str, object], layout: str | None
) -> None:
    """megatron-core would cut the layers of the first rank into two chunks, for a configuration made early (0.19)."""
    script = script_arguments(**{"add_bias_linear": False, "num_virtual_stages_per_pipeline_rank": 2, **ends})
    given = dict.fromkeys(ends.keys() - {"num_layers"})
    validate_arguments(
        LaunchFlags(zero_bubble_schedule="zb-v"), Call(vars, inspect.signature(lambda args: None).bind(script))
    )
    assert script.pipeline_model_parallel_layout == layout
    assert not any(getattr(script, name) for name in given)
    assert script.num_virtual_stages_per_pipeline_rank == (2 if layout is None else None)


@pytest.mark.parametrize("post_validation", [False, True])
def test_under_post_validation_megatron_lm_runs_no_step_again(
    post_validation: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise the optimizer would take the step of an iteration with a loss that is not finite twice."""
    flags = LaunchFlags(zero_bubble_schedule="zb-h1", zero_bubble_post_validation=post_validation)
    script = script_arguments(rerun_mode="validate_results")
    validate_arguments(flags, Call(vars, inspect.signature(lambda args: None).bind(script)))
    assert script.rerun_mode == ("disabled" if post_validation else "validate_results")
    assert ("--rerun-mode validate_results is set to disabled" in capsys.readouterr().out) is post_validation


@pytest.mark.parametrize(
    ("placement", "refused"), [(Placement("linear", 4), False), (Placement("v", 4, 2), True)], ids=["linear", "V"]
)
def test_a_layout_of_several_chunks_is_not_restored_where_iterations_are_skipped(
    placement: Placement, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = script_arguments(iterations_to_skip=[5], load="saved")
    monkeypatch.setattr(script_choice, "_saved_choice", mock.Mock())
    session = mock.Mock(job=mock.Mock(placement=placement))
    with pytest.raises(SessionError) if refused else contextlib.nullcontext() as error:
        assert settle_layout(settings, mock.Mock(), session, mock.Mock(), {})
    if error is not None:
        assert str(error.value) == (
            "--load saved, whose layout has 2 model chunks a rank, does not work with --iterations-to-skip 5, which "
            "Megatron-LM supports with one model chunk a rank only: leave one of them out"
        )


def test_a_local_checkpoint_alone_records_no_layout() -> None:
    manager = mock.Mock(find_latest=lambda: 7)
    setup = {"checkpointing_context": {"local_checkpoint_manager": manager}}
    with pytest.raises(SessionError, match=r"^--non-persistent-ckpt-type local: .*: give the flags that the first job"):
        settle_layout(script_arguments(load="new"), None, mock.Mock(), mock.Mock(), setup)


def test_a_restart_within_the_process_is_refused_where_megatron_lm_would_wrap_the_training() -> None:
    script = script_arguments(inprocess_restart=True)
    call = Call(pytest.fail, inspect.signature(lambda train, args: None).bind(None, script))
    with pytest.raises(SessionError, match=r"^--inprocess-restart does not work with --zero-bubble: connections"):
        refuse_restarts(call)


def test_a_model_that_no_schedule_can_run_is_refused_when_it_is_built() -> None:
    """No flag of Megatron-LM sets this; a script may."""
    run = Run(script_arguments(), LaunchFlags(zero_bubble_schedule="zb-h1"))
    config = TransformerConfig(num_layers=8, hidden_size=32, num_attention_heads=4)
    config.enable_autocast = True
    with pytest.raises(SessionError, match=r"^enable_autocast is not supported by zero-bubble schedules"):
        run.build_chunk({"config": config})


def test_a_script_whose_model_does_not_recompute_as_its_flags_say_is_refused() -> None:
    script = script_arguments(recompute_granularity="full")
    with pytest.raises(SessionError, match=r"^--zero-bubble-recompute planned lets .* --recompute-granularity full$"):
        Run(script, LaunchFlags(zero_bubble=True, zero_bubble_recompute="planned"))
    run = Run(script, LaunchFlags(zero_bubble_schedule="zb-h1"))
    config = TransformerConfig(num_layers=8, hidden_size=32, num_attention_heads=4)
    with pytest.raises(SessionError, match=r"^a schedule that recomputes needs .* 'full'.*, got None$"):
        run.build_chunk({"config": config})


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_built(monkeypatch) -> None:
    """The first rank checks, because it alone writes; all ranks end with its line."""
    monkeypatch.setattr("megatron.zero_bubble.launcher.run.on_rank", lambda rank, action: action())
    monkeypatch.setattr("megatron.zero_bubble.session.same_flags.from_all_ranks", lambda own: [own])
    flags = LaunchFlags(zero_bubble=True, zero_bubble_profile_output="/no/such/folder/profile.json")
    run = Run(script_arguments(), flags)
    with pytest.raises(SessionError, match=r"^--zero-bubble-profile-output /no/such/folder/.*: its folder does not"):
        run.begin(Call(run.begin, inspect.signature(lambda: None).bind()))


def test_a_script_that_fits_is_not_refused() -> None:
    Run(script_arguments(), LaunchFlags(zero_bubble_schedule="zb-h1"))
    Run(script_arguments(fp8="hybrid"), LaunchFlags(zero_bubble_schedule="zb-h1"))
    chunks = {"virtual_pipeline_model_parallel_size": 2}
    assert Run(script_arguments(**chunks), LaunchFlags(zero_bubble_schedule="zb-v")).stages.is_v
    assert not Run(script_arguments(**chunks), LaunchFlags(zero_bubble=True)).stages.is_v


def test_a_script_that_ends_because_a_checkpoint_is_missing_had_nothing_to_train() -> None:
    run = Run(script_arguments(exit_on_missing_checkpoint=True), LaunchFlags(zero_bubble_schedule="zb-h1"))
    assert run.had_nothing_to_train
    run.session.has_started = True
    assert not run.had_nothing_to_train


def test_a_run_without_a_schedule_ends_before_its_process_groups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.zero_bubble.session.same_flags.from_all_ranks", lambda own: [own])
    flags = LaunchFlags(zero_bubble=True, zero_bubble_keep_layout=True, zero_bubble_memory_limit="0.2")
    run = Run(script_arguments(), flags)
    groups = mock.Mock()
    with pytest.raises(SessionError, match=r"^--zero-bubble-memory-limit 0\.2: schedule auto needs at least "):
        run.begin(groups)
    groups.proceed.assert_not_called()


def test_timers_that_wait_for_the_device_inside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SessionError, match="--timing-log-level 2"):
        Run(script_arguments(timing_log_level=2), LaunchFlags(zero_bubble_schedule="zb-h1"))


def test_in_a_v_a_layout_has_its_prediction_layers_on_the_last_stage() -> None:
    chunks = {"num_virtual_stages_per_pipeline_rank": None, "virtual_pipeline_model_parallel_size": 2}
    layout = "Et|t|tt|t|t|t|tm|L"
    script = script_arguments(**chunks, pipeline_model_parallel_layout=layout, mtp_num_layers=1)
    with pytest.raises(SessionError, match=rf"^--pipeline-model-parallel-layout {re.escape(layout)}: in a V, all"):
        Run(script, LaunchFlags(zero_bubble_schedule="zb-v"))


def test_a_v_is_refused_for_a_model_whose_tied_weights_it_would_not_copy() -> None:
    run = Run(script_arguments(virtual_pipeline_model_parallel_size=2), LaunchFlags(zero_bubble_schedule="zb-v"))
    wrap = inspect.signature(lambda module: None).bind(torch.nn.Linear(2, 2))
    run._built.append(torch.nn.Linear(1, 1))  # the language model inside of the script's model, such as LLaVA's
    with pytest.raises(SessionError, match=r"^a V placement needs .*GPTModel or .*, got Linear: choose a linear sched"):
        run.wrap_in_ddp(Call(lambda module: None, wrap))
