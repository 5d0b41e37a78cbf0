"""Memory without pages: zeros that were never written, and tensors whose pages are given back."""

import re
from pathlib import Path

import pytest
import torch

from paceline.system.pages import empty_pages, untouched_zeros

MEGABYTE = 1 << 20


def resident_bytes():
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.parametrize("num_elements", [0, 1, 511, 512, 1025, 5_000, 300_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_zeros_are_zero_and_pages_that_are_given_back_too(num_elements, dtype):
    x = untouched_zeros(num_elements, dtype)
    assert (x.shape, x.dtype) == ((num_elements,), dtype)
    assert not x.any()
    x.fill_(1.0)
    part = x[num_elements // 3 :]
    empty_pages(part)
    page = 4096 // x.element_size()
    assert part.count_nonzero() < 2 * page, "what shares a page with other memory stays"
    assert x[: num_elements // 3].all()


def test_only_pages_that_are_written_take_memory():
    before = resident_bytes()
    x = untouched_zeros(64 * MEGABYTE, torch.float32)  # 256 MB
    empty_pages(x)
    assert not x[:: 1024 * 1024].any()
    assert resident_bytes() - before < 8 * MEGABYTE
    x[:: 64 * 1024] = 1.0  # 1,024 pages
    assert 4 * MEGABYTE <= resident_bytes() - before < 16 * MEGABYTE
    empty_pages(x)
    assert resident_bytes() - before < 8 * MEGABYTE
