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
    "The servers apply gradients by {}, which overrides the workers' optimizer: of that, only the first learning rate"
    " counts."
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
