"""Turns errors of megatron-core about users' settings into one-line errors."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.zero_bubble.schedule.errors import one_line


@contextmanager
def as_users_mistake(subject: str, *refusals: type[Exception]) -> Iterator[None]:
    """Turn a megatron-core error into a one-line `ValueError` with the error's message or the failed line of code.

    Args:
        subject: the refused object, such as "this model".
        refusals: types of the errors.
    """
    try:
        yield
    except refusals as error:
        reason = one_line(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ValueError(f"megatron-core refuses {subject}: {reason}") from error
