"""A run's live curves in TensorBoard, through PyTorch's writer. Needs the extra `paceline[tensorboard]`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.observe.progress import Progress, Throttled
from paceline.records.run_data import RunData

_EVERY_S = 1.0


class TensorBoard(Throttled):
    """Writes a run's curves over samples, about once a second, in a `with` block.

    The curves are loss, accuracy, samples per second, staleness, waiting and workers; messages are texts. A call costs less
    than a millisecond. The folder's files are created at the first call, so a run that never begins leaves none.

    Args:
        folder: for TensorBoard's files; one for each run, inside the folder given to `tensorboard --logdir`.
        now_s: for tests; a monotonic clock.

    >>> with TensorBoard("runs/first/tensorboard") as board:  # doctest: +SKIP
    ...     run = pl.train(config, out=Path("runs/first"), on_progress=board.update)
    ...     board.end(run)

    Raises:
        UsageError: the extra is missing.
    """

    def __init__(self, folder: Path | str, *, now_s: Callable[[], float] = time.monotonic) -> None:
        check_tensorboard()
        super().__init__(_EVERY_S, now_s)
        self._folder = Path(folder)
        self._made: Any = None

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        if self._made is not None:
            self._made.close()

    def update(self, progress: Progress) -> None:
        """Writes `progress`, unless the last update was too recent; a message is always written."""
        if progress.message:
            self._writer.add_text("messages", progress.message, progress.samples)
        super().update(progress)

    def end(self, run: RunData) -> None:
        """Writes the final figures, which the last progress lacked."""
        result = run.result
        self._show_last()
        self._last = None
        for name, key in (("loss/train", "train_loss"), ("accuracy/test", "test_accuracy")):
            self._scalar(name, result.get(key), result.get("samples", 0))
        self._writer.flush()

    @property
    def _writer(self) -> Any:
        if self._made is None:
            from torch.utils.tensorboard import SummaryWriter

            self._made = SummaryWriter(str(self._folder))
        return self._made

    def _show(self, progress: Progress) -> None:
        at, alive = progress.samples, [one for one in progress.workers if one.alive]
        self._scalar("loss/train", progress.loss, at)
        self._scalar("accuracy/test", progress.accuracy, at)
        self._scalar("run/samples per second", progress.samples_per_s, at)
        self._scalar("run/updates", progress.version, at)
        self._scalar("run/workers", len(alive), at)
        self._scalar("staleness/mean", _mean([one.mean_staleness for one in alive]), at)
        self._scalar("waiting/share of time", _mean([one.waiting_share for one in alive]), at)
        self._writer.flush()  # TensorBoard shows only what is in the file

    def _scalar(self, name: str, value: float | None, at: int) -> None:
        if value is not None and math.isfinite(value):
            self._writer.add_scalar(name, value, at)


def check_tensorboard() -> None:
    """Fails early if the package is missing."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise UsageError("Curves in TensorBoard need its package: pip install 'paceline[tensorboard]'.") from error


def _mean(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None
