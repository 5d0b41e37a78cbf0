"""Embeddings whose tables lie at servers: a worker has the rows that its model looks up, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from paceline.errors import UsageError, WorkerLostError
from paceline.optim.flat import FlatBinding
from paceline.optim.held_rows import HeldRows
from paceline.optim.ranges import Ranges
from paceline.optim.rows import Rows, Table
from paceline.system.torch_internals import TENSOR_HOOKS, without_overrides

LEAST_BYTES = 1 << 24  # of a table; smaller ones are not worth a request in every step

# What does not read a parameter's values. Anything else that gets the parameter makes the table whole.
_PROPERTIES = (
    "device dtype grad grad_dtype grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse itemsize layout"
    " names nbytes ndim requires_grad retains_grad shape _version"
)
_FUNCTIONS = (
    "__hash__ __len__ data_ptr dim element_size empty_like full_like get_device is_complex is_contiguous is_floating_point"
    " nelement numel ones_like register_hook register_post_accumulate_grad_hook requires_grad_ size stride zeros_like"
)
_HARMLESS_PROPERTIES = frozenset((*_PROPERTIES.split(), *TENSOR_HOOKS))
_HARMLESS_FUNCTIONS = frozenset(_FUNCTIONS.split())
_LOST = (
    "This worker has left the run with an error and has only some rows of the table of shape {}: make the model anew, or load"
    " weights from a checkpoint."
)


class LookedUpTable(nn.Parameter):
    """A table's parameter as long as its memory has only some rows: every use of it goes through `LookedUpTables`.

    PyTorch's parameters without a shape, `UninitializedParameter`, change their class likewise.
    """

    tables: LookedUpTables

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_harmless(func):
            for one in _tables_in((args, kwargs)):
                one.tables.use(one, func, args, kwargs)
        with without_overrides():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.tables.make_whole(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.tables.make_whole(self)
        return self.__reduce_ex__(protocol)


class _Source(NamedTuple):
    """The program that brings rows."""

    x: torch.Tensor  # its vector (P,)
    fetch: Callable[[Rows, torch.Tensor], None]
    hold_whole: Callable[[], None]


class LookedUpTables:
    """A worker's large embeddings with sparse gradients; implements `Lookups`.

    `F.embedding` and `F.embedding_bag`, and so their modules, first fetch the rows that they need and the worker does not
    have. If the loop uses a table in any other way, such as `state_dict()`, a norm or a tied layer, all rows of all tables are
    fetched first, and this worker holds whole tables from then on, as under any other algorithm.

    Costs: some 2 us for each use of a parameter by Python; a request and its answer for each lookup; a page of memory
    (4 KB) for each row of the present step. Functions of `torch.func` that get the parameter itself, and not a detached
    tensor, go unseen.

    Attributes:
        tables: empty once they are whole.
        is_stepping: whether the loop's optimizer is in its step, which has the rows that it needs.
        raise_if_stopped: called with the error of a fetch, which may come of the run's end.
        on_change: called with the elements of the tables, or none, when these begin or end to be incomplete.
    """

    def __init__(self, parameters: dict[Table, nn.Parameter], binding: FlatBinding) -> None:
        self.tables: tuple[Table, ...] = tuple(parameters)
        self._parameters = parameters  # by table, in ascending order
        self._binding = binding
        self._held: dict[int, HeldRows] = {}  # by a vector's address
        self._source: _Source | None = None
        self._forget_run()

    @property
    def ranges(self) -> Ranges:
        """The elements of tables that are incomplete."""
        return tuple((one.begin, one.end) for one in self.tables) if self._source is not None else ()

    def begin(
        self, x: torch.Tensor, fetch: Callable[[Rows, torch.Tensor], None], hold_whole: Callable[[], None]
    ) -> None:
        self._source = _Source(x, fetch, hold_whole)
        self.outdate(x)
        for parameter in self._parameters.values():
            parameter.__class__ = LookedUpTable
            parameter.tables = self  # type: ignore[attr-defined]
        self.on_change(self.ranges)

    def outdate(self, x: torch.Tensor, *, is_whole: bool = False) -> None:
        key = x.data_ptr()
        if key not in self._held:
            self._held[key] = HeldRows(x, self.tables)
        else:
            self._held[key].forget(is_whole=is_whole)

    def use(self, parameter: nn.Parameter, function: Any, args: Any, kwargs: Any) -> None:
        """The loop is about to call this function with a table's parameter.

        Raises:
            UsageError: the rows that it needs cannot be had any more.
        """
        if self.is_stepping():
            return
        source = self._source
        if source is None or not _is_lookup(parameter, function, args, kwargs):
            self.make_whole(parameter)
            return
        table = next(one for one, own in self._parameters.items() if own is parameter)
        x = self._binding.bound_to
        assert x is not None
        held = self._held[x.data_ptr()]
        missing = held.missing(table, args[0].detach().long().flatten())
        if len(missing):
            self._fetch(source, {table: missing}, x)
            held.add(table, missing)

    def _fetch(self, source: _Source, rows: Rows, x: torch.Tensor) -> None:
        try:
            source.fetch(rows, x)
        except WorkerLostError as error:
            self.raise_if_stopped(error)
            raise

    def make_whole(self, parameter: nn.Parameter) -> None:
        """Fetches all rows of all tables; from now on this worker holds them.

        Raises:
            UsageError: the worker has left the run, and this table is incomplete.
        """
        if self._source is None:
            raise UsageError(_LOST.format(tuple(parameter.shape)))
        for held in (self._held[one.data_ptr()] for one in self._vectors(self._source)):
            for table in self.tables:
                numbers = torch.arange((table.end - table.begin) // table.width)
                self._fetch(self._source, {table: held.missing(table, numbers)}, held.x)
        self._source.hold_whole()
        on_change = self.on_change
        self.end()
        on_change(())

    def _vectors(self, source: _Source) -> list[torch.Tensor]:
        x = self._binding.bound_to
        return [source.x] if x is None or x.data_ptr() == source.x.data_ptr() else [source.x, x]

    def end(self) -> None:
        """The parameters' memory has all rows."""
        if self._source is not None:
            for parameter in self._parameters.values():
                del parameter.tables  # type: ignore[attr-defined]
                parameter.__class__ = nn.Parameter
        self.give_up()

    def give_up(self) -> None:
        """The worker leaves the run: tables that are incomplete stay so, and every use of them raises an error."""
        self._source, self.tables = None, ()
        self._held.clear()
        self._forget_run()

    def _forget_run(self) -> None:
        self.is_stepping: Callable[[], bool] = bool
        self.raise_if_stopped: Callable[[Exception], None] = lambda error: None
        self.on_change: Callable[[Ranges], None] = lambda ranges: None


def _is_harmless(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        attribute = function.__self__.__name__
        return attribute in _HARMLESS_PROPERTIES and (name == "__get__" or attribute in ("grad", "requires_grad"))
    return name in _HARMLESS_FUNCTIONS or function is torch.autograd.grad


def _is_lookup(parameter: nn.Parameter, function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    return (
        function in (F.embedding, F.embedding_bag)
        and args[1] is parameter
        and not args[0].is_floating_point()
        and kwargs["sparse"]
        and kwargs["max_norm"] is None
        and kwargs.get("per_sample_weights") is None  # whose gradient needs the rows later
    )


def _tables_in(values: Any) -> Iterator[LookedUpTable]:
    if type(values) is LookedUpTable:
        yield values
    elif isinstance(values, dict):
        yield from _tables_in(list(values.values()))
    elif isinstance(values, list | tuple):
        for one in values:
            yield from _tables_in(one)


def looked_up_tables(model: nn.Module, binding: FlatBinding) -> LookedUpTables | None:
    """The model's large embeddings with sparse gradients, on the CPU; None: it has none."""
    modules = list(model.modules())
    unseen = {p for one in modules if isinstance(one, torch.jit.ScriptModule) for p in one.parameters()}
    weights = {
        one._parameters["weight"]
        for one in modules
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse and "weight" in one._parameters
    }
    found = {
        Table(begin, end, (end - begin) // len(parameter)): parameter
        for parameter, (begin, end) in zip(binding.parameters, binding.ranges, strict=True)
        if parameter in weights - unseen
        and type(parameter) is nn.Parameter
        and parameter.nbytes >= LEAST_BYTES
        and parameter.is_contiguous()
    }
    return LookedUpTables(found, binding) if found and binding.device.type == "cpu" else None
