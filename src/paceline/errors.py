"""Errors that a user can act on: one sentence says what is wrong, and what to do about it."""

from __future__ import annotations

__all__ = [
    "DivergedError",
    "OverrideWarning",
    "PacelineError",
    "PeerLostError",
    "RunStopped",
    "UsageError",
    "WorkerLostError",
    "first_line",
    "name_workers",
]


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


class DivergedError(PacelineError):
    """The loss or the parameters are no longer finite: the run ends as `diverged`."""


class OverrideWarning(UserWarning):
    """An algorithm overrides something that the user has chosen elsewhere."""


class UsageError(PacelineError, ValueError):
    """The input is wrong: the message names it and the remedy. The CLI prints the message and exits with code 2."""


class WorkerLostError(PacelineError, RuntimeError):
    """An algorithm that cannot go on without a worker lost one; the message names the workers present and missing."""


class PeerLostError(WorkerLostError):
    """A message could not be delivered.

    Attributes:
        peer: whom it was for.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"Worker {peer} cannot be reached: {why}.")
        self.peer = peer


class RunStopped(PacelineError):  # noqa: N818  (not an error of anybody: the run is over)
    """The supervisor stopped the run while this worker waited; whatever it was about to do was not done."""


def name_workers(ids: list[int]) -> str:
    """Workers in a sentence.

    >>> name_workers([2]), name_workers([0, 1, 3])
    ('worker 2', 'workers 0, 1 and 3')
    """
    if len(ids) == 1:
        return f"worker {ids[0]}"
    return f"workers {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


def first_line(error: BaseException) -> str:
    r"""What went wrong, as the end of a sentence of somebody else's.

    >>> first_line(UsageError("There is no file x.py.\nMake it.")), first_line(UsageError())
    ('There is no file x.py', 'UsageError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
