"""A model's parameters as views of one flat vector, so that workers exchange a single tensor."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import UsageError
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows, Selection, Table
from paceline.system.pages import untouched_zeros
from paceline.system.torch_internals import foreach_copy, without_overrides

TAKES_DENSE = (
    "This algorithm takes dense gradients, but the model has sparse ones: use sparse=False in its embeddings; or lockstep or"
    " all-reduce, not sharded and without a codec, where only weights of nn.Embedding and nn.EmbeddingBag may have them; or"
    " local-sgd, whose workers apply their own gradients; or parameter-server(mode=async), without a codec, and with"
    " apply=user, sgd or adagrad."
)
_ALIGNMENT_BYTES = 64  # as PyTorch aligns its own tensors: matrix products may round differently on other alignments


class FlatBinding:
    """Makes parameters views of a flat vector `x` (P,), and moves them from one vector to another.

    P includes padding: every parameter begins at a multiple of 64 bytes, as PyTorch's own tensors do. Padding is zero and
    stays zero under every elementwise optimizer. The first 64 bytes and the last element are always padding.

    Args:
        parameters: to be trained; all of one floating-point type, on one device.
        on_any_device: whether they may be on a GPU.
        num_cut: how many of the parameters, the last ones, are this worker's shards of larger ones; padding lies before them.

    Raises:
        UsageError: no parameters, or they differ in type or device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, on_any_device: bool = False, num_cut: int = 0) -> None:
        self.parameters: list[nn.Parameter] = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise UsageError("The model has no parameters that require a gradient; there is nothing to train.")
        if any(map(is_lazy, self.parameters)):
            raise UsageError(
                "Parameters of lazy modules, such as LazyLinear, have no shape yet: call the model with a first batch "
                "before you make the optimizer and call attach."
            )
        types = {(p.dtype, p.device) for p in self.parameters}
        if len(types) > 1 or not self.parameters[0].dtype.is_floating_point:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in types))
            is_complex = any(dtype.is_complex for dtype, _ in types)
            remedy = "keep complex ones as torch.view_as_real(...)" if is_complex else "convert it with model.to(...)"
            raise UsageError(
                f"Shared parameters must have one floating-point type on one device, but the model has {found}; {remedy}."
            )
        self.device = self.parameters[0].device  # where the parameters are
        if self.device.type != "cpu" and not on_any_device:
            raise UsageError(
                "Simulations and methods on shared memory train on the CPU; move the model there with model.cpu()."
            )
        self.dtype = self.parameters[0].dtype
        self._numels = [p.numel() for p in self.parameters]
        self._strides = [p.stride() if _is_dense(p) else None for p in self.parameters]
        alignment = _ALIGNMENT_BYTES // self.dtype.itemsize
        self.offsets: list[int] = []  # where each parameter begins in a flat vector
        offset = alignment
        first_cut = len(self._numels) - num_cut if num_cut else -1
        for index, numel in enumerate(self._numels):
            if index == first_cut and index and self.offsets[-1] + self._numels[index - 1] == offset:
                offset += alignment
            self.offsets.append(offset)
            offset += math.ceil(numel / alignment) * alignment
        if self.offsets[-1] + self._numels[-1] == offset:
            offset += alignment
        # Each parameter's elements there.
        self.ranges: Ranges = tuple((o, o + n) for o, n in zip(self.offsets, self._numels, strict=True))
        self.num_elements = offset  # P
        self.cut_from = self.offsets[first_cut] if num_cut else offset  # where the first shard begins; P without any
        self.num_parameters = sum(self._numels)
        self.tables: tuple[Table, ...] = ()  # those of the parameters that `find_tables` has found
        self._of_tables: list[int] = []  # their parameters' numbers
        self._range_of: dict[torch.Tensor, tuple[int, int]] = {}  # once asked for
        self._views: dict[int, list[torch.Tensor]] = {}
        self._bindable: dict[int, list[torch.Tensor]] = {}
        self._bound: int | None = None
        self.bound_to: torch.Tensor | None = None  # the vector that they are views of, if any
        # `bound_to` if `bind` to it would do nothing; None on a GPU, where `bind` checks whether they were moved.
        self.rests_on: torch.Tensor | None = None

    def range_of(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """A parameter's elements; None: it is not one of these."""
        self._range_of = self._range_of or dict(zip(self.parameters, self.ranges, strict=True))
        return self._range_of.get(parameter)

    def zeros(self) -> torch.Tensor:
        """A new flat vector (P,) where the parameters are."""
        if self.device.type == "cpu":
            return untouched_zeros(self.num_elements, self.dtype)
        return torch.zeros(self.num_elements, dtype=self.dtype, device=self.device)

    def views(self, x: torch.Tensor) -> list[torch.Tensor]:
        """`x` (P,) cut into the parameters' shapes; made once per vector."""
        key = x.data_ptr()
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = self._make_views(x)
        return views

    def _make_views(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self._view(x, number, begin) for number, begin in enumerate(self.offsets)]

    def bind(self, x: torch.Tensor) -> None:
        """Makes the parameters views of `x` (P,); cheap when they already are.

        Raises:
            UsageError: they were, but something has moved them, so that `x` does not have their present values.
        """
        key = x.data_ptr()
        if key == self._bound:
            if self.device.type != "cpu":
                self._check_in_place(x)
            return
        bindable = self._bindable.get(key)
        if bindable is None:
            bindable = self._bindable[key] = list(map(with_its_own_storage, self.views(x)))
        with without_overrides():
            for parameter, view in zip(self.parameters, bindable, strict=True):
                parameter.data = view
        self._bound, self.bound_to = key, x
        self.rests_on = x if self.device.type == "cpu" else None

    def rebind(self, x: torch.Tensor) -> None:
        """`bind`, even if the loop has moved parameters to other memory."""
        self._bound = None
        self.bind(x)

    def _check_in_place(self, x: torch.Tensor) -> None:
        for parameter, view in zip(self.parameters, self.views(x), strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise UsageError(
                    "Something moved the model's parameters to other memory, such as flatten_parameters of a "
                    "recurrent layer on a GPU, or model.to: leave such calls out of the `with`."
                )

    def read(self, x: torch.Tensor) -> None:
        """Copies the parameters' present values into `x` (P,)."""
        x.zero_()
        with without_overrides():
            # Views that `views` remembers would keep a vector that is read only once.
            foreach_copy(self._make_views(x), [p.detach() for p in self.parameters])

    def missing_gradients(self) -> Ranges:
        return tuple(own for own, p in zip(self.ranges, self.parameters, strict=True) if p.grad is None)

    def weight_gradients(self, weight: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(weight)

    def gather_gradients(self, g: torch.Tensor) -> Ranges:
        """Copies the gradients into `g` (P,), whose padding is zero; zeroes and returns parameters without one.

        Raises:
            UsageError: a gradient is sparse.
        """
        views = self.views(g)
        gradients = [p.grad for p in self.parameters]
        missing: Ranges = ()
        if any(gradient is None for gradient in gradients):
            missing = self.missing_gradients()
            for view, gradient in zip(views, gradients, strict=True):
                if gradient is None:  # the others may be views of `g` already
                    view.zero_()
        targets = [view for view, gradient in zip(views, gradients, strict=True) if gradient is not None]
        if not targets:
            return missing
        try:
            foreach_copy(targets, [gradient for gradient in gradients if gradient is not None])
        except RuntimeError as error:
            if not any(gradient is not None and gradient.layout != torch.strided for gradient in gradients):
                raise
            raise UsageError(TAKES_DENSE) from error
        return missing

    def find_tables(self, model: nn.Module) -> None:
        """Finds the weights of embeddings with `sparse=True`, whose gradients consist of rows: the same on all workers."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        weights = {
            one.weight for one in model.modules() if isinstance(one, kinds) and one.sparse and one.weight.numel()
        }
        self._of_tables = [number for number, one in enumerate(self.parameters) if one in weights]
        self.tables = tuple(map(self._table, self._of_tables))

    def _table(self, number: int) -> Table:
        (begin, end), shape = self.ranges[number], self.parameters[number].shape
        return Table(begin, end, (end - begin) // max(1, shape[0]) if shape else 1)

    def sparse_rows(self) -> Rows | None:
        """The rows of tables with sparse gradients, which it coalesces; None: no gradient is sparse."""
        gradients = [p.grad for p in self.parameters]
        if all(one is None or one.layout == torch.strided for one in gradients):
            return None
        return self._rows_of(range(len(self.parameters)))

    def table_rows(self) -> Rows:
        """The rows of `tables` that have gradients; as `sparse_rows`, without a table whose gradient is dense."""
        return self._rows_of(self._of_tables)

    def _rows_of(self, numbers: Iterable[int]) -> Rows:
        rows: Rows = {}
        for number in numbers:
            parameter, table = self.parameters[number], self._table(number)
            gradient = parameter.grad
            if gradient is None:
                rows[table] = None
            elif gradient.layout != torch.strided:
                if gradient.layout != torch.sparse_coo or gradient.sparse_dim() != 1 or not parameter.is_contiguous():
                    raise UsageError(
                        "Sparse gradients must consist of rows, as those of nn.Embedding(sparse=True) do: use dense ones."
                    )
                parameter.grad = gradient.coalesce()
                rows[table] = parameter.grad.indices()[0]
        return rows

    def no_rows(self) -> torch.Tensor:
        """A gradient of 0 without rows (count,)."""
        rows: Rows = dict.fromkeys(self.tables)
        return torch.zeros(Selection(rows, 0, self.num_elements).count, dtype=self.dtype, device=self.device)

    def gather_rows(self, rows: Rows) -> torch.Tensor:
        """The gradients' elements that the rows of `sparse_rows` or `table_rows` select (count,), in ascending order.

        Raises:
            UsageError: another gradient is sparse.
        """
        selection = Selection(rows, 0, self.num_elements, self.device)
        g = torch.zeros(selection.count, dtype=self.dtype, device=self.device)
        gradients = deque((n, p.grad) for n, p in enumerate(self.parameters) if p.grad is not None)
        for where, index, values in selection.each(g):
            while gradients and (begin := self.offsets[gradients[0][0]]) < where.stop:
                number, gradient = gradients.popleft()
                if index is not None:
                    values.copy_(gradient.values().flatten())
                elif gradient.layout != torch.strided:
                    raise UsageError(TAKES_DENSE)
                else:
                    self._view(values, number, begin - where.start).copy_(gradient)
        return g

    def scatter_rows(self, rows: Rows, g: torch.Tensor) -> None:
        """Makes the gradients views of `g` (count,), the elements that these rows select; those of tables are sparse."""
        selection = Selection(rows, 0, self.num_elements, self.device)
        parameters = deque(enumerate(self.parameters))
        numbers_of = {table.begin: numbers for table, numbers in rows.items()}
        for where, index, values in selection.each(g):
            while parameters and (begin := self.offsets[parameters[0][0]]) < where.stop:
                number, parameter = parameters.popleft()
                if begin < where.start or not self._numels[number]:  # a table without a gradient, or nothing
                    continue
                if index is None:
                    parameter.grad = self._view(values, number, begin - where.start)
                    continue
                numbers = numbers_of[begin]
                assert numbers is not None
                parameter.grad = torch.sparse_coo_tensor(
                    numbers.to(self.device).unsqueeze(0), values.view(-1, *parameter.shape[1:]), parameter.shape,
                    is_coalesced=True, check_invariants=False,
                )  # fmt: skip

    def _view(self, x: torch.Tensor, number: int, begin: int) -> torch.Tensor:
        """A parameter's elements, which begin at `begin` of `x` (n,), in its shape."""
        parameter, stride = self.parameters[number], self._strides[number]
        if stride is None:
            return x[begin : begin + self._numels[number]].view(parameter.shape)
        return x.as_strided(parameter.shape, stride, x.storage_offset() + begin)

    def scatter_gradients(self, g: torch.Tensor, missing: Ranges = ()) -> None:
        """Copies `g` (P,) into the parameters' gradients, which keep their own memory.

        Args:
            g: the gradients as one vector.
            missing: parameters that get none, so that the optimizer leaves them out.
        """
        views = self.views(g)
        self.leave_out(missing)
        them = set(missing)
        for parameter, view, own in zip(self.parameters, views, self.ranges, strict=True):
            if parameter.grad is None and own not in them:
                parameter.grad = view.clone()
        pairs = [(p.grad, view) for p, view in zip(self.parameters, views, strict=True) if p.grad is not None]
        if pairs:
            foreach_copy([gradient for gradient, _ in pairs], [view for _, view in pairs])

    def bind_gradients(self, g: torch.Tensor, missing: Ranges = ()) -> None:
        """Makes the parameters' gradients views of `g` (P,), so that backward adds straight into it; `missing` get none."""
        for parameter, view in zip(self.parameters, self.views(g), strict=True):
            parameter.grad = view
        self.leave_out(missing)

    def leave_out(self, missing: Ranges) -> None:
        if missing:
            them = set(missing)
            for parameter, own in zip(self.parameters, self.ranges, strict=True):
                if own in them:
                    parameter.grad = None

    def release_gradients(self) -> None:
        """Moves the gradients to their own memory again, with their present values."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def release(self) -> None:
        """Moves the parameters to their own memory again, with their present values."""
        with without_overrides():
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
        self._bound = self.bound_to = self.rests_on = None
        self._views.clear()

    def describe(self) -> Sequence[tuple[int, ...]]:
        """The shapes, in order: what all workers of a run must agree on."""
        return [tuple(p.shape) for p in self.parameters]

    @property
    def memory_order(self) -> str:
        """By number of a parameter that is not contiguous, such as in channels_last: its dimensions, largest stride first."""
        found = []
        for number, (p, strides) in enumerate(zip(self.parameters, self._strides, strict=True)):
            dims = [dim for dim, size in enumerate(p.shape) if size > 1]
            order = dims if strides is None else sorted(dims, key=[-one for one in strides].__getitem__)
            found += [f"{number}:{','.join(map(str, order))}"] if order != dims else []
        return " ".join(found)


def with_its_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory, as a storage that begins and ends where the parameter does.

    `torch.save` writes whole storages, and PyTorch 2.13 adds a sparse vector to the wrong elements of a view that begins
    later.
    """
    if type(view) is not torch.Tensor or not view.is_cpu:
        return view
    if not view.numel():
        return torch.empty_like(view)
    memory = view.as_strided((view.numel(),), (1,)).view(torch.uint8).numpy()
    return torch.from_numpy(memory).view(view.dtype).as_strided(view.shape, view.stride())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor fills its memory without gaps, in any order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def model_words(model: nn.Module) -> str:
    """A model's size, and a digest of its shapes: what workers must agree on."""
    binding = FlatBinding(model.parameters(), on_any_device=True)
    frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    others = sorted((name, tuple(one.shape), str(one.dtype)) for name, one in (*model.named_buffers(), *frozen))
    digest = hashlib.sha256(
        repr((binding.describe(), binding.memory_order, binding.dtype, others)).encode()
    ).hexdigest()[:12]
    return f"{binding.num_parameters:,} parameters (shapes {digest})"
