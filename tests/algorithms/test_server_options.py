"""Options of the methods with servers, as Python gives them: of the wrong type, or without effect."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

import paceline as pl
from paceline.observe.report import runs_and_notes
from paceline.observe.tables import comparison_table, result_table

WRONG = [
    (pl.Sync, {"backups": "Auto"}, "backups .* a whole number or 'auto', not 'Auto'. Did you mean 'auto'?"),
    (pl.Sync, {"backups": 1.5}, "backups of Sync must be a whole number"),
    (pl.Sync, {"backups": True}, "backups of Sync must be a whole number"),
    (pl.Bounded, {"clock_bound": None}, "clock_bound of Bounded must be a whole number, not None"),
    (
        pl.ParameterServer,
        {"mode": "async"},
        r"an object, such as Async\(\) .* not 'async'; .* parse\('parameter-server\(mode=async",
    ),
    (pl.ParameterServer, {"mode": 1}, "mode .* of the kind Mode, not 1"),
    (pl.ParameterServer, {"apply": "adagrad"}, "apply .* of the kind ApplyRule, not 'adagrad'"),
    (pl.ParameterServer, {"average": "0.9"}, "average .* a number or None"),
    (pl.ParameterServer, {"shards": None}, "shards"),
    (pl.Downpour, {"push": "2"}, "push of Downpour must be a whole number"),
    (pl.AdaptiveRevision, {"revision_state": "echos"}, "Did you mean 'echo'?"),
]


@pytest.mark.parametrize(("method", "arguments", "says"), WRONG, ids=[str(one) for _, one, _ in WRONG])
def test_a_value_of_the_wrong_type_is_one_sentence(method, arguments, says):
    with pytest.raises(pl.UsageError, match=says):
        method(**arguments)


def test_numbers_of_numpy_are_numbers():
    assert pl.Sync(backups=np.int64(1)) == pl.Sync(backups=1)
    assert pl.ParameterServer(average=np.float64(0.5)) == pl.ParameterServer(average=0.5)


@pytest.mark.parametrize("faults", [{}, {"kill": 1}, []])
def test_faults_are_a_script(faults):
    with pytest.raises(pl.UsageError, match=r"faults must be a script such as pl\.Faults\(\)\.kill"):
        pl.simulate(lambda: None, workers=2, faults=faults)
    with pytest.raises(pl.UsageError, match="faults must be a script"):
        pl.simulate_task(pl.TrainConfig(algorithm="parameter-server", steps=1), faults=faults)


@pytest.mark.parametrize(
    ("spec", "left_out"),
    [
        ("parameter-server(shards=2, durability=replica)", "shards, durability play no part."),
        ("downpour(push=3)", "push plays no part."),
        ("adaptive-revision(shards=2)", "shards plays no part."),
        ("parameter-server(mode=async, average=0.9)", "mode plays no part."),
        ("parameter-server(average=0.9)", ""),
        ("hogwild", ""),
    ],
)
def test_a_lone_worker_has_options_that_play_no_part(spec, left_out):
    assert pl.parse(spec).note(1).partition(": ")[2] == left_out
    assert pl.parse(spec).note(2) == ""


def test_its_result_says_so():
    settings = {"algorithm": "downpour(push=3)", "workers": 1, "steps": 2}
    said = ["A lone worker needs no server and has none: push plays no part."]
    assert pl.train(pl.TrainConfig(**settings, backend="threads")).result["notes"] == said
    assert pl.simulate_task(pl.TrainConfig(**settings)).result["notes"] == said
    assert pl.simulate(alone, workers=1, algorithm="downpour(push=3)").result["notes"] == said


def alone():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.attach(model, optimizer) as worker:
        for batch in worker.batches([torch.ones(2)]):
            model(batch).sum().backward()
            optimizer.step()


def test_that_an_average_was_evaluated_is_said_beside_its_accuracy():
    plain = pl.simulate_task(pl.TrainConfig(algorithm="parameter-server", workers=2, steps=2)).result
    averaged = pl.simulate_task(pl.TrainConfig(algorithm="parameter-server(average=0.9)", workers=2, steps=2)).result
    words = "moving average of parameters and buffers, decay 0.9"
    for tables, said in (
        ([result_table(averaged), comparison_table([plain, averaged])], 1),
        ([result_table(plain), comparison_table([plain])], 0),
    ):
        for table in tables:
            Console(file=(text := io.StringIO()), width=200).print(table)
            assert " ".join(text.getvalue().split()).count(words) == said, text.getvalue()
    assert runs_and_notes([plain, averaged])["notes"].count(words) == 1
    assert words not in runs_and_notes([plain])["notes"]
