"""Instructions that Numba lacks: prefetching, and an atomic addition."""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.system import compilation

FAST = {"contract", "reassoc", "nsz"}
"""Sums may be reordered and multiply-adds fused. NaN and infinity stay what they are: divergence must be seen."""

_BYTES = ir.IntType(8).as_pointer()


def compiled(function: Any = None, *, allocates: bool = False) -> Any:
    """Numba's compiler with this package's options: lazy, cached on disk, without the GIL.

    Functions that make no arrays are compiled without reference counts: counting is an atomic operation for each use of
    an array, which costs as much as several non-zeros, and much more on several threads.
    """
    if function is None:
        return functools.partial(compiled, allocates=allocates)
    options: dict[str, Any] = {"nogil": True, "fastmath": FAST, "_nrt": allocates}
    return compilation.compiled(function, **options)


def _element(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
    """The address of an array's element; no bounds check, no wrap-around."""
    return builder.gep(context.make_array(kind)(context, builder, array).data, [index])


def _prefetching(array: Any, to_write: bool) -> Any:
    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        place = builder.bitcast(_element(context, builder, signature.args[0], *arguments), _BYTES)
        word = ir.IntType(32)
        hint = ir.FunctionType(ir.VoidType(), [_BYTES, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, hint, "llvm.prefetch.p0")
        write, keep, data = (ir.Constant(word, value) for value in (int(to_write), 3, 1))
        builder.call(function, [place, write, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@intrinsic
def prefetch(typing_context, array, index):  # noqa: ANN001, ANN201  (the shape Numba prescribes; so below)
    """Prefetches the cache line of `array[index]`; reads nothing, so an index beyond the end is harmless."""
    return _prefetching(array, False)


@intrinsic
def prefetch_to_write(typing_context, array, index):  # noqa: ANN001, ANN201
    """Like `prefetch`, and takes the line away from other cores, which a write needs anyway."""
    return _prefetching(array, True)


@intrinsic
def add_atomically(typing_context, array, index, value):  # noqa: ANN001, ANN201
    """Adds to `array[index]` atomically; returns the old value."""

    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        place = _element(context, builder, signature.args[0], *arguments[:2])
        return builder.atomic_rmw("fadd", place, arguments[2], "monotonic")

    return array.dtype(array, types.uint64, array.dtype), generate
