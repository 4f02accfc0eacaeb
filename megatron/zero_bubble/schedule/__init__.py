"""Pipeline schedules: operations, placements, costs, simulation and validation. The package does not need torch."""

from megatron.zero_bubble.schedule.analysis import Bubble, bubbles, critical_path
from megatron.zero_bubble.schedule.costs import StageCosts
from megatron.zero_bubble.schedule.errors import (
    Deadlock,
    Infeasible,
    InvalidSchedule,
    ScheduleError,
    UnknownSchedule,
)
from megatron.zero_bubble.schedule.ir import Op, Placement, Schedule
from megatron.zero_bubble.schedule.kinds import OpKind
from megatron.zero_bubble.schedule.lower import lower
from megatron.zero_bubble.schedule.simulate import simulate
from megatron.zero_bubble.schedule.step_ops import iteration_time, repeat, with_post_validation
from megatron.zero_bubble.schedule.timeline import HardwareQueues, Idle, TimedOp, Timeline
from megatron.zero_bubble.schedule.validate import validate

__all__ = [
    "Bubble",
    "Deadlock",
    "HardwareQueues",
    "Idle",
    "Infeasible",
    "InvalidSchedule",
    "Op",
    "OpKind",
    "Placement",
    "Schedule",
    "ScheduleError",
    "StageCosts",
    "TimedOp",
    "Timeline",
    "UnknownSchedule",
    "bubbles",
    "critical_path",
    "iteration_time",
    "lower",
    "repeat",
    "simulate",
    "validate",
    "with_post_validation",
]
