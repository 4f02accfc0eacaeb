"""Faults of the lowering."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="standstill-with-one-queue-not-raised",
        file="schedule/streams.py",
        old="""        replay.run(HardwareQueues.MANY)  # if that stands still, too, the error is not about the queue
        raise
""",
        new="""        replay.run(HardwareQueues.MANY)  # if that stands still, too, the error is not about the queue
""",
        effect=(
            "A given schedule with messages that stands still with CUDA_DEVICE_MAX_CONNECTIONS=1 is accepted, and "
            "the training hangs."
        ),
    ),
    Fault(
        name="receives-out-of-the-order-of-sends",
        file="schedule/lower.py",
        old="""        places.append(_Place(min(before, places[-1].before) if places else before, turn))
""",
        new="""        places.append(_Place(before, turn))
""",
        effect=(
            "Where a rank uses the messages of one channel in another order than they are sent, receives stand in "
            "the wrong order, and the schedule is refused."
        ),
    ),
    Fault(
        name="receive-posted-before-its-phase",
        file="schedule/lower.py",
        old="""    phases = order.phases[channel.destination]
    places: list[_Place] = []
    for message, turn in reversed(list(zip(channel.messages, _turns(channel, order), strict=True))):
        before = max(phases.begins[phases.of(message.consumer)], message.consumer - receive_ahead)
""",
        new="""    places: list[_Place] = []
    for message, turn in reversed(list(zip(channel.messages, _turns(channel, order), strict=True))):
        before = max(0, message.consumer - receive_ahead)
""",
        effect=(
            "With post-validation a receive may be posted before VALIDATE although its message is sent after it, "
            "and the schedule is refused."
        ),
    ),
    Fault(
        name="collective-may-cross-validation",
        file="schedule/lower_collectives.py",
        old="""    next_phase = (number for number in order.first_of_phase if number > last_maker)
    earliest = [0] * schedule.num_ranks
    for rank, position in made_at:
        earliest[rank] = max(earliest[rank], position + 1)
    users = (order.numbers[rank][position] for rank, position in used_at)
    total = sum(map(len, order.numbers))
    return _Collective(op, last_maker, ready, min([total, *users, *next_phase]), tuple(earliest))
""",
        new="""    earliest = [0] * schedule.num_ranks
    for rank, position in made_at:
        earliest[rank] = max(earliest[rank], position + 1)
    users = (order.numbers[rank][position] for rank, position in used_at)
    total = sum(map(len, order.numbers))
    return _Collective(op, last_maker, ready, min([total, *users]), tuple(earliest))
""",
        effect=(
            "With vocabulary shards and post-validation some ranks may take part in a collective before VALIDATE "
            "and others after it, and the schedule is refused."
        ),
    ),
    Fault(
        name="message-does-not-wait-for-the-one-before",
        file="schedule/launches.py",
        old="""        self.complete.append((max(start, self.complete[-1]) if index else start) + time)
""",
        new="""        self.complete.append(start + time)
""",
        effect=(
            "Times predicted for hardware queues are too short where messages of one channel queue up behind each "
            "other."
        ),
    ),
    Fault(
        name="slower-places-of-receives-chosen",
        file="schedule/lower.py",
        old="""    return between if _time_with_one_queue(between, costs) < time else ahead
""",
        new="""    return between if _time_with_one_queue(between, costs) > time else ahead
""",
        effect=(
            "Schedules that lose time or stand still with one hardware queue keep the bad places of their "
            "receives: they are slower, or refused as a deadlock."
        ),
    ),
)
