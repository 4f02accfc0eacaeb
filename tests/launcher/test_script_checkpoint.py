"""A checkpoint that Megatron-LM cannot load into the job's model chunks is refused; `torch_dist` fits every layout."""

from __future__ import annotations

import sys
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

from megatron.zero_bubble.launcher import script_checkpoint
from megatron.zero_bubble.launcher.script_checkpoint import ScriptCheckpoint, record_stages
from megatron.zero_bubble.schedule import Placement
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


PLACEMENTS = {
    "linear": Placement("linear", 2),
    "interleaved": Placement("interleaved", 2, 2),
    "interleaved, 4 chunks": Placement("interleaved", 2, 4),
    "V": Placement("v", 2, 2),
}


def partition_of(placement: Placement) -> list[int]:
    return [8 // placement.num_stages] * placement.num_stages


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
        record_stages(saved, PLACEMENTS[was], partition_of(PLACEMENTS[was]))
    reads.side_effect = lambda script, load_arg: (script, saved)
    checkpoint = checkpoint_of(folder)
    fits = was == now
    with nullcontext() if fits else pytest.raises(SessionError, match=r"^[^\n]+$") as error:
        checkpoint.check_stages(PLACEMENTS[now], partition_of(PLACEMENTS[now]))
    if error is not None:
        assert str(error.value).startswith(
            f"--load {folder}: a checkpoint of format torch loads only into its own layout ({chunks} chunk"
        )
    reads.assert_called_once()


def test_other_layers_of_the_stages_do_not_fit(reads: mock.Mock, folder: Path) -> None:
    saved = Namespace(virtual_pipeline_model_parallel_size=None)
    record_stages(saved, PLACEMENTS["linear"], [3, 5])
    reads.side_effect = lambda script, load_arg: (script, saved)
    message = (
        r"its own layout \(1 chunk a rank, layers 3 5\), and this job has another \(1 chunk a rank, layers 4 4\): "
    )
    with pytest.raises(SessionError, match=message):
        checkpoint_of(folder).check_stages(PLACEMENTS["linear"], [4, 4])


def test_a_checkpoint_without_arguments_is_loaded(reads: mock.Mock, folder: Path) -> None:
    reads.side_effect = lambda script, load_arg: script
    checkpoint_of(folder).check_stages(PLACEMENTS["V"], [2] * 4)


def test_sharded_checkpoints_are_not_read(reads: mock.Mock, folder: Path) -> None:
    checkpoint_of(with_shards(folder), ckpt_format="torch_dist").check_stages(PLACEMENTS["V"], [2] * 4)
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
    assert checkpoint_of(with_shards(folder), ckpt_format="torch_dist", **script).keeps_optimizers_layout is keeps
