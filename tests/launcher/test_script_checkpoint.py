"""A checkpoint that Megatron-LM cannot load into the job's model chunks is refused; `torch_dist` fits every layout."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from megatron.zero_bubble.launcher import script_checkpoint
from megatron.zero_bubble.launcher.hooks import Call
from megatron.zero_bubble.launcher.script_checkpoint import ScriptCheckpoint, load_arguments, record_stages
from megatron.zero_bubble.schedule import Placement
from megatron.zero_bubble.session.job_flags import JobFlags
from megatron.zero_bubble.session.settings import JobSettings
from megatron.zero_bubble.session.start_up import SessionError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of one file a rank."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4\n")
    (tmp_path / "iter_0000004" / "mp_rank_00_000").mkdir(parents=True)
    return tmp_path


def with_shards(folder: Path) -> Path:
    (folder / "iter_0000004" / "metadata.json").touch()
    return folder


def checkpoint_of(folder: Path, **settings: object) -> ScriptCheckpoint:
    """The checkpoint of a script with `--load folder`."""
    given = ScriptCheckpoint.of(Namespace(**{"load": str(folder), "ckpt_format": "torch", **settings}))
    assert given is not None
    return given


def test_a_pretrained_checkpoint_is_loaded_if_load_has_none(folder: Path, tmp_path: Path) -> None:
    script = Namespace(load=str(tmp_path / "new"), pretrained_checkpoint=str(folder))
    pretrained = ScriptCheckpoint.of(script)
    assert str(pretrained) == f"--pretrained-checkpoint {folder}"
    assert not pretrained.is_continued
    assert str(checkpoint_of(folder, pretrained_checkpoint=str(folder))) == f"--load {folder}"
    assert ScriptCheckpoint.of(Namespace(load=None)) is None
    # A step does not make Megatron-LM prefer a --load without a tracker file.
    (tmp_path / "new").mkdir()
    assert str(ScriptCheckpoint.of(Namespace(**vars(script), ckpt_step=4))) == str(pretrained)


def test_a_script_that_fine_tunes_does_not_continue_the_checkpoint(folder: Path) -> None:
    assert checkpoint_of(folder).is_continued
    assert not checkpoint_of(folder, finetune=True).is_continued


def test_a_step_needs_no_tracker_file(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").unlink()
    assert ScriptCheckpoint.of(Namespace(load=str(folder))) is None
    assert checkpoint_of(folder, ckpt_step=4).other_format == "torch"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_checkpoints_that_are_not_persistent_are_found_and_have_shards(tmp_path: Path, elsewhere: bool) -> None:
    newer = tmp_path / ("elsewhere" if elsewhere else "saved/non_persistent")
    newer.mkdir(parents=True)
    (newer / "latest_checkpointed_iteration.txt").write_text("4\n")
    settings = {"load": str(tmp_path / "saved"), "non_persistent_global_ckpt_dir": str(newer) if elsewhere else None}
    assert ScriptCheckpoint.of(Namespace(**settings)) is None
    found = ScriptCheckpoint.of(Namespace(**settings, non_persistent_ckpt_type="global", ckpt_format="torch"))
    assert found is not None
    assert found.is_continued
    assert found.other_format is None


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
def test_the_files_tell_the_format(folder: Path, kind: str) -> None:
    given = {"ckpt_format": kind, "ckpt_step": None}
    assert checkpoint_of(folder, **given).other_format == "torch"
    with_shards(folder)
    assert checkpoint_of(folder, **given).other_format is None
    (folder / "iter_0000002").mkdir()
    assert checkpoint_of(folder, ckpt_format=kind, ckpt_step=2).other_format == "torch"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Megatron-LM's function that reads a checkpoint's arguments."""
    reads = mock.Mock()
    training = mock.Mock(load_args_from_checkpoint=reads)
    monkeypatch.setitem(sys.modules, "megatron.training", mock.Mock(checkpointing=training))
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", training)
    monkeypatch.setattr(script_checkpoint, "jointly", lambda action: action())
    return reads


def test_arguments_are_not_read_from_a_local_checkpoint(folder: Path, reads: mock.Mock) -> None:
    """Megatron-LM needs the whole model for that; the persistent checkpoint of the training has the same layout."""
    reads.side_effect = lambda given, load_arg: (given, given)
    for kind, expected in (("local", None), ("global", "global")):
        arguments = checkpoint_of(folder, non_persistent_ckpt_type=kind).arguments
        assert arguments is not None
        assert arguments.non_persistent_ckpt_type == expected


def test_an_unreadable_checkpoint_is_refused_with_the_reason_that_megatron_lm_prints(
    folder: Path, reads: mock.Mock
) -> None:
    def ends(given: Namespace, load_arg: str) -> None:
        print("could not load the checkpoint\nfailed finding central directory\nframe #0: read()")
        sys.exit()

    reads.side_effect = ends
    with pytest.raises(SessionError) as error:
        checkpoint_of(folder).check_stages(job_of("V"))
    assert str(error.value) == f"--load {folder}: could not load the checkpoint: failed finding central directory"


@pytest.mark.parametrize(
    ("given", "placement", "loaded"), [(None, "v", "*-*-"), (None, None, "*|-|*|-"), ("*-|*-", "v", "*-|*-")]
)
def test_a_pattern_from_a_checkpoint_has_no_stages_of_a_chosen_layout(
    given: str | None, placement: str | None, loaded: str
) -> None:
    """Otherwise, `--use-checkpoint-args` would fix the layout, and the chosen placement would not be restored."""
    saved = Namespace(hybrid_layer_pattern="*|-|*|-", zero_bubble_placement=placement)

    def load_args_from_checkpoint(args: Namespace, load_arg: str = "load") -> tuple[Namespace, Namespace]:
        args.hybrid_layer_pattern = args.hybrid_layer_pattern or saved.hybrid_layer_pattern
        return args, saved

    script = Namespace(hybrid_layer_pattern=given)
    bound = inspect.signature(load_args_from_checkpoint).bind(script)
    assert load_arguments(Call(load_args_from_checkpoint, bound)) == (script, saved)
    assert script.hybrid_layer_pattern == loaded


PLACEMENTS = {
    "linear": Placement("linear", 2),
    "interleaved": Placement("interleaved", 2, 2),
    "interleaved, 4 chunks": Placement("interleaved", 2, 4),
    "V": Placement("v", 2, 2),
}


def job_of(name: str, layers: Sequence[int] = (), **flags: object) -> JobSettings:
    """A job of eight layers, which are spread evenly by default."""
    placement = PLACEMENTS[name]
    even = (8 // placement.num_stages,) * placement.num_stages
    return JobSettings(JobFlags(**flags), None, placement, tuple(layers) or even)


# Megatron-LM saves no V, and records no stages.
SAVED = [(was, is_recorded) for was in PLACEMENTS for is_recorded in (False, True) if is_recorded or was != "V"]


@pytest.mark.parametrize("now", PLACEMENTS)
@pytest.mark.parametrize(("was", "is_recorded"), SAVED)
def test_a_file_a_rank_fits_only_its_own_layout(
    reads: mock.Mock, folder: Path, was: str, now: str, is_recorded: bool
) -> None:
    """Megatron-LM would load the layers by their numbers on the rank, without an error. The file is read once."""
    chunks = PLACEMENTS[was].num_chunks
    saved = Namespace(virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None)
    if is_recorded:
        record_stages(saved, job_of(was))
    reads.side_effect = lambda script, load_arg: (script, saved)
    checkpoint = checkpoint_of(folder)
    fits = was == now
    with nullcontext() if fits else pytest.raises(SessionError, match=r"^[^\n]+$") as error:
        checkpoint.check_stages(job_of(now))
    if error is not None:
        assert str(error.value).startswith(
            f"--load {folder}: a checkpoint of format torch loads only into its own layout ({chunks} chunk"
        )
    reads.assert_called_once()


def test_other_layers_of_the_stages_do_not_fit(reads: mock.Mock, folder: Path) -> None:
    saved = Namespace(virtual_pipeline_model_parallel_size=None)
    record_stages(saved, job_of("linear", [3, 5]))
    reads.side_effect = lambda script, load_arg: (script, saved)
    message = (
        r"its own layout \(1 chunk a rank, layers 3 5\), and this job has another \(1 chunk a rank, layers 4 4\): "
    )
    with pytest.raises(SessionError, match=message):
        checkpoint_of(folder).check_stages(job_of("linear"))


SHARDS = {"zero_bubble_vocabulary_parallel": "on"}


@pytest.mark.parametrize("now", [{}, SHARDS])
@pytest.mark.parametrize("was", [None, {}, SHARDS])
def test_a_file_a_rank_fits_only_with_or_without_vocabulary_shards(
    reads: mock.Mock, folder: Path, was: dict[str, str] | None, now: dict[str, str]
) -> None:
    """Megatron-LM would keep random values of parameters with other names. It saves no shards, and records nothing."""
    saved = Namespace()
    if was is not None:
        record_stages(saved, job_of("linear", **was))
    reads.side_effect = lambda script, load_arg: (script, saved)
    with nullcontext() if (was or {}) == now else pytest.raises(SessionError) as error:
        checkpoint_of(folder, finetune=True).check_stages(job_of("linear", **now))
    if error is not None:
        layers = "1 chunk a rank" if was is None else "1 chunk a rank, layers 4 4"
        had, has = ("", ", vocabulary shards") if now else (", vocabulary shards", "")
        assert f"({layers}{had}), and this job has another ({layers}{has}): " in str(error.value)


def test_a_checkpoint_without_arguments_is_loaded(reads: mock.Mock, folder: Path) -> None:
    reads.side_effect = lambda script, load_arg: script
    checkpoint_of(folder).check_stages(job_of("V"))


def test_sharded_checkpoints_are_not_read(reads: mock.Mock, folder: Path) -> None:
    checkpoint_of(with_shards(folder), ckpt_format="torch_dist").check_stages(job_of("V"))
    reads.assert_not_called()


@pytest.mark.parametrize("text", ["", "xyz", "4.5"])
def test_a_tracker_file_without_an_iteration_is_refused(folder: Path, text: str) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_text(f" {text}\n")
    with pytest.raises(SessionError, match=rf"^--load .*: latest_.*\.txt contains '{text}' in place of an iteration"):
        checkpoint_of(folder)


def test_a_step_without_a_checkpoint_is_refused(folder: Path) -> None:
    (folder / "iter_0000002").mkdir()
    with pytest.raises(SessionError, match=r"^--ckpt-step 5: --load .* has no such iteration \(it has 2, 4\)$"):
        checkpoint_of(folder, ckpt_step=5)


@pytest.mark.parametrize(
    ("saved", "script", "keeps"),
    [
        ({"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": False}, {}, True),
        ({"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}, {}, False),
        ({"use_distributed_optimizer": False, "dist_ckpt_optim_fully_reshardable": False}, {}, False),
        (
            {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": False},
            {"no_load_optim": True},
            False,
        ),
        ({"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": False}, {"finetune": True}, False),
    ],
)
def test_states_of_a_distributed_optimizer_may_fit_no_other_layout(
    reads: mock.Mock, folder: Path, saved: dict[str, bool], script: dict[str, bool], keeps: bool
) -> None:
    """Megatron-LM shards them by the buckets of DDP, unless the saved job had a flag."""
    reads.side_effect = lambda script, load_arg: (script, Namespace(**saved))
    settings = {"ckpt_format": "torch_dist", "use_distributed_optimizer": True, **script}
    assert checkpoint_of(with_shards(folder), **settings).keeps_optimizers_layout is keeps


def test_states_of_a_distributed_optimizer_that_do_not_fit_are_refused(reads: mock.Mock, folder: Path) -> None:
    saved = Namespace(use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=False)
    record_stages(saved, job_of("V"))
    reads.side_effect = lambda script, load_arg: (script, saved)
    checkpoint = checkpoint_of(with_shards(folder), ckpt_format="torch_dist", use_distributed_optimizer=True)
    checkpoint.check_stages(job_of("V"))
    with pytest.raises(SessionError) as error:
        checkpoint.check_stages(job_of("linear"))
    assert str(error.value) == (
        f"--load {folder}: the state of the distributed optimizer loads only into its own layout (2 chunks a rank, in "
        "a V, layers 2 2 2 2), and this job has another (1 chunk a rank, layers 4 4): choose flags that give the "
        "layout of the checkpoint, give --no-load-optim, or save the checkpoint again with its flags and "
        "--dist-ckpt-optim-fully-reshardable, which fits every layout"
    )


def test_states_of_which_no_shards_are_recorded_are_loaded_with_shards(reads: mock.Mock, folder: Path) -> None:
    """Version 0.2 recorded only chosen shards; megatron-core notices states that do not fit."""
    saved = Namespace(use_distributed_optimizer=True, dist_ckpt_optim_fully_reshardable=False)
    reads.side_effect = lambda script, load_arg: (script, saved)
    checkpoint = checkpoint_of(with_shards(folder), ckpt_format="torch_dist", use_distributed_optimizer=True)
    checkpoint.check_stages(job_of("linear", **SHARDS))
