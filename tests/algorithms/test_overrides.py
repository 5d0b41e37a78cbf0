"""A rule of the servers' own overrides the user's optimizer: they are told, once, where it need not be so."""

import json
import warnings

import pytest
import torch
from typer.testing import CliRunner

import paceline as pl
from paceline.algorithms import registry
from paceline.errors import OverrideWarning

SAYS = (
    "The servers apply gradients by {}, which overrides the workers' optimizer: of that, only the learning rate counts."
)
OVERRIDES = {
    "parameter-server(mode=async, apply=adagrad)": "adagrad",
    "parameter-server(apply=momentum(beta=0.5))": "momentum(beta=0.5)",
    "parameter-server(apply=delayed(delay=constant(updates_late=2)))": "delayed(delay=constant(updates_late=2))",
}


@pytest.mark.parametrize("spec", OVERRIDES)
def test_says_which_rule(spec):
    assert pl.parse(spec).overrides == SAYS.format(OVERRIDES[spec])


@pytest.mark.parametrize("name", registry.names())
def test_a_method_of_which_it_is_a_part_says_so_in_its_card_only(name):
    assert pl.parse(name).overrides == ""


def loop():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.attach(model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()


def test_python_warns_once_and_names_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pl.simulate(loop, workers=3, algorithm="parameter-server(apply=sgd)")
        pl.simulate(loop, workers=3, algorithm="downpour")
        pl.simulate(loop, workers=3, algorithm="parameter-server")
    assert [str(one.message) for one in caught] == [SAYS.format("sgd")]
    assert caught[0].filename == __file__


@pytest.mark.parametrize("spec", ["downpour", "adaptive-revision", "parameter-server(apply=sgd)"])
def test_a_rule_that_minimizes_refuses_an_optimizer_that_maximizes(spec):
    def maximized():
        model = torch.nn.Linear(3, 1)
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, maximize=True)):
            raise AssertionError

    with pytest.raises(pl.UsageError, match="has maximize=True: negate the loss"):
        pl.simulate(maximized, workers=2, algorithm=spec)


@pytest.mark.filterwarnings("ignore::paceline.errors.OverrideWarning")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("spec", ["downpour", "downpour(push=2)", "adaptive-revision", "parameter-server(apply=sgd)"])
def test_a_rule_with_one_rate_refuses_groups_with_several(spec, workers):
    """Also those that a schedule makes; groups without trained parameters do not count."""

    def fine_tuned():
        body, head, frozen = (torch.nn.Linear(3, 3) for _ in range(3))
        frozen.requires_grad_(False)
        groups = [
            {"params": head.parameters()},
            {"params": body.parameters()},
            {"params": frozen.parameters(), "lr": 1.0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda n: 1.0, lambda n: 1.0 if n < 4 else 0.1, lambda n: 1.0]
        )
        with pl.attach(torch.nn.Sequential(body, head, frozen), optimizer, same_random=True):
            for step in range(8):
                steps.append(step)
                optimizer.zero_grad()
                head(body(torch.ones(2, 3))).sum().backward()
                optimizer.step()
                schedule.step()

    steps = []
    with pytest.raises(pl.UsageError, match=r"groups have 0.001, 0.01: use one"):
        pl.simulate(fine_tuned, workers=workers, algorithm=spec)
    assert 4 in steps


def test_train_warns_a_python_program():
    with pytest.warns(OverrideWarning, match="by sgd"):
        pl.train(pl.TrainConfig(algorithm="parameter-server(apply=sgd)", workers=2, steps=2, backend="threads"))
    with pytest.warns(OverrideWarning, match="by sgd"):
        pl.simulate_task(pl.TrainConfig(algorithm="parameter-server(apply=sgd)", workers=2, steps=2))


@pytest.mark.parametrize("verb", [["train", "--backend", "threads"], ["simulate"], ["compare", "--backend", "threads"]])
def test_the_command_line_says_it_on_stderr_and_not_in_the_json(verb, tmp_path):
    from paceline.cli.app import app

    command = [*verb, "--algorithm", "parameter-server(apply=sgd)", "--workers", "2", "--steps", "2", "--json"]
    result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert result.stderr.count(SAYS.format("sgd")) == 1
    assert "parameter-server(apply=sgd): The servers" in result.stderr
    assert result.stdout.count("\n") == 1
    assert "which overrides" not in result.stdout
    json.loads(result.stdout)
