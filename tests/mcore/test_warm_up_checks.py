"""The warm-up's losses stay out of Megatron-LM's checks; tests/end_to_end/test_warm_up.py runs whole warm-ups."""

from __future__ import annotations

from megatron.core.rerun_state_machine import get_rerun_state_machine

from megatron.zero_bubble.mcore.warm_up import _results_unchecked


def test_megatron_lm_checks_no_result_of_the_warm_up() -> None:
    """A loss of random inputs may be infinite, and would count as the first result of the step."""
    machine = get_rerun_state_machine()
    results: list[float] = []

    def is_rejected(result: float) -> bool:
        results.append(result)
        return False

    def check() -> None:
        machine.validate_result(result=1.0, rejection_func=is_rejected, message="a loss", fatal=True)

    machine.mode = type(machine.mode).DISABLED  # rejected results then end the job
    with _results_unchecked():
        check()
    assert results == []
    check()
    assert results == [1.0]
