"""Digests of tensors: equal where the bytes are, wherever they lie, and different for other bytes or another order."""

import torch

from paceline.optim.model_state import digest


def test_permutation_matrices_differ():
    draw = torch.Generator().manual_seed(0)
    for size in (256, 512, 1024):
        matrices = [torch.eye(size, dtype=torch.float64)[torch.randperm(size, generator=draw)] for _ in range(4)]
        assert len({digest(one) for one in matrices}) == 4


def test_where_a_tensor_lies_makes_no_difference():
    whole = torch.arange(3001, dtype=torch.float32)
    assert digest(whole[1:]) == digest(whole[1:].clone()) != digest(whole[:-1])


def test_a_short_tensor_has_a_digest():
    assert digest(torch.ones(1, dtype=torch.uint8)) != digest(torch.zeros(1, dtype=torch.uint8))
