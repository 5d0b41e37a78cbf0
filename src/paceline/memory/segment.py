"""One piece of anonymous memory that all processes of a run share, and its layout."""

from __future__ import annotations

import mmap
import os
import weakref
from multiprocessing import reduction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

WORD_BYTES = 8
LINE_BYTES = 64  # words of different workers lie this far apart, to avoid false sharing
PAGE_BYTES = 4096  # vectors start on a page: they can be placed on a NUMA node, and untouched ones cost nothing


class Layout:
    """Reserves named areas, one behind the other; the segment is created with its `size_bytes` afterwards.

    Plain data: it can be pickled, and so can the plans made from it.

    >>> layout = Layout()
    >>> layout.words("head", 1), layout.vector("x", 10, torch.float32), layout.size_bytes
    (0, 4096, 4136)
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.offsets: dict[str, int] = {}

    def reserve(self, name: str, size_bytes: int, alignment_bytes: int = LINE_BYTES) -> int:
        """Reserves an area with a new name; returns its offset in bytes from the start of the segment."""
        if name in self.offsets:
            raise ValueError(f"the layout already has an area {name!r}; give the second one a name of its own")
        if size_bytes < 1:
            raise ValueError(f"area {name!r} has {size_bytes} bytes; an area has at least one")
        offset = -(-self.size_bytes // alignment_bytes) * alignment_bytes
        self.size_bytes = offset + size_bytes
        self.offsets[name] = offset
        return offset

    def words(self, name: str, count: int) -> int:
        """Reserves `count` int64 words, one cache line apart: word i is at `offset + i * LINE_BYTES`."""
        return self.reserve(name, count * LINE_BYTES)

    def vector(self, name: str, num_elements: int, dtype: torch.dtype) -> int:
        return self.reserve(name, num_elements * dtype.itemsize, PAGE_BYTES)


class NamedLayout(Layout):
    """A layout that holds several parts of one kind."""

    def __init__(self, layout: Layout, prefix: str) -> None:
        super().__init__()
        self._layout, self._prefix = layout, prefix

    def reserve(self, name: str, size_bytes: int, alignment_bytes: int = LINE_BYTES) -> int:
        return self._layout.reserve(self._prefix + name, size_bytes, alignment_bytes)


class Segment:
    """Shared memory without a name: it reaches another process as a file descriptor and dies with its last user.

    No kill leaves anything behind in `/dev/shm`. All bytes are zero at first; a page takes physical memory when it is first
    written. Can be an argument of a `multiprocessing.Process` (any start method).

    Tensors, arrays and addresses stay valid after `close` as long as something refers to them or to `mapping`.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        # Tensors refer to the array, not the mmap: torch.frombuffer keeps a reference to its argument but no buffer export,
        # so on a bare mmap `close` would unmap memory under living tensors. An array holds its export of the mmap for as
        # long as anything refers to the array.
        self.mapping: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, size_bytes), dtype=np.uint8)
        self.address: int = self.mapping.ctypes.data
        self._close_fd = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Makes a new segment of zeros.

        Not limited by the size of `/dev/shm` (containers often give it 64 MB): a memfd counts as this process's memory.
        """
        fd = os.memfd_create("paceline", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size_bytes)
            return cls(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def from_fd(cls, fd: int, size_bytes: int) -> Segment:
        """Maps a segment that another process created; the descriptor belongs to the new object.

        Raises:
            ValueError: the file is smaller than `size_bytes` (touching the rest would end the process).
        """
        if os.fstat(fd).st_size < size_bytes:
            raise ValueError(f"the segment has {os.fstat(fd).st_size} bytes, not the expected {size_bytes}")
        return cls(fd, size_bytes)

    def tensor(self, offset: int, shape: tuple[int, ...] | int, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor object over the memory, not a copy.

        A new object each time because two views of one tensor share autograd's version counter: a write through one
        in one thread would invalidate what another thread saved for its backward pass.
        """
        size = torch.Size((shape,) if isinstance(shape, int) else shape)
        flat = torch.frombuffer(self._bytes(), dtype=dtype, count=size.numel(), offset=offset)
        return flat.view(size)

    def array(self, offset: int, shape: tuple[int, ...] | int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype=dtype, buffer=self._bytes(), offset=offset)

    def close(self) -> None:
        """Closes the descriptor and releases the mapping, which ends with the last tensor over it."""
        self._close_fd()
        if hasattr(self, "mapping"):
            del self.mapping

    def _bytes(self) -> Any:
        if not hasattr(self, "mapping"):
            raise ValueError("the segment is closed")
        return self.mapping

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_duplicate, (reduction.DupFd(self.fd), self.size_bytes)


def _from_duplicate(duplicate: Any, size_bytes: int) -> Segment:
    return Segment.from_fd(duplicate.detach(), size_bytes)
