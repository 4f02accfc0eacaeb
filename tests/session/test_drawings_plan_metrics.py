"""A plan reaches TensorBoard: why ranks will idle, and the schedule's picture."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.zero_bubble.planner import generate
from megatron.zero_bubble.planner.prediction import Prediction
from megatron.zero_bubble.runtime.plan_report import Report
from megatron.zero_bubble.schedule import StageCosts, simulate
from megatron.zero_bubble.schedule.formats import Profile
from megatron.zero_bubble.schedule.kinds import KINDS, OpKind
from megatron.zero_bubble.session.drawings import cause_scalars, plan_picture, write_plan

COSTS = StageCosts.uniform(3, time_f=1.0, time_b=1.0, time_w=1.0)
SCHEDULE = generate("zb-h1", 3, 4)
REPORT = Report(Prediction(Profile(SCHEDULE.placement, COSTS, 0.0, {}), SCHEDULE), True, None, 6)


def test_the_causes_add_up_to_the_predicted_idle_share() -> None:
    timeline = simulate(generate("1f1b", 3, 4), COSTS)
    scalars = cause_scalars(timeline)
    assert sum(scalars.values()) == pytest.approx(timeline.idle.total)
    assert scalars["predicted-idle/warmup"] == pytest.approx(3 / 3 / float(timeline.cost), rel=0.01)
    assert all(tag.startswith("predicted-idle/") and " " not in tag for tag in scalars)


def test_the_picture_has_every_kind_of_operation_in_its_colour() -> None:
    picture = plan_picture(simulate(generate("zb-h1", 3, 4), COSTS))
    assert picture.shape == (3 * 28, 1600, 3)
    for kind in (OpKind.F, OpKind.B, OpKind.W):
        colour = [int(KINDS[kind].colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert (picture == np.array(colour)).all(axis=2).sum() > 1000


def test_weights_and_biases_gets_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, Any], int]] = []
    html = SimpleNamespace(Html=lambda text, inject: text, log=lambda values, step: logged.append((values, step)))
    monkeypatch.setitem(sys.modules, "wandb", html)
    write_plan(REPORT, 6, None, html)
    assert {step for _, step in logged} == {6}
    values = {tag: value for part, _ in logged for tag, value in part.items()}
    assert values["zero-bubble/schedule"].startswith("<svg")
    assert "predicted-idle/warmup" in values


def test_tensorboard_gets_the_plan(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    write_plan(REPORT, 6, writer, None)
    writer.close()
    events = EventAccumulator(str(tmp_path), {"images": 0, "scalars": 0})
    events.Reload()
    assert [image.step for image in events.Images("zero-bubble/schedule")] == [6]
    assert "predicted-idle/tail" in events.Tags()["scalars"]
