"""A placed model on real worker processes trains as one process does, bit for bit."""

import pytest
import torch

from chosen import each_value
from model_parallel.models import CASES, STEPS, alone, contrary, placed, planned


def check_equal(name, workers, folder, dtype, ordered=lambda plan: plan):
    plan = ordered(planned(name, workers, dtype))
    idle = {0} if name == "0-1-0" and workers == 3 else set()
    assert set(plan.placement.device_of) == set(range(workers)) - idle
    one, model = alone(name, dtype, plan=planned(name, 1, dtype) if name == "dropout" else None)
    run, found = placed(name, plan, folder, dtype)
    assert run.result["steps"] == STEPS
    for step in range(STEPS):
        loss, gradients, _ = one[step]
        seen = {}
        for steps, _ in found:
            assert steps[step][0] == loss, f"step {step}"
            assert not seen.keys() & steps[step][1].keys()
            seen |= steps[step][1]
        assert seen.keys() == gradients.keys()
        for key, gradient in gradients.items():
            assert torch.equal(seen[key], gradient), f"{key} in step {step}"
    for _, state in found:  # all leave with the whole model
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "workers"), [(name, 3) for name in CASES] + [(name, 2) for name in ("skips", "0-1-0", "tied embedding")]
)
def test_loss_all_gradients_and_five_steps_of_adam_are_equal(name, workers, tmp_path):
    check_equal(name, workers, tmp_path, torch.float64)


@pytest.mark.parametrize("name", ["two towers", "read by three"])
def test_float32_is_equal_too_where_sums_keep_their_order(name, tmp_path):
    check_equal(name, 3, tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("name", "how"),
    each_value(["attention", "read by three", "returned"], [(3, torch.float32), (2, torch.float64)]),
    ids=str,
)
def test_gradients_of_a_tensor_with_several_readers_are_added_in_the_models_order(name, how, tmp_path):
    check_equal(name, how[0], tmp_path, how[1], ordered=contrary)
