"""A lone worker that applies a server's rule itself: no server, no messages, the same updates."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from paceline.algorithms.plain import work_plainly
from paceline.algorithms.server.apply import Applier, ApplyRule, one_rate
from paceline.algorithms.server.average import SharedAverage, without_average
from paceline.algorithms.server.delayed import Delayed
from paceline.algorithms.server.gathering import without_gathered
from paceline.algorithms.server.update import UpdateInfo
from paceline.algorithms.server.user import UserOptimizer
from paceline.optim.rows import Selection
from paceline.ports.ports import Ports
from paceline.ports.replica import Replica
from paceline.ports.shared import WritableParameters


def work_alone(
    replica: Replica, ports: Ports[WritableParameters], rule: ApplyRule, average: float | None = None
) -> None:
    """A lone worker's program. x: the parameters (P,), in its own memory; g: its gradient (P,).

    The user's optimizer takes its own steps, so any optimizer works; a delay precedes it. `average` is the decay of the moving
    average used for evaluation.
    """
    shared, storage = ports.shared, ports.storage
    averages = SharedAverage(ports, average, with_buffers=True) if average is not None else None
    if isinstance(rule, UserOptimizer) and averages is None:
        work_plainly(replica, ports)
        return
    applier, takes_own_steps = _start(rule, replica, shared.x)
    if rule.takes_rows and not takes_own_steps:
        replica.take_rows()
    kept = storage.restore() if storage is not None else None
    if kept is not None:
        applier.load(without_gathered(without_average(kept)))
        if averages is not None:
            averages.load(kept)

    def state() -> dict[str, Tensor]:
        return applier.state() | (averages.state() if averages is not None else {})

    for step in replica.steps():
        version = shared.version
        echo = applier.read(ports.worker_id, version)
        replica.gradient(at=shared.x, version=version)
        g, rows = replica.g, replica.rows
        selection = Selection(rows, 0, len(shared.x), g.device) if rows is not None else None
        if selection is not None and echo is not None:
            echo = selection.take(echo)
        update = UpdateInfo(
            worker_id=ports.worker_id,
            sequence=step,
            step=version,
            version_read=version,
            version=version,
            num_samples=replica.samples,
            missing=replica.missing,
            selection=selection,
            echo=echo,
        )
        rate = 0.0 if takes_own_steps else one_rate(replica.optimizer_settings())
        with shared.writing():
            applier.update(shared.x, g, update, rate)
            if averages is not None:
                averages.update()
            replica.applied(shared.advance() + applier.postponed, gradient_version=version)
        if storage is not None:
            storage.keep(state, version + 1)


def _start(rule: ApplyRule, replica: Replica, x: Tensor) -> tuple[Applier, bool]:
    """The rule's applier for x (P,), and whether the worker's own optimizer steps."""
    if isinstance(rule, UserOptimizer):
        return _OwnStep(replica), True
    if isinstance(rule, Delayed) and isinstance(rule.rule, UserOptimizer):
        return rule.around(_OwnStep(replica), len(x), x.dtype), True
    with x.device:
        return rule.start(len(x), x.dtype), False


class _OwnStep(Applier):
    """The worker's own optimizer as a rule: it steps with the gradient that is due."""

    leaves_out: ClassVar[bool] = True

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._replica = replica

    def apply(self, x: Tensor, gradient: Tensor, info: UpdateInfo, learning_rate: float) -> None:
        if gradient is not self._replica.g:  # it was late
            self._replica.g.copy_(gradient)
            self._replica.missing = info.missing
        self._replica.apply(to=x)
