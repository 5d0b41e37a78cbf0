"""Errors that a user can act on: one sentence says what is wrong and how to fix it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from numbers import Real
from typing import Any

_SHOWN_CHARACTERS = 80


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


class DivergedError(PacelineError):
    """The loss or the parameters are no longer finite: the run ends as `diverged`."""


class OverrideWarning(UserWarning):
    """An algorithm overrides a choice that the user has made elsewhere."""


class AlgorithmWarning(UserWarning):
    """An algorithm's arguments are valid but probably not intended."""


class ClippingWarning(UserWarning):
    """A loop clips its own gradient although an update is the mean of several workers' gradients."""


class NotFiniteWarning(UserWarning):
    """A gradient with infinite elements or NaN was left out, as it cannot be encoded."""


class UsageError(PacelineError, ValueError):
    """The input is wrong: the message names it and the remedy. The CLI prints the message and exits with code 2."""


class NotWrittenError(PacelineError):
    """A file cannot be written: the message names it, the reason, and the remedy. An existing file is unchanged.

    Attributes:
        run: if a run has ended and only its files are missing, what it measured (`RunData`); else None.
    """

    run: Any = None


class NotReplacedError(PacelineError):
    """This process cannot take a dead worker's place, and the others go on without it.

    Attributes:
        why: a clause for a sentence that names the worker.
        can_try_again: whether another process may be able to.
    """

    def __init__(self, why: str, *, can_try_again: bool = False) -> None:
        super().__init__(f"This process cannot take a dead worker's place: {why}.")
        self.why, self.can_try_again = why, can_try_again


class WorkerLostError(PacelineError, RuntimeError):
    """An algorithm lost a worker without which it cannot continue; the message names the workers present and missing."""


class ExcludedError(WorkerLostError):
    """This worker could not reach the others, which may continue without it.

    Attributes:
        why: what happened, as a sentence.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"{why} Start it again to take part, if the others still train.")
        self.why = why


class PeerLostError(WorkerLostError):
    """A message could not be delivered.

    Attributes:
        peer: the recipient.
    """

    def __init__(self, peer: int, why: str) -> None:
        super().__init__(f"Worker {peer} cannot be reached: {why}.")
        self.peer = peer


class NoGradient(PacelineError):  # noqa: N818  (nor is this)
    """Tells a worker's program that the user's loop has ended, without a gradient for the step that it began.

    No further steps follow, and `replica.samples` is 0. A program that has told others of this step ends it as one without
    a batch.
    """


class RunStopped(PacelineError):  # noqa: N818  (not an error: the run is over)
    """The supervisor stopped the run while this worker waited; the operation was not carried out."""


def exits_in_order(error: object) -> bool:
    """Whether `sys.exit()` or `sys.exit(0)` raised this: a user's function then ends as at a `return`."""
    return isinstance(error, SystemExit) and error.code in (None, 0)


def name_workers(ids: list[int]) -> str:
    """Workers in a sentence.

    >>> name_workers([2]), name_workers([0, 1, 3])
    ('worker 2', 'workers 0, 1 and 3')
    """
    if len(ids) == 1:
        return f"worker {ids[0]}"
    return f"workers {', '.join(map(str, ids[:-1]))} and {ids[-1]}"


@contextlib.contextmanager
def located(where: object) -> Iterator[None]:
    """Puts a place before the message of a `UsageError`."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def first_line(error: BaseException) -> str:
    r"""An error's first line, without its full stop, as the end of another sentence.

    >>> first_line(UsageError("There is no file x.py.\nMake it.")), first_line(UsageError())
    ('There is no file x.py', 'UsageError')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def printable(text: str, *, keep: str = "") -> str:
    r"""Makes untrusted text safe for a terminal: escapes control characters as in Python's string literals.

    Also escapes characters that are invisible or change the layout (U+202E), and undecodable bytes of file names.

    >>> print(printable("red: \x1b[31m, two\nlines", keep="\n"))
    red: \x1b[31m, two
    lines
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else repr(one)[1:-1] for one in text)


def shown(value: object) -> str:
    """A user's value for a sentence: on one line, printable, and shortened.

    >>> shown(-1), shown("a" * 100)[-8:], shown(10**5000)
    ('-1', 'aaaa ...', 'a number of thousands of digits')
    """
    try:
        text = printable(str(value) if isinstance(value, Real) else repr(value))  # NumPy's numbers look like Python's
    except ValueError:  # Python converts no longer integers
        return "a number of thousands of digits"
    except RecursionError:
        return "what is nested too deeply"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]} ..."
