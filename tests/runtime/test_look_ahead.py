"""Items that were seen are still there."""

from __future__ import annotations

from megatron.zero_bubble.runtime.look_ahead import LookAhead


def test_items_come_in_their_order_whether_they_were_seen_or_not():
    read: list[int] = []
    items = LookAhead(read.append(number) or number for number in range(5))
    assert next(items) == 0
    assert (items.peek(2), items.peek(1)) == ([1, 2], [1])
    assert read == [0, 1, 2]
    assert [next(items), *items.peek(9)] == [1, 2, 3, 4]
    assert list(items) == [2, 3, 4]
    assert items.peek(1) == []
