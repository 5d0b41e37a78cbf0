"""Failures of Spark's tasks: each task reports its failure at the join point, and the driver finds the first cause."""

from __future__ import annotations

import contextlib
import re
import traceback
from pathlib import Path
from typing import Literal

from paceline.errors import PacelineError, first_line
from paceline.membership.join_point import JoinPoint, JoinPointLostError

Kind = Literal["raised", "died", "follows"]


def tell(join_point: JoinPoint, partition: int, sentence: str, kind: Kind = "raised") -> None:
    """Tells the driver of a partition's first failure; an error replaces a death, or a consequence of others' failures."""
    with contextlib.suppress(JoinPointLostError):
        number = join_point.add("failures", 1)
        told = f"{kind} {number} {sentence}"
        before = join_point.compare_set(_key(partition), "", told).decode()
        if kind == "raised" and not before.startswith("raised "):
            join_point.set(_key(partition), told)


def make_good(join_point: JoinPoint, partition: int) -> None:
    """Clears the failure of earlier attempts at the partition: another one has succeeded."""
    with contextlib.suppress(JoinPointLostError):
        join_point.set(_key(partition), "")


def said(partition: int, error: BaseException) -> str:
    """The error, and its place in the user's code."""
    if isinstance(error, PacelineError):
        return f"partition {partition}: {first_line(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parents[1])
    own = [one for one in frames if not one.filename.startswith(ours) and "site-packages" not in one.filename] or frames
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"partition {partition}: {type(error).__name__}: {first_line(error)}{where}"


def first_cause(error: Exception, join_point: JoinPoint, workers: int) -> str:
    """The reason why Spark has ended a job, in one sentence."""
    if told := first_told(join_point, workers):
        return failed_in(told)
    text = str(error)
    if ours := re.findall(r"^paceline\.errors\.\w+: (.*)", text, re.MULTILINE):
        return ours[0]
    given_up = re.search(r"Task (\d+) in stage [\d.]+ failed (\d+) times", text)
    if given_up and "Python worker exited unexpectedly" in text:
        return (
            f"Spark ended the training: the Python worker of task {given_up[1]} ended without a word, {given_up[2]} times"
            " (killed, or out of memory?). See the executor's log, or raise spark.task.maxFailures."
        )
    if raised := re.search(r"\bTraceback \(most .*\n(?:[ \t].*\n)*(\S.*)", text):
        missing = raised[1].startswith("ModuleNotFoundError")
        remedy = (
            ": make it known to the executors, by spark.sparkContext.addPyFile, in Spark Connect by"
            " spark.addArtifacts(..., pyfile=True), or by their PYTHONPATH"
        ) * missing
        return f"Spark ended the training: a task raised {raised[1]}{remedy}."
    return f"Spark ended the training: {first_line(error)}."


def failed_in(told: str) -> str:
    """The sentence in a task's report."""
    return f"The training failed, first in {told}."


def first_told(join_point: JoinPoint, workers: int, *kinds: Kind) -> str:
    """The first failure of these kinds (none: all) that tasks have reported; consequences of others' ends come last."""
    told = []
    with contextlib.suppress(JoinPointLostError):
        for key in map(_key, range(workers)):
            kind, _, rest = (join_point.get(key) if join_point.check([key]) else b"").decode().partition(" ")
            number, _, sentence = rest.partition(" ")
            if number.isdecimal() and (not kinds or kind in kinds):
                told.append((kind == "follows", int(number), sentence))
    return min(told)[2] if told else ""


def _key(partition: int) -> str:
    return f"failure/{partition}"
