"""`attach` with a layout: a loop of the user's own, on shared memory and on Gloo, with whole models before and after."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline as pl
from model_parallel.hybrid.cut_loops import found, loop, samples
from model_parallel.hybrid.rooms import small_vgg
from paceline.model_parallel.hybrid.choose import chosen_layout, counted_s
from paceline.model_parallel.hybrid.layout import HybridParallel
from paceline.model_parallel.hybrid.plan import plan_cuts


def launched(out, groups, workers=4, **settings):
    out.mkdir()
    pl.launch(partial(loop, groups, out, **settings), workers=workers, backend="threads")
    return found(out)


def check_same(one, other):
    for name, value in other["model"].items():
        torch.testing.assert_close(one["model"][name], value, rtol=0, atol=1e-12)
    for name, state in other["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(one["state"][name][key], value, rtol=0, atol=1e-12)


def test_a_loop_ends_with_the_same_whole_model_and_state_whatever_the_groups(tmp_path):
    runs = {groups: launched(tmp_path / str(groups), groups, rows=48, clip=0.5) for groups in (4, 2, 1)}
    for groups, one in runs.items():
        check_same(one, runs[4])
        assert one["norms"] == pytest.approx(runs[4]["norms"], rel=1e-9)
        assert one["shapes"]["5.0.weight"] == (48 * groups // 4, 64)
        for worker in range(1, 4):
            check_same(found(tmp_path / str(groups), worker), one)
    assert runs[1]["model"].keys() == small_vgg().state_dict().keys()


def test_without_dropout_it_is_what_all_reduce_comes_to(tmp_path):
    check_same(launched(tmp_path / "cut", 2, dropout=0.0), launched(tmp_path / "plain", None, dropout=0.0))


def test_alone_a_layout_changes_nothing_but_how_dropout_draws(tmp_path):
    for groups in (None, 2):
        (tmp_path / str(groups)).mkdir()
        loop(groups, tmp_path / str(groups), dropout=0.0)
    check_same(found(tmp_path / "2"), found(tmp_path / "None"))


def test_clipping_by_torch_is_refused_as_workers_would_clip_differently(tmp_path):
    with pytest.raises(pl.UsageError, match=r"clip by worker\.clip_grad_norm_"):
        launched(tmp_path / "run", 2, torch_clip=True)


def test_clipping_in_a_round_that_has_one_batch_is_what_all_reduce_comes_to(tmp_path):
    cut, plain = (launched(tmp_path / str(g), g, rows=20, clip=0.5, dropout=0.0) for g in (2, None))
    check_same(cut, plain)
    assert cut["norms"] == pytest.approx(plain["norms"], rel=1e-9)


def test_a_killed_worker_is_named(tmp_path):
    with pytest.raises(pl.WorkerLostError, match="worker 3 did not"):
        pl.launch(partial(loop, 2, tmp_path, kill=(3, 2)), workers=4)


@pytest.mark.parametrize(
    ("layout", "algorithm", "message"),
    [
        ("hybrid(groups=3, min_weights=500)", "all-reduce", "groups=1 or 2 or 4"),
        ("hybrid(groups=2)", "all-reduce", "nothing to cut"),
        ("hybrid(groups=1, layers=5.6)", "all-reduce", "5.6 has 10 outputs, which 4 workers"),
        ("hybrid(groups=2, layers=0)", "all-reduce", "0 is not an nn.Linear of the model"),
        ("hybrid(groups=2, min_weights=500)", "hogwild", "hogwild cannot average shards"),
        ("hybrid(groups=2, min_weights=500)", "all-reduce(sharded=true)", "cannot average shards"),
        ("hybrid(groups=auto, min_weights=500)", "all-reduce", r"give attach example_inputs=x.*or say groups=2"),
        ("hybrid(group=2)", "all-reduce", "no argument 'group'"),
    ],
)
def test_what_does_not_fit_is_one_sentence_before_training(layout, algorithm, message):
    def train():
        model = small_vgg()
        with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, layout=layout):
            raise AssertionError("training has begun")

    with pytest.raises(pl.UsageError, match=message):
        pl.launch(train, workers=4, backend="threads")


def test_an_optimizer_that_looks_at_whole_layers_is_refused():
    model = small_vgg()
    with pytest.raises(pl.UsageError, match="LBFGS may keep state"):
        pl.attach(model, torch.optim.LBFGS(model.parameters()), "all-reduce", layout="hybrid(groups=1)")


def test_tied_weights_batch_norm_between_cut_layers_and_sparse_tables_are_refused():
    tied = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    norm = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    sparse = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 8, sparse=True), torch.nn.Linear(8, 8))
    messages = "tied to", "1 lies between the cut layers 0 and 2", "those of 0 are sparse: give it sparse=False"
    for model, message in zip((tied, norm, sparse), messages, strict=True):
        with pytest.raises(pl.UsageError, match=message):
            plan_cuts(model, HybridParallel(groups=1, min_weights=1), 2)


def test_evaluating_a_cut_model_alone_is_refused_instead_of_waited_for(tmp_path):
    def train():
        model = small_vgg()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            pl.attach(model, optimizer, "all-reduce", layout="hybrid(groups=1, min_weights=500)") as worker,
            torch.no_grad(),
        ):
            if worker.worker_id == 0:
                model(torch.zeros(1, 3, 8, 8, dtype=torch.float64))

    with pytest.raises(pl.UsageError, match="give attach its evaluate="):
        pl.launch(train, workers=2, backend="threads")


def test_auto_is_chosen_by_example_inputs_alike_on_all_workers_and_trains_as_all_reduce(tmp_path):
    chosen = {}

    def train(layout, examples):
        model = small_vgg(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer, "all-reduce", layout=layout, example_inputs=examples) as worker:
            for inputs, targets in worker.batches(DataLoader(samples(48), batch_size=4)):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
        chosen.setdefault(layout, []).append((getattr(worker, "layout", None), model.state_dict()))

    examples = samples(4).tensors[0]
    auto = HybridParallel(groups="auto", min_weights=500)
    for layout, given in ((auto, examples), (None, None)):
        pl.launch(partial(train, layout, given), workers=4, backend="threads")
    layouts = {layout for layout, _ in chosen[auto]}
    expected = chosen_layout(auto, small_vgg(), examples, workers=4, batch_size=4, compute_s=counted_s)
    assert layouts == {expected}
    for _, state in chosen[auto]:
        for name, value in chosen[None][0][1].items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def test_example_inputs_show_what_a_layout_cannot_cut_and_are_refused_without_one():
    class Sequence(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = torch.nn.Linear(8, 64)

        def forward(self, x):
            return self.wide(x)

    def train(layout):
        model = Sequence()
        pl.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), "all-reduce", layout=layout,
            example_inputs=torch.zeros(2, 3, 8),
        )  # fmt: skip

    with pytest.raises(pl.UsageError, match="wide"):
        pl.launch(partial(train, "hybrid(groups=1, min_weights=16)"), workers=2, backend="threads")
    with pytest.raises(pl.UsageError, match="give attach a layout, too"):
        train(None)
