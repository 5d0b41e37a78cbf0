"""What a loop does to its parameters outside the step lasts, as in plain PyTorch, or is refused in a sentence."""

import contextlib
import threading

import pytest
import torch
from torch import nn

import paceline as pl
from chosen import soaked
from loops import families
from loops.changes import BOUND, CHANGES, clamp, nothing, swap, trained
from loops.coder import batches, loss_of, made, own_id, vector
from loops.habits import plain_attach

LOST = "would be lost: load weights before attach"
NOT_ALIKE = "changed them outside optimizer.step.. in different ways"


def simulated(loop, algorithm, workers=2):
    found = {}

    def body():
        found[own_id()] = loop()

    run = pl.simulate(body, workers=workers, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    return found


ALIKE, SHARDED = families.SHARED_LOCKSTEP, "all-reduce(sharded=true)"
SEEN, ON_A_COPY = ["hogwild", "leashed"], "computes on a copy of the parameters"
LIVE = ["hogwild", "hogwild(reads=copy)", "locked", "ad-psgd"]  # the trained vector, right after a step


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("algorithm", [*ALIKE, *families.OWN_LOCKSTEP, *LIVE])
def test_after_a_step_it_lasts(algorithm, change):
    found = simulated(lambda: trained(pl.attach, change, "step"), algorithm)
    for x in found.values():
        assert x.abs().max() < 1.5 * BOUND  # an average may have another worker's step that is not clamped yet


@pytest.mark.parametrize(
    ("algorithm", "place"),
    [
        (one, place)
        for one in ALIKE
        for place in ("before", "top", "backward", "epoch")
        if one != SHARDED or place in ("before", "epoch")
    ],
)
def test_all_workers_alike_it_is_the_plain_loop(algorithm, place):
    """Whose batches are those of all workers, and whose last epoch ends as the workers' does."""

    def loop(attach, own):
        model, optimizer = made()
        with attach(model, optimizer) as worker:
            for _ in range(2):
                if place in ("before", "epoch"):
                    clamp(model)
                for x in worker.batches(own):
                    if place == "top":
                        clamp(model)
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    if place == "backward":
                        clamp(model)
                    optimizer.step()
        return vector(model)

    parts = batches(6, worker=0)
    plain = loop(plain_attach, [torch.cat(parts[n : n + 2]) for n in range(0, 6, 2)])
    found = simulated(lambda: loop(pl.attach, parts), algorithm)
    for x in found.values():
        torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["before", "top", "step", "epoch"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("algorithm", ALIKE)
def test_by_one_worker_alone_it_is_refused_where_all_train_the_same(algorithm, change, place):
    with pytest.raises(
        pl.UsageError, match=f"{LOST}|{NOT_ALIKE}" if algorithm == SHARDED and place == "top" else NOT_ALIKE
    ):
        simulated(lambda: trained(pl.attach, change if own_id() else nothing, place), algorithm)


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce"])
def test_by_one_of_real_workers(algorithm):
    with pytest.raises(pl.UsageError, match=NOT_ALIKE):
        pl.launch(
            lambda: trained(pl.attach, clamp if own_id() else nothing, "step"),
            workers=2,
            algorithm=algorithm,
            backend="threads",
        )


# Where parameters are a copy, or a version that is published, at each place of the loop.
REFUSED = [
    *(
        (one, place)
        for one in [*families.SERVED, "leashed"]
        for place in ("before", "top", "backward", "step", "epoch")
    ),
    *((one, place) for one in LIVE[1:] for place in ("before", "top", "backward")),
    *((SHARDED, place) for place in ("top", "backward")),
    ("hogwild", "before"),
    ("local-sgd(period=3)", "before"),
    *(("d-psgd", place) for place in ("before", "top", "backward")),
]


# Servers' workers have one guard: all changes with one of their modes, and one change in turn with each of the others.
ONE_EACH = [one for one in families.SERVED if one != "parameter-server(mode=async)"]


@pytest.mark.parametrize(
    ("algorithm", "place", "change"),
    [
        (algorithm, place, change)
        for row, (algorithm, place) in enumerate(REFUSED)
        for number, change in enumerate(CHANGES)
        if algorithm not in ONE_EACH or (row % 5 + row // 5) % 4 == number
    ],
)
def test_elsewhere_it_is_refused(algorithm, place, change):
    with pytest.raises(pl.UsageError, match=LOST):
        simulated(lambda: trained(pl.attach, change, place), algorithm)


@pytest.mark.parametrize("algorithm", ["parameter-server(mode=async)", "leashed", "hogwild(reads=copy)"])
def test_of_real_workers(algorithm):
    """While a step is under way: no other worker's pace decides what is seen."""
    with pytest.raises(pl.UsageError, match=LOST):
        pl.launch(lambda: trained(pl.attach, clamp, "top"), workers=2, algorithm=algorithm, backend="threads")


def swapping(algorithms):
    places = [("before", True), ("top", True), ("step", True), ("epoch", True)]
    return [(algorithm, *one) for algorithm in algorithms for one in places]


@pytest.mark.parametrize(
    ("algorithm", "place", "uses_batches"),
    [
        *((one, "step", False) for one in families.ALL),
        *swapping(families.KINDS),
        *soaked(*swapping([one for one in families.ALL if one not in families.KINDS])),
    ],
)
def test_weights_that_are_swapped_for_an_evaluation_are_no_change(algorithm, place, uses_batches):
    is_seen = (
        algorithm in SEEN and algorithm != "leashed" and (place == "top" or (not uses_batches and place != "before"))
    )
    # Under leashed what a loop loads goes into a copy.
    with pytest.warns(pl.errors.AlgorithmWarning, match=ON_A_COPY) if is_seen else contextlib.nullcontext():
        simulated(lambda: trained(pl.attach, swap, place, uses_batches=uses_batches, number=12), algorithm)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("algorithm", SEEN)
def test_what_is_moved_and_put_back_within_a_step_is_seen_once(algorithm, replaces):
    """Under leashed others do not see it in the first step either, which is on a copy."""
    barrier, seen = threading.Barrier(2, timeout=60.0), []
    known = int(algorithm == "hogwild")  # from which step on others do not see it

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for number, x in enumerate(worker.batches(batches(8, worker=0))):
                own = [p.detach().clone() for p in model.parameters()]
                if worker.worker_id == 0:
                    with torch.no_grad():
                        for p in model.parameters():
                            p.add_(1000.0 if number >= known else 0.0)
                barrier.wait()
                if worker.worker_id == 1 and number >= known:
                    seen.append(vector(model).abs().max().item())
                barrier.wait()
                if worker.worker_id == 0:
                    for p, value in zip(model.parameters(), own, strict=True):
                        if replaces:
                            p.data = value
                        else:
                            with torch.no_grad():
                                p.copy_(value)
                barrier.wait()
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()

    with pytest.warns(pl.errors.AlgorithmWarning, match=ON_A_COPY):
        pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")
    assert len(seen) == 4 - known
    assert max(seen) < 500


@pytest.mark.parametrize("change", CHANGES[1:])
def test_what_is_changed_within_a_step_of_hogwild_lasts(change):
    with pytest.warns(pl.errors.AlgorithmWarning, match=ON_A_COPY):
        found = simulated(lambda: trained(pl.attach, change, "backward"), "hogwild")
    for x in found.values():
        assert x.abs().max() < 1.5 * BOUND


@pytest.mark.parametrize(
    ("algorithm", "place"),
    [
        (one, place)
        for one in families.ALL
        for place in ("top", "backward", "step", "epoch")
        if one in families.KINDS or place == "backward"
    ],
)
def test_parameters_replaced_by_equal_ones_are_put_back(algorithm, place):
    def same(model):
        for p in model.parameters():
            p.data = p.data.clone()

    simulated(lambda: trained(pl.attach, same, place), algorithm)


@pytest.mark.parametrize("halves", [False, True])
def test_gradients_that_are_replaced_or_removed_are_changed(halves):
    def change(model):
        for p in model.parameters():
            p.grad = p.grad / 2 if halves else None

    with pytest.raises(pl.UsageError, match="own part of the mean gradient only"):
        simulated(lambda: trained(pl.attach, change, "backward"), SHARDED)


@pytest.mark.parametrize("algorithm", families.ALL)
def test_by_one_worker_for_its_evaluation(algorithm):
    simulated(lambda: trained(pl.attach, nothing if own_id() else swap, "step", number=12), algorithm)


@pytest.mark.parametrize("algorithm", ["parameter-server(mode=async)", "locked"])
def test_a_change_late_in_the_run(algorithm):
    """One element of many, by `p.data`, in every step from the 100th on: seen within ten."""
    steps = []

    def loop():
        torch.manual_seed(0)
        model = nn.Linear(40, 40)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with pl.attach(model, optimizer):
            for number in range(130):
                if number >= 100:
                    steps.append(number)
                    model.weight.data[7, 7] += 0.1
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(number + 1000 * own_id())
                model(torch.randn(4, 40, generator=generator)).square().mean().backward()
                optimizer.step()

    with pytest.raises(pl.UsageError, match=LOST):
        simulated(loop, algorithm)
    assert max(steps) < 112


@pytest.mark.parametrize("algorithm", ["lockstep", "hogwild", "parameter-server(mode=async)"])
def test_another_shape_is_refused(algorithm):
    def other_shape(model):
        model.decoder.bias.data = torch.zeros(1)

    with pytest.raises(
        pl.UsageError, match=LOST if "server" in algorithm else r"the shape \(1,\): change the model before"
    ):
        simulated(lambda: trained(pl.attach, other_shape, "step"), algorithm)


@pytest.mark.parametrize("algorithm", ALIKE)
def test_an_embedding_whose_rows_are_normalised_as_they_are_looked_up(algorithm):
    """`max_norm` writes into the rows that a worker's batch has, and no other worker's has."""

    def loop():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 4, max_norm=0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            rows = torch.arange(48).view(12, 4)
            for x in worker.batches(list(rows)):
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()

    with pytest.raises(pl.UsageError, match=f"{LOST}|{NOT_ALIKE}"):
        simulated(loop, algorithm)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize(
    "algorithm", ["hogwild(reads=copy)", "locked", "leashed", "ad-psgd", "parameter-server(mode=async)"]
)
def test_what_a_worker_loads_when_it_has_ended_is_its_own(algorithm, evaluates):
    """Under leashed it wrote into the version that the others computed on."""

    def trained(loads):
        def loop():
            model, optimizer = made()
            with pl.attach(model, optimizer):
                for x in batches(2 if own_id() else 6):
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    optimizer.step()
                if own_id() and evaluates:
                    loss_of(model, x)  # which begins a step
                if own_id() and loads:
                    model.load_state_dict({name: torch.full_like(one, 5.0) for name, one in model.state_dict().items()})
            return vector(model)

        return pl.simulate(loop, workers=2, algorithm=algorithm).returned[0]

    assert torch.equal(trained(True), trained(False))
