"""Counts the memory that PyTorch's operations read and write."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_WRITE_ONLY = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}  # do not read their output
_TOUCH_NOTHING = ("empty", "new_empty")


class TrafficCount(TorchDispatchMode):
    """Counts the bytes of all tensors that operations read and write inside its `with`.

    A tensor passed twice counts once; views cost nothing. Temporary memory inside an operation is invisible, so the count is a
    lower bound.

    Args:
        counts: called for each operation that reads or writes; returns whether it counts. None: all do.

    Attributes:
        num_bytes: so far.
    """

    def __init__(self, counts=None):
        super().__init__()
        self._counts = counts
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Carries an operation out."""
        returned = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(_TOUCH_NOTHING) or (self._counts is not None and not self._counts()):
            return returned
        given = [(one, None) for one in func._schema.arguments[: len(args)]]
        given = [(schema, value) for (schema, _), value in zip(given, args, strict=True)]
        by_name = {one.name: one for one in func._schema.arguments}
        given += [(by_name[key], value) for key, value in (kwargs or {}).items()]
        read = {}
        written = {}
        for schema, value in given:
            writes = schema.alias_info is not None and schema.alias_info.is_write
            for tensor in _tensors(value):
                if writes:
                    written[tensor.data_ptr()] = tensor.nbytes
                if not writes or (schema.name != "out" and name not in _WRITE_ONLY):
                    read[tensor.data_ptr()] = tensor.nbytes
        if not written:
            if any(one.alias_info is not None for one in func._schema.returns):
                return returned  # a view
            written = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors(returned)}
        self.num_bytes += sum(read.values()) + sum(written.values())
        return returned


def _tensors(value):
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
