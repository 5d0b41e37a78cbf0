"""A worker's part of checkpoints: the state of its program, and how failures to write are handled."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.data.round_deal import Left
from paceline.errors import NotWrittenError, UsageError
from paceline.optim.flat import FlatBinding
from paceline.optim.frozen import FrozenParameters
from paceline.optim.sharding import Sharding
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files
from paceline.system.saved_state import check_fits
from paceline.worker.memberships.membership import LoopState
from paceline.worker.process import NotSaved

_END_PAUSES_S = (0.0, 0.3, 1.0)  # before each try to write the last checkpoint
_OTHER_FROZEN = (
    "The frozen parameter {name} has another value than in the run that this one resumes, whose checkpoint has only what loops"
    " change: let every start of the script make or load the same, such as by a seed."
)


def _warn(news: NotSaved) -> None:
    warnings.warn(f"A checkpoint was skipped: {news.why}", stacklevel=5)


@dataclass(eq=False)
class WorkerStorage:
    """Implements `Storage` for a worker: writes only when its membership saves a checkpoint."""

    worker_id: int
    resume: Path | None  # the checkpoint from which the run resumes, or None
    folder: Path | None  # of the run's checkpoints, or None
    tell: Callable[[NotSaved], object] = _warn  # reports what cannot be written; training continues
    _: KW_ONLY
    makes_same_updates: bool = False  # whether a worker that is new to the run begins with the first worker's state
    frozen: FrozenParameters | None = None  # of its model; None: checkpoints have nothing of them

    def __post_init__(self) -> None:
        self._state: Callable[[], dict[str, Any]] | None = None
        self._updates_before = 0  # of its own model, up to the checkpoint

    def restore(self) -> dict[str, Any] | None:
        if self.resume is None:
            return None
        return checkpoint.load_program(self.resume, self.worker_id, makes_same_updates=self.makes_same_updates)

    def keep(self, state: Callable[[], dict[str, Any]], version: int) -> None:
        """Makes checkpoints hold what `state` returns, from now on."""
        self._state = state

    def checkpoint(self, state: Callable[[], dict[str, Any]], number: int | None) -> None:
        """Does nothing: the membership writes a worker's checkpoints."""

    def left(self, first: int) -> Left:
        """The batches that a run in rounds has left; `first`: of a task's checkpoint at an epoch's beginning."""
        found = checkpoint.load_left(self.resume) if self.resume is not None else None
        return Left(*found) if found is not None else Left(first, [])

    def load_parameters(
        self,
        binding: FlatBinding,
        buffers: dict[str, torch.Tensor],
        same_workers: int | None,
        parts: Sharding | None = None,
    ) -> checkpoint.Parameters | None:
        """The parameters to resume from, checked against the model and, if it matters, the number of workers; None: none.

        `parts`: servers hold the vectors of a model's parts, which the checkpoint has in a row.
        """
        if self.resume is None:
            return None
        size, division = (binding.num_elements, "") if parts is None else (sum(parts.sizes), parts.digest)
        saved = checkpoint.load_fitting(self.resume, size, binding.dtype, buffers, same_workers)
        if saved.memory_order != binding.memory_order:
            raise UsageError(
                f"The checkpoint in {self.resume} is of a model in another memory format, such as channels_last: give the"
                " model the format that it had when the run was started."
            )
        if saved.division != division:
            raise UsageError(
                f"The checkpoint in {self.resume} has the servers' state of a model that was divided in another way: resume"
                " with the layout or the plan that the run was started with."
            )
        return saved if parts is None else replace(saved, x=parts.whole_of(saved.x))

    def load_shared_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copies what the checkpoint has of the optimizer's state that all workers share, named by parameter and key."""
        assert self.resume is not None
        saved = checkpoint.load_optimizer_state(self.resume)
        for name, tensor in state.items():
            _, index, key = name.split(" ")
            if int(index) in saved:
                check_fits({key: saved[int(index)].get(key)}, {key: tensor}, "the shared optimizer")
                tensor.copy_(saved[int(index)][key])

    def load_worker(
        self,
        optimizer: torch.optim.Optimizer,  # to restore
        own_model: Any,  # the vector; None: the worker replaces a dead one and keeps its vector, which is newer
        # Called first, with the number of parameters that the optimizer's first group had.
        expect: Callable[[int], None] = lambda _: None,
        *,
        sizes: bool = True,  # whether workers keep the optimizer's state for whole parameters
    ) -> int:
        """Restores the optimizer's state, frozen parameters that the loop has changed, and the worker's vector if it had one.

        Returns:
            the batches that the worker had taken.
        """
        if self.frozen is not None:
            saved = checkpoint.load_frozen(self.resume, self.worker_id) if self.resume is not None else {}
            if (differ := self.frozen.begin(saved)) and not self.worker_id:
                warnings.warn(_OTHER_FROZEN.format(name=differ[0]), stacklevel=5)
        if self.resume is None:
            return 0
        if (found := checkpoint.load_model(self.resume, self.worker_id)) is not None:
            self._updates_before = found[1]
        if found is not None and own_model is not None:
            version, _, x = found
            if x.shape != own_model.x.shape:
                raise UsageError(
                    "The checkpoint was written under another layout: resume with the layout that the run was started "
                    "with."
                )
            check_fits(x, own_model.x, "the worker's model")
            own_model.restore(version, x)
        alike = self.makes_same_updates
        return checkpoint.load_worker(
            self.resume, self.worker_id, optimizer, expect, sizes=sizes, makes_same_updates=alike
        )

    def save(
        self,
        number: int | None,
        state: LoopState,
        own_model: Any = None,
        parameters: Callable[[], checkpoint.Parameters] | None = None,
    ) -> bool:
        """Writes the worker's part of a checkpoint; returns whether it succeeded.

        The run's last checkpoint has no `number` and is tried again, as there will be no other. `own_model` is the worker's
        vector, if every worker has one; `parameters` makes the run's, if this worker saves them.
        """

        def write(folder: Path) -> None:
            model = None
            if own_model is not None:
                version, updates, x = own_model.own()
                model = version, self._updates_before + updates, x
            program = self._state() if self._state is not None else None
            worker, frozen = self.worker_id, self.frozen.state() if self.frozen is not None else None
            checkpoint.save_worker(
                folder, number, worker, state.optimizer, state.taken, model, program, state.left, frozen
            )
            if parameters is not None and number is not None:
                checkpoint.save_parameters(folder, number, parameters())

        return self._try(number, write)

    def save_alone(self, state: LoopState, parameters: checkpoint.Parameters, least: int) -> Path | None:
        """Writes a run's last checkpoint with this worker's part alone, from which workers that are equal can all resume.

        Its number is `least` or more. Returns the checkpoint; None: it could not be written.
        """
        written: list[Path] = []

        def write(folder: Path) -> None:
            worker, frozen = self.worker_id, self.frozen.state() if self.frozen is not None else None
            checkpoint.save_worker(folder, None, worker, state.optimizer, state.taken, left=state.left, frozen=frozen)
            number = checkpoint.end(folder, parameters, least)
            checkpoint_files.complete(folder, number, [self.worker_id], {})
            written.append(folder / str(number))

        return written[0] if self._try(None, write) else None

    def complete(self, number: int, num_workers: int) -> bool:
        """Marks a checkpoint as complete once all workers' parts are there; returns False while parts are missing."""
        workers = list(range(num_workers))
        if self.folder is None or not checkpoint_files.all_there(self.folder, number, workers):
            return self.folder is None
        self._try(number, lambda folder: checkpoint_files.complete(folder, number, workers, {}))
        return True

    def _try(self, number: int | None, write: Callable[[Path], object]) -> bool:
        assert self.folder is not None
        failure = ""
        for pause_s in (0.0,) if number is not None else _END_PAUSES_S:
            time.sleep(pause_s)
            try:
                write(self.folder)
                return True
            except NotWrittenError as error:
                failure = str(error)
        self.tell(NotSaved(failure, number))
        return False
