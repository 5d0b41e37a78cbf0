"""Both ways of training in Spark, from a client of Spark Connect: its server, with the executors, is another process."""

import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

import forked
import paceline as pl
from integrations.spark_sessions import SparkSession
from paceline.errors import PacelineError

pytest.importorskip("grpc_status", reason="needs pip install 'pyspark[connect]'")
pytestmark = pytest.mark.filterwarnings("default")

ROWS, BATCH, EPOCHS = 200, 16, 3
HERE = {"workers": 2, "host": "127.0.0.1"}


@pytest.fixture(scope="module")
def spark():
    program = Path(__file__).parent / "connect_server.py"
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        ) as server,
    ):
        patch.setenv(
            "SPARK_CONNECT_MODE_ENABLED", "1"
        )  # which the session sets, and later tests' sessions must not find
        own = SparkSession.builder.remote(f"sc://127.0.0.1:{int(server.stdout.readline())}").create()
        yield own
        own.stop()
        server.communicate(timeout=forked.AGAINST_HANGS_S)
    assert server.returncode == 0


def numbers(spark):
    return spark.range(0, ROWS, 1, 2).selectExpr("cast(id as double) as number")


def scales():
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def added(model, update):
    model.weight += update["weight"]


def trained(rows):
    """Every row moves the weight by its number."""
    model = scales()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pl.attach(model, optimizer) as worker:
        for batch in worker.batches(rows.loader(batch_size=BATCH)):
            optimizer.zero_grad()
            (-model.weight.sum() * batch["number"].mean()).backward()
            optimizer.step()


def test_deepdist_counts_every_update_once_when_workers_are_killed(spark):
    calls = []

    def gradient(model, batch):
        from pyspark import TaskContext

        calls.append(1)
        if TaskContext.get().attemptNumber() == 0 and len(calls) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"weight": batch["number"].sum().view(1, 1)}

    model = scales()
    told = pl.spark.DeepDist(model, **HERE).train(numbers(spark), gradient, added, EPOCHS, batch_size=BATCH)
    assert model.weight.item() == EPOCHS * sum(range(ROWS))
    assert (told.partitions, told.restarts, told.samples) == (2, 2, EPOCHS * ROWS)


@pytest.mark.parametrize("algorithm", ["ad-psgd", "all-reduce"])
def test_a_loop_trains_in_the_tasks(spark, algorithm):
    run = pl.spark.launch(trained, algorithm=algorithm, data=numbers(spark), **HERE)
    assert (run.result["outcome"], run.result["workers"], run.result["samples"]) == ("stopped", 2, ROWS)
    assert run.result["steps"] == (14 if algorithm == "ad-psgd" else 7)
    assert run.state_dict["weight"].item() > 0


def test_without_a_host_it_is_asked_for_and_slots_are_those_of_the_settings(spark):
    with pytest.raises(PacelineError, match=r"how executors reach this process: give DeepDist\(host=\.\.\.\)"):
        pl.spark.DeepDist(scales()).train(numbers(spark), lambda model, batch: None, added)
    with pytest.raises(PacelineError, match=r"launch needs 3 free slots, .* and Spark has 2 \(local\[2,4\]\): give"):
        pl.spark.launch(trained, algorithm="all-reduce", data=numbers(spark), **HERE | {"workers": 3})


def sentence_of(train, *arguments, **settings):
    with pytest.raises(PacelineError) as caught:
        train(*arguments, **settings)
    (sentence,) = str(caught.value).splitlines()
    return sentence


def test_a_gradient_that_fails_is_named_with_its_line(spark):
    def gradient(model, batch):
        raise KeyError("colour")

    line = gradient.__code__.co_firstlineno + 1
    sentence = sentence_of(pl.spark.DeepDist(scales(), **HERE).train, numbers(spark), gradient, added)
    cause = rf"KeyError: 'colour' \(test_spark_connect.py, line {line}\)\."
    assert re.fullmatch(rf"The training failed, first in partition [01]: {cause}", sentence)


def test_a_module_that_executors_lack_is_named(spark, monkeypatch):
    """They lack it while the function is still being read, and so before they could tell anything."""
    mine = types.ModuleType("mine")
    exec("def train(rows): pass", vars(mine))
    monkeypatch.setitem(sys.modules, "mine", mine)
    sentence = sentence_of(pl.spark.launch, mine.train, algorithm="all-reduce", data=numbers(spark), **HERE)
    assert "ModuleNotFoundError: No module named 'mine'" in sentence
