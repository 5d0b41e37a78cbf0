"""Lightning's Trainer with our strategy, the real package: alone it is the plain Trainer, bit for bit; in a run all learn."""

import ast
import builtins
import importlib
import io
import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import paceline as pl
from forked import AGAINST_HANGS_S

lightning = pytest.importorskip("lightning", reason="needs the extra: pip install 'paceline[lightning]'")
from integrations import lightning_programs as programs  # noqa: E402
from integrations import lightning_scenarios as scenarios  # noqa: E402
from integrations.lightning_programs import Classifier, fit, launched, vector  # noqa: E402
from paceline.integrations.lightning import PacelineStrategy  # noqa: E402
from paceline.integrations.lightning_parts import bring_together, reduced  # noqa: E402
from paceline.integrations.lightning_words import in_lightnings_words  # noqa: E402
from real_data import needs_mnist  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
# A pair of processes for all of them: one that forks loaders after others have trained in it is left to those alone.
OF_TWO = [name for name in scenarios.SCENARIOS if name != "copies"]
OWN_TO_TWO = ("frequency", "averaging", "estimated steps", "collectives")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"limit_train_batches": 7},
    ],
    ids=["plain", "accumulation", "clipping", "bf16-mixed", "fewer batches"],
)
@pytest.mark.parametrize("optimizer", [("SGD", {"lr": 0.3, "momentum": 0.9}), ("AdamW", {"lr": 0.01})])
def test_one_worker_is_the_plain_trainer_bit_for_bit(optimizer, settings):
    name, own = optimizer
    found = [fit(one, lambda: Classifier(name, by_step=True, **own), **settings) for one in ("auto", "paceline")]
    (plain, plain_trainer), (ours, our_trainer) = found
    assert np.array_equal(vector(plain), vector(ours))
    assert plain_trainer.global_step == our_trainer.global_step > 0
    assert plain_trainer.callback_metrics == our_trainer.callback_metrics
    rates = [one.optimizers().param_groups[0]["lr"] for one in (plain, ours)]
    assert rates[0] == rates[1] < own["lr"]


def test_going_on_from_a_checkpoint_of_lightnings_is_as_with_the_plain_trainer(tmp_path):
    def made():
        return Classifier("AdamW", lr=0.01)

    first, trainer = fit(PacelineStrategy(), made, epochs=2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed, plain = (
        fit(one, made, epochs=3, checkpoint=tmp_path / "two.ckpt")[0] for one in (PacelineStrategy(), "auto")
    )
    assert np.array_equal(vector(resumed), vector(plain))
    assert not np.array_equal(vector(resumed), vector(first))


@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [
        ("all-reduce", 2),
        ("all-reduce", 4),
        ("ad-psgd", 2),
        ("parameter-server(mode=async)", 2),
        ("hogwild", 2),
        ("parameter-server", 3),
    ],
)
def test_all_workers_learn_and_end_with_one_model(algorithm, workers, tmp_path):
    run, told, vectors = launched(programs.learn, tmp_path, False, workers=workers, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] == 4 * 1440
    assert sorted(told) == list(range(workers))
    assert all(np.array_equal(one, vectors[0]) for one in vectors.values())
    assert min(one["accuracy"] for one in told.values()) > 0.85
    losses = {one["loss"] for one in told.values()}
    assert len(losses) == (1 if algorithm == "all-reduce" else workers)


@needs_mnist
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize(
    ("algorithm", "rate"),
    [("all-reduce", 0.6), ("ad-psgd", 0.6), ("parameter-server(mode=async)", 0.2), ("hogwild", 0.2)],
)
def test_all_workers_learn_mnist(algorithm, rate, workers, tmp_path):
    _, told, vectors = launched(programs.learn_mnist, tmp_path, rate, workers=workers, algorithm=algorithm)
    assert sorted(told) == list(range(workers))
    assert all(np.array_equal(one, vectors[0]) for one in vectors.values())
    module = programs.mnist_classifier()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(vectors[0]), module.parameters())
    x, y = programs.mnist()[1].tensors
    # Without rounds, how far a run comes depends on when its workers ran.
    assert (module.net(x).argmax(1) == y).double().mean() > 0.9


@pytest.mark.parametrize("algorithm", ["all-reduce", "hogwild"])
def test_a_schedule_per_step_follows_the_runs_steps(algorithm, tmp_path):
    """Two workers make as many steps together as one alone, or half as many: the schedule is where the run is."""
    _, told, _ = launched(programs.learn, tmp_path, True, workers=2, algorithm=algorithm)
    steps = 4 * (23 if algorithm == "all-reduce" else 45)
    rate = 0.3 * (1 - 0.9 * min(steps, 90) / 90)
    assert [one["rate"] for one in told.values()] == pytest.approx([rate] * 2, rel=0.05)


def test_one_that_stops_early_stops_all_in_lockstep(tmp_path):
    _, told, _ = launched(programs.stop_early, tmp_path, workers=2, algorithm="all-reduce")
    assert {one["epochs"] for one in told.values()} == {2}


def test_worker_0_writes_the_checkpoint(tmp_path):
    launched(programs.save, tmp_path, workers=2, algorithm="all-reduce")
    state = torch.load(tmp_path / "best.ckpt", weights_only=False)["state_dict"]
    assert set(state) == set(Classifier().state_dict())
    assert not list(tmp_path.glob("best-v*"))


def test_a_killed_worker_does_not_end_the_others(tmp_path):
    run, told, vectors = launched(programs.die, tmp_path, workers=3, algorithm="ad-psgd")
    assert sorted(told) == [0, 2]
    assert run.result["workers_lost"] == [1]
    assert np.array_equal(vectors[0], vectors[2])
    assert min(one["accuracy"] for one in told.values()) > 0.85


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What both workers have found in each scenario: one pair of processes, as a launcher of another kind starts them."""
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    of_run = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "PACELINE_DEADLINE_S": "120"}
    path = os.pathsep.join(filter(None, sys.path))
    said = [(folder / rank).open("w+") for rank in "01"]
    workers = [
        subprocess.Popen(
            [sys.executable, scenarios.__file__, folder, *OF_TWO],
            env={**os.environ, "PYTHONPATH": path, **of_run, "RANK": rank, "LOCAL_RANK": rank},
            stdout=file,
            stderr=file,
        )
        for rank, file in zip("01", said, strict=True)
    ]
    codes = [worker.wait(timeout=AGAINST_HANGS_S) for worker in workers]
    for file in said:
        file.close()
    assert codes == [0, 0], [(folder / rank).read_text()[-2000:] for rank in "01"]
    return lambda name: [json.loads((folder / f"{name} {rank}.json").read_text()) for rank in "01"]


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_alone_is_the_plain_trainer(name, tmp_path):
    plain, ours = (tmp_path / one for one in ("plain", "ours"))
    plain.mkdir()
    ours.mkdir()
    assert scenarios.run_scenario(name, "paceline", ours) == scenarios.run_scenario(name, "auto", plain)


@pytest.mark.parametrize("name", [one for one in OF_TWO if one not in OWN_TO_TWO])
def test_two_workers_are_the_plain_trainer_with_twice_the_batch(name, of_two, tmp_path):
    first, second = of_two(name)
    assert first == second
    plain = scenarios.run_scenario(name, "auto", tmp_path, batch_size=16)
    # bfloat16's rounding depends on how many samples are added up
    assert_close(first, plain, 1e-2 if "clipping" in name else 1e-4)


def assert_close(found, expected, tolerance=1e-6):
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value == (
            expected[key] if isinstance(value, str) else pytest.approx(expected[key], tolerance, tolerance)
        ), key


@pytest.mark.parametrize("name", ["frequency", "averaging", "estimated steps"])
def test_schedules_of_two_workers_end_where_the_plain_trainers_do(name, of_two, tmp_path):
    """In half as many steps."""
    first, second = of_two(name)
    plain = scenarios.run_scenario(name, "auto", tmp_path)
    assert first["rate"] == second["rate"] == pytest.approx(plain["rate"])
    assert first.get("total") == plain.get("total")


def test_collectives_are_of_all_workers(of_two):
    first, second = of_two("collectives")
    assert first == second
    assert first["reduced"] == [0.5, 1.0, 1.0, 0.0]
    assert first["told"] == {"by": [1, "all"]}
    assert first["gathered"] == [0.0, 1.0]
    assert first["metric"] == 0.5
    assert first["prepared"] == "once "


@pytest.mark.parametrize("algorithm", ["hogwild", "all-reduce"])
@pytest.mark.parametrize("name", ["best", "collectives"])
def test_workers_of_paceline_launch_know_the_files_of_worker_0(name, algorithm, tmp_path):
    """And meet before and after training, under methods whose workers do not wait, too."""
    pl.launch(partial(scenarios.tell_scenario, str(tmp_path), name), workers=2, algorithm=algorithm)
    first, second = (json.loads((tmp_path / f"{name} {rank}.json").read_text()) for rank in "01")
    assert first["x"] == second["x"]
    assert first.get("file") == second.get("file")
    assert first.get("gathered") == second.get("gathered")
    assert first.get("prepared", "once ") == "once "


@pytest.mark.parametrize("name", ["without a length", "adversarial", "frequency", "estimated steps"])
def test_one_worker_of_paceline_launch_is_the_plain_trainer(name, tmp_path):
    pl.launch(partial(scenarios.tell_scenario, str(tmp_path), name), workers=1, algorithm="hogwild")
    ours = json.loads((tmp_path / f"{name} 0.json").read_text())
    assert_close(ours, scenarios.run_scenario(name, "auto", tmp_path))


def test_values_of_workers_that_do_not_wait_are_said_to_be_their_own(tmp_path):
    raced = PacelineStrategy()
    raced._world_size, raced._races = 2, True
    with pytest.warns(UserWarning, match="this worker's own"):
        assert raced.reduce(torch.tensor(3.0)) == 3.0
    assert raced.all_gather(torch.tensor([3.0])).shape == (1, 1)


def test_what_cannot_be_is_one_sentence():
    with pytest.raises(pl.UsageError):
        PacelineStrategy("no such algorithm")


# Raised by calls that no module makes: worker.sum and worker.follow, optimizers in a list, arguments of attach.
NOT_REACHED = (
    "algorithms/shares.py",
    "loop/schedules.py",
    "optim/several_optimizers.py",
    "worker/arguments.py",
    "worker/attach.py",
    "worker/gathering.py",
    "worker/lone.py",
    "worker/whole_run.py",
)
ROOMS = ("algorithms", "data", "loop", "membership", "optim", "worker")


def sentences(path):
    """What a file raises, with `...` for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        is_raised = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UsageError"
        if is_raised or (isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)):
            parts = [
                one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            yield "...".join(parts)


def test_errors_name_what_the_author_of_a_module_writes():
    source = Path(pl.__file__).parent
    ours = re.compile(r"\battach|\bworker\.\w+\(|`with")
    changed = 0
    for path in sorted(one for room in ROOMS for one in (source / room).rglob("*.py")):
        if str(path.relative_to(source)).startswith(NOT_REACHED):
            continue
        for sentence in filter(ours.search, sentences(path)):
            error = pl.UsageError(sentence)
            in_lightnings_words(error)
            assert not ours.search(str(error)), (path, str(error))
            changed += 1
    assert changed > 10


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (programs.Forgets, "No optimizer that configure_optimizers returned has the parameter .*forgotten"),
        (programs.Unfreezes, "requires a gradient only since fit has begun.*unfreeze or add it before fit"),
    ],
)
def test_a_refused_module_is_told_what_to_write(kind, says):
    with pytest.raises(pl.UsageError, match=says) as raised:
        pl.launch(partial(programs.refused, kind), workers=2, algorithm="all-reduce")
    assert "attach" not in str(raised.value)


class JoinPoint:
    """Where another worker brings something else."""

    def __init__(self, operation):
        self.operation = operation

    def gather(self, value, call):
        packed = io.BytesIO()
        torch.save((self.operation, 1, None), packed)
        return [value, torch.frombuffer(packed.getbuffer(), dtype=torch.uint8)]


def test_what_workers_bring_is_checked():
    with pytest.raises(pl.UsageError, match=r"strategy\.barrier and others strategy\.reduce.*is_global_zero"):
        bring_together(JoinPoint("barrier"), "reduce", 0, torch.ones(1))
    with pytest.raises(pl.UsageError, match="broadcast takes tensors, numbers, strings"):
        bring_together(JoinPoint("broadcast"), "broadcast", 0, JoinPoint("x"))
    with pytest.raises(pl.UsageError, match="not prod"):
        reduced([torch.ones(1)], "prod")


def test_without_the_package_the_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def without(name, *others, **more):
        if name.partition(".")[0] == "lightning":
            raise ImportError(name)
        return imported(name, *others, **more)

    monkeypatch.delitem(sys.modules, "paceline.integrations.lightning")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(pl.UsageError, match=r"paceline\[lightning\]"):
        importlib.import_module("paceline.integrations.lightning")


def test_lightning_has_the_private_parts_that_the_strategy_uses():
    trainer = lightning.Trainer(logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop
    for owner, name, breaks in (
        (trainer._accelerator_connector, "use_distributed_sampler", "each worker trains on a part of its own batches"),
        (loop.epoch_loop, "_broadcast_sigterm_tensor", "asynchronous workers wait for each other under torchrun"),
        (loop, "_combined_loader", "the training loader remains the workers' shared one after fit"),
        (loop, "_data_fetcher", "fit does not share batches if estimated_stepping_batches was read before"),
        (loop.epoch_loop, "_results", "logged means count workers without a batch"),
    ):
        assert hasattr(owner, name), (
            f"Lightning {lightning.__version__} lacks {name}: {breaks}; see lightning_internals.py"
        )
