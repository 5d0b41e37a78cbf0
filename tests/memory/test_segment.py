import os

import pytest
import torch

from paceline.memory.segment import PAGE_BYTES, Layout, Segment


def test_areas_are_aligned_and_do_not_overlap():
    layout = Layout()
    words = layout.words("words", 3)
    vector = layout.vector("vector", 5, torch.float64)
    behind = layout.reserve("behind", 1)
    assert (words, vector, behind) == (0, PAGE_BYTES, PAGE_BYTES + 64)
    assert layout.size_bytes == behind + 1


def test_an_area_has_a_name_of_its_own_and_a_size():
    layout = Layout()
    layout.words("head", 1)
    with pytest.raises(ValueError, match="already has an area 'head'"):
        layout.words("head", 1)
    with pytest.raises(ValueError, match="at least one"):
        layout.reserve("empty", 0)


def test_views_are_of_the_same_memory_but_have_version_counters_of_their_own():
    segment = Segment.create(4096)
    one, other = segment.tensor(64, (2, 3), torch.float32), segment.tensor(64, (2, 3), torch.float32)
    one.fill_(7)
    assert torch.equal(other, torch.full((2, 3), 7.0))
    assert (one._version, other._version) == (1, 0)
    assert (segment.array(64, 6, "f4") == 7).all()
    segment.close()


def test_tensors_outlive_close_and_nothing_stays_open():
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    segment = Segment.create(1 << 20)
    x = segment.tensor(0, 1 << 18, torch.float32)
    segment.close()
    segment.close()
    x.fill_(1)
    assert x.sum() == 1 << 18
    with pytest.raises(ValueError, match="closed"):
        segment.tensor(0, 1, torch.float32)
    del x
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


def test_a_segment_that_is_too_small_is_refused():
    segment = Segment.create(4096)
    fd = os.dup(segment.fd)
    with pytest.raises(ValueError, match="has 4096 bytes, not the expected 8192"):
        Segment.from_fd(fd, 8192)
    again = Segment.from_fd(fd, 4096)
    segment.tensor(0, 1, torch.float32).fill_(3)
    assert again.tensor(0, 1, torch.float32) == 3
