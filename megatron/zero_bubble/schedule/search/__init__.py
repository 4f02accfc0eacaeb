"""How the generators that search build a schedule: orders of operations, weighed by the time they take.

- `problem`: what is to be planned, flattened for speed, and the smallest memory limit that works.
- `event_loop`: the event loop that all planners share, and its result, `PlannedOrders`.
- `fill`: a given order of F and B, into which W goes where it costs least.
- `greedy`: no order given; for one chunk a rank, every rank decides when it is free.
- `profiles`: the orders worth trying for one chunk a rank.
- `dropping`: for one chunk a rank, which microbatches to drop where a memory limit demands it.
- `blocks`: the orders worth trying for a V.
- `preference`: no order given; for a V, every free rank runs what it prefers.
- `ways`: when every operation of complete orders starts, and the critical path.
- `local`: improves complete orders of any placement by moving one operation at a time.
- `fitting`: drops activations of a plan that keeps everything, until it fits.
- `portfolio`: tries candidates and keeps the best; chooses between whole schedules by simulation.
"""
