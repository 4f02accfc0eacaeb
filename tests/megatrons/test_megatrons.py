"""Under the launcher, Megatron's own trainer computes with every schedule what it computes with its own.

`make test-megatron` runs this for each version. A case is a line of `CASES`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.launch import run
from tests.launcher.launched import launch

TRAINER = find_spec("megatron.training")
pytestmark = pytest.mark.skipif(TRAINER is None, reason="there is no megatron.training: make test-megatron fetches it")
FOLDER = Path(TRAINER.origin).parents[2] if TRAINER is not None and TRAINER.origin is not None else Path()
"""A wheel, unpacked, or a checkout of Megatron-LM."""

SHAPE = (
    *("--pipeline-model-parallel-size", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--micro-batch-size", "1", "--global-batch-size", "4"),
    *("--transformer-impl", "local", "--distributed-backend", "gloo", "--use-cpu-initialization"),
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion", "--no-rope-fusion"),
    *("--no-bias-dropout-fusion", "--no-gradient-accumulation-fusion", "--no-persist-layer-norm"),
)
TRAINING = (
    *("--train-iters", "6", "--lr", "1e-2", "--clip-grad", "0.5", "--eval-interval", "3", "--eval-iters", "1"),
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "120", "--num-workers", "0"),
    *("--log-interval", "1", "--ckpt-format", "torch_dist", "--save-interval", "6"),
)
GPT = "--num-layers 4"
HYBRID = "--hybrid-layer-pattern *-*-|*-*- --spec megatron.zero_bubble.mcore.hybrid_spec stack_spec"


@dataclass(frozen=True)
class Case:
    """A training under a schedule of ours, which is compared with one under Megatron's.

    Attributes:
        model: Megatron's flags, of both trainings.
        zero_bubble: the launcher's flags.
        base: the launcher's flags of the training to compare with; none for Megatron's own schedule.
        rounding: largest relative difference of a printed number; 0 where all numbers and parameters must be equal.
    """

    model: str
    zero_bubble: str
    base: str = ""
    rounding: float = 0.0


ZB_H1 = "--zero-bubble-schedule zb-h1"
BY_LAYER = "--zero-bubble-seed-by-layer"
"""Initial weights that do not depend on the layout."""
CASES = {
    "zb-h1": Case(GPT, ZB_H1),
    "zb-2p, post-validated": Case(
        f"{GPT} --log-interval 3", "--zero-bubble-schedule zb-2p --zero-bubble-post-validation"
    ),
    "planned": Case(GPT, "--zero-bubble --zero-bubble-keep-layout --zero-bubble-profile-iters 1 2"),
    "chosen layout": Case(
        GPT, f"--zero-bubble {BY_LAYER}", base=f"--zero-bubble-schedule 1f1b {BY_LAYER}", rounding=1e-4
    ),
    "vocabulary shards": Case(GPT, f"{ZB_H1} --zero-bubble-vocabulary-parallel on", rounding=1e-4),
    "hybrid, zb-h1": Case(HYBRID, ZB_H1),
}


class MegatronTrainings:
    """Trainings of Megatron's script on two ranks, each of which runs when a test first asks for it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folders: dict[str, Path] = {}
        self._outputs: dict[str, str] = {}

    def folder(self, flags: str) -> Path:
        """The folder to which the training with these flags saves."""
        return self._folders.setdefault(flags, self._root / str(len(self._folders)))

    def command(self, flags: str) -> tuple[Path, list[str]]:
        """The script and the arguments of a training."""
        name = "pretrain_hybrid.py" if "--hybrid" in flags else "pretrain_gpt.py"
        script = FOLDER / name
        if not script.exists():  # a wheel has no scripts
            script = Path(__file__).with_name("pretrain.py")
        return script, [*SHAPE, *TRAINING, "--save", str(self.folder(flags)), *flags.split(), "--zero-bubble-cpu"]

    def output(self, flags: str) -> str:
        """What the ranks print."""
        if flags not in self._outputs:
            script, arguments = self.command(flags)
            job = launch(2, script, *arguments)
            assert job.status == 0, f"status {job.status}: {job.output[-2000:]}{job.errors[-6000:]}"
            self._outputs[flags] = job.output
        return self._outputs[flags]

    def numbers(self, flags: str) -> list[str]:
        return numbers(self.output(flags))

    def parameters(self, flags: str) -> dict[str, torch.Tensor]:
        """The parameters and the state of the optimizer after the last iteration."""
        self.output(flags)
        (folder,) = self.folder(flags).glob("iter_*")
        reader = FileSystemReader(folder)
        state = {
            name: torch.empty(found.size, dtype=found.properties.dtype)
            for name, found in reader.read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        load(state, storage_reader=reader, no_dist=True)
        return state


def numbers(output: str) -> list[str]:
    """Losses, norms and perplexities in the order in which they are printed, without the times."""
    return re.findall(r"(?:loss|grad norm|loss value|loss PPL): (\S+)", output)


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not equal."""
    assert found.keys() == expected.keys()
    return [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> MegatronTrainings:
    return MegatronTrainings(tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_schedule_computes_what_megatrons_computes(trainings: MegatronTrainings, case: Case) -> None:
    if "--hybrid" in case.model and not (FOLDER / "megatron" / "core" / "models" / "hybrid").exists():
        pytest.skip("this Megatron is older than hybrid models")
    ours, base = f"{case.model} {case.zero_bubble}", f"{case.model} {case.base}"
    assert "bubble rate:" in trainings.output(ours)
    if case.rounding:
        found, expected = ([float(number) for number in trainings.numbers(flags)] for flags in (ours, base))
        assert found == pytest.approx(expected, rel=case.rounding)
        return
    assert trainings.numbers(ours) == trainings.numbers(base)
    assert different(trainings.parameters(ours), trainings.parameters(base)) == []


@pytest.mark.parametrize(("first", "then"), [("", ZB_H1), (ZB_H1, "")], ids=["to zb-h1", "from zb-h1"])
def test_a_checkpoint_does_not_depend_on_the_schedule(trainings: MegatronTrainings, first: str, then: str) -> None:
    """The other schedule goes on as Megatron's goes on from its own checkpoint, and ends as it would without a stop."""
    stopped, own = f"{GPT} --exit-interval 4 {first}", f"{GPT} --exit-interval 4 "
    for flags in (stopped, own):
        trainings.output(flags)
    resumed = f"{GPT} --load {trainings.folder(stopped)} {then}"
    assert trainings.numbers(resumed) == trainings.numbers(f"{GPT} --load {trainings.folder(own)}")
    assert different(trainings.parameters(resumed), trainings.parameters(f"{GPT} ")) == []


def test_torchrun_starts_it(trainings: MegatronTrainings) -> None:
    """As a user does; the other trainings are forked from a process that has imported Megatron."""
    flags = f"{GPT} {ZB_H1}"
    script, arguments = trainings.command(flags)
    job = run(2, "-m", "megatron.zero_bubble", str(script), *arguments)
    assert job.returncode == 0, job.stderr[-6000:]
    assert numbers(job.stdout) == trainings.numbers(flags)
