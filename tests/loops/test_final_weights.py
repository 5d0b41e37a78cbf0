"""What worker 0's loop leaves in its model after its last step is the run's result; else everybody's last update made it."""

import copy
import threading

import pytest
import torch
from torch import nn

import forked
import paceline as pl
from loops import families
from loops.coder import batches, own_id, vector
from paceline.optim.flat import FlatBinding
from paceline.records import checkpoint_contents as checkpoint
from paceline.records import checkpoint_files

ASYNCHRONOUS = [*families.ASYNCHRONOUS, *(one for one in families.SERVED if "async" in one or "(" not in one)]


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 6))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def flat(state):
    return torch.cat([value.double().flatten() for value in state.values()])


def restores(model, best):
    model.load_state_dict(best)
    return flat(best)


def leaves_nothing(model, best):
    return flat(model.state_dict())


def trains(uses_batches, number_of=lambda worker: 6, at_the_end=restores):
    """A loop that keeps what its model was after its third step; what it leaves in it, by worker, and what it ends with."""
    kept = {}

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer, evaluate=lambda model: {"loss": vector(model).sum().item()}) as worker:
            number = number_of(own_id())
            for step, x in enumerate(
                worker.batches(batches(3 * number, worker=0)) if uses_batches else batches(number), 1
            ):
                optimizer.zero_grad()
                (model(x) - x).square().mean().backward()
                optimizer.step()
                if step == 3:
                    best = copy.deepcopy(model.state_dict())
            if number:
                kept[own_id()] = at_the_end(model, best)
        kept["after", own_id()] = flat(model.state_dict())
        return flat(model.state_dict())

    return loop, kept


def check(kept, result, workers=3):
    """All workers end with what worker 0 has left, which is not what the others have."""
    for worker in range(workers):
        assert torch.equal(kept["after", worker], kept[0]), worker
    best, _ = made()
    offset = 0
    for value in best.state_dict().values():
        value.copy_(kept[0][offset : (offset := offset + value.numel())].view(value.shape))
    assert result.evaluations[-1]["test_loss"] == pytest.approx(vector(best).sum().item(), abs=1e-6)
    return vector(best)


def simulated(loop, algorithm, workers=3, **options):
    return pl.simulate(loop, workers=workers, algorithm=algorithm, **options)


def launched(loop, algorithm, workers=3, **options):
    run = pl.launch(loop, workers=workers, algorithm=algorithm, backend="threads", **options)
    assert run.result["outcome"] == "stopped"
    return run


@pytest.mark.parametrize("algorithm", families.ALL)
def test_best_weights_that_every_worker_restores_for_itself(algorithm, tmp_path):
    """With `worker.batches`; the test below has batches of the workers' own."""
    loop, kept = trains(True)
    check(kept, simulated(loop, algorithm, out=tmp_path / "run"))


@pytest.mark.parametrize("algorithm", families.ALL)
def test_they_are_the_last_checkpoint_too(algorithm, tmp_path):
    loop, kept = trains(False)
    best = check(kept, launched(loop, algorithm, out=tmp_path / "run"))
    saved = checkpoint.load_parameters(checkpoint_files.newest(tmp_path / "run" / "checkpoint"))
    binding = FlatBinding(made()[0].parameters())
    assert torch.equal(torch.cat([view.flatten() for view in binding.views(saved.x)]), best)
    loaded = made()[0]
    for name, buffer in loaded.named_buffers():
        buffer.copy_(saved.buffers[f"buffer {name}"])
    torch.nn.utils.vector_to_parameters(best, loaded.parameters())
    assert torch.equal(flat(loaded.state_dict()), kept[0])


@pytest.mark.parametrize(("start", "numbers"), [(simulated, [3, 9, 6]), (launched, [9, 3, 6])], ids=["first", "last"])
@pytest.mark.parametrize("algorithm", ASYNCHRONOUS)
def test_worker_0_may_end_first_or_last(algorithm, numbers, start):
    loop, kept = trains(False, numbers.__getitem__)
    start(loop, algorithm)
    for worker in range(3):
        assert torch.equal(kept["after", worker], kept[0])


WAYS = {
    "by data": lambda model, best: [p.data.copy_(best[name]) for name, p in model.named_parameters()],
    "another tensor": lambda model, best: [
        setattr(p, "data", best[name].clone()) for name, p in model.named_parameters()
    ],
    "assigned": lambda model, best: model.load_state_dict(best, assign=True),
    "in place": lambda model, best: [p.detach().mul_(0.5) for p in model.parameters()],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("algorithm", ["hogwild", "leashed", "all-reduce", "local-sgd(period=3)", "parameter-server"])
def test_however_the_loop_changes_its_model(algorithm, way):
    def changes(model, best):
        WAYS[way](model, best)
        return flat(model.state_dict())

    loop, kept = trains(True, at_the_end=changes)
    simulated(loop, algorithm)
    for worker in range(3):
        parameters = slice(0, 5 * 6 + 5)
        assert torch.equal(kept["after", worker][parameters], kept[0][parameters])


@pytest.mark.parametrize("algorithm", families.ALL)
def test_alone(algorithm):
    loop, kept = trains(True)
    loop()
    assert torch.equal(kept["after", 0], kept[0])


@pytest.mark.parametrize("start", [simulated, launched])
@pytest.mark.parametrize("algorithm", families.ALL)
def test_a_loop_that_leaves_nothing_ends_with_everybody_s_last_update(algorithm, start):
    is_uneven = algorithm in ASYNCHRONOUS
    loop, kept = trains(False, (lambda worker: 4 + 3 * worker) if is_uneven else (lambda worker: 6), leaves_nothing)
    run = start(loop, algorithm)
    assert run.result["steps"] > 0
    for worker in (1, 2):
        assert torch.equal(kept["after", worker], kept["after", 0])


def test_under_hogwild_all_wait_for_the_last_update():
    """The others are done before the last worker begins its last step."""
    others, models = threading.Semaphore(0), {}

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            for step, x in enumerate(batches(3)):
                optimizer.zero_grad()
                (model(x) - x).square().mean().backward()
                if own_id() == 2 and step == 2:
                    assert others.acquire(timeout=forked.AGAINST_HANGS_S)
                    assert others.acquire(timeout=forked.AGAINST_HANGS_S)
                optimizer.step()
            if own_id() != 2:
                others.release()
            else:
                models["last"] = vector(model)
        models[own_id()] = vector(model)

    launched(loop, "hogwild")
    for worker in range(3):
        assert torch.equal(models[worker], models["last"])


@pytest.mark.parametrize("dead", [0, 1])
@pytest.mark.parametrize("algorithm", ["hogwild", "leashed", "ad-psgd", "parameter-server(mode=async)"])
def test_nobody_waits_for_a_worker_that_was_killed(algorithm, dead):
    loop, kept = trains(False)
    faults = pl.Faults().kill(worker=dead, step=4)
    run = simulated(loop, algorithm, faults=faults)
    assert run.result["workers_lost"] == [dead]
    alive = [worker for worker in range(3) if worker != dead]
    expected = kept[0] if dead else kept["after", 1]
    for worker in alive:
        assert torch.equal(kept["after", worker][: 5 * 6 + 5], expected[: 5 * 6 + 5])


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("algorithm", ["hogwild", "parameter-server(mode=async)"])
def test_nobody_waits_for_a_worker_that_has_failed(algorithm, failing):
    ended = []

    def loop():
        model, optimizer = made()
        with pl.attach(model, optimizer):
            for x in batches(3):
                optimizer.zero_grad()
                (model(x) - x).square().mean().backward()
                optimizer.step()
            if own_id() == failing:
                raise ValueError("no such file")
        ended.append(own_id())

    with pytest.raises(pl.PacelineError, match="no such file"):
        pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")
    assert ended == [1 - failing]
