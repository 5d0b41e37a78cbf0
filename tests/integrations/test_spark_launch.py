"""`pl.spark.launch` in real Spark: everybody's loop learns on the tasks' own rows, and the first cause of an end is named."""

import inspect
import os
import re
import signal
import time

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline as pl
from integrations.spark_sessions import end_java, meetings_elsewhere, session
from paceline.errors import PacelineError, UsageError
from paceline.integrations import spark_job
from paceline.integrations import spark_launch as integration
from paceline.records.run_data import RunData

pytestmark = pytest.mark.filterwarnings("default")
LIMIT_S = 120


@pytest.fixture(scope="module")
def spark():
    own = session("local[2,4]")
    yield own
    own.stop()
    end_java()


def digits():
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int64)


@pytest.fixture(scope="module")
def frame(spark):
    x, y = digits()
    rows = [(one.tolist(), int(label)) for one, label in zip(x, y, strict=True)]
    return spark.createDataFrame(rows, "features array<float>, label long").repartition(2).cache()


def trained_for(epochs, rate, batch_size):
    """A loop that tells nothing of Spark but where its batches come from."""

    def train(rows):
        torch.manual_seed(0)
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with pl.attach(model, optimizer) as worker:
            for _ in range(epochs):
                for batch in worker.batches(rows.loader(batch_size=batch_size)):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(batch["features"]), batch["label"])
                    loss.backward()
                    optimizer.step()
                    worker.report(loss)

    return train


@pytest.mark.parametrize("algorithm", ["ad-psgd", "all-reduce"])
def test_a_loop_learns_digits_from_the_rows_of_its_task(frame, algorithm, tmp_path):
    run = pl.spark.launch(trained_for(8, 0.2, 16), workers=2, algorithm=algorithm, data=frame, out=tmp_path / "run")
    x, y = digits()
    model = nn.Linear(64, 10)
    model.load_state_dict(run.state_dict)
    assert np.mean(model(torch.tensor(x)).argmax(1).numpy() == y) > 0.93
    assert (run.result["outcome"], run.result["workers"], run.result["algorithm"]) == ("stopped", 2, algorithm)
    assert run.result["samples"] == 8 * len(y)  # each row once in every epoch, by one worker
    assert sorted(run.records) == [0, 1]
    assert run.result["restarts"] == 0
    assert RunData.load(tmp_path / "run").result["steps"] == run.result["steps"]
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.soak  # under torchrun in every `make test`
def test_in_lockstep_a_step_on_uneven_partitions_is_one_on_all_rows(frame):
    data = frame.limit(37)
    rows = data.collect()
    run = pl.spark.launch(trained_for(2, 0.5, 1000), workers=2, algorithm="all-reduce", data=data)
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    features, labels = torch.tensor([row.features for row in rows]), torch.tensor([row.label for row in rows])
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(run.state_dict[name], value)


@pytest.mark.soak  # likewise
def test_a_worker_with_fewer_batches_takes_part_in_the_rounds_of_the_others(spark):
    data = spark.range(0, 41, 1, 1)  # 20 and 21 rows, and so 2 and 3 batches

    def train(rows):
        model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer) as worker:
            for _ in range(3):
                for batch in worker.batches(rows.loader(batch_size=10)):
                    optimizer.zero_grad()
                    (-model.weight.sum() * batch["id"].double().mean()).backward()
                    optimizer.step()

    run = pl.spark.launch(train, workers=2, algorithm="all-reduce", data=data)
    assert run.result["samples"] == 3 * 41
    assert run.result["steps"] == 3 * 3


def test_a_worker_that_is_killed_comes_again_in_its_place(spark, frame, tmp_path):
    def train(rows):
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        until_s, steps, comes_again = time.monotonic() + LIMIT_S, 0, (tmp_path / "killed").exists()
        with pl.attach(model, optimizer) as worker:
            while not (tmp_path / "back").exists() and time.monotonic() < until_s:
                for batch in worker.batches(rows.loader(batch_size=16)):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(batch["features"]), batch["label"]).backward()
                    optimizer.step()
                    steps += 1
                    if steps >= 20 and comes_again and worker._membership.ports.counts.averages:
                        (tmp_path / "back").touch()
                    if steps == 20 and worker.worker_id == 1 and not comes_again:
                        (tmp_path / "killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)

    run = pl.spark.launch(train, workers=2, algorithm="ad-psgd", data=frame)
    assert (tmp_path / "back").exists()
    assert run.result["restarts"] == 1
    assert run.result["models_in_mean"] == 2
    assert sorted(run.records) == [0, 1]


# What goes wrong is one sentence, with the first cause


def refused(data, train, **settings):
    with pytest.raises(PacelineError) as caught:
        pl.spark.launch(train, data=data, **{"workers": 2, **settings})
    (sentence,) = str(caught.value).splitlines()
    return sentence


@pytest.mark.parametrize("algorithm", ["ad-psgd", "all-reduce"])
def test_a_function_that_fails_is_named_with_its_line(frame, algorithm):
    def train(rows):
        model = nn.Linear(64, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for steps, batch in enumerate(worker.batches(rows.loader(batch_size=16))):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch["features"]), batch["label"]).backward()
                optimizer.step()
                if steps == 5 and worker.worker_id == 1:
                    raise KeyError("colour")

    source, first = inspect.getsourcelines(train)
    line = first + next(index for index, text in enumerate(source) if "raise KeyError" in text)
    sentence = refused(frame, train, algorithm=algorithm)
    cause = rf"partition [01]: KeyError: 'colour' \(test_spark_launch.py, line {line}\)\."
    assert re.fullmatch(rf"The training failed, first in {cause}", sentence)


def test_a_loop_that_never_attaches_is_said(frame):
    assert refused(frame, lambda rows: len(rows)) == "No worker called paceline.attach."


def test_too_few_slots_are_said_before_anything_starts(frame, monkeypatch):
    monkeypatch.setattr(integration, "_REACH_S", 0.0)
    sentence = refused(frame, trained_for(1, 0.1, 16), workers=3)
    expected = r"pl\.spark\.launch needs 3 free slots, one for each worker, and Spark has 2 \(local.*\): give workers=2"
    assert re.match(expected, sentence)


def test_a_task_without_rows_is_said(frame):
    sentence = refused(frame.where("label < 0"), trained_for(1, 0.1, 16))
    assert re.fullmatch(
        r"The training failed, first in partition [01]: it has no rows, but each of the 2 workers needs some: use"
        r" data\.repartition\(2\), or fewer workers\.",
        sentence,
    )


def test_a_driver_that_no_task_reaches_is_said(frame, monkeypatch):
    with meetings_elsewhere() as (far, elsewhere):
        monkeypatch.setattr(spark_job, "JoinPoint", far)
        monkeypatch.setattr(integration, "_REACH_S", 0.1)
        monkeypatch.setattr(spark_job, "num_workers", lambda *_: 2)
        sentence = refused(frame, trained_for(1, 0.1, 16))
    assert re.fullmatch(
        rf"The task of partition [01] cannot reach the driver at {elsewhere} within 0.1 s: give"
        r" launch\(host=...\) an address of the driver's machine that executors can reach\.",
        sentence,
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"algorithm": "hogwild"}, "hogwild needs memory that all workers share"),
        ({"algorithm": None}, "pl.spark.launch needs an algorithm"),
        ({"workers": 0}, "workers must be 1 or more, not 0"),
    ],
)
def test_arguments_without_a_meaning_are_refused(frame, settings, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        pl.spark.launch(trained_for(1, 0.1, 16), data=frame, **{"workers": 2, **settings})


def test_what_is_no_function_is_refused(frame):
    with pytest.raises(UsageError, match=r"runs a function of a task's rows, not 'train'"):
        pl.spark.launch("train", workers=2, data=frame)
