"""Which rows of tables a vector has, and what it forgets."""

import mmap

import torch

from paceline.optim.held_rows import HeldRows
from paceline.optim.rows import Selection, Table, nothing_but

TABLE, OTHER = Table(16, 16 + 4 * 10_000, 4), Table(40_032, 40_052, 2)


def test_rows_that_are_missing():
    held = HeldRows(torch.zeros(40_064), [TABLE, OTHER])
    asked = torch.tensor([7, 3, 7, 9_999, 10_000, -1])
    assert held.missing(TABLE, asked).tolist() == [3, 7, 9_999], "each once; others do not exist"
    held.add(TABLE, torch.tensor([3, 9_999]))
    held.add(TABLE, torch.tensor([5]))
    assert held.missing(TABLE, asked).tolist() == [7]
    assert held.missing(OTHER, torch.tensor([3])).tolist() == [3]
    held.forget()
    assert held.missing(TABLE, asked).tolist() == [3, 7, 9_999]


def test_memory_is_given_back_once_a_25th_may_be_in_use():
    x = torch.zeros(40_064)
    held = HeldRows(x, [TABLE, OTHER])
    middle = slice(16 + 4 * 2_000, 16 + 4 * 8_000)
    x[middle] = 1.0
    most = (4 * 40_000 // 25) // (16 + mmap.PAGESIZE)
    held.add(TABLE, torch.arange(most))
    held.forget()
    assert x[middle].all(), "they stay, for it is cheaper"
    held.add(TABLE, torch.arange(most + 1))
    held.forget()
    assert not x[middle].any()
    x[middle] = 1.0
    held.forget(is_whole=True)
    assert not x[middle].any()


def test_rows_and_nothing_else():
    rows = {Table(4, 12, 2): torch.tensor([1]), Table(20, 26, 3): torch.tensor([0, 1])}
    for begin, end, expected in [(0, 30, [6, 7, *range(20, 26)]), (7, 22, [7, 20, 21]), (12, 20, []), (26, 40, [])]:
        selection = Selection(nothing_but(rows, begin, end), begin, end)
        assert (selection.index() + begin).tolist() == expected
        again = Selection.from_bytes(selection.to_bytes(), begin, end)
        assert (again.index() + begin).tolist() == expected
