"""An optimizer goes on from state that it may have written, and from no other."""

import copy
import inspect

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.saved_state import check_state

OPTIMIZERS = [
    one
    for one in vars(torch.optim).values()
    if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
]
SETTINGS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}, "Adam": {"amsgrad": True}}


def made(kind, steps=0, **settings):
    """Of a matrix and of a parameter that never gets a gradient."""
    sparse = kind is torch.optim.SparseAdam
    matrix, without = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2, 2))
    optimizer = kind([matrix] if kind is torch.optim.LBFGS else [matrix, without], lr=0.01, **settings)
    for _ in range(steps):
        gradient = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
        matrix.grad = gradient.to_sparse() if sparse else gradient
        optimizer.step(*[lambda: matrix.sum()] * (kind is torch.optim.LBFGS))
    return optimizer


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_its_own_state_is_accepted(kind, steps):
    settings = SETTINGS.get(kind.__name__, {})
    state = made(kind, steps, **settings).state_dict()["state"]
    check_state(state, [made(kind, **settings)])
    check_state(state, [made(kind)])  # a resumed run may change settings


@pytest.mark.parametrize("kind", [one for one in OPTIMIZERS if one not in (torch.optim.LBFGS, torch.optim.SparseAdam)])
def test_state_of_another_form_is_refused(kind):
    settings = SETTINGS.get(kind.__name__, {})
    state = made(kind, 2, **settings).state_dict()["state"]
    for name, value in state[0].items():
        wrong = ["text", None, [1.0]]
        if isinstance(value, torch.Tensor):
            wrong += [torch.ones(5, 7, dtype=value.dtype), value.to(torch.int64), value.unsqueeze(0)]
        for other in wrong:
            changed = copy.deepcopy(state)
            changed[0][name] = other
            with pytest.raises(UsageError, match=rf"of the optimizer, '{name}' is "):
                check_state(changed, [made(kind, **settings)])
        changed = copy.deepcopy(state)
        del changed[0][name]
        if changed[0]:
            with pytest.raises(UsageError, match=rf"of the optimizer, .* lacks '{name}'"):
                check_state(changed, [made(kind, **settings)])
    for place in (-1, 2, "0"):
        with pytest.raises(UsageError, match="the state has besides"):
            check_state({place: state[0]}, [made(kind, **settings)])
    with pytest.raises(UsageError, match="has besides 'more'"):
        check_state({0: {**state[0], "more": torch.zeros(4, 3)}}, [made(kind, **settings)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", [one for one in OPTIMIZERS if one is not torch.optim.SparseAdam])
def test_state_that_has_been_loaded_before_is_accepted(kind, dtype):
    def fresh(state):
        parameter = nn.Parameter(torch.ones(4, 3, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        optimizer = kind([parameter], lr=0.01)
        check_state(state, [optimizer])
        if state:  # without one, Adagrad in PyTorch 2.8 cannot step
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        optimizer.step(*[lambda: parameter.abs().sum()] * (kind is torch.optim.LBFGS))
        return copy.deepcopy(optimizer.state_dict()["state"])

    state = {}
    for _ in range(4):
        state = fresh(state)


class Changing(torch.optim.SGD):
    """Its state changes form from step to step, and some of it belongs to no parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.state["of all"] = len(self.state)
        for parameter in self.param_groups[0]["params"]:
            own = self.state[parameter]
            own["past"] = [*own.get("past", []), parameter.norm()][-3:]
            own[f"step {len(own['past'])}"] = None


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_state_of_a_user_defined_class_may_have_any_form(steps):
    check_state(made(Changing, steps).state_dict()["state"], [made(Changing)])


def test_several_optimizers_number_their_parameters_one_after_the_other():
    adam, sgd = made(torch.optim.Adam, 1), made(torch.optim.SGD, 1, momentum=0.9)
    state = {0: adam.state_dict()["state"][0], 2: sgd.state_dict()["state"][0]}
    check_state(state, [made(torch.optim.Adam), made(torch.optim.SGD, momentum=0.9)])
    with pytest.raises(UsageError, match="of the optimizer"):
        check_state(state, [made(torch.optim.SGD, momentum=0.9), made(torch.optim.Adam)])
