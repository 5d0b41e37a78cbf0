"""Copies and files of a model or an optimizer, made inside the `with`, are plain."""

import copy
import copyreg
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id, vector


def through_torch_save(one):
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    one = AveragedModel(model)
    one.update_parameters(model)
    return one.module


WAYS = {
    "deepcopy": copy.deepcopy,
    "copied twice": lambda model: copy.deepcopy(copy.deepcopy(model)),
    "averaged": averaged,
    "torch.save": through_torch_save,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "by parts": lambda model: nn.Sequential(copy.deepcopy(model.encoder), through_torch_save(model.decoder)),
}


def copies(kept, uses_batches):
    """Copies at every moment of a step; keeps what became of it, and what the model was then."""

    def keep(model):
        for name, way in WAYS.items():
            kept.append((name, way(model), vector(model)))

    def loop():
        model, optimizer = made(momentum=0.9)
        keep_here = keep if own_id() == 0 else vector
        with pl.attach(model, optimizer) as worker:
            keep_here(model)
            for x in worker.batches(batches(4), own=True) if uses_batches else batches(2):
                optimizer.zero_grad()
                loss = loss_of(model, x)
                keep_here(model)
                loss.backward()
                keep_here(model)
                optimizer.step()
                keep_here(model)
        keep_here(model)
        return vector(model)

    return loop


def simulated(loop, algorithm):
    pl.simulate(loop, workers=2, algorithm=algorithm)


def in_threads(loop, algorithm):
    run = pl.launch(loop, workers=2, algorithm=algorithm, backend="threads")
    assert run.result["outcome"] == "stopped"


@pytest.mark.parametrize(("start", "uses_batches"), [(simulated, True), (in_threads, False)])
@pytest.mark.parametrize("algorithm", families.ALL)
def test_copies_of_a_model_are_plain_and_stay_as_they_were(algorithm, start, uses_batches):
    kept = []
    start(copies(kept, uses_batches), algorithm)
    assert len(kept) > 10
    for name, one, then in kept:
        # In threads others write between the two where they may at any time: the shared vector, or a partner's average.
        if start is simulated or algorithm not in families.ASYNCHRONOUS:
            assert torch.equal(vector(one), then), name
        before = vector(one)
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)  # and it trains by itself
        one(torch.ones(3, 6)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(vector(one), before), name


# Sharded, state is in pieces.
@pytest.mark.parametrize("algorithm", [one for one in families.ALL if "sharded" not in one])
def test_copies_of_an_optimizer_are_plain(algorithm):
    kept = []

    def loop():
        model, optimizer = made(momentum=0.9)
        with pl.attach(model, optimizer):
            for x in batches(2):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
                if own_id() == 0:
                    both = copy.deepcopy((model, optimizer))
                    kept.extend([both, pickle.loads(pickle.dumps((model, optimizer)))])

    pl.simulate(loop, workers=2, algorithm=algorithm)
    for model, optimizer in kept:
        before = vector(model)
        loss_of(model, batches(1)[0]).backward()
        optimizer.step()
        assert not torch.equal(vector(model), before)


def test_a_file_made_inside_needs_no_paceline(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch; sys.modules['paceline'] = None;"
        f" print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 2)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "torch.Size([1, 2])\n", done.stderr


def nothing(*_):
    pass


class Noted(nn.Linear):
    """Has hooks of its own, as a user registers them."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_forward_pre_hook(nothing)
        self.register_forward_pre_hook(nothing, with_kwargs=True)
        self.register_load_state_dict_pre_hook(nothing)


@pytest.mark.parametrize("algorithm", families.KINDS)
def test_a_file_needs_no_more_classes_than_one_made_before(algorithm):
    """So that `torch.load` with `weights_only=True` reads it where the user's classes are named as safe."""
    files = {}

    def needed(model):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(file))

    def loop():
        model = nn.Sequential(Noted(), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before, table = needed(model), dict(copyreg.dispatch_table)
        with pl.attach(model, optimizer):
            inside = [needed(model)]
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.rand(4, 2)).sum().backward()
                inside.append(needed(model))
                optimizer.step()
            hooks = copy.deepcopy(model)[0]
        if own_id() == 0:
            files.update(before=before, inside=inside, after=needed(model), hooks=hooks)
        return table

    (table, _) = pl.simulate(loop, workers=2, algorithm=algorithm).returned.values()
    assert files["inside"] == [files["before"]] * 4
    assert files["after"] == files["before"]
    assert [*files["hooks"]._forward_pre_hooks.values()] == [nothing, nothing]
    assert len(files["hooks"]._forward_pre_hooks_with_kwargs) == len(files["hooks"]._load_state_dict_pre_hooks) == 1
    assert copyreg.dispatch_table == table


class Copied(nn.Linear):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo):
        other = Copied.__new__(Copied)
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


def test_a_class_that_copies_itself_gets_hooks_that_do_nothing():
    model = Copied(2, 2)
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        other = copy.deepcopy(model)
    other(torch.ones(1, 2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(vector(other), vector(model))


def test_a_class_that_has_told_copyreg_how_it_is_copied_goes_on_so():
    class Told(nn.Linear):
        pass

    copyreg.pickle(Told, lambda model: (nn.Linear, (model.in_features, model.out_features)))
    try:
        told = copyreg.dispatch_table[Told]
        model = Told(2, 2)
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
            assert type(copy.deepcopy(model)) is nn.Linear
        assert copyreg.dispatch_table[Told] is told
    finally:
        del copyreg.dispatch_table[Told]


@pytest.mark.parametrize("algorithm", ["hogwild", "leashed", "all-reduce", "ad-psgd", "parameter-server"])
def test_a_file_holds_the_parameters_and_not_what_workers_share(algorithm):
    sizes = []

    def loop():
        model = nn.Linear(300, 300)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain, inside = io.BytesIO(), io.BytesIO()
        torch.save(model, plain)
        with pl.attach(model, optimizer):
            model(torch.ones(2, 300)).sum().backward()
            optimizer.step()
            torch.save(model, inside)
        sizes.extend(len(file.getvalue()) for file in (plain, inside))

    pl.launch(loop, workers=1, algorithm=algorithm, backend="threads")
    assert sizes[1] < 1.05 * sizes[0]


def test_a_file_of_one_of_two_models_holds_nothing_of_the_other():
    """`torch.save` writes whole storages, and parameters are views of one vector."""
    small, large = nn.Linear(10, 10), nn.Linear(300, 300)
    optimizer = torch.optim.SGD([*small.parameters(), *large.parameters()], lr=0.1)
    plain, inside = io.BytesIO(), io.BytesIO()
    torch.save(small.state_dict(), plain)
    with pl.attach((small, large), optimizer):
        (small(torch.ones(2, 10)).sum() + large(torch.ones(2, 300)).sum()).backward()
        optimizer.step()
        torch.save(small.state_dict(), inside)
    assert len(inside.getvalue()) < 1.05 * len(plain.getvalue())
