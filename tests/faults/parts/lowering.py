"""Faults of the lowering."""

from __future__ import annotations

from tests.faults import Fault

FAULTS = (
    Fault(
        name="standstill-with-one-queue-not-raised",
        file="schedule/streams.py",
        old="""        run_on_streams(schedule, costs, HardwareQueues.MANY)
        raise
""",
        new="""        run_on_streams(schedule, costs, HardwareQueues.MANY)
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
        before = max(phases.starts[phases.of(message.consumer)], message.consumer - receive_ahead)
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
        name="slower-places-of-collectives-chosen",
        file="schedule/lower_collectives.py",
        old="""    return undisturbed if delay_of_collective <= delay_of_rank else running
""",
        new="""    return undisturbed if delay_of_collective > delay_of_rank else running
""",
        effect=(
            "With one hardware queue ranks take part in the collectives of vocabulary shards at the slower of two "
            "places, so that iterations take longer."
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
