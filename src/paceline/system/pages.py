"""Memory that costs nothing until it is written: the kernel keeps no pages for it."""

from __future__ import annotations

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None)
_NO_HUGE_PAGES = 15  # MADV_NOHUGEPAGE, which `mmap` does not always name


def untouched_zeros(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros (n,) in the CPU's memory, whose pages are taken when they are first written."""
    x = torch.empty(num_elements, dtype=dtype, device="cpu")
    first, past = _whole_pages(x)
    x.view(torch.uint8)[:first] = 0
    x.view(torch.uint8)[past:] = 0
    empty_pages(x)
    return x


def empty_pages(x: torch.Tensor) -> None:
    """Gives back the memory of a tensor (n,): its elements on whole pages become zero, the others stay as they are."""
    if not _advise(x, mmap.MADV_DONTNEED):  # some are locked in memory
        x.view(torch.uint8)[slice(*_whole_pages(x))] = 0


def take_small_pages(x: torch.Tensor) -> None:
    """Makes a write to a tensor (n,) take one page of 4 KB, even if the kernel prefers 2 MB."""
    _advise(x, _NO_HUGE_PAGES)


def give_back_freed() -> None:
    """Gives memory that the process has freed back to the kernel; worker processes keep it otherwise."""
    if hasattr(_libc, "malloc_trim"):  # other C libraries than glibc have none
        _libc.malloc_trim(0)


def _advise(x: torch.Tensor, advice: int) -> bool:
    first, past = _whole_pages(x)
    return first == past or not _libc.madvise(
        ctypes.c_void_p(x.data_ptr() + first), ctypes.c_size_t(past - first), advice
    )


def _whole_pages(x: torch.Tensor) -> tuple[int, int]:
    """A tensor's (n,) first byte on a whole page, and the one after the last."""
    first = min(-x.data_ptr() % mmap.PAGESIZE, x.nbytes)
    return first, first + (x.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
