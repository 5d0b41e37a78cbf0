"""Atomic operations on 64-bit words of shared memory, sequentially consistent, compiled by Numba.

A word is named by its address, a plain integer: Numba unboxes an integer in a few nanoseconds and an array in hundreds.
Each operation is one machine instruction behind a call of about 0.1 us from Python, and is inlined where another kernel
calls it. Every word holds an int64 and is aligned to 8 bytes.

The kernels keep the GIL: they end sooner than the GIL could be released and taken back, and handing it over in the
middle of a lock operation would stretch that operation from nanoseconds to milliseconds. Only the spinning ones in
`waiting.py` release it.

An address is trusted: a wrong one ends the process. Objects that keep an address keep the `Segment`'s mapping with it.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paceline.system.compilation import compiled

_Kernel = TypeVar("_Kernel", bound=Callable[..., Any])
_WORD = ir.IntType(64)


def kernel(signature: str, *, releases_gil: bool = False) -> Callable[[_Kernel], _Kernel]:
    """Compiles a function for exactly one signature when it is defined, from Numba's cache if it is there.

    The explicit signature, such as `"int64(int64, int64)"`, is what moves compilation from the first call (in the middle of a
    step, while others wait) to the import. Numba's cache notices a change of the kernel's own file only: after changing an
    operation of this module, remove the `__pycache__` of the modules that inline it. `releases_gil` lets other Python threads
    run meanwhile, and costs about 0.1 us per call.
    """
    return functools.partial(compiled, signature=signature, nogil=releases_gil)


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> Any:
    return builder.inttoptr(address, _WORD.as_pointer())


@intrinsic
def _load(typing_context, address):  # noqa: ANN001, ANN202  (the shape Numba prescribes; so below)
    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        return builder.load_atomic(_pointer(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _store(typing_context, address, value):  # noqa: ANN001, ANN202
    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        builder.store_atomic(arguments[1], _pointer(builder, arguments[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _compare_and_swap(typing_context, address, expected, desired):  # noqa: ANN001, ANN202
    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        address, expected, desired = arguments
        outcome = builder.cmpxchg(_pointer(builder, address), expected, desired, "seq_cst", "seq_cst")
        return builder.extract_value(outcome, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _fetch_add(typing_context, address, value):  # noqa: ANN001, ANN202
    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        return builder.atomic_rmw("add", _pointer(builder, arguments[0]), arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _fence(typing_context):  # noqa: ANN001, ANN202
    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _pause(typing_context):  # noqa: ANN001, ANN202
    def generate(context, builder, signature, arguments):  # noqa: ANN001, ANN202
        # Tells the core's other hardware thread that this one only waits; a no-op on machines not named here.
        if platform.machine() in ("x86_64", "AMD64"):
            hint = ir.FunctionType(ir.VoidType(), ())
            builder.call(cgutils.get_or_insert_function(builder.module, hint, "llvm.x86.sse2.pause"), ())
        elif platform.machine() in ("aarch64", "arm64"):
            hint = ir.FunctionType(ir.VoidType(), (ir.IntType(32),))
            function = cgutils.get_or_insert_function(builder.module, hint, "llvm.aarch64.hint")
            builder.call(function, (ir.Constant(ir.IntType(32), 1),))
        return context.get_dummy_value()

    return types.void(), generate


@kernel("int64(int64)")
def load(address: int) -> int:
    """The word's value."""
    return _load(address)  # pyright: ignore[reportCallIssue]


@kernel("void(int64, int64)")
def store(address: int, value: int) -> None:
    """Sets the word."""
    _store(address, value)  # pyright: ignore[reportCallIssue]


@kernel("boolean(int64, int64, int64)")
def compare_and_swap(address: int, expected: int, desired: int) -> bool:
    """Sets the word to `desired` if it is `expected`; returns whether it was."""
    return _compare_and_swap(address, expected, desired)  # pyright: ignore[reportCallIssue]


@kernel("int64(int64, int64)")
def fetch_add(address: int, value: int) -> int:
    """Adds to the word; returns what it was before."""
    return _fetch_add(address, value)  # pyright: ignore[reportCallIssue]


@kernel("void()")
def fence() -> None:
    """Orders ordinary memory accesses before it against those after it, in both directions."""
    _fence()  # pyright: ignore[reportCallIssue]


@kernel("void()")
def pause() -> None:
    """A hint for waiting loops."""
    _pause()  # pyright: ignore[reportCallIssue]
