"""Progress of a running training: a live table on a terminal, plain lines elsewhere, and a base class of other displays."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.observe.words import number_text, percent_text, seconds_text

_SECONDS_BETWEEN_LINES = 2.0
_MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """Recent progress of one worker."""

    worker_id: int
    alive: bool = True  # False once it was declared dead
    steps: int = 0  # gradients computed so far
    steps_per_s: float = 0.0
    mean_staleness: float | None = None  # of its latest applied updates; None before the first
    waiting_share: float | None = None  # share of its recent time, from 0 to 1; None before the first step


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run."""

    elapsed_s: float  # since the start of training
    share_done: float = 0.0  # from 0 to 1, of the limit that comes first
    remaining_s: float | None = None  # estimate; None if unknown
    version: int = 0  # updates applied
    samples: int = 0  # samples of the applied gradients
    samples_per_s: float = 0.0  # recent throughput
    loss: float | None = None  # running training loss
    accuracy: float | None = None  # of the last evaluation, from 0 to 1
    epoch: int | None = None  # number of epochs begun; None if the task has none
    workers: tuple[WorkerProgress, ...] = ()
    message: str | None = None  # a one-time message: a worker lost, a restart, a checkpoint


class LiveTable:
    """Shows progress within a `with` block.

    On a terminal the table is redrawn in place, at most four times a second, and messages scroll by above it. Elsewhere
    (a log file, CI) it prints a line about every two seconds, and at once for a message or a new epoch.

    Args:
        title: heads the table and the first line.
        console: for tests; stderr by default.
        now_s: for tests; a monotonic clock.
    """

    def __init__(
        self, title: str = "", *, console: Console | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._title = title
        self._console = console if console is not None else Console(stderr=True, highlight=False)
        self._now_s = now_s
        self._live: Live | None = None
        self._epoch: int | None = None
        self._line_s = -math.inf  # when the last line was printed
        self._unprinted: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            heading = Text(self._title or "starting", style="bold")
            self._live = Live(heading, console=self._console, refresh_per_second=4, transient=False)
            self._live.start()
        elif self._title:
            self._line(self._title)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._unprinted is not None:
            self._line(plain_line(self._unprinted))

    def update(self, progress: Progress) -> None:
        """Show `progress`. Costs a few hundred microseconds; call it a few times a second."""
        if self._live is not None:
            if progress.message:
                said = f"{seconds_text(progress.elapsed_s)}  {progress.message}"
                self._console.print(Text(said), soft_wrap=False)  # it would hold for the table as well
            self._live.update(render(progress, self._title))
            return
        self._unprinted, now_s = progress, self._now_s()
        if progress.message or progress.epoch != self._epoch or now_s - self._line_s >= _SECONDS_BETWEEN_LINES:
            self._line(plain_line(progress))
            self._epoch, self._line_s, self._unprinted = progress.epoch, now_s, None

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def plain_line(progress: Progress) -> str:
    """Progress as one line, for output that is not a terminal."""
    parts = [f"{progress.elapsed_s:7.1f} s", f"{progress.share_done:4.0%}".replace("%", " %")]
    figures = [(name, text) for name, text in _overall(progress) if name not in ("time", "left")]
    parts += [f"{text} {name}" if name in ("updates", "samples/s") else f"{name} {text}" for name, text in figures]
    known = [worker.mean_staleness for worker in progress.workers if worker.mean_staleness is not None]
    if known:
        parts.append(f"staleness {sum(known) / len(known):.1f}")
    dead = [worker.worker_id for worker in progress.workers if not worker.alive]
    if dead:
        parts.append(f"lost: worker {', '.join(map(str, dead))}")
    if progress.remaining_s is not None:
        parts.append(f"{seconds_text(progress.remaining_s)} left")
    if progress.message:
        parts.append(progress.message)
    return "  ".join(parts)


def render(progress: Progress, title: str = "") -> Group:
    """The live table as a Rich renderable."""
    head = Text(no_wrap=True, overflow="ellipsis")
    if title:
        head.append(title, style="bold")
    overall = Table.grid(padding=(0, 3))
    names, values = [], []
    for name, value in _overall(progress):
        overall.add_column(justify="right", no_wrap=True)
        names.append(Text(name, style="dim"))
        values.append(Text(value, style="bold"))
    overall.add_row(*names)
    overall.add_row(*values)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=1.0, completed=min(max(progress.share_done, 0.0), 1.0), width=40),
        Text(f"{progress.share_done:.0%}".replace("%", " %")),
    )
    workers = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("worker", "state", "steps", "steps/s", "staleness (updates)", "waiting (% of time)"):
        workers.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
    for worker in progress.workers[:_MAX_ROWS]:
        workers.add_row(
            str(worker.worker_id),
            Text("running", style="green") if worker.alive else Text("lost", style="bold red"),
            f"{worker.steps:,}",
            number_text(worker.steps_per_s) if worker.alive else "-",
            "-" if worker.mean_staleness is None else f"{worker.mean_staleness:.1f}",
            "-" if worker.waiting_share is None else f"{100 * worker.waiting_share:.0f}",
        )
    parts: list[Text | Table] = [head, bar, overall, workers]
    if len(progress.workers) > _MAX_ROWS:
        parts.append(Text(f"and {len(progress.workers) - _MAX_ROWS} more workers", style="dim"))
    return Group(*(parts if title else parts[1:]))


def _overall(progress: Progress) -> list[tuple[str, str]]:
    shown = [("time", seconds_text(progress.elapsed_s))]
    if progress.remaining_s is not None:
        shown.append(("left", seconds_text(progress.remaining_s)))
    if progress.epoch is not None:
        shown.append(("epoch", str(progress.epoch)))
    shown += [("updates", f"{progress.version:,}"), ("samples/s", number_text(progress.samples_per_s))]
    if progress.loss is not None:
        shown.append(("loss", number_text(progress.loss)))
    if progress.accuracy is not None:
        shown.append(("accuracy", percent_text(progress.accuracy)))
    return shown


class Throttled(ABC):
    """Shows progress at most every `every_s` seconds, and the last progress at the end of its `with` block."""

    def __init__(self, every_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._now_s = now_s
        self._shown_s = -math.inf
        self._last: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._show_last()

    def update(self, progress: Progress) -> None:
        self._last = progress
        if self._now_s() - self._shown_s >= self._every_s:
            self._shown_s = self._now_s()
            self._show(progress)

    def _show_last(self) -> None:
        if self._last is not None:
            self._show(self._last)

    @abstractmethod
    def _show(self, progress: Progress) -> None: ...
