"""`paceline launch` refuses loops that cannot be trained in one sentence with exit code 2, as a function or as a script."""

import pytest

import forked

LOOPS = """
import sys
import torch
from torch import nn
import paceline as pl


def made():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def looped(model, optimizer, algorithm=None, step=lambda model, optimizer: optimizer.step()):
    with pl.attach(model, optimizer, algorithm) as worker:
        for number, x in enumerate(worker.batches([torch.ones(2, 4)] * 40)):
            assert number < 2, "it was not refused"
            model.zero_grad()
            model(x).square().mean().backward()
            step(model, optimizer)


def unknown_algorithm():
    model = made()
    looped(model, sgd(model), "hogwil")


def chosen_by_the_loss():
    model = made()
    looped(model, torch.optim.LBFGS(model.parameters()), "ad-psgd")


def several():
    model = made()
    looped(model, [sgd(layer) for layer in model], "ad-psgd")


def by_hand():
    def step(model, optimizer):
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)

    model = made()
    looped(model, sgd(model), "ad-psgd", step)


def by_another_optimizer():
    model = made()
    other = sgd(model)
    looped(model, sgd(model), "ad-psgd", lambda *_: other.step())


def by_worker_0_alone():
    model = made()
    other = sgd(model)
    with pl.attach(model, sgd(model), "ad-psgd") as worker:
        if worker.worker_id == 0:
            model(torch.ones(2, 4)).square().mean().backward()
            other.step()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
"""


def refused(folder, *words):
    """The refusal, which each worker of a script prints."""
    done = forked.run(["-m", "paceline", "launch", "--workers", "2", *words], folder, errors=None)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (said,) = {line for line in done.stderr.splitlines() if line.startswith("paceline: ")}
    return said


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unknown_algorithm", "Did you mean 'hogwild'"),
        ("chosen_by_the_loss", "LBFGS chooses its steps by the loss"),
        ("several", "takes one optimizer, and attach was given 2"),
        ("by_hand", "never called optimizer.step()"),
        ("by_another_optimizer", "steps a SGD that attach was not given"),
        ("by_worker_0_alone", "steps a SGD that attach was not given"),
    ],
)
def test_a_function_and_a_script_are_refused_alike(name, says, tmp_path):
    (tmp_path / "loops.py").write_text(LOOPS)
    of_function, of_script = refused(tmp_path, f"loops.py:{name}"), refused(tmp_path, "--", "loops.py", name)
    assert says in of_script
    assert of_function == of_script
