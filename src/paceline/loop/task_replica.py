"""The replica of `paceline train`, which owns its loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import nn

from paceline.data.plan import BatchSource
from paceline.errors import DivergedError
from paceline.loop.base_replica import BaseReplica
from paceline.loop.buckets import GradientBuckets
from paceline.loop.sharded import check_sharded, cut_flat_state, in_pieces
from paceline.optim.flat_parameters import FlatParameters
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows, Selection
from paceline.optim.saved_state import load_with_own_settings, state_for_checkpoints
from paceline.optim.settings import ELEMENTWISE, OptimizerSettings, is_plain_sgd, raw_step, scaled_step, settings_of
from paceline.ports.replica import OnBucket, OnEnd, Piece


class TaskReplica(BaseReplica):
    """A replica that owns its loop: a batch from a source, one forward and one backward pass, then the optimizer.

    Gradients are views of one flat vector into which backward adds; elementwise optimizers hold that vector and the parameters
    as one tensor. Under plain SGD, backward's own tensors are used instead if the program does not ask for `g`. The results
    are bit-for-bit the same; this saves passes over memory and Python loops over parameters.
    """

    def __init__(
        self,
        model: nn.Module,  # called on the inputs of a batch
        loss: Callable[[Any, Any], torch.Tensor],  # maps the model's output and the targets to a scalar mean loss
        # Builds the optimizer for the parameters it is given.
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        batches: BatchSource,  # yields `(batch_number, inputs, targets)`
        *,
        shares_state: bool = False,  # whether the optimizer's state is that of all workers
        **base: Any,
    ) -> None:
        super().__init__(**base)
        self.model = model
        self._loss_function = loss
        self._batches = batches
        self.binding.find_tables(model)
        self._g = self.binding.zeros()
        # Each has its own version counter, unlike other views: it shows which parameters backward has added to.
        self._gradients = [view.data for view in self.binding.views(self._g)]
        self._bind_gradients()
        self.optimizer = make_optimizer(self.binding.parameters)
        self._flat: FlatParameters | None = None
        if type(self.optimizer) in ELEMENTWISE:
            self._flat = FlatParameters(make_optimizer, self._g, shares_state=shares_state)
            self.optimizer = self._flat.optimizer
        self._step = raw_step(self.optimizer)
        self._is_plain_sgd = self._flat is not None and is_plain_sgd(self.optimizer)
        self._takes_own = self._is_plain_sgd  # whether the next gradient stays in the tensors that backward makes
        self._in_own = False  # whether the present one does
        self._takes_rows = self._takes_tables = False
        self._rows: Rows | None = None
        self._selected: torch.Tensor | None = None  # elements of the rows
        self._buckets: GradientBuckets | None = None
        self._missing: Ranges | None = None
        # The place of each parameter among the owned pieces.
        self._owned: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def missing(self) -> Ranges:
        if self._missing is None:
            self._missing = self._buckets.missing if self._buckets else self.binding.missing_gradients()
        return self._missing

    @missing.setter
    def missing(self, agreed: Ranges) -> None:
        self._missing = agreed

    @property
    def g(self) -> torch.Tensor:
        """The gradient (P,), or the elements of its rows.

        A program that asks once for a dense one gets it without a copy from the next step on.
        """
        if self._in_own and self._rows is None:
            self._rows = self.binding.table_rows() if self._takes_tables else self.binding.sparse_rows()
            if self._rows is not None and self._takes_rows:
                self._missing = self.binding.missing_gradients() if self._takes_tables else ()
                self._selected = self.binding.gather_rows(self._rows)
            else:  # with no gradient at all, the next one may be sparse
                self._takes_own = self._takes_rows and all(one.grad is None for one in self.binding.parameters)
                self._in_own = False
                self._make_dense()
        return self._g if self._rows is None or self._selected is None else self._selected

    def _make_dense(self) -> None:
        if self._rows is not None and self._selected is not None:
            self._g.zero_()
            Selection(self._rows, 0, len(self._g)).put(self._g, self._selected)
        else:
            self._rows = None
            for parameter in self.binding.parameters:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            self.missing = self.binding.gather_gradients(self._g)
        self._bind_gradients()

    @property
    def rows(self) -> Rows | None:
        return self._rows

    def take_rows(self) -> None:
        self._takes_rows = self._takes_own = True

    def take_tables(self) -> None:
        self.take_rows()
        self._takes_tables = True

    def put(self, rows: Rows, g: torch.Tensor) -> None:
        self._rows, self._selected = rows, g
        if self._is_plain_sgd:  # which steps with the parameters' own
            self.binding.scatter_rows(rows, g)

    def _bind_gradients(self) -> None:
        for parameter, gradient in zip(self.binding.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def steps(self) -> Iterator[int]:
        while not self._stopped():
            started_s = self._now_s()
            if (batch := self._batches.next()) is None:
                return
            self.batch, self._inputs, self._targets = batch
            self.samples = 0 if self._targets is None else self._targets.shape[0]
            self._begin_step(started_s)
            yield self.step

    def gradient(self, at: torch.Tensor, version: int, ready: OnBucket = None, finish: OnEnd = None) -> None:
        """Computes the mean gradient over the batch at `at` (P,) into `g`.

        With `ready`, backward makes tensors of its own, which are copied into `g` bucket by bucket: that saves clearing `g`
        and reading it again.

        Raises:
            DivergedError: the loss is not finite.
        """
        self._read_version = version
        self.binding.bind(at)
        self._gradient_started_s = self._now_s()
        self._in_own = self._takes_own and ready is None
        self._missing = self._rows = self._selected = None
        if self._in_own or ready is not None:
            for parameter in self.binding.parameters:
                parameter.grad = None
        else:
            self._g.zero_()
        changes = [gradient._version for gradient in self._gradients]
        if ready is not None:
            if self._buckets is None:
                self._buckets = GradientBuckets(self.binding, self._g, self._complete, self._bucket_bytes)
            self._buckets.begin(ready, at_end=self._slowness is not None)  # a slow worker's, at the end of its time
        if self.samples:
            with torch.enable_grad():
                loss = self._loss_function(self.model(self._inputs), self._targets)
            loss.backward()
            self.loss = loss.item()
            if not math.isfinite(self.loss):
                raise DivergedError(
                    f"The loss became {self.loss} at step {self.step} (version {version}); lower the learning rate."
                )
            if self._slowness is not None:
                self._slowness.sleep(self._gradient_started_s)
        elif self.without_batch is not None:
            self.without_batch()
        if ready is not None:
            assert self._buckets is not None
            self._buckets.complete_all()
            self._bind_gradients()
        elif not self._in_own:
            without = [a == b._version for a, b in zip(changes, self._gradients, strict=True)]
            self._missing = tuple(compress(self.ranges, without))
        self._gradient_ended_s = self._now_s()
        if finish is not None:
            finish()

    def _complete(self, index: int) -> None:
        assert self._buckets is not None
        self._buckets.complete(index)

    def apply(self, to: torch.Tensor, scale: float = 1.0, of: torch.Tensor | None = None, weight: float = 1.0) -> None:
        begun_s = self._now_s()
        if self._in_own and not self._is_plain_sgd:
            self._in_own = False
            self._make_dense()
        if self._is_plain_sgd:
            # SGD's step without its Python overhead; with `of`, one pass over memory instead of two.
            rate = self.optimizer.param_groups[0]["lr"] * scale * weight
            if self._in_own:
                self._add_own(to if of is None else of, to, -rate)
            else:
                torch.add(to if of is None else of, self._g, alpha=-rate, out=to)
        else:
            if weight != 1.0:
                self._g.mul_(weight)
            self._step_on(to if of is None else to.copy_(of), scale)
        self._count_apply(begun_s)

    def _step_on(self, to: torch.Tensor, scale: float, block: int = 0) -> None:
        if self._flat is not None:
            self._flat.step(to, self._g, self.ranges, self.missing, scale, block)
            return
        self.binding.bind(to)
        self.binding.leave_out(self.missing)
        scaled_step(self._step, self.optimizer, scale)
        self._bind_gradients()

    def apply_pieces(self, to: torch.Tensor, g: torch.Tensor, pieces: Sequence[Piece]) -> None:
        """Lets the optimizer take its one step on `to` (S,), whose gradient is `g` (S,)."""
        begun_s = self._now_s()
        check_sharded(self.optimizer)
        assert self._flat is not None
        if self._is_plain_sgd:
            torch.add(to, g, alpha=-self.optimizer.param_groups[0]["lr"], out=to)
        else:
            cut_flat_state(self._flat.state_of_all(), self._g.numel(), to.numel(), pieces)
            self._owned = self._owned or in_pieces(self.ranges, pieces)
            missing = tuple(self._owned[one] for one in self.missing if one in self._owned)
            self._flat.step(to, g, tuple(self._owned.values()), missing)
        self._count_apply(begun_s)

    def _add_own(self, x: torch.Tensor, to: torch.Tensor, factor: float) -> None:
        """`to` (P,) becomes x + factor * gradient, parameter by parameter."""
        views = self.binding.views
        for parameter, before, after in zip(self.binding.parameters, views(x), views(to), strict=True):
            if parameter.grad is not None:
                torch.add(before, parameter.grad, alpha=factor, out=after)
            elif after is not before:
                after.copy_(before)

    def optimizer_settings(self) -> OptimizerSettings:
        first = self.optimizer.param_groups[0]["params"][0]  # of all stretches, for all of them
        settings = settings_of(self.optimizer, lambda one: (0, self.binding.num_elements) if one is first else None)
        return settings._replace(missing=self.missing)

    def expect_state(self, num_parameters: int) -> None:
        """Prepares to load a checkpoint's state of `num_parameters` parameters."""
        if self._flat is not None:
            self._flat.expect(num_parameters)

    def carries_all(self) -> bool:
        return True

    def for_newcomers(self) -> dict[str, Any]:
        return {"optimizer": state_for_checkpoints(self.optimizer), **self._counts_for_newcomers()}

    def enter(self, given: dict[str, Any]) -> None:
        self._take_counts(given)
        self.expect_state(len(given["optimizer"]["param_groups"][0]["params"]))
        load_with_own_settings(self.optimizer, given["optimizer"])

    def update_since(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """`after - before` (P,), in the gradient's memory."""
        return torch.sub(after, before, out=self._g)
