"""Downpour with replicas of several workers: each part pushes and fetches its own parameters."""

from functools import partial

import pytest
import torch

import paceline as pl
from model_parallel.replica_loops import killing_server
from model_parallel.tensor.run_loops import alone, check_same, found, last_steps
from model_parallel.tensor.run_loops import loop as plain_loop
from model_parallel.tensor.turns import Turns, loop
from paceline.algorithms import registry
from paceline.model_parallel.tensor.worker_part import WorkerPart
from paceline.records import checkpoint_contents as contents
from paceline.records import checkpoint_files as files

ONE_ONLY, UNEVEN = [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 1, 1, 0, 0]
#: The biases of keys change no softmax: their gradients are rounding errors, which an AdaGrad from 0 would scale up.
ADAGRAD = "apply=adagrad(initial=0.01)"
LINE, SQUARE = pl.TensorParallel(line=2), pl.TensorParallel(q=2)


def taken_in_turns(out, layout, order, algorithm, *, replicas=2, **settings):
    out.mkdir(exist_ok=True)
    parts = layout.shape.workers if layout is not None else 1
    built = registry.build(algorithm)
    settings = {"push": built.push if built.overlap else None, **settings}
    target = partial(loop, Turns(order, parts, parts * replicas), layout, out, algorithm, **settings)
    return pl.launch(target, workers=parts * replicas, backend="threads")


def launched(out, layout, workers, *, backend="threads", launch=None, **settings):
    out.mkdir(exist_ok=True)
    settings = {"algorithm": f"downpour({ADAGRAD})", "optimizer": "momentum", "clip": None, **settings}
    return pl.launch(partial(plain_loop, layout, out, **settings), workers=workers, backend=backend, **(launch or {}))


@pytest.mark.parametrize(("layout", "workers"), [(LINE, 2), (SQUARE, 4)], ids=str)
def test_one_replica_that_pushes_and_fetches_in_every_step_is_plain_sgd(layout, workers, tmp_path):
    run = launched(tmp_path, layout, workers, algorithm="downpour(apply=user)", clip=1.0)
    for worker in range(workers):
        check_same(found(tmp_path, worker), {**alone("momentum"), "state": {}})
    assert (run.result["steps"], run.result["samples"], run.result["updates_per_worker"][1]) == (3, 36, 0)


@pytest.mark.parametrize(
    ("layout", "order", "algorithm"),
    [
        (LINE, UNEVEN, "downpour(apply=user)"),
        (LINE, UNEVEN, f"downpour(fetch=2, push=1, shards=2, {ADAGRAD})"),
        (LINE, ONE_ONLY, f"downpour(fetch=3, push=2, {ADAGRAD})"),
        (LINE, UNEVEN, f"downpour(fetch=2, push=2, overlap=true, {ADAGRAD})"),
        (LINE, UNEVEN, f"downpour(codec=bf16, {ADAGRAD})"),
        (SQUARE, UNEVEN, f"downpour(fetch=1, push=2, {ADAGRAD})"),
        (SQUARE, UNEVEN, "downpour(fetch=2, push=2, overlap=true, apply=user)"),
    ],
    ids=str,
)
def test_replicas_do_what_as_many_ordinary_workers_do(layout, order, algorithm, tmp_path):
    taken_in_turns(tmp_path / "plain", None, order, algorithm, clip=0.5)
    taken_in_turns(tmp_path / "cut", layout, order, algorithm, clip=0.5)
    parts = layout.shape.workers
    for worker in range(2 * parts):
        one, other = found(tmp_path / "cut", worker), found(tmp_path / "plain", worker // parts)
        for name in ("losses", "norms"):
            assert one[name] == pytest.approx(other[name], abs=1e-10)
        for name, value in other["model"].items():
            torch.testing.assert_close(one["model"][name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("algorithm", ["all-reduce", "downpour(apply=user)"])
def test_workers_of_a_replica_read_a_stream_alike(algorithm, tmp_path):
    launched(tmp_path, LINE, 2, algorithm=algorithm, is_stream=True)
    check_same(found(tmp_path, 1), {**alone("momentum", clip=None), "state": {}})


@pytest.mark.parametrize("is_kept", [True, False])
def test_parts_of_a_replica_have_equal_values_of_what_they_hold_in_common(is_kept, tmp_path, monkeypatch):
    """Under a codec each part's servers apply another gradient of a gain, as they do if pushes come in another order."""
    if not is_kept:
        monkeypatch.setattr(WorkerPart, "_make_alike", lambda *_: None)
    launched(tmp_path, LINE, 4, algorithm="downpour(codec=qsgd(bits=4))", replicas=2)
    for replica in (0, 2):
        gains = [found(tmp_path, worker)["gains"] for worker in (replica, replica + 1)]
        if gains[0]:
            assert all(torch.equal(*pair) for pair in zip(*gains, strict=True)) is is_kept


def test_a_run_goes_on_after_a_kill_as_if_there_had_been_none(tmp_path, nothing_left):
    """The only replica ends with its part; AdaGrad's sums of all parts are in the checkpoint of an epoch's beginning."""
    settings = {"steps": 2, "epochs": 3}
    launched(tmp_path / "whole", LINE, 2, **settings)
    part, out = tmp_path / "part", tmp_path / "part" / "run"
    run = {"out": out, "checkpoint_every_s": 0}
    with pytest.raises(pl.WorkerLostError, match="Worker 1 was ended by signal 9"):
        launched(part, LINE, 2, backend="processes", **settings, kill=(1, 5), launch=run)
    saved = contents.load_parameters(files.newest(out / "checkpoint"))
    assert saved.version in (2, 4)
    with pytest.raises(pl.UsageError, match=r"holds \d+ elements .* resume with the task"):
        launched(part, SQUARE, 4, **settings, launch={"resume": out})
    launched(part, LINE, 2, backend="processes", **settings, launch={"resume": out})
    for worker in range(2):
        one, other = found(part, worker), found(tmp_path / "whole", worker)
        assert len(one["losses"]) == 6 - saved.version
        check_same(one, {**last_steps(other, 6 - saved.version), "state": {}})


@pytest.mark.parametrize("killed", [0, 3])
def test_a_lost_part_is_a_lost_replica_and_the_others_go_on(killed, tmp_path, nothing_left):
    run = launched(tmp_path, LINE, 4, backend="processes", batches=20, kill=(killed, 2))
    mate = killed ^ 1
    assert run.result["notes"][:2] == [
        f"Worker {killed} was ended by signal 9.",
        f"Worker {mate} left, as another worker of its replica is lost.",
    ]
    assert (run.result["outcome"], run.result["workers_lost"]) == ("stopped", [killed, mate])
    left = 2 - killed // 2 * 2
    models = [found(tmp_path, worker)["model"] for worker in (left, left + 1)]
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name])
    assert len(found(tmp_path, left)["losses"]) >= 20 - 3


def test_a_run_that_is_stopped_ends_on_all_workers_and_is_evaluated(tmp_path, nothing_left):
    run = launched(
        tmp_path, LINE, 4, backend="processes", replicas=2, epochs=10_000, evaluates=True,
        launch={"limit_samples": 12 * 50, "out": tmp_path / "run"},
    )  # fmt: skip
    assert (run.result["outcome"], run.result["samples"] >= 12 * 50) == ("stopped", True)
    first = found(tmp_path)
    assert run.evaluations[-1]["test_loss"] == pytest.approx(first["test loss"]["loss"], abs=1e-12)
    for worker in range(1, 4):
        one = found(tmp_path, worker)
        for name, value in one["model"].items():
            assert torch.equal(value, first["model"][name]) or name.endswith("calls"), "all have what the run ends with"
    assert len(found(tmp_path, 2)["losses"]) == len(found(tmp_path, 3)["losses"])


@pytest.mark.parametrize(
    ("algorithm", "launch", "says"),
    [
        ("downpour(durability=replica)", {}, "leave out durability=replica"),
        ("downpour", {"restarts": 1}, "cannot be replaced alone"),
        ("parameter-server(mode=async)", {}, "does not work with a tensor layout"),
    ],
    ids=str,
)
def test_what_is_refused(algorithm, launch, says, tmp_path):
    with pytest.raises(pl.UsageError, match=says) as refused:
        launched(tmp_path, LINE, 4, algorithm=algorithm, launch=launch)
    assert "\n" not in str(refused.value)


def test_a_dead_server_of_one_part_is_replaced(tmp_path, nothing_left):
    """Server 5: the second part's; workers are 0 to 3."""
    run = launched(
        tmp_path, LINE, 4, backend="processes", replicas=2, epochs=10_000, algorithm="downpour(snapshot_s=0.01)",
        launch={"limit_samples": 12 * 100, "on_progress": killing_server(5)},
    )  # fmt: skip
    assert (run.result["outcome"], run.result["server_restarts"]) == ("stopped", 1)
    assert run.result["lost_versions"] == [] or run.result["lost_versions"][0][0] == 1
    first = found(tmp_path)["model"]
    for worker in range(1, 4):
        for name, value in found(tmp_path, worker)["model"].items():
            assert torch.equal(value, first[name]) or name.endswith("calls")
