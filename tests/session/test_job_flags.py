"""What follows from the flags of a job."""

from __future__ import annotations

from megatron.zero_bubble.session.job_flags import JobFlags


def test_a_job_ends_at_the_next_multiple_of_the_exit_interval() -> None:
    flags = JobFlags(train_iters=10, exit_interval=4)
    assert [flags.num_iterations(start) for start in range(11)] == [4, 3, 2, 1, 4, 3, 2, 1, 2, 1, 0]
