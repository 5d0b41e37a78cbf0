"""Sparse gradients of embeddings under methods with servers: against dense ones, against PyTorch, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.algorithms.server.answers import ChangedRows
from paceline.optim.rows import Selection, Table
from paceline.run.simulate_task import TaskSimulation

pytestmark = pytest.mark.filterwarnings("ignore::paceline.errors.OverrideWarning")

ROWS, WIDTH = 60, 3


class Recommender(nn.Module):
    """Two tables of users and items, and a dense part; `bags`: items are the mean of several."""

    def __init__(self, sparse, bags=False, tied=False, dtype=torch.float64, **options):
        super().__init__()
        torch.manual_seed(0)
        self.users = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype, **options)
        kind = partial(nn.EmbeddingBag, mode="mean") if bags else nn.Embedding
        self.items = kind(ROWS, WIDTH, sparse=sparse, dtype=dtype)
        if tied:
            self.items.weight = self.users.weight
        self.score = nn.Linear(2 * WIDTH, 1, dtype=dtype)

    def forward(self, pairs):
        items = pairs[:, 1:] if isinstance(self.items, nn.EmbeddingBag) else pairs[:, 1]
        return self.score(torch.cat([self.users(pairs[:, 0]), self.items(items)], 1)).squeeze(1)


def batches(number, size=6):
    """Pairs of few users and many items; users repeat within a batch."""
    draw = torch.Generator().manual_seed(3)
    return [
        torch.stack([torch.randint(0, high, (size,), generator=draw) for high in (8, ROWS, ROWS)], 1)
        for _ in range(number)
    ]


SGD = partial(torch.optim.SGD, lr=0.3)


class Loop:
    """Trains on all batches; returns the model's parameters and the losses."""

    def __init__(self, sparse, optimizer=SGD, number=24, **model):
        self.sparse, self.optimizer, self.number, self.model = sparse, optimizer, number, model

    def __call__(self):
        model = Recommender(self.sparse, **self.model)
        optimizer, losses = self.optimizer(model.parameters()), []
        with pl.attach(model, optimizer) as worker:
            for pairs in worker.batches(batches(self.number)):
                optimizer.zero_grad()
                loss = (model(pairs) - (pairs[:, 0] - pairs[:, 1]).sign()).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return [parameter.detach().clone() for parameter in model.parameters()], losses


# No two workers take equally long, and neither messages nor memory take any time: the order of events is the same with dense
# gradients.
CLUSTER = pl.Cluster(
    workers=3, slowness=((1, 1.37), (2, 1.83)), latency_s=0.0, bandwidth_bytes_per_s=1e18, core_bytes_per_s=1e18,
    bus_bytes_per_s=1e18,
)  # fmt: skip

SERVER = "parameter-server(mode=async, shards=2)"
RULES = ["sgd", "adagrad", "async-adagrad", "adaptive-revision(alpha=0.5)", "staleness-scaled"]


def ends_alike(algorithm, cluster=CLUSTER, rtol=1e-12, atol=1e-13, **loop):
    """Dense and sparse gradients give the same run."""
    runs = [pl.simulate(Loop(sparse, **loop), cluster=cluster, algorithm=algorithm) for sparse in (False, True)]
    dense, sparse = (run.returned.values() for run in runs)
    for (expected, losses), (found, found_losses) in zip(dense, sparse, strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(found_losses, losses, rtol=rtol, atol=atol)


MODES = ["async", "sync(backups=0)", "sync(backups=1)", "bounded(clock_bound=1)"]


@pytest.mark.parametrize(("mode", "shards"), [*((mode, n) for mode in MODES for n in (1, 2, 3)), ("ringmaster", 1)])
def test_sparse_gradients_train_as_dense_ones(mode, shards):
    ends_alike(f"parameter-server(mode={mode}, shards={shards})")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shards", [1, 3])
def test_rules_that_leave_elements_with_a_gradient_of_0_alone_do_so(rule, shards):
    ends_alike(f"parameter-server(mode=async, apply={rule}, shards={shards})")


@pytest.mark.parametrize(
    "algorithm",
    [
        *("adaptive-revision", "adaptive-revision(revision_state=snapshot, shards=2)"),
        *("downpour(apply=sgd)", "downpour(fetch=3, push=1, apply=sgd, shards=2)", "downpour(fetch=2, push=3)"),
        *("downpour(fetch=3, push=2, warm_start_steps=3)", "downpour(fetch=2, push=2, apply=user)"),
        "downpour(overlap=true, apply=adaptive-revision(revision_state=snapshot))",
        *("downpour(overlap=true, apply=sgd, shards=2)", "downpour(overlap=true, fetch=3, push=2)"),
    ],
)
def test_methods_with_servers_of_their_own_rules(algorithm):
    ends_alike(algorithm)


def test_the_users_adagrad_is_applied():
    ends_alike("parameter-server(mode=async, shards=2)", optimizer=partial(torch.optim.Adagrad, lr=0.3))


@pytest.mark.parametrize(
    "model",
    [
        {"bags": True},
        {"tied": True},
        {"padding_idx": 3},
    ],
)
@pytest.mark.parametrize("algorithm", [SERVER, "downpour(fetch=2, push=3)", "adaptive-revision"])
def test_kinds_of_embeddings(model, algorithm):
    ends_alike(algorithm, **model)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("algorithm", [SERVER, "downpour(push=2, apply=sgd)"])
def test_half_types(dtype, rounding, algorithm):
    """PyTorch adds rows that occur twice in another order than dense gradients."""
    ends_alike(algorithm, dtype=dtype, number=6, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    "algorithm",
    [SERVER, "downpour", "downpour(fetch=2, push=2, apply=sgd)", "downpour(overlap=true)", "adaptive-revision"],
)
def test_embeddings_whose_norm_is_bounded_change_rows_outside_the_step(algorithm):
    """`max_norm` rescales rows in the forward pass, which servers would not see."""
    with pytest.raises(pl.UsageError, match="has changed its parameters"):
        pl.simulate(Loop(True, max_norm=0.1), cluster=CLUSTER, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", [SERVER, "downpour(fetch=2, push=3)", "adaptive-revision"])
def test_a_row_that_all_batches_have_several_times_and_rows_that_none_has(algorithm):
    """Row 0 occurs twice in each batch of each worker, besides row 1 or 2."""

    def train(sparse):
        table = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=torch.float64)
        with torch.no_grad():
            table.weight.copy_(torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH))
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        with pl.attach(table, optimizer) as worker:
            for rows in worker.batches([torch.tensor([0, 0, 1 + n % 2]) for n in range(24)]):
                optimizer.zero_grad()
                table(rows).square().sum().backward()
                optimizer.step()
        return table.weight.detach().clone()

    dense, sparse = (
        pl.simulate(partial(train, one), cluster=CLUSTER, algorithm=algorithm).returned.values()
        for one in (False, True)
    )
    begun = torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)
    for expected, found in zip(dense, sparse, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        assert torch.equal(found[3:], begun[3:])
        assert (found[0] != begun[0]).all()


class ChangedLate(Loop):
    """A large table, of which the guard adds up a part only, is changed after 60 steps."""

    def __init__(self, change):
        self.change = change

    def __call__(self):
        model = nn.Embedding(30_000, 8, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for n in worker.batches(list(range(160))):
                optimizer.zero_grad()
                model(torch.tensor([n])).sum().backward()
                optimizer.step()
                if n >= 130:
                    self.change(model.weight)


@torch.no_grad()
def one_row(weight):
    weight[29_999] = 0.0


def all_of_it_by_data(weight):
    weight.data.mul_(0.9)


@pytest.mark.parametrize("change", [one_row, all_of_it_by_data])
def test_a_large_table_that_a_loop_changes_is_refused_late_too(change):
    with pytest.raises(pl.UsageError, match="has changed its parameters"):
        pl.simulate(ChangedLate(change), workers=2, algorithm="parameter-server(mode=async)")


class SparseAdam(Loop):
    """All parameters are tables."""

    def __call__(self):
        model = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH))
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for pairs in worker.batches(batches(self.number)):
                optimizer.zero_grad()
                model(pairs[:, 0]).square().mean().backward()
                optimizer.step()
        return model.weight.detach().clone()


@pytest.mark.parametrize("shards", [1, 2])
def test_sparse_adam_at_the_servers_equals_pytorchs_on_the_mean_gradient(shards):
    two = pl.Cluster(workers=2)
    run = pl.simulate(
        SparseAdam(True), cluster=two, algorithm=f"parameter-server(mode=sync(backups=0), shards={shards})"
    )
    weight = nn.Parameter(torch.linspace(-1, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH))
    optimizer, data = torch.optim.SparseAdam([weight], lr=0.1), batches(24)
    for both in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        users = torch.cat([pairs[:, 0] for pairs in both])
        nn.functional.embedding(users, weight, sparse=True).square().mean().backward()
        optimizer.step()
    for found in run.returned.values():
        torch.testing.assert_close(found, weight.detach())


def bytes_sent():
    """By two workers to two servers, in 40 steps with 200 rows each of a table fifty times as large."""

    def train():
        model = nn.Embedding(10_000, 16, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pl.attach(model, optimizer) as worker:
            for n in worker.batches(list(range(40))):
                optimizer.zero_grad()
                model(torch.arange(10 * n, 10 * n + 200)).sum().backward()
                optimizer.step()

    run = pl.simulate(train, workers=2, algorithm="parameter-server(mode=async, shards=2)")
    return sum(int(of_worker["sent_bytes"].sum()) for of_worker in run.records.values())


def test_bytes_are_those_of_the_rows():
    rows_and_numbers = 40 * 200 * (16 * 4 + 4)
    assert rows_and_numbers < bytes_sent() < 1.05 * rows_and_numbers


def simulated_task(sparse, algorithm, optimizer, monkeypatch):
    """A task's final parameters."""
    samples = torch.cat(batches(20)), torch.randn(120, generator=torch.Generator().manual_seed(5))
    task = pl.Task(
        name="pairs",
        model=partial(Recommender, sparse, dtype=torch.float32),
        datasets=lambda _: (torch.utils.data.TensorDataset(*samples),) * 2,
        loss=nn.functional.mse_loss,
        accuracy=None,
    )
    monkeypatch.setattr("paceline.run.simulate_task.load_task", lambda _: task)
    config = pl.TrainConfig(algorithm=algorithm, epochs=2, batch_size=6, learning_rate=0.1, optimizer=optimizer)
    simulation = TaskSimulation(config, CLUSTER)
    simulation.run()
    x = torch.empty(simulation.binding.num_elements)
    simulation.machine.shared.snapshot(x)
    return x


@pytest.mark.parametrize(
    "algorithm", ["parameter-server(mode=async)", "downpour(fetch=3, push=2)", "downpour", "lockstep", "all-reduce"]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_tasks_with_sparse_gradients(algorithm, optimizer, monkeypatch):
    dense, sparse = (simulated_task(one, algorithm, optimizer, monkeypatch) for one in (False, True))
    torch.testing.assert_close(sparse, dense)


def test_pushes_without_a_row_and_steps_without_some_of_the_tables():
    """Worker by worker, a batch may touch one table only, or none."""

    class InTurn(Loop):
        def __call__(self):
            model = Recommender(self.sparse)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
            with pl.attach(model, optimizer) as worker:
                for n, pairs in enumerate(worker.batches(batches(24))):
                    optimizer.zero_grad()
                    empty = pairs[:0, 0]
                    users = model.users(empty if n % 3 == 0 else pairs[:, 0]).sum()
                    items = model.items(pairs[:, 1]).square().sum() if n % 2 else 0.0
                    (users + items).backward()
                    optimizer.step()
            return [parameter.detach().clone() for parameter in model.parameters()]

    for algorithm in ("parameter-server(mode=async, shards=2)", "downpour(push=2, fetch=3)"):
        dense, sparse = (
            pl.simulate(InTurn(one), cluster=CLUSTER, algorithm=algorithm).returned.values() for one in (False, True)
        )
        for expected, found in zip(dense, sparse, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "algorithm",
    [
        *("parameter-server(mode=async, codec=top-k)", "parameter-server(mode=rennala(gradients=2))"),
        *("parameter-server(mode=ringleader)", "parameter-server(mode=ringmaster(threshold=auto))"),
        *("parameter-server(mode=sync(backups=0), apply=adaptive-revision)", "downpour(codec=qsgd)"),
        *("parameter-server(mode=async, apply=async-adagrad(form=dual-averaging))", "all-reduce(sharded=true)"),
        "parameter-server(mode=async, apply=delayed(delay=constant(updates_late=2)))",
    ],
)
def test_what_takes_dense_gradients_says_so(algorithm):
    with pytest.raises(pl.UsageError, match="takes dense gradients, but the model has sparse ones: use sparse=False"):
        pl.simulate(Loop(True), cluster=CLUSTER, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ["parameter-server(mode=async)", "downpour(fetch=2, apply=sgd)"])
def test_optimizers_without_steps_on_rows_are_refused(algorithm):
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(pl.UsageError, match="not by SGD with momentum"):
        pl.simulate(Loop(True, momentum), cluster=CLUSTER, algorithm=algorithm)
    assert (
        pl.simulate(Loop(True, momentum), cluster=CLUSTER, algorithm="downpour").result["steps"] > 0
    )  # it is overridden


def rows_since(changed, version):
    selection = changed.since(version)
    if selection is None:
        return None
    return {table: [] if rows is None else rows.tolist() for table, rows in selection.rows.items()}


def test_changed_rows():
    table, other = Table(0, 20, 5), Table(30, 36, 2)

    def note(version, **rows):
        both = {table: torch.tensor(rows["table"])}
        if "other" in rows:
            both[other] = torch.tensor(rows["other"])
        changed.note(Selection(both, 0, 40), version)

    changed = ChangedRows(0, 40)
    note(5, table=[2])
    assert rows_since(changed, 4) == {table: [2]}
    note(6, table=[2, 3], other=[1])
    assert rows_since(changed, 5) == {table: [2, 3], other: [1]}
    assert rows_since(changed, 4) == {table: [2, 3]}, "the other table is whole in the first update"
    assert rows_since(changed, 6) == {table: [], other: []}
    changed.note(None, 7)
    assert rows_since(changed, 6) is None
    for version in range(8, 12):
        note(version, table=[0, 1], other=[2])
    assert rows_since(changed, 8) is None, "with them, more rows than there are"
    assert rows_since(changed, 9) == {table: [0, 1], other: [2]}


def test_updates_without_rows_are_forgotten_some_day():
    changed, nothing = ChangedRows(0, 40), Selection({Table(0, 20, 5): torch.zeros(0, dtype=torch.int64)}, 0, 40)
    for version in range(1, 12_000):
        changed.note(nothing, version)
    assert len(changed._updates) == 10_000
    assert changed.since(11_000) is not None
    assert changed.since(1_000) is None


class Sometimes(Loop):
    """In some steps of a worker the loss has nothing to do with the tables; one parameter never gets a gradient."""

    def optimizers(self, tables, others):
        return [
            torch.optim.Adagrad(tables, lr=0.1, lr_decay=0.1),
            torch.optim.SGD(others, lr=0.02, momentum=0.9, weight_decay=0.1),
        ]

    def __call__(self):
        model = Recommender(self.sparse)
        model.unused = nn.Parameter(torch.ones(5, dtype=torch.float64))
        tables = [model.users.weight, model.items.weight]
        others = [one for one in model.parameters() if not any(one is table for table in tables)]
        optimizers = self.optimizers(tables, others)
        with pl.attach(model, optimizers) as worker:
            own = batches(24)[worker.worker_id :: worker.num_workers]  # all are free at once in sync, to whom first?
            for n, pairs in enumerate(worker.batches(own, own=True)):
                for one in optimizers:
                    one.zero_grad()
                inputs = torch.ones(4, 2 * WIDTH, dtype=torch.float64)
                output = model(pairs) if (n + worker.worker_id) % 3 else model.score(inputs)
                output.square().mean().backward()
                for one in optimizers:
                    one.step()
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "algorithm",
    [
        *("parameter-server(mode=sync(backups=0), shards=3)", "parameter-server(mode=async, shards=3)"),
        "downpour(fetch=2, push=2, apply=user, shards=2)",
    ],
)
def test_sparse_gradients_beside_dense_ones(algorithm):
    """Where a loss has nothing to do with the tables, they have no gradient, which is not a gradient of 0."""
    dense, sparse = (
        pl.simulate(Sometimes(one), cluster=CLUSTER, algorithm=algorithm).returned.values() for one in (False, True)
    )
    for expected, found in zip(dense, sparse, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        assert torch.equal(found[0], torch.ones(5, dtype=torch.float64)), "the one without a gradient"


class SometimesBySparseAdam(Sometimes):
    def optimizers(self, tables, others):
        return [torch.optim.SparseAdam(tables, lr=0.02), torch.optim.Adam(others, lr=0.02)]


def test_tables_that_two_shards_share_step_as_those_of_one():
    """Also where a worker's gradient has no part of them."""
    runs = [
        pl.simulate(
            SometimesBySparseAdam(True), cluster=CLUSTER, algorithm=f"parameter-server(shards={shards})"
        ).returned
        for shards in (1, 3)
    ]
    for one, other in zip(*(returned.values() for returned in runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "algorithm", ["adaptive-revision", "parameter-server(mode=async, apply=adaptive-revision)", "downpour"]
)
def test_a_lone_worker(algorithm):
    ends_alike(algorithm, cluster=pl.Cluster(workers=1))


def sparse_adam_of_all(parameters):
    return torch.optim.SparseAdam(list(parameters), lr=0.1)


def test_sparse_adam_is_refused_with_dense_gradients():
    with pytest.raises(pl.UsageError, match="SparseAdam takes sparse gradients only"):
        pl.simulate(Loop(False, sparse_adam_of_all), cluster=CLUSTER, algorithm="parameter-server(mode=async)")


@pytest.mark.parametrize("shards", [1, 2])
def test_row_wise_adagrad_has_one_rate_per_row(shards):
    """Two workers in lockstep; the border of two shards lies between two rows."""

    def train():
        model = nn.ModuleList(
            [nn.Embedding(16, 4, sparse=True, dtype=torch.float64), nn.Linear(4, 1, dtype=torch.float64)]
        )
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-1, 1, 64, dtype=torch.float64).view(16, 4))
            model[1].weight.fill_(0.5)
            model[1].bias.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        with pl.attach(model, optimizer) as worker:
            for rows in worker.batches([torch.tensor([n % 16, (3 * n) % 16]) for n in range(20)]):
                optimizer.zero_grad()
                model[1](model[0](rows)).square().mean().backward()
                optimizer.step()
        return [one.detach().clone() for one in model.parameters()]

    algorithm = f"parameter-server(mode=sync(backups=0), apply=rowwise-adagrad, shards={shards})"
    found = pl.simulate(train, workers=2, algorithm=algorithm).returned[0]
    table = torch.linspace(-1, 1, 64, dtype=torch.float64).view(16, 4).requires_grad_()
    weight, bias = torch.full((1, 4), 0.5, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    own = [table, weight.requires_grad_(), bias.requires_grad_()]
    sums = [torch.zeros(16, 1, dtype=torch.float64), *(torch.zeros_like(one) for one in own[1:])]
    for n in range(0, 20, 2):
        rows = torch.tensor([k for m in (n, n + 1) for k in (m % 16, (3 * m) % 16)])
        gradients = torch.autograd.grad((table[rows] @ weight.T + bias).square().mean(), own)
        with torch.no_grad():
            squares = [gradients[0].square().mean(1, keepdim=True), *(one.square() for one in gradients[1:])]
            for one, gradient, z, square in zip(own, gradients, sums, squares, strict=True):
                z += square
                one -= 0.2 * gradient / (z.sqrt() + 1e-10)
    for one, other in zip(found, own, strict=True):
        torch.testing.assert_close(one, other.detach())
