"""A loop that draws its own batches and calls parts of the model: the next step begins when the last one ends."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import paceline as pl
from loops import families
from loops.coder import batches, held_out_loss, initial, loss_of, made, own_id, vector

STEPS = 13  # no multiple of downpour's pushes
SHARED = [*families.SHARED_LOCKSTEP, "parameter-server"]


def by_parts(own=batches, evaluate=False):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            for x in own(STEPS):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                if evaluate and own_id() == 0:
                    with torch.no_grad():
                        model(torch.zeros(50, 6))
        return vector(model)

    return loop


def plain(xs):
    """Each of `xs`: what all workers have in one step, as one batch."""
    model, optimizer = made()
    for x in xs:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    return vector(model)


@pytest.mark.parametrize("algorithm", families.ALL)
def test_it_trains_under_every_algorithm(algorithm):
    run = pl.simulate(by_parts(), workers=3, algorithm=algorithm)
    assert run.result["outcome"] == "stopped"
    assert run.result["samples"] == 3 * STEPS * 4
    for worker in range(3):
        assert held_out_loss(run.returned[worker]) < 0.9 * held_out_loss(initial())


@pytest.mark.parametrize("algorithm", [one for one in families.ALL if one not in families.OWN_RULE])
def test_alone_it_is_plain_training(algorithm):
    model, optimizer = made()
    with pl.attach(model, optimizer, algorithm=algorithm):
        for x in batches(STEPS):
            optimizer.zero_grad()
            loss_of(model, x).backward()
            optimizer.step()
    assert torch.equal(vector(model), plain(batches(STEPS)))


def of_different_sizes(number):
    return batches(number, size=2 + 3 * own_id())


@pytest.mark.parametrize("algorithm", SHARED)
def test_workers_of_one_model_weigh_by_the_samples_that_they_called_it_with(algorithm):
    run = pl.simulate(by_parts(of_different_sizes), workers=2, algorithm=algorithm)
    together = [torch.cat(pair) for pair in zip(batches(STEPS, 2, 0), batches(STEPS, 5, 1), strict=True)]
    for worker in range(2):
        torch.testing.assert_close(run.returned[worker], plain(together), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", families.ALL)
def test_evaluation_begins_no_step_and_counts_no_samples(algorithm):
    run = pl.simulate(by_parts(evaluate=True), workers=2, algorithm=algorithm)
    assert run.result["samples"] == 2 * STEPS * 4
    for rows in run.records.values():
        assert set(rows["samples"].tolist()) <= {4, 0}  # 0: the round of d-psgd that the end leaves without a gradient


@pytest.mark.parametrize("algorithm", ["locked", "leashed", "parameter-server(mode=async)"])
def test_gradients_are_of_the_parameters_that_their_step_has_read(algorithm):
    """Every update adds 1, so what a worker computes with is the version that it has read."""
    seen = {0: [], 1: [], 2: []}

    def loop():
        model = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
        torch.nn.init.zeros_(model[0].weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with pl.attach(model, optimizer, same_random=True):  # all workers' inputs are 1
            for _ in range(STEPS):
                optimizer.zero_grad()
                value = model[0](torch.ones(1, 1)).sum()
                (-value).backward()
                optimizer.step()
                seen[own_id()].append(value.item())

    run = pl.simulate(loop, workers=3, algorithm=algorithm)
    for worker, rows in run.records.items():
        assert rows["read_version"].tolist() == seen[worker]
    assert max(int(n) for rows in run.records.values() for n in rows["applied_version"] - 1 - rows["read_version"]) > 0


def test_parameters_may_be_used_without_a_call_of_a_module():
    def loop():
        weight = torch.nn.Parameter(torch.zeros(3))
        holder = torch.nn.ParameterList([weight])
        optimizer = torch.optim.SGD([weight], lr=0.1)
        with pl.attach(holder, optimizer):
            for _ in range(20):
                optimizer.zero_grad()
                (weight - torch.tensor([1.0, 2.0, 3.0])).square().sum().backward()
                optimizer.step()
        return weight.detach().clone()

    for algorithm in families.ALL:
        run = pl.simulate(loop, workers=2, algorithm=algorithm)
        assert run.result["samples"] == 40, algorithm
        assert run.returned[0].norm() > 0.3, algorithm


@pytest.mark.parametrize("algorithm", ["lockstep", "all-reduce", "hogwild"])
def test_passes_add_up_and_the_loop_may_say_how_many_samples_there_were(algorithm):
    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for number, x in enumerate(batches(6)):
                loss_of(model, x).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            for x in batches(2):
                loss = loss_of(model, x)
                worker.report(loss, samples=11)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    run = pl.simulate(loop, workers=1, algorithm=algorithm)
    assert run.records[0]["samples"].tolist() == [8, 8, 8, 11, 11]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["by parts", "as a whole"])
def test_what_backward_calls_again_to_recompute_is_no_pass_of_its_own(whole, use_reentrant):
    """Checkpointed activations: backward calls parts of the model, with gradients enabled."""

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = made()[0]

        def forward(self, x):
            return (checkpoint(self.inner, x, use_reentrant=use_reentrant) - x).square().mean()

    def loop():
        model = Checkpointed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer):
            for x in batches(STEPS):
                optimizer.zero_grad()
                x = x.clone().requires_grad_()
                (model if whole else model.forward)(x).backward()
                optimizer.step()

    for algorithm in ("all-reduce", "hogwild"):
        assert pl.simulate(loop, workers=2, algorithm=algorithm).result["samples"] == 2 * STEPS * 4


@pytest.mark.parametrize(
    ("algorithm", "after"), [(one, True) for one in families.ALL] + [(one, False) for one in families.KINDS]
)
def test_losses_are_those_of_their_steps(algorithm, after):
    told = {0: [], 1: []}

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for x in batches(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                loss.backward()
                if not after:
                    worker.report(loss)
                optimizer.step()
                if after:
                    worker.report(loss)
                told[own_id()].append(loss.item())

    run = pl.simulate(loop, workers=2, algorithm=algorithm)
    for worker, rows in run.records.items():
        assert rows[rows["samples"] > 0]["loss"].tolist() == told[worker]


@pytest.mark.parametrize("algorithm", families.ALL)
def test_a_warm_up_of_its_own_before_worker_batches(algorithm):
    """A step that was begun without a batch takes the first of `batches`, or learns that there is none for its worker."""

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer) as worker:
            for xs in (batches(2), worker.batches(batches(5, worker=9))):
                for x in xs:
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    optimizer.step()

    run = pl.simulate(loop, workers=3, algorithm=algorithm)
    assert run.result["samples"] == 4 * (3 * 2 + 5)
    handed_out = sorted(n for rows in run.records.values() for n in rows["batch"].tolist() if n >= 0)
    assert handed_out == [0, 1, 2, 3, 4]
