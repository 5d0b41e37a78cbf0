"""Partial execution: values inside a placed model, without the operations that they do not need."""

import copy

import pytest
import torch
from hypothesis import given, settings
from torch import nn

import paceline as pl
from model_parallel.drawn import Drawn
from model_parallel.models import BATCH, data, made, planned
from model_parallel.test_drawn import DRAWN, batches, close, pins_of
from paceline.model_parallel.graph.in_threads import run_parts


def outputs(model, x):
    """By path, the output of each module in its last call, as a hook sees it, and the order of the calls."""
    found = {}

    def keep(path):
        return lambda module, given, out: found.__setitem__(path, out.detach().clone())

    hooks = [one.register_forward_hook(keep(path)) for path, one in model.named_modules() if path]
    with torch.no_grad():
        model(**x) if isinstance(x, dict) else model(x)
    for one in hooks:
        one.remove()
    return found


def fetched(plan, model, work):
    """By worker, what `work` returns, with copies of the model; and the modules' paths that ran there."""
    twins, ran = [copy.deepcopy(model) for _ in range(plan.workers)], [set() for _ in range(plan.workers)]
    for twin, paths in zip(twins, ran, strict=True):
        for path, one in twin.named_modules():
            if not list(one.children()):
                one.register_forward_pre_hook(lambda *_, path=path, paths=paths: paths.add(path))
    return run_parts(plan, twins, work), ran


@pytest.mark.parametrize(("name", "workers"), [("two towers", 2), ("two towers", 3), ("skips", 3), ("batch norm", 2)])
@pytest.mark.parametrize("training", [True, False])
def test_a_modules_output_is_that_of_the_model(name, workers, training):
    plan, model, x = planned(name, workers), made(name).train(training), data(name)[:BATCH][0]
    expected = outputs(copy.deepcopy(model), x)
    found, _ = fetched(plan, model, lambda part: {path: part.fetch(path, x) for path in expected})
    assert set(expected) >= {"a", "a.0", "b", "head" if name != "skips" else "d"}
    for one in found:
        for path, value in expected.items():
            assert torch.equal(one[path], value), path


def test_only_what_a_tower_needs_runs_and_only_where_it_is():
    plan, model, x = planned("two towers", 2), made("two towers"), data("two towers")[:BATCH][0]
    found, ran = fetched(plan, model, lambda part: (part.fetch("a", x), part.transfers))
    assert ran == [{"a.0", "a.1"}, set()]
    assert [[one[1:] for one in sent] for _, sent in found] == [[("the shape of a_1", 0, 1), ("a_1", 0, 1)], []]
    _, ran = fetched(plan, model, lambda part: part.fetch(["a.0", "b"], x))
    assert ran == [{"a.0"}, {"b.0", "b.1"}]


def test_a_step_is_the_same_with_and_without_fetches_around_it():
    plan, model, x = planned("dropout", 2), made("dropout"), data("dropout")[:BATCH][0]

    def steps(part, *, fetches):
        seen = []
        for _ in range(3):
            if fetches:
                _, head = part.fetch(["a", "head"], x)
                seen.append(torch.equal(head, part.fetch("head", x)))
            out = part(x)
            seen.append(out.detach())
            assert not fetches or torch.equal(seen[-1], head)
            out.sum().backward()
        return [*seen[fetches :: 1 + fetches], *(one.grad for one in part.parameters() if one.grad is not None)]

    plain, _ = fetched(plan, model, lambda part: steps(part, fetches=False))
    mixed, _ = fetched(plan, model, lambda part: steps(part, fetches=True))
    for one, other in zip(plain, mixed, strict=True):
        assert all(map(torch.equal, one, other))


class Masked(nn.Module):
    """A tensor that is changed in place through a view, and read under its first name."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight.requires_grad_(False)

    def forward(self, x):
        h = self.a(x)
        h[:, 2:4].fill_(0.5)
        return self.b(h)


class Averaged(Masked):
    """A module whose parameter another operation changes before."""

    def forward(self, x):
        with torch.no_grad():
            self.b.weight.lerp_(self.a.weight, 0.5)
        return self.b(self.a(x))


@pytest.mark.parametrize("kind", [Masked, Averaged])
def test_changes_in_place_of_what_a_value_needs_are_made(kind):
    torch.manual_seed(1)
    model, x = kind(), torch.randn(BATCH, 8)
    plan = pl.place(model, x, devices=2, repeats=1, force=True)
    expected = outputs(copy.deepcopy(model), x)
    found, _ = fetched(plan, model, lambda part: part.fetch(["b", "a"], x))
    for b, a in found:
        assert torch.equal(b, expected["b"])
        assert torch.equal(a, expected["a"])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.cell(x.unsqueeze(0))[0][0])


REFUSED = [
    ("tower", r"named 'tower'\. It has .*a_0, .*b_0"),
    ("a.3", r"named 'a\.3'\. Did you mean 'a\.[01]'\? It has "),
]


@pytest.mark.parametrize(("name", "message"), REFUSED)
def test_an_unknown_name_is_refused_with_near_ones(name, message):
    part, x = planned("two towers", 1).part(made("two towers")), data("two towers")[:BATCH][0]
    with pytest.raises(pl.UsageError, match=message):
        part.fetch(name, x)


def test_several_values_and_micro_batches_are_refused_on_all_workers():
    torch.manual_seed(1)
    model, x = Recurrent(), torch.randn(BATCH, 8)
    plan = pl.place(model, x, devices=2, repeats=1, force=True)

    def refusal(part):
        with pytest.raises(
            pl.UsageError, match="The value of cell is not one tensor: fetch the operations that read it"
        ):
            part.fetch("cell", x)
        return part.fetch("head", x)

    found, _ = fetched(plan, model, refusal)
    assert torch.equal(found[0], found[1])
    plan = pl.place(made("two towers"), data("two towers")[:BATCH][0], objective="throughput", microbatches=2, repeats=1,
                    devices=1, force=True)  # fmt: skip
    with pytest.raises(pl.UsageError, match="fetch needs a plan without micro-batches"):
        plan.part(made("two towers")).fetch("a", x)


@settings(max_examples=10)
@given(*DRAWN)
def test_drawn_models(operations, heads, device_of):
    """Every module's output, in drawn cuts of models with contexts and changes in place."""
    torch.manual_seed(0)
    is_cast = any(one.kind == "autocast" for one in operations)
    dtype = torch.float32 if is_cast else torch.float64
    model, ((x, _), *_) = Drawn(operations, heads).to(dtype), batches(dtype)
    plan = pl.place(model, x, devices=3, pins=pins_of(model, x, device_of), repeats=1, force=True)
    expected = outputs(copy.deepcopy(model), x)
    found, _ = fetched(plan, model, lambda part: {path: part.fetch(path, **x) for path in expected})
    for one in found:  # a transposed tensor arrives in rows, and products are then added in another order
        assert all(close(3e-2 if is_cast else 1e-9, one[path], value) for path, value in expected.items())
