"""The gradient of a loop's step if the program takes the rows of tables: as it is, or as each backward pass ends."""

from __future__ import annotations

import torch

from paceline.loop.step_gradient import BucketedGradient, ParameterGradient
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows


class TableGradient(ParameterGradient):
    """A gradient whose program reads the rows of the tables and all else, and puts others in their place."""

    def read(self, *, weighs_nothing: bool) -> torch.Tensor:
        if not self.is_read:
            self.is_read, binding = True, self._binding
            if weighs_nothing:
                self.rows = dict.fromkeys(binding.tables)
                self._selected = binding.no_rows()
            else:
                self.rows = binding.table_rows()
                self._selected = binding.gather_rows(self.rows)
        assert self._selected is not None
        return self._selected

    def put(self, rows: Rows, g: torch.Tensor) -> None:
        self.rows, self._selected = rows, g

    def in_backward(self) -> type[BucketedGradient]:
        return TablesInBackward

    def write_back(self) -> None:
        if self.is_read:
            self._bind()

    def _bind(self) -> None:
        assert self.rows is not None
        assert self._selected is not None
        self._binding.scatter_rows(self.rows, self._selected)
        self._binding.leave_out(self.missing)


class TablesInBackward(TableGradient, BucketedGradient):
    """Such a gradient that the program averages at the end of each backward pass, before `backward` returns."""

    def _in_buckets(self) -> None:
        return None

    def _find_missing(self) -> Ranges:
        return self._binding.missing_gradients()

    @property
    def returned(self) -> torch.Tensor:
        assert self._selected is not None
        return self._selected

    def read(self, *, weighs_nothing: bool) -> torch.Tensor:
        is_new = not self.is_read
        g = super().read(weighs_nothing=weighs_nothing)
        return g.div_(self._loss_scale) if is_new and self._loss_scale is not None else g

    def _return(self) -> None:
        if self._loss_scale is not None:
            self.returned.mul_(self._loss_scale)
        self._bind()
        self.is_read = False  # so that the step finds what the loop makes of it
