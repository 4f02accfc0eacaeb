"""Makes the child processes of a rank (loader workers, checkpoint writers) end together with the rank.

Python itself ends child processes only at a regular exit, and then waits for them without limit. Without this module,
a killed rank would leave its child processes running, and a child that ignores SIGTERM would prevent the exit of its
rank.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time


def end_with_parent(death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Make Linux send `death_signal` to this process as soon as the thread that has forked this process ends.

    On operating systems other than Linux, `end_with_parent` does nothing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, death_signal)  # 1 is PR_SET_PDEATHSIG


def tie_children() -> None:
    """Tie later child processes of the main thread to this process: each child ends as soon as this process ends.

    Children that other threads fork are not affected, because the kernel would end each of these children as soon as
    the thread that has forked the child ends.
    """
    is_main_thread = False

    def remember_thread() -> None:
        nonlocal is_main_thread
        is_main_thread = threading.current_thread() is threading.main_thread()

    def tie() -> None:
        if is_main_thread:
            end_with_parent()

    os.register_at_fork(before=remember_thread, after_in_child=tie)


def end_children(patience: float = 2.0) -> None:
    """End the daemonic children of `multiprocessing`, for which Python would wait without limit at exit.

    Args:
        patience: seconds between the SIGTERM to all children and the SIGKILL to children that are still alive.
    """
    children = [child for child in multiprocessing.active_children() if child.daemon]
    # torch's SIGCHLD handler raises an error in this process when a loader worker that it counts as working ends.
    if children and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in children:
        child.terminate()
    deadline = time.monotonic() + patience
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
