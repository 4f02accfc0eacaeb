"""Faults of the job."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="stall-timeout-in-minutes",
        file="session/stalls.py",
        old="    return _SHARE * 60.0 * flags.distributed_timeout_minutes if given is None else given",
        new="    return _SHARE * flags.distributed_timeout_minutes if given is None else given",
        effect="By default the watchdog ends a job after nine seconds at one operation, and not after nine minutes.",
    ),
    Fault(
        name="kept-input-not-divided-by-sequence-parallelism",
        file="session/profiled_costs.py",
        old="""    divided = model.tensor_model_parallel_size if model.sequence_parallel else 1
    return elements * element_bytes(model) / divided""",
        new="    return elements * element_bytes(model)",
        effect=(
            "With sequence parallelism, costs from a profile say that recomputation frees less memory than it does."
        ),
    ),
    Fault(
        name="timeline-window-ignores-a-resume",
        file="session/drawings.py",
        old="    after = iteration + (window[1] if window else 1)",
        new="    after = window[1] if window else 1",
        effect=(
            "A job that resumed from a checkpoint draws no timeline by default, because the iterations to draw "
            "are in the past."
        ),
    ),
    Fault(
        name="same-dropout-in-every-iteration",
        file="mcore/unit_seeds.py",
        old="            _begin(_mixed(seed, iteration(), model.current_microbatch, replica), _UnitKind.EMBEDDING, 0, _DEFAULT)",
        new="            _begin(_mixed(seed, model.current_microbatch, replica), _UnitKind.EMBEDDING, 0, _DEFAULT)",
        effect="With seeds by layer, every iteration draws the same dropout masks.",
    ),
    Fault(
        name="exit-interval-ignores-the-start",
        file="session/job_flags.py",
        old="            limits.append(self.exit_interval - start % self.exit_interval)",
        new="            limits.append(self.exit_interval)",
        effect=(
            "A resumed job that --exit-interval ends before its profile is complete no longer warns that there "
            "will be no plan from measured times."
        ),
    ),
    Fault(
        name="attention-dropout-forgotten-in-group-size",
        file="session/plans.py",
        old="    draws = any(getattr(flags, name, None) or flags.given_model.get(name) for name in RANDOM_SETTINGS)",
        new="    draws = any(getattr(flags, name, None) or flags.given_model.get(name) for name in RANDOM_SETTINGS[1:])",
        effect=(
            "With attention dropout alone, an interleaved plan may change the order of forwards, so that its "
            "losses differ from megatron-core's."
        ),
    ),
)
