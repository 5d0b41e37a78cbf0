"""A parameter without a gradient on any worker makes no step, and has no state; with one on any, all make the same step.

The model takes another way through every batch, so workers have gradients for different parameters in one step.
"""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chosen import each_value
from rounds import (
    EPOCHS,
    OWN_MODELS,
    SHARED_MODEL,
    Loop,
    in_order,
    in_sequence,
    mixture,
    reference,
    run_loop,
    run_task,
    shuffled,
    task_file,
)

SERVERS = [f"parameter-server(shards={shards})" for shards in (1, 2, 3)]
IN_ROUNDS = SHARED_MODEL + OWN_MODELS
ORDERS = ["clear, backward, step", "backward, step, clear", "backward, step, zero"]
ALONE = [
    "sequential", "lockstep", "all-reduce", "all-reduce(sharded=true)", "locked", "hogwild", "hogwild(reads=copy)", "leashed",
    "local-sgd", "local-sgd(warmup_steps=3)", "da-sgd", "d-psgd", "ad-psgd", "parameter-server", "downpour(apply=user)",
    "sequential(delay=constant(updates_late=2))",
]  # fmt: skip


def check_states(found, expected):
    assert found.keys() == expected.keys(), "state of what was never used, or none of what was"
    for index, one in expected.items():
        assert found[index].keys() == one.keys()
        for name, value in one.items():
            torch.testing.assert_close(
                torch.as_tensor(found[index][name]), torch.as_tensor(value), rtol=1e-4, atol=1e-5
            )


def check_loop(algorithm, optimizer, num_batches, workers, order, backend):
    loop = Loop(optimizer, num_batches, order, make=mixture)
    _, models = run_loop(algorithm, loop, workers, backend)
    epochs = [in_order(num_batches)] * EPOCHS
    expected, states = reference(
        algorithm,
        optimizer,
        in_sequence(epochs) if algorithm in SERVERS else epochs,
        workers,
        make=mixture,
        order=order,
    )
    for model in models:
        torch.testing.assert_close(model, expected, rtol=1e-4, atol=1e-5)
    assert (models[0][0] == 1.0).all()
    if algorithm not in SERVERS:  # where the servers have it
        for worker, state in loop.states.items():
            check_states(state, states[worker])


def check_task(algorithm, optimizer, num_batches, workers, backend, folder):
    name = task_file(folder, num_batches, "mixture")
    _, model = run_task(algorithm, optimizer, name, workers, backend)
    epochs = shuffled(num_batches)
    epochs = in_sequence(epochs) if algorithm in SERVERS else epochs
    expected, _ = reference(algorithm, optimizer, epochs, workers, make=mixture)
    torch.testing.assert_close(list(model), expected, rtol=1e-4, atol=1e-5)
    assert (model[0] == 1.0).all()


sizes = st.tuples(st.sampled_from([5, 6, 7, 11, 13]), st.sampled_from([1, 2, 3, 5]))


LOOPS = {
    "algorithm": st.sampled_from(IN_ROUNDS + SERVERS),
    "optimizer": st.sampled_from(["momentum", "adamw", "groups"]),
    "size": sizes,
    "order": st.sampled_from(ORDERS),
}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(**LOOPS)
@example("lockstep", "adamw", (7, 3), ORDERS[0])
@example("all-reduce", "groups", (7, 3), ORDERS[1])
@example("all-reduce(sharded=true)", "adamw", (7, 3), ORDERS[0])
@example("parameter-server(shards=2)", "groups", (6, 3), ORDERS[0])
def test_simulated_loops_equal_plain_pytorch(algorithm, optimizer, size, order):
    check_loop(algorithm, optimizer, *size, order, "simulator")


@pytest.mark.soak
@settings(max_examples=500, deadline=None, derandomize=True)
@given(**LOOPS)
def test_many_simulated_loops_do(algorithm, optimizer, size, order):
    check_loop(algorithm, optimizer, *size, order, "simulator")


@pytest.mark.parametrize(("order", "optimizer"), [*zip(ORDERS, ["groups", "adamw", "momentum"], strict=True)])
@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_loops_of_real_workers_equal_plain_pytorch(algorithm, order, optimizer):
    check_loop(algorithm, optimizer, 7, 3, order, "threads")


TASKS = {
    "algorithm": st.sampled_from(IN_ROUNDS + SERVERS),
    "optimizer": st.sampled_from(["sgd", "momentum", "adamw"]),
    "size": sizes,
}


@settings(max_examples=15, deadline=None, derandomize=True)
@given(**TASKS)
@example("lockstep", "adamw", (7, 3))
@example("all-reduce(sharded=true)", "adamw", (7, 3))
@example("parameter-server(shards=3)", "adamw", (6, 3))
def test_simulated_tasks_equal_plain_pytorch(tmp_path_factory, algorithm, optimizer, size):
    check_task(algorithm, optimizer, *size, "simulator", tmp_path_factory.mktemp("task"))


@pytest.mark.soak
@settings(max_examples=500, deadline=None, derandomize=True)
@given(**TASKS)
def test_many_simulated_tasks_do(tmp_path_factory, algorithm, optimizer, size):
    check_task(algorithm, optimizer, *size, "simulator", tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("algorithm", IN_ROUNDS)
def test_tasks_of_real_workers_equal_plain_pytorch(algorithm, optimizer, tmp_path):
    check_task(algorithm, optimizer, 7, 3, "threads", tmp_path)


def alone(algorithm, optimizer, epochs):
    """One worker's model; bit for bit, so its batches are not weighed. With the delay, gradients wait two updates."""
    expected, _ = reference(
        "sequential", optimizer, in_sequence(epochs), 1, make=mixture, late=2 * ("late" in algorithm)
    )
    return expected


@pytest.mark.parametrize(("algorithm", "how"), each_value(ALONE, [("threads", "adamw"), ("simulator", "momentum")]))
def test_a_lone_worker_is_plain_pytorch_bit_for_bit(algorithm, how, tmp_path):
    backend, optimizer = how
    _, model = run_task(algorithm, optimizer, task_file(tmp_path, 11, "mixture"), 1, backend)
    for found, expected in zip(model, alone(algorithm, optimizer, shuffled(11)), strict=True):
        assert torch.equal(found, expected)
    loop = Loop(optimizer, 11, ORDERS[0], make=mixture)
    _, models = run_loop(algorithm, loop, 1, backend)
    for found, expected in zip(models[0], alone(algorithm, optimizer, [in_order(11)] * EPOCHS), strict=True):
        assert torch.equal(found, expected)


ASYNCHRONOUS = [
    "hogwild", "hogwild(reads=copy)", "locked", "leashed", "ad-psgd", "parameter-server(mode=async, shards=2)",
    "parameter-server(mode=bounded(clock_bound=1), shards=2)", "parameter-server(apply=momentum(beta=0.9))",
    "parameter-server(mode=async, apply=adam)", "parameter-server(mode=async, apply=rmsprop(momentum=0.5), shards=2)",
    "parameter-server(mode=async, apply=delayed(delay=constant(updates_late=2), rule=user), shards=2)",
    "parameter-server(mode=async, codec=top-k(fraction=0.2))", "downpour", "downpour(fetch=2, push=3, apply=user, shards=2)",
    "downpour(apply=adam)", "adaptive-revision", "adaptive-revision(revision_state=snapshot, shards=2)",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::paceline.errors.OverrideWarning")
@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [(one, "adamw") for one in ASYNCHRONOUS]
    + [(one, "momentum") for one in ("hogwild", "leashed", "ad-psgd", "parameter-server(mode=async, shards=2)")],
)
def test_what_no_worker_uses_stays_as_it_was(algorithm, optimizer, tmp_path):
    """Without rounds the result is a matter of timing, but for this."""
    for run, what in (
        (lambda: run_task(algorithm, optimizer, task_file(tmp_path, 11, "mixture"), 3, "simulator")[1], "a task"),
        (lambda: run_loop(algorithm, Loop(optimizer, 11, ORDERS[0], make=mixture), 3, "simulator")[1][0], "a loop"),
    ):
        model, before = list(run()), [p.detach() for p in mixture().parameters()]
        names = [name for name, _ in mixture().named_parameters()]
        for name, found, expected in zip(names, model, before, strict=True):
            used = not name.startswith(("unused", "never"))
            assert torch.equal(found, expected) != used, (what, name)


@pytest.mark.filterwarnings("ignore::paceline.errors.OverrideWarning")
@pytest.mark.parametrize(
    ("algorithm", "optimizer"),
    [
        ("lockstep", "momentum"), ("lockstep", "adamw"), ("all-reduce(sharded=true)", "adamw"), ("d-psgd", "adamw"),
        ("parameter-server(shards=2)", "momentum"), ("parameter-server(shards=2)", "adamw"), ("hogwild", "adamw"),
        ("parameter-server(apply=delayed(delay=constant(updates_late=2), rule=user), shards=2)", "momentum"),
    ],
)  # fmt: skip
def test_a_resumed_run_goes_on_with_what_each_parameter_had(algorithm, optimizer, tmp_path):
    """Adam's counts of steps, and momentum that does not exist as yet."""
    workers = 1 if algorithm == "hogwild" else 3
    name = task_file(tmp_path, 6, "mixture")
    run_task(algorithm, optimizer, name, workers, "threads", out=tmp_path / "run")
    _, resumed = run_task(algorithm, optimizer, name, workers, "threads", resume=tmp_path / "run", epochs=2 * EPOCHS)
    _, straight = run_task(algorithm, optimizer, name, workers, "threads", epochs=2 * EPOCHS)
    torch.testing.assert_close(list(resumed), list(straight), rtol=1e-5, atol=1e-6)
    assert (resumed[0] == 1.0).all()


@pytest.mark.parametrize("shards", [1, 3])
def test_a_servers_snapshot_with_other_shards_has_it_all(shards, tmp_path):
    name = task_file(tmp_path, 6, "mixture")
    specs = [f"parameter-server(shards={one})" for one in (2, shards)]
    run_task(specs[0], "adamw", name, 3, "threads", out=tmp_path / "run")
    _, resumed = run_task(specs[1], "adamw", name, 3, "threads", resume=tmp_path / "run", epochs=2 * EPOCHS)
    _, straight = run_task(specs[1], "adamw", name, 3, "threads", epochs=2 * EPOCHS)
    torch.testing.assert_close(list(resumed), list(straight), rtol=1e-4, atol=1e-5)


def test_shared_state_is_left_alone_where_nothing_is_used(tmp_path):
    """Adam's count of steps is one for all parameters there."""
    settings = {"optimizer_state": "shared", "backend": "threads", "workers": 1}
    name = task_file(tmp_path, 11, "mixture")
    for optimizer in ("momentum", "adamw"):
        _, model = run_task("hogwild", optimizer, name, out=tmp_path / optimizer, **settings)
        assert (model[0] == 1.0).all()
        assert not torch.equal(model[1], next(iter(mixture().experts[0].parameters())))
        _, resumed = run_task("hogwild", optimizer, name, resume=tmp_path / optimizer, epochs=2 * EPOCHS, **settings)
        _, straight = run_task("hogwild", optimizer, name, epochs=2 * EPOCHS, **settings)
        assert all(torch.equal(a, b) for a, b in zip(resumed, straight, strict=True))
