"""Replicas of a script's pipeline that average their parameters train as replicas that reduce gradients do.

These trainings are exhaustive: `tests/end_to_end/test_hierarchical_sgd.py` trains replicas with our own trainer.
"""

from __future__ import annotations

import pytest
import torch

from tests.launcher.script_trainings import ScriptTrainings, Training

REPLICAS = ("--pipeline-model-parallel-size", "2", "--optimizer", "sgd", "--clip-grad", "0", "--train-iters", "6")
"""On four ranks, two replicas of a pipeline."""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> ScriptTrainings:
    """Trainings on four ranks: gradients reduced, and parameters averaged often and seldom."""
    seldom = {"schedule": "zb-2p", "post_validation": True, "hierarchical_sgd": "4:2"}
    table = {
        "reduced": Training({"schedule": "zb-h1"}, REPLICAS),
        "averaged": Training({"schedule": "zb-h1", "hierarchical_sgd": "1:2"}, REPLICAS),
        "averaged, logged sometimes": Training(
            {"schedule": "zb-h1", "hierarchical_sgd": "1:2"}, (*REPLICAS, "--log-interval", "3")
        ),
        "averaged seldom": Training(seldom, REPLICAS, saves=True),
    }
    return ScriptTrainings(4, table, tmp_path_factory.mktemp("replicas"))


@pytest.mark.exhaustive
def test_replicas_that_average_every_iteration_have_the_numbers_of_those_that_reduce_gradients(
    replicas: ScriptTrainings,
) -> None:
    """Up to rounding: six losses, of which the script prints the mean over replicas, and that of the validation."""
    reduced, averaged, seldom = (
        [float.fromhex(loss) for loss in replicas.losses(name)] for name in ("reduced", "averaged", "averaged seldom")
    )
    assert len(reduced) == 7
    assert averaged == pytest.approx(reduced, rel=1e-6)
    assert seldom[0] == reduced[0]
    assert seldom[2:] != pytest.approx(reduced[2:], rel=1e-6)


@pytest.mark.exhaustive
def test_a_log_line_has_the_mean_loss_of_all_replicas_over_its_iterations(replicas: ScriptTrainings) -> None:
    *losses, validation = [float.fromhex(loss) for loss in replicas.losses("averaged")]
    logged = [float.fromhex(loss) for loss in replicas.losses("averaged, logged sometimes")]
    assert logged == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3, validation], rel=1e-6)


@pytest.mark.exhaustive
def test_what_is_saved_is_the_same_on_all_replicas(replicas: ScriptTrainings) -> None:
    """After iteration 6, where replicas that average every fourth have stepped alone twice."""
    replicas.run("averaged seldom")
    saved = replicas.folder / "averaged seldom"
    states = [torch.load(saved / f"rank_{rank}.pt", weights_only=False) for rank in range(2)]
    (_, [model], optimizer, _), (_, [other_model], other_optimizer, _) = states
    weights = [name for name, value in model.items() if isinstance(value, torch.Tensor)]
    assert weights
    assert all(torch.equal(model[name], other_model[name]) for name in weights)
    moments, other_moments = optimizer["state"], other_optimizer["state"]
    assert moments
    for parameter, state in moments.items():
        assert torch.equal(state["momentum_buffer"], other_moments[parameter]["momentum_buffer"])
