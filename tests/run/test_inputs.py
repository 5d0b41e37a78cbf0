"""Fingerprints of a task's file and training set."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from paceline.run.inputs import inputs_of, source_digest
from paceline.specs.file_loop import FileLoop
from paceline.system import files


def data(x):
    return inputs_of("digits-mlp", TensorDataset(x))["data"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64])
def test_every_kind_of_number_has_a_fingerprint(dtype):
    x = torch.arange(12).to(dtype).view(4, 3)
    assert data(x) == data(x.t().contiguous().t())
    assert data(x) != data(torch.zeros_like(x))
    assert data(x) != data(x.view(4, 3, 1))


def test_sets_that_cannot_be_read_twice_have_none():
    class Drawn(TensorDataset):
        pass

    x = torch.eye(4)
    assert inputs_of("digits-mlp", Drawn(x)) == {"script": None, "samples": 4, "data": None}
    assert data(x.to_sparse()) is None


def test_large_sets_are_read_in_part():
    """A sample that is not read can change unnoticed."""
    x = torch.zeros(5000, 1)
    before = data(x)
    x[2] = 1
    assert data(x) == before
    x[-1] = 1
    assert data(x) != before


def test_a_loop_has_the_digest_of_its_file(tmp_path):
    path = tmp_path / "loops.py"
    path.write_text("def train():\n    pass\n")
    assert source_digest(FileLoop(path, "train")) == files.digest_of(path)
    assert source_digest(test_a_loop_has_the_digest_of_its_file) == files.digest_of(Path(__file__))
    assert source_digest(partial(print)) is None
