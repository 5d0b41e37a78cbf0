"""Downpour with replicas of a placed model: each part pushes and fetches its own parameters."""

import time
from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from model_parallel.models import made, planned
from model_parallel.replica_loops import batches, found, killing_server, taken_in_turns, train
from paceline.algorithms import registry
from paceline.model_parallel.graph.placed_worker import _calls_of
from paceline.records import checkpoint_contents as contents
from paceline.records import checkpoint_files as files
from paceline.run.supervisor import Supervisor
from paceline.transport.wire import HEADER_BYTES

ONE_ONLY, UNEVEN = [0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0, 1, 1, 0]
NAME = "two towers"


def launched(out, plan, replicas=1, *, name=NAME, launch=None, algorithm="downpour", **settings):
    out.mkdir(exist_ok=True)
    workers = replicas * (plan.workers if plan is not None else 1)
    loop = partial(train, name, plan, out, **settings)
    return pl.launch(loop, workers=workers, plan=plan, algorithm=algorithm, **(launch or {}))


def check_same(one, other):
    assert one["losses"] == other["losses"]
    check_same_model(one, other)


def check_same_model(one, other):
    for key, value in other["model"].items():
        assert torch.equal(one["model"][key], value), key


@pytest.mark.parametrize(
    ("name", "parts", "order", "algorithm"),
    [
        (NAME, 2, UNEVEN, "downpour(apply=user)"),
        ("tied embedding", 2, UNEVEN, "downpour(fetch=2, push=1, shards=2)"),
        ("0-1-0", 2, ONE_ONLY, "downpour(fetch=3, push=2)"),
        ("skips", 3, UNEVEN, "downpour(fetch=2, push=2, overlap=true)"),
        ("batch norm", 2, UNEVEN, "downpour(push=2, codec=bf16)"),
    ],
)
def test_replicas_do_what_as_many_plain_workers_do(name, parts, order, algorithm, tmp_path):
    built = registry.build(algorithm)
    settings = {"clip": 0.5, "push": built.push if built.overlap else None}
    plain = taken_in_turns(name, order, algorithm, None, tmp_path / "plain", backend="threads", **settings)
    placed = taken_in_turns(name, order, algorithm, planned(name, parts), tmp_path / "placed", **settings)
    for worker, one in enumerate(placed):
        other = plain[worker // parts]
        assert one["norms"] == other["norms"]
        check_same(one, other)


@pytest.mark.parametrize("name", ["tied embedding", "attention"])
def test_one_replica_does_what_one_worker_does(name, tmp_path):
    """One part of the tied embedding's model has no parameters."""
    run = launched(tmp_path / "placed", planned(name, 3), name=name, clip=0.5)
    launched(tmp_path / "alone", None, name=name, clip=0.5)
    for worker in range(3):
        check_same(found(tmp_path / "placed", worker), found(tmp_path / "alone"))
    assert (run.result["steps"], run.result["samples"], run.result["updates_per_worker"]) == (5, 30, [5, 0, 0])
    assert run.result["waits_for"] is None, "parts wait for each other"


def test_each_replica_draws_its_own_random_numbers(tmp_path):
    """As a plan for one device does, of which each worker is a replica."""
    placed = taken_in_turns("dropout", UNEVEN, "downpour", planned("dropout", 2), tmp_path / "placed")
    on_one = taken_in_turns("dropout", UNEVEN, "downpour", planned("dropout", 1), tmp_path / "one")
    for worker, one in enumerate(placed):
        check_same(one, on_one[worker // 2])
    first, second = (
        taken_in_turns("dropout", order, "downpour", planned("dropout", 2), tmp_path / str(order[0]))
        for order in ([0, 1], [1, 0])
    )
    assert first[0]["losses"] != second[2]["losses"], "the same batch and parameters"


def test_parts_of_a_replica_draw_the_loops_random_numbers_alike(tmp_path):
    launched(tmp_path, planned(NAME, 2), 2, steps=12)
    drawn = [found(tmp_path, worker)["drawn"] for worker in range(4)]
    assert (drawn[0], drawn[2]) == (drawn[1], drawn[3])
    assert not set(drawn[0]) & set(drawn[2])


@pytest.mark.parametrize("module", ["a", "b"])
def test_a_replica_fetches_values_from_its_own_parts(module, tmp_path):
    launched(tmp_path, planned(NAME, 2), 2, steps=12, fetches=module)
    owner = planned(NAME, 2).part(made(NAME), worker=0).owner_of[f"{module}.0.weight"]
    for replica in range(2):
        first, second = (found(tmp_path, 2 * replica + part) for part in range(2))
        assert torch.equal(first["fetched"], (first, second)[owner]["computed"])
        assert torch.equal(first["fetched"], second["fetched"])


def test_each_part_sends_its_own_parameters_only(tmp_path):
    """Worker 0 has a tower and the head, worker 1 a tower."""
    plan = planned(NAME, 2)
    for steps in (2, 4):
        launched(tmp_path / str(steps), plan, steps=steps)
    first, second = (
        (found(tmp_path / "4", worker)["sent"] - found(tmp_path / "2", worker)["sent"]) // 2 for worker in (0, 1)
    )
    # In flat vectors: 64 bytes of padding, and each parameter's elements, filled up to 64 bytes.
    tower, head = 8 * (64 + 8), 8 * (48 + 8)
    own = [64 + tower + head, 64 + tower + 64]
    # The output of worker 1's tower, its gradient, the model's output, and a batch's number.
    between = [8 * (6 * 8 + 6 * 3 + 1), 8 * 6 * 8]
    assert [first, second] == [own[0] + between[0] + 4 * HEADER_BYTES, own[1] + between[1] + 2 * HEADER_BYTES]


def test_a_run_goes_on_after_a_kill_as_if_there_had_been_none(tmp_path, nothing_left):
    plan, part, out = planned("dropout", 2), tmp_path / "part", tmp_path / "part" / "run"
    with pytest.raises(pl.WorkerLostError, match="Worker 1 was ended by signal 9"):
        launched(
            part, plan, name="dropout", steps=2, epochs=10_000, kill=(1, 3), saved=out,
            launch={"out": out, "checkpoint_every_s": 0},
        )  # fmt: skip
    checkpoint = files.newest(out / "checkpoint")
    assert files.describe(checkpoint)["workers"] == [0, 1], (
        "not what a part alone has reached after the other one's death"
    )
    version = contents.load_parameters(checkpoint).version
    assert version
    settings = {"name": "dropout", "steps": 2, "epochs": version // 2 + 2}
    swapped = pl.place(
        made("dropout"), batches("dropout", 1)[0][0], devices=2, pins={"a": 1, "b": 0, "head": 0}, repeats=1, force=True
    )
    with pytest.raises(pl.UsageError, match="divided in another way: resume with the layout or the plan"):
        launched(part, swapped, **settings, launch={"resume": out})
    with pytest.raises(pl.UsageError, match="give launch the same algorithm"):
        launched(part, plan, **settings, algorithm=None, launch={"resume": out})
    launched(part, plan, **settings, launch={"resume": out})
    launched(tmp_path / "whole", plan, **settings)
    launched(tmp_path / "two", plan, 2, **{**settings, "epochs": settings["epochs"] + 2}, launch={"resume": out})
    assert sum(len(found(tmp_path / "two", worker)["losses"]) for worker in (0, 2)) == 4
    for worker in range(2):
        one, other = found(part, worker), found(tmp_path / "whole", worker)
        assert one["losses"] == other["losses"][version:]
        check_same_model(one, other)


@pytest.mark.parametrize("killed", [0, 3])
def test_a_lost_part_is_a_lost_replica_and_the_others_go_on(killed, tmp_path, nothing_left):
    mate = killed ^ 1
    run = launched(tmp_path, planned(NAME, 2), 2, steps=20, kill=(killed, 2), outlives=mate)
    assert run.result["notes"][:2] == [
        f"Worker {killed} was ended by signal 9.",
        f"Worker {mate} left, as another worker of its replica is lost.",
    ]
    assert (run.result["outcome"], run.result["workers_lost"]) == ("stopped", [killed, mate])
    left = 2 - killed // 2 * 2
    check_same(found(tmp_path, left), found(tmp_path, left + 1))
    assert len(found(tmp_path, left)["losses"]) >= 20 - 4, "a part may have claimed another batch"


def test_a_part_may_notice_a_death_before_the_launcher(tmp_path, monkeypatch):
    """Its connection to the lost part breaks before that process has ended."""
    seen_s, lose = [], Supervisor._lose

    def lose_later(supervisor, worker, how=""):
        seen_s.append(time.monotonic())
        if how or seen_s[-1] > seen_s[0] + 0.5:
            lose(supervisor, worker, how)

    monkeypatch.setattr(Supervisor, "_lose", lose_later)
    run = launched(tmp_path, planned(NAME, 2), 2, steps=20, kill=(3, 2))
    assert (run.result["outcome"], run.result["workers_lost"]) == ("stopped", [3, 2])


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_run_that_is_stopped_ends_on_all_workers_and_is_evaluated(replicas, tmp_path, nothing_left):
    run = launched(
        tmp_path, planned(NAME, 2), replicas, epochs=10_000, evaluates=True,
        launch={"limit_samples": 300, "out": tmp_path / "run", "slow": {1: 1.5}},
    )  # fmt: skip
    assert (run.result["outcome"], run.result["samples"] >= 300) == ("stopped", True)
    assert run.evaluations[-1]["test_loss"] == pytest.approx(found(tmp_path)["test loss"]["loss"], abs=1e-12)
    for worker in range(2 * replicas):
        check_same_model(found(tmp_path, worker), found(tmp_path))
        assert len(found(tmp_path, worker)["losses"]) == len(found(tmp_path, worker ^ 1)["losses"])


def test_all_parts_of_a_replica_end_after_the_same_step(tmp_path):
    """Worker 1 waits for the gradient of worker 0, which goes on only when the run is being stopped."""
    run = launched(tmp_path, planned(NAME, 2), steps=20, holds=3, launch={"limit_samples": 18})
    assert len({shard["version"] for shard in run.result["shards"]}) == 1
    assert len(found(tmp_path, 0)["losses"]) == len(found(tmp_path, 1)["losses"])


def test_a_dead_server_of_one_part_is_replaced(tmp_path, nothing_left):
    """Server 5: the second part's; workers are 0 to 3."""
    run = launched(
        tmp_path, planned(NAME, 2), 2, epochs=10_000, algorithm="downpour(snapshot_s=0.01)",
        launch={"limit_samples": 600, "on_progress": killing_server(5)},
    )  # fmt: skip
    assert (run.result["outcome"], run.result["server_restarts"]) == ("stopped", 1)
    for worker in range(4):
        check_same_model(found(tmp_path, worker), found(tmp_path))


class Embedded(nn.Module):
    """Two tables whose gradients are rows, one for each part."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.EmbeddingBag(500, 8, mode="mean", sparse=True) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(torch.cat([self.a(x), self.b(x)], 1))


def embedded():
    torch.manual_seed(3)
    return Embedded().double()


@pytest.mark.parametrize("least_bytes", [1 << 24, 1])
def test_parts_with_sparse_tables_push_rows(least_bytes, tmp_path):
    name = "tied embedding"
    plan = pl.place(
        embedded(), batches(name, 1)[0][0], devices=2, pins={"a": 0, "b": 1, "head": 0}, repeats=1, force=True
    )
    settings = {"name": name, "make": embedded, "algorithm": "downpour(apply=user)", "clip": 0.3}
    launched(tmp_path / "placed", plan, least_bytes=least_bytes, **settings)
    launched(tmp_path / "alone", None, **settings)
    for worker in range(2):
        one, other = found(tmp_path / "placed", worker), found(tmp_path / "alone")
        assert one["losses"] == pytest.approx(other["losses"], abs=1e-12)
        for key, value in other["model"].items():
            torch.testing.assert_close(one["model"][key], value, rtol=0, atol=1e-12)
    assert found(tmp_path / "placed", 1)["sent"] < 5 * 500 * 8 * 8 / 4


@pytest.mark.parametrize(
    ("replicas", "algorithm", "launch", "says"),
    [
        (2, "downpour(durability=replica)", {}, "leave durability=replica out"),
        (2, "downpour", {"restarts": 1}, "cannot be replaced alone"),
        (2, "parameter-server(mode=async)", {}, "choose downpour"),
        (2, "all-reduce", {}, "choose downpour"),
        (1, "downpour", {"backend": "threads"}, "launch them as processes"),
        (1.5, "downpour", {}, "start a multiple of 2"),
        (2, None, {}, 'train replicas of it with algorithm="downpour"'),
    ],
)
def test_what_is_refused(replicas, algorithm, launch, says, tmp_path):
    plan = planned(NAME, 2)
    with pytest.raises(pl.UsageError, match=says) as refused:
        pl.launch(
            partial(train, NAME, plan, tmp_path), workers=int(2 * replicas), plan=plan, algorithm=algorithm, **launch
        )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("is_placed", "settings", "algorithm", "says"),
    [
        (False, {}, "downpour", r"attach plan\.part\(model\)"),
        (True, {"names": "downpour"}, None, "name the algorithm in launch"),
        (True, {"uneven": True}, "downpour", "drop_last=True"),
        (True, {"torch_clip": True}, "downpour", r"clip by worker\.clip_grad_norm_"),
    ],
)
def test_loops_that_are_refused(is_placed, settings, algorithm, says, tmp_path):
    plan = planned(NAME, 2)
    loop = partial(train, NAME, plan if is_placed else None, tmp_path, **settings)
    with pytest.raises(pl.UsageError, match=says):
        pl.launch(loop, workers=2, plan=plan, algorithm=algorithm)


@pytest.mark.parametrize("program", [{}, {"calls": -1}, {"calls": 1.0}])
def test_a_checkpoint_that_no_replica_writes_is_refused(program, tmp_path):
    assert _calls_of(None, tmp_path) == 0
    with pytest.raises(pl.UsageError, match="is not one that a placed run of this model writes"):
        _calls_of(program, tmp_path)


def test_simulations_are_refused(tmp_path):
    with pytest.raises(pl.UsageError, match="They cannot be simulated"):
        pl.simulate(partial(train, NAME, planned(NAME, 2), tmp_path), workers=2, algorithm="downpour")
