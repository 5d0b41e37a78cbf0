"""Plans: what is refused and how, what is sent, and that they survive their file."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline as pl
from model_parallel.models import BATCH, CASES, alone, data, made, placed, planned
from paceline.model_parallel.graph.exchange import from_wire, to_wire, truncated
from paceline.model_parallel.graph.problem import TensorInfo
from paceline.model_parallel.graph.schedule import longest_remaining
from paceline.model_parallel.graph.trace import trace
from paceline.simulator import Cluster

X = torch.randn(BATCH, 8, dtype=torch.float64)


class Branching(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # this line
            return x
        return -x


def test_control_flow_that_depends_on_data_is_refused_with_its_line():
    number = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if "  # this line" in line)
    with pytest.raises(
        pl.UsageError, match=rf"at line {number} of .*test_plan.py its code depends on a tensor's value"
    ):
        pl.place(Branching(), X)


class Endless(nn.Module):
    def forward(self, x):
        return self.forward(x + 1)


class Circular(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(8, 8)
        self.child.parent = self

    def forward(self, x):
        return self.child(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [(Endless, "Endless has no graph: its forward calls itself"), (Circular, "is its own submodule")],
)
def test_recursion_without_an_end_is_refused(model, words):
    with pytest.raises(pl.UsageError, match=words):
        pl.place(model(), X)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pins": {"tower": 0}}, "no module or operation 'tower' to pin"),
        ({"pins": {"a": 5}}, r"a is pinned to device 5, but there are 2"),
        ({"pins": {"a": 0, "a.0": 1}}, "The pins a: 0 and a.0: 1 conflict"),
        ({"pins": {"a": "gpu"}}, "device of kind 'gpu', but there are only: cpu"),
        (
            {"pins": {"a": 0, "b": 1}, "together": [("a", "b")]},
            r"on device 0 and b_0 on device 1|both must be on one device",
        ),
        ({"memory_bytes": 100}, "MB"),
        ({"devices": 0}, "devices must be from 1"),
        ({"slow": {4: 2.0}}, "Device 4 cannot be slow: there are 2 devices"),
        ({"slow": {1: float("inf")}}, "Device 1 cannot take inf times as long"),
        ({"devices": [pl.Device(), pl.Device(slowness=0.0)]}, "Device 1 cannot take 0.0 times as long"),
        ({"devices": []}, "devices must be from 1"),
        ({"objective": "speed"}, "latency or throughput"),
        ({"objective": "throughput", "microbatches": 4}, "cannot be cut into 4"),
        ({"placer": "finish-sonest"}, "Did you mean"),
        ({"wire": "float8"}, "wire must be one of"),
    ],
)
def test_wrong_input_is_one_sentence(options, words):
    with pytest.raises(pl.UsageError, match=words) as raised:
        pl.place(made("two towers"), X, force=True, repeats=1, **options)
    assert "\n" not in str(raised.value)


def test_a_plan_for_another_number_of_workers():
    plan = planned("two towers", 3)
    assert plan.again(devices=2) == plan.again(devices=[pl.Device()] * 2)
    for none in (0, []):
        with pytest.raises(pl.UsageError, match="at least one device"):
            plan.again(devices=none)
    with pytest.raises(pl.UsageError, match="Unknown placer 'balancd'"):
        plan.again(placer="balancd")


def test_an_example_that_does_not_fit_is_refused():
    with pytest.raises(pl.UsageError, match=r"does not fit TwoTowers\.forward"):
        pl.place(made("two towers"), (X, X))
    with pytest.raises(pl.UsageError, match="fails on the example"):
        pl.place(made("two towers"), X[:, :5])


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x, shift, scale=None, times=1.0):
        x = x if shift is None else x + shift
        return self.a(x if scale is None else x * scale) * times


@pytest.mark.parametrize("example", [(X, None), {"x": X, "shift": None, "scale": None}, (X, None, X), (X, X, None)])
@pytest.mark.parametrize("options", [{}, {"objective": "throughput", "microbatches": 2}], ids=str)
def test_arguments_that_are_none_are_constants(example, options):
    model, named = Shifted().double(), isinstance(example, dict)
    plan = pl.place(model, example, devices=1, repeats=1, force=True, **options)
    assert plan.is_verified
    part, args = plan.part(model), tuple(example.values()) if named else example
    rest = dict(zip(["shift", "scale"], args[1:], strict=False))
    torch.testing.assert_close(part(*args), model(*args))
    torch.testing.assert_close(part(X, **rest), model(*args))
    with pytest.raises(pl.UsageError, match="The plan expects the shapes of its example"):
        part(X, X, X)


class OfADict(Shifted):
    def forward(self, batch):
        return self.a(batch["x"] if batch["shift"] is None else batch["x"] + batch["shift"])


class Adding(Shifted):
    def forward(self, x, shift):
        return self.a(x + shift)


class Reducing(Shifted):
    def forward(self, x, shift):
        return self.a(x) + shift.sum()


@pytest.mark.parametrize(
    ("kind", "example", "words"),
    [
        (Shifted, (X, None, None, None), r"with None among the inputs \(shift, scale, times\): give a tensor"),
        (OfADict, ({"x": X, "shift": None},), r"with None among the inputs \(batch\): give a tensor"),
        (Adding, (X, None), r"fails on the example: .*, with None among the inputs \(shift\): give a tensor"),
        (Reducing, (X, None), r"has no graph: .*, with None among the inputs \(shift\): give a tensor"),
    ],
)
def test_none_that_cannot_be_a_constant_is_refused_by_name(kind, example, words):
    with pytest.raises(pl.UsageError, match=words):
        pl.place(kind().double(), example, devices=1, repeats=1, force=True)


def test_other_shapes_other_models_and_other_workers_are_refused():
    plan = planned("two towers", 2)
    with pytest.raises(pl.UsageError, match="belongs to another model"):
        plan.part(made("skips"), worker=0)
    with pytest.raises(pl.UsageError, match="no worker 2"):
        plan.part(made("two towers"), worker=2)
    with pytest.raises(pl.UsageError, match=r"for 2 workers, not 3"):
        pl.launch(print, workers=3, plan=plan)
    with pytest.raises(pl.UsageError, match="leave the algorithm out"):
        pl.launch(print, workers=2, plan=plan, algorithm="hogwild")
    with pytest.raises(pl.UsageError, match="as processes"):
        pl.launch(print, workers=2, plan=plan, backend="threads")
    one = planned("two towers", 1)
    with pytest.raises(pl.UsageError, match=r"inputs, \[6, 8\] of float64, but was given \[4, 8\]"):
        one.part(made("two towers"))(X[:4])
    with pytest.raises(pl.UsageError, match=r"call plan\.part in the function that paceline\.launch runs"):
        plan.part(made("two towers"))


def test_times_that_do_not_add_up_are_refused_unless_forced(monkeypatch):
    from paceline.model_parallel.graph import placing
    from paceline.model_parallel.graph.cost import Measured

    tried = []

    def off(model, traced, groups, arguments, **options):
        measured = placing_measure(model, traced, groups, arguments, **options)
        tried.append(len(groups))
        is_off = len(tried) in errors
        return Measured(measured.groups, measured.sum_s / (2 if is_off else 1), measured.sum_s)

    placing_measure = placing.measure
    monkeypatch.setattr(placing, "measure", off)
    errors = range(100)
    with pytest.raises(pl.UsageError, match=r"block by block 3 times, .* 100% off, too far to plan by"):
        pl.place(made("two towers"), X, repeats=1)
    assert len(tried) == 4, "once roughly, and three times"
    tried.clear()
    errors = range(1, 4)
    assert pl.place(made("two towers"), X, repeats=1).error == 0.0, "the third was not off"
    assert len(tried) == 4
    errors = range(100)
    assert pl.place(made("two towers"), X, repeats=1, force=True).error == pytest.approx(1.0)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_same_after_its_file(name, tmp_path):
    plan = planned(name, 3)
    plan.save(tmp_path / "plan.json")
    assert pl.Plan.load(tmp_path / "plan.json") == plan
    assert plan.explain().count("\n") > 5


def test_a_plan_takes_the_links_of_each_pair_of_workers_from_the_cluster():
    cluster = Cluster(
        workers=4,
        latency_s=1e-3,
        bandwidth_bytes_per_s=1e7,
        core_bytes_per_s=1e10,
        link_factors=((0, 1, 3.0), (1, 3, 5.0)),
    )
    plan = pl.place(made("two towers"), X, devices=3, cluster=cluster, repeats=1, force=True)
    links = plan.problem.links
    assert links[1][2].move_s(0) == pytest.approx(1e-3), "as measured, with the time to send and to receive"
    assert links[1][2].bytes_per_s == pytest.approx(1e7, rel=0.01), "with the sender's copy"
    assert links[0][1].bytes_per_s == links[1][0].bytes_per_s == pytest.approx(links[1][2].bytes_per_s / 3)
    assert "0 to 1 takes 3 times as long." in plan.explain()
    assert plan.again(devices=[pl.Device(2.0)] * 3).problem.link_factors == ((0, 1, 3.0),)
    assert plan.again(devices=[pl.Device()] * 2).problem.link_factors == ()
    assert pl.Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_what_is_no_plan_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"groups": []}')
    with pytest.raises(pl.UsageError, match="holds no plan"):
        pl.Plan.load(tmp_path / "a.json")
    with pytest.raises(pl.UsageError, match="does not exist"):
        pl.Plan.load(tmp_path / "b.json")


@pytest.mark.parametrize("name", ["read by three", "skips"])
def test_simulated_and_real_make_the_same_transfers_in_the_same_order(name, tmp_path):
    plan = planned(name, 3)
    _, found = placed(name, plan, tmp_path)
    events = [e for e in plan.schedule().events if e.kind in ("move", "return")]
    for worker, (steps, _) in enumerate(found):
        simulated = [(e.kind, e.name, e.place, e.to) for e in events if e.place == worker]
        for _, _, sent in steps:
            assert list(sent) == simulated


def test_one_send_per_tensor_and_destination():
    plan = planned("read by three", 3)
    assert len(plan.transfers()) == len(set(plan.transfers()))
    name = next(
        t.node for t in plan.problem.tensors if len(t.consumers) > 1
    )  # the third may be in the group that makes it
    to = [(e.place, e.to) for e in plan.schedule().events if e.kind == "move" and e.name == name]
    assert to == [(0, 1), (0, 2)]


class Awkward(nn.Module):
    """In-place operations, views, tuples, sizes, a default argument, a module used twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x, shift=None):
        h = self.relu(self.a(x.view(x.size(0), -1)))
        if shift is not None:
            h = h + shift
        u, v = h.chunk(2, dim=1)
        w = self.a(torch.cat([v, u], 1))
        w += 1
        return {"out": self.b(w) + h.mean(), "size": w.reshape(x.shape[0], 2, -1)}


def test_awkward_operations_come_out_as_in_the_model():
    torch.manual_seed(0)
    model = Awkward().double()
    plan = pl.place(model, X, devices=1, repeats=1, force=True)
    part, expected = plan.part(model), model(X)
    out = part(X)
    assert all(torch.equal(out[key], expected[key]) for key in expected)
    out["out"].sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(X)["out"].sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    nodes = {one.name: one for one in trace(model, X).nodes}
    assert nodes["relu"].changes
    assert nodes["view"].is_local, "every worker makes views of its inputs by itself"


def test_casts_on_the_wire_have_their_published_errors_and_keep_nan():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    about = TensorInfo("x", 0, (), 0, shape=(100_000,))
    rounded, cut = (from_wire(to_wire(x, wire), about, wire) for wire in ("bfloat16", "bfloat16-truncated"))
    assert ((rounded - x) / x).abs().max() <= 2**-8
    assert ((cut - x) / x).abs().max() <= 2**-7
    assert -0.0035 < ((cut - x) / x).mean() < -0.002, "towards zero"
    assert abs(((rounded - x) / x).mean()) < 1e-4
    odd = torch.tensor([0x7F800001, 0x7F800000, -0x800000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    assert truncated(odd).isnan().tolist() == [True, False, False, True]
    assert truncated(odd)[1:3].tolist() == [float("inf"), float("-inf")]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float16, torch.int64, torch.float64])
def test_all_types_come_through_the_wire(dtype):
    x = torch.arange(6).to(dtype).view(2, 3)
    about = TensorInfo("x", 0, (), 0, shape=(2, 3), dtype=str(dtype).removeprefix("torch."))
    for wire in ("", "bfloat16"):
        assert torch.equal(from_wire(to_wire(x.t().contiguous().t(), wire), about, wire), x)


def test_a_cast_model_trains_on_two_workers(tmp_path):
    plan = planned("two towers", 2, torch.float32, wire="bfloat16")
    _, found = placed("two towers", plan, tmp_path, torch.float32)
    exact, _ = alone("two towers", torch.float32)
    losses = [one[0] for one in found[0][0]]
    assert losses == [one[0] for one in found[1][0]]
    assert losses != [one[0] for one in exact]
    assert losses == pytest.approx([one[0] for one in exact], rel=0.02)


def test_micro_batches_come_to_the_same_gradients(tmp_path):
    plan = planned("0-1-0", 2, objective="throughput", microbatches=3)
    _, found = placed("0-1-0", plan, tmp_path)
    exact, _ = alone("0-1-0")
    for step in range(5):
        seen = {k: v for steps, _ in found for k, v in steps[step][1].items()}
        assert found[0][0][step][0] == pytest.approx(exact[step][0], rel=1e-12)
        assert all(torch.allclose(seen[k], v, rtol=1e-9, atol=1e-12) for k, v in exact[step][1].items())
    assert data("0-1-0")[0][0].shape == (8,)


class SharedNorm(nn.Module):
    """One batch norm for two branches, the second of which has the longer way to go."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.far = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        u, v = self.norm(self.a(x)), self.norm(self.b(x))
        for one in self.far:
            v = one(v)
        return u + v


def test_calls_that_share_state_keep_their_order_whatever_is_urgent():
    torch.manual_seed(0)
    model = SharedNorm().double()
    pins = {"a": 0, "b": 0, "norm": 0, "far.0": 1, "far.1": 0, "far.2": 1, "far.3": 0}
    problem = pl.place(model, X, devices=2, pins=pins, repeats=1, force=True).problem
    calls = [node for group in longest_remaining(problem) for node in problem.groups[group].nodes if "norm" in node]
    assert calls == ["norm", "norm_1"], "its averages are of the second call last"


class ChangedInPlace(nn.Module):
    """A mask that is put in place, while what it changes is read under its first name."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.a(x) + 0
        h.masked_fill_(self.c(x) > 0, 0.0)
        return self.b(h)


class ChangedAfterItWasRead(ChangedInPlace):
    def forward(self, x):
        h = self.a(x) + 0
        u = h + 1
        h.mul_(2)
        return self.b(u) + self.c(h)


def test_what_reads_a_tensor_that_was_changed_in_place_waits_for_the_change():
    nodes = {one.name: one for one in trace(ChangedInPlace().double(), X).nodes}
    assert nodes["b"].inputs == ("masked_fill_",)


def test_a_change_in_place_of_what_was_read_before_is_refused_with_both_lines():
    words = r"mul_ \(test_plan.py:\d+\) changes in place a tensor that add_1 \(test_plan.py:\d+\) reads"
    with pytest.raises(pl.UsageError, match=words):
        pl.place(ChangedAfterItWasRead().double(), X, repeats=1, force=True)


class WithConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) + torch.arange(8.0)


class WithNoise(WithConstant):
    def forward(self, x):
        return self.a(x) + torch.randn(8)


def test_tensors_that_forward_makes_of_nothing_are_constants_of_the_graph():
    model = WithConstant().double()
    plan = pl.place(model, X, devices=1, repeats=1, force=True)
    assert plan.any_mode
    assert torch.equal(plan.part(model)(X), model(X))
    assert torch.equal(plan.part(model)(X), model(X)), "a model that has been traced before is still the same"


def test_random_numbers_that_would_be_constants_are_refused():
    with pytest.raises(pl.UsageError, match="the same ones in every step"):
        pl.place(WithNoise().double(), X, devices=1, repeats=1, force=True)
