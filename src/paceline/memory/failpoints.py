"""Points where a test, or a user's fault drill, can kill a worker with SIGKILL at a chosen moment.

Armed by the environment variable `PACELINE_FAIL_POINT`, `name@worker_id#hit`: `slots.claimed@2#40` kills worker 2
when it reaches that point for the 40th time. Not armed, a fail point costs one call and one comparison (30 ns).
"""

from __future__ import annotations

import os
import re
import signal

from paceline.errors import UsageError

ENVIRONMENT_VARIABLE = "PACELINE_FAIL_POINT"

FAIL_POINTS = (
    "copy.mid_write",  # a shard's second copy is about to make an update
    "lock.taken",  # a lock was just taken, for reading or for writing; nothing is written yet
    "locked.mid_write",  # the locked vector is marked as being written
    "lockstep.arrived",  # this worker has written its gradient and announced it; it still waits for the others
    "newcomers.let_in",  # this worker is about to give its state to a dead worker's replacement, which is let in by now
    "order.unwritten",  # this worker is about to record what timing decided, such as one half of an average that it has made
    "replicated.mid_write",  # this worker is marked as writing its own replica
    "served.mid_write",  # this server is marked as writing its shard
    "racing.mid_write",  # this worker is marked as writing the racing vector
    "ring.unwritten",  # this worker is about to write a step's record; its update, if there was one, is a version by now
    "slots.claimed",  # a slot belongs to this worker and holds nothing yet
    "slots.hazard_set",  # this worker protects the newest version from reuse and has not used it yet
    "slots.published",  # the new version is visible; its slot still carries this worker's claim
    "views.begun",  # this worker has begun a round of messages, and has sent none
)

_armed_name: str | None = None
_hits_left = 0


def arm(worker_id: int, incarnation: int = 0) -> None:
    """Arms this process, unless it is a restarted one, if the environment variable names it; refuses a wrong variable."""
    global _armed_name, _hits_left
    wanted = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not wanted:
        return
    parts = re.fullmatch(r"([a-z_.]+)@(\d+)#([1-9]\d*)", wanted)
    if parts is None or parts[1] not in FAIL_POINTS:
        raise UsageError(
            f"{ENVIRONMENT_VARIABLE}={wanted!r} is not name@worker_id#hit (such as slots.claimed@2#40) "
            f"with one of the names {', '.join(FAIL_POINTS)}"
        )
    if int(parts[2]) == worker_id and incarnation == 0:
        _armed_name, _hits_left = parts[1], int(parts[3])


def fail_point(name: str) -> None:
    """Kills this process if this point is armed and this is the chosen hit."""
    global _hits_left
    if name != _armed_name:
        return
    _hits_left -= 1
    if _hits_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
