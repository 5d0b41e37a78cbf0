import numba
import numpy as np

from memory import programs
from paceline.memory.atomics import compare_and_swap, fetch_add, load, store
from paceline.memory.segment import Layout, Segment


def test_each_operation_alone():
    word = np.zeros(1, np.int64)
    address = word.ctypes.data
    store(address, -(2**62))
    assert load(address) == -(2**62)
    assert fetch_add(address, 5) == -(2**62)
    assert not compare_and_swap(address, 0, 1)
    assert compare_and_swap(address, 5 - 2**62, 9)
    assert word[0] == 9


def test_other_kernels_can_call_them():
    @numba.njit
    def add_twice(address):
        fetch_add(address, 1)
        return fetch_add(address, 1)

    word = np.zeros(1, np.int64)
    assert add_twice(word.ctypes.data) == 1
    assert word[0] == 2


def test_four_processes_lose_no_addition(workers):
    layout = Layout()
    start, word = layout.words("start", 1), layout.words("word", 1)
    segment = Segment.create(layout.size_bytes)
    for _ in range(4):
        workers.start(programs.count_up, segment, start, word, 4, 20_000)
    workers.join()
    assert load(segment.address + word) == 4 * 2 * 20_000
