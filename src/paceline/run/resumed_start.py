"""The checkpoint with which a run was resumed, as the start of its replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from paceline.algorithms import Algorithm
from paceline.data.round_deal import Left
from paceline.errors import UsageError
from paceline.optim.flat import FlatBinding
from paceline.optim.model_state import dense_buffers
from paceline.ports.ports import Storage
from paceline.records import checkpoint_contents, checkpoint_files
from paceline.worker.storage import WorkerStorage


class ServerState(Storage):
    """Gives a replayed server the state of its rule, and keeps nothing."""

    def __init__(self, rule: dict[str, Any]) -> None:
        self._rule = rule

    def restore(self) -> dict[str, Any] | None:
        return {"rule": self._rule} if self._rule else None


class ResumedStart:
    """Begins a replay as `SupervisedMembership` begins the workers of a run that is resumed.

    Raises:
        UsageError: the checkpoint is gone or damaged.
    """

    def __init__(self, checkpoint: Path, algorithm: Algorithm) -> None:
        if not checkpoint.is_dir():
            raise UsageError(
                f"{checkpoint}, from which the run was resumed, is gone: without it, the run cannot be replayed."
            )
        checkpoint_files.check(checkpoint)
        self._checkpoint, self._algorithm = checkpoint, algorithm

    @property
    def taken(self) -> int:
        """Rounds before it, in lockstep."""
        return checkpoint_contents.load_workers(self._checkpoint)[0]["taken"]

    def initialise(self, shared: Any, binding: FlatBinding, model: nn.Module) -> None:
        """Sets the parameters, their version, and the model's buffers."""
        buffers = dense_buffers(model)
        saved = checkpoint_contents.load_fitting(self._checkpoint, binding.num_elements, binding.dtype, buffers, None)
        shared.initialise(saved.x, saved.version)
        for name, buffer in buffers.items():
            buffer.copy_(saved.buffers[name])

    def begin_worker(self, worker_id: int, replica: Any, own_model: Any) -> int:
        """Restores a worker's optimizer, PyTorch's random state, and its model, if each has its own; returns its batches."""
        return self.storage(worker_id).load_worker(
            replica.optimizer,
            own_model,
            replica.expect_state,
            sizes=not self._algorithm.splits_update,
        )

    def storage(self, worker_id: int) -> WorkerStorage:
        """Of a worker's program."""
        return WorkerStorage(worker_id, self._checkpoint, None, makes_same_updates=self._algorithm.survivors_have_all)

    def server_state(self, begin: int, end: int) -> ServerState:
        """Of the shard with these elements."""
        return ServerState(checkpoint_contents.load_rule_state(self._checkpoint, begin, end))

    def left(self) -> Left:
        """The batches that are left, in lockstep."""
        first = checkpoint_contents.load_parameters(self._checkpoint).next_batch
        return self.storage(0).left(first) if self._algorithm.in_rounds else Left(first, [])
