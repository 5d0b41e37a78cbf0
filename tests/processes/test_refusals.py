"""Every launcher refuses loops that cannot be trained in one sentence, printed once, with exit code 2 and no traceback."""

import json

import pytest

import forked
from chosen import soaked
from free_ports import free_port

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


def aliased():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight.data = model[0].weight.data
    looped(model, sgd(model), "ad-psgd")


def unfrozen():
    def step(model, optimizer):
        optimizer.step()
        model[0].requires_grad_(True)

    model = made()
    model[0].requires_grad_(False)
    looped(model, sgd(model[1]), "ad-psgd", step)


def follows_a_measure():
    model = made()
    optimizer = sgd(model)
    with pl.attach(model, optimizer, "ad-psgd") as worker:
        worker.follow(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))


def steps_inside_backward():
    model = made()
    optimizer = sgd(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    looped(model, optimizer, "ad-psgd")


def by_worker_0_alone():
    model = made()
    other = sgd(model)
    with pl.attach(model, sgd(model), "ad-psgd") as worker:
        if worker.worker_id == 0:
            model(torch.ones(2, 4)).square().mean().backward()
            other.step()


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        pl.launch(globals()[sys.argv[2]], workers=2)
    else:
        globals()[sys.argv[1]]()
"""


def refusal(process):
    """The one line of errors that a program has printed."""
    _, errors = process.communicate(forked.AGAINST_HANGS_S)
    assert process.returncode == 2, errors
    assert "Traceback" not in errors
    (said,) = [line for line in errors.splitlines() if line.startswith("paceline: ")]
    return said


def refused(folder, *words):
    with forked.Python(words, folder, errors=None) as process:
        return refusal(process)


def refused_as_under_torchrun(folder, name):
    """What worker 0 of two prints."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with forked.running(["loops.py", name], [{**meeting, "RANK": str(rank)} for rank in range(2)], folder) as workers:
        return refusal(workers[0])


LAUNCH = ["-m", "paceline", "launch", "--workers", "2"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("unknown_algorithm", "Did you mean 'hogwild'"),
        ("several", "takes one optimizer, but attach was given 2"),
        ("by_hand", "never called optimizer.step()"),
        ("by_worker_0_alone", "steps a SGD that attach was not given"),
        ("unfrozen", "requires a gradient only since attach"),
        ("steps_inside_backward", "calls step() inside backward"),
        *soaked(
            ("chosen_by_the_loss", "LBFGS chooses its steps by the loss"),
            ("by_another_optimizer", "steps a SGD that attach was not given"),
            ("aliased", "share memory, as after `b.weight.data = a.weight.data`"),
            ("follows_a_measure", "ReduceLROnPlateau follows a metric"),
        ),
    ],
)
def test_all_launchers_refuse_alike(name, says, tmp_path):
    """Whatever refuses: `attach`, a step, one worker alone, or a hook within backward."""
    (tmp_path / "loops.py").write_text(LOOPS)
    of_function = refused(tmp_path, *LAUNCH, f"loops.py:{name}")
    assert says in of_function
    assert refused(tmp_path, *LAUNCH, "--", "loops.py", name) == of_function
    assert refused(tmp_path, "loops.py", "launch", name) == of_function
    assert says in refused_as_under_torchrun(tmp_path, name)
    for run in tmp_path.glob("runs/*"):  # is kept only if another worker has trained
        assert json.loads((run / "result.json").read_text())["steps"] or (run / "checkpoint").exists()
