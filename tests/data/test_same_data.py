"""Digests of samples of any type: equal for equal values, and different where values differ."""

import numpy as np
import pytest
import torch

from paceline.data.same_data import digest


def conjugated(number):
    return torch.tensor([1j, number * 1j]).conj()


def nested(layout):
    return lambda number: torch.nested.nested_tensor([torch.ones(2), torch.full((3,), float(number))], layout=layout)


def object_array(number):
    return np.array([(str(number), 1)], dtype=[("name", object), ("count", int)])


def scalar_object(number):
    return np.array(str(number), dtype=object)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [conjugated, nested(torch.strided), nested(torch.jagged), object_array, scalar_object])
def test_equal_values_have_equal_digests(make):
    assert digest(make(1)) == digest(make(1)) != digest(make(2))


def test_a_tensor_without_values_has_a_digest():
    assert digest(torch.ones(3, device="meta")) != digest(torch.ones(4, device="meta"))
