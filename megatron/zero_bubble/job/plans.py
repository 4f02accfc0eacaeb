"""From flags to the plan of schedules and the placement of stages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.zero_bubble.job.layers import check_given_layers, choose_layout
from megatron.zero_bubble.job.profiling import memory_limit
from megatron.zero_bubble.schedule import Infeasible, Placement, Schedule, ScheduleError, simulate
from megatron.zero_bubble.schedule.errors import one_line
from megatron.zero_bubble.schedule.formats import schedule_from_text
from megatron.zero_bubble.schedule.generators import default_costs, placement_for
from megatron.zero_bubble.schedule.plan import FixedPlan, NamedPlan, Plan
from megatron.zero_bubble.training.arguments import Arguments
from megatron.zero_bubble.training.size_checks import planning_seconds

_FILE = "file:"
_SILENT_SECONDS = 5.0
"""That planning may take without a word."""
_REPEATS = 1000
"""That a layout may have whatever the number of layers: of stages without a layer, for example."""


def choose_plan(args: Arguments) -> Plan | None:
    """The plan that the flags ask for; None for megatron-core's own schedule. `check_plan` says whether it works.

    Raises:
        ValueError: no such schedule, or it does not fit the number of ranks or chunks.
    """
    name = args.schedule
    if name is None:
        return None
    num_ranks, num_chunks = args.pipeline_model_parallel_size, args.model_chunks
    if num_ranks < 2:
        by = f"--zero-bubble-schedule {name}" if args.zero_bubble_schedule else "--zero-bubble"
        raise ValueError(f"{by} needs --pipeline-model-parallel-size of at least 2, got {num_ranks}")
    with _as_users_mistake(args, name):
        if not name.startswith(_FILE):
            placement_for(name, num_ranks, num_chunks)
            return _named_plan(args, name, num_chunks)
        plan = FixedPlan(_read(Path(name.removeprefix(_FILE))))
        if plan.placement.num_ranks != num_ranks:
            raise ScheduleError(f"the schedule is for {plan.placement.num_ranks} ranks")
        if num_chunks is not None and plan.placement.num_chunks != num_chunks:
            raise ScheduleError(f"the schedule is for {plan.placement.num_chunks} chunks a rank, not {num_chunks}")
        return plan


def check_plan(args: Arguments, plan: Plan | None) -> None:
    """Make every schedule that the run needs, to see that it can be made.

    Raises:
        ValueError: there is none for some number of microbatches, or under the memory limit.
    """
    if plan is None:
        return
    assert args.schedule is not None
    sizes = _batch_sizes(args)
    if not isinstance(plan, FixedPlan):
        seconds = planning_seconds(args, sizes)
        if seconds > _SILENT_SECONDS and args.rank == 0:
            print(f" > planning schedule {plan.name} for up to {_most_microbatches(args)} microbatches", flush=True)
    with _as_users_mistake(args, args.schedule):
        for size in sizes:
            plan.schedule(_num_microbatches(args, size))
        if isinstance(plan, FixedPlan):
            if plan.given.has_post_validation and not args.zero_bubble_post_validation:
                raise ScheduleError("its STEP and VALIDATE need --zero-bubble-post-validation")
            _check_memory(args, plan.given)


@contextmanager
def _as_users_mistake(args: Arguments, name: str) -> Iterator[None]:
    """Name the flag that asks for what cannot be planned."""
    try:
        yield
    except Infeasible as error:
        raise ValueError(
            f"{limit_flag(args)}: schedule {name} needs {_multiple(args, error.smallest_limit)}"
        ) from error
    except ScheduleError as error:
        raise ValueError(f"--zero-bubble-schedule {name}: {error}") from error


def _named_plan(args: Arguments, name: str, num_chunks: int | None) -> NamedPlan:
    """The plan before anything is measured: all stages cost the same, memory in M_B."""
    num_ranks, limit = args.pipeline_model_parallel_size, memory_limit(args)
    in_unit_costs = None
    if limit is not None:
        in_unit_costs = limit.in_unit_costs(num_ranks, _most_microbatches(args))
        if in_unit_costs is None and name == "auto":
            # Bytes say nothing yet: begin with what 1F1B takes.
            in_unit_costs = float(num_ranks)
    return NamedPlan(
        name,
        num_ranks,
        num_chunks,
        memory_limit=in_unit_costs,
        group_size=args.microbatch_group_size_per_virtual_pipeline_stage,
    )


def _check_memory(args: Arguments, schedule: Schedule) -> None:
    """A schedule file cannot adapt to a limit. What bytes allow is known once the run has been measured."""
    limit = memory_limit(args)
    in_unit_costs = limit.in_unit_costs(schedule.num_ranks, schedule.num_microbatches) if limit is not None else None
    peak = max(simulate(schedule, default_costs(schedule.placement)).peak_memory)
    if in_unit_costs is not None and peak > in_unit_costs * (1 + 1e-9):
        raise Infeasible("it does not fit under the limit", peak)


def limit_flag(args: Arguments) -> str:
    """The memory limit as the user gave it."""
    pending = args.zero_bubble_max_pending_backward
    if pending is not None:
        return f"--zero-bubble-max-pending-backward {pending}"
    return f"--zero-bubble-memory-limit {args.zero_bubble_memory_limit or '1 (the default)'}"


def _multiple(args: Arguments, smallest: float) -> str:
    """A limit in M_B in the words of the flag that set it, rounded so that it suffices."""
    if args.zero_bubble_max_pending_backward is not None:
        return f"at least {math.ceil(smallest - 1e-9)}"
    peak = min(args.pipeline_model_parallel_size, _most_microbatches(args))
    return f"at least {math.ceil(smallest / peak * 1000 - 1e-6) / 1000:g} times 1F1B's peak"


def choose_placement(args: Arguments, plan: Plan | None) -> Placement:
    """Where the stages are: as the plan has it, or as megatron-core's own schedule does."""
    if plan is not None:
        return plan.placement
    num_chunks = args.model_chunks or 1
    return Placement("interleaved" if num_chunks > 1 else "linear", args.pipeline_model_parallel_size, num_chunks)


def check_stages(args: Arguments, placement: Placement) -> None:
    """Refuse layers that do not fit the stages; `--allow-padding-num-layers` is turned into a layout.

    Raises:
        ValueError: which flags contradict each other.
    """
    # megatron-core counts a layout's layers by the process's own rank, whatever stage it is told to build.
    uneven = args.pipeline_model_parallel_layout is not None or _has_uneven_ranks(args)
    if placement.kind == "v" and uneven:
        raise ValueError(f"--zero-bubble-schedule {args.schedule} places layers in a V, in even stages: no layout")
    if placement.kind == "v" and args.mtp_num_layers is not None:
        raise ValueError(
            f"--zero-bubble-schedule {args.schedule} places layers in a V, which ends on the first rank, and "
            "megatron-core puts the layers of --mtp-num-layers on the last: choose a schedule that is not a V"
        )
    if uneven:
        check_given_layers(args, placement)
    else:
        args.pipeline_model_parallel_layout = choose_layout(args, placement)


def _has_uneven_ranks(args: Arguments) -> bool:
    return args.decoder_first_pipeline_num_layers is not None or args.decoder_last_pipeline_num_layers is not None


def chunks_of_flags(args: Arguments) -> int | None:
    """Chunks a rank, if Megatron's flags ask for several.

    Raises:
        ValueError: the flags contradict each other or do not divide the layers.
    """
    per_rank, per_chunk = args.num_virtual_stages_per_pipeline_rank, args.num_layers_per_virtual_pipeline_stage
    if per_rank is not None and per_chunk is not None:
        raise ValueError(
            "give --num-virtual-stages-per-pipeline-rank or --num-layers-per-virtual-pipeline-stage, not both"
        )
    pipeline = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        return _chunks_of_layout(args)
    if per_chunk is not None:
        ends = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        if not args.allow_padding_num_layers and (args.num_layers + ends) % (pipeline * per_chunk) != 0:
            counted = f", with {ends} for the embedding and the loss," if ends else ""
            raise ValueError(
                f"--num-layers {args.num_layers}{counted} is not a multiple of --pipeline-model-parallel-size "
                f"{pipeline} x --num-layers-per-virtual-pipeline-stage {per_chunk}"
            )
        per_rank = -(-(args.num_layers + ends) // (pipeline * per_chunk))
    if per_rank is not None and per_rank > 1 and pipeline < 2:
        raise ValueError(f"several model chunks a rank need --pipeline-model-parallel-size above 1, got {pipeline}")
    # The embedding and the loss may have a stage each to themselves.
    if per_rank is not None and per_rank * pipeline > args.num_layers + 2:
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {per_rank} x --pipeline-model-parallel-size {pipeline} are more "
            f"stages than --num-layers {args.num_layers}"
        )
    return per_rank if per_rank is not None and per_rank > 1 else None


def _chunks_of_layout(args: Arguments) -> int | None:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout, pipeline = args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    assert layout is not None
    most = max(args.num_layers, _REPEATS)
    for repeats in re.findall(r"\*(\d+)", layout):
        # megatron-core writes them out.
        if len(repeats) > len(str(most)) or int(repeats) > most:
            raise ValueError(
                f"--pipeline-model-parallel-layout {layout} repeats something {repeats} times, but --num-layers is "
                f"{args.num_layers}"
            )
    try:
        parsed = PipelineParallelLayerLayout(layout, pipeline)
    except (AssertionError, ValueError, KeyError) as error:
        reason = one_line(error)
        raise ValueError(f"--pipeline-model-parallel-layout {layout}: megatron-core refuses it: {reason}") from error
    chunks = parsed.virtual_pipeline_model_parallel_size
    return chunks if chunks > 1 else None


def _batch_sizes(args: Arguments) -> range:
    """Every global batch size that a step of this run has: one, unless the batch grows."""
    assert args.global_batch_size is not None
    start, increment, _ = args.rampup_batch_size or (args.global_batch_size, 1, 0)
    return range(start, args.global_batch_size + 1, increment)


def _num_microbatches(args: Arguments, batch_size: int) -> int:
    return batch_size // (args.micro_batch_size * args.data_parallel_size)


def _most_microbatches(args: Arguments) -> int:
    return _num_microbatches(args, _batch_sizes(args)[-1])


def _read(path: Path) -> Schedule:
    try:
        return schedule_from_text(path.read_text(encoding="utf-8"), name=path.stem)
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot be read: {error}") from None
