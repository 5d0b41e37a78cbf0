"""Tables whose rows workers look up at servers equal whole tables, for all uses of a table and all deaths."""

import copy
import io
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import paceline as pl
from algorithms.server.test_sparse_gradients import (
    CLUSTER,
    MODES,
    ROWS,
    SERVER,
    WIDTH,
    Loop,
    Recommender,
    SparseAdam,
    batches,
    bytes_sent,
    ends_alike,
)
from paceline.loop.looked_up_tables import LookedUpTable, LookedUpTables

pytestmark = pytest.mark.filterwarnings("ignore::paceline.errors.OverrideWarning")


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    """All tables are large; returns how many rows each lookup has fetched."""
    monkeypatch.setattr("paceline.loop.looked_up_tables.LEAST_BYTES", 0)
    numbers, begin = [], LookedUpTables.begin

    def begin_counted(self, x, fetch, hold_whole):
        def counted(rows, into):
            numbers.append(sum(len(one) for one in rows.values()))
            fetch(rows, into)

        begin(self, x, counted, hold_whole)

    monkeypatch.setattr(LookedUpTables, "begin", begin_counted)
    return numbers


def ends_as_with_whole_tables(algorithm):
    """Bit for bit."""
    runs = [pl.simulate(Loop(True), cluster=CLUSTER, algorithm=algorithm).returned.values()]
    with mock.patch("paceline.loop.looked_up_tables.LEAST_BYTES", 1 << 40):
        runs.append(pl.simulate(Loop(True), cluster=CLUSTER, algorithm=algorithm).returned.values())
    for (found, losses), (expected, expected_losses) in zip(*runs, strict=True):
        assert losses == expected_losses
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("mode", "shards"), [*((mode, 3) for mode in MODES), ("async", 1), ("ringmaster", 1)])
def test_rows_that_are_looked_up_train_as_whole_tables(mode, shards, fetched):
    ends_alike(f"parameter-server(mode={mode}, shards={shards})")
    assert len(fetched) == 2 * 24
    assert max(fetched) <= 6


@pytest.mark.parametrize("rule", ["adagrad", "adaptive-revision(alpha=0.5)", "rowwise-adagrad"])
def test_rules(rule, fetched):
    ends_as_with_whole_tables(f"parameter-server(mode=async, apply={rule}, shards=3)")
    assert fetched


@pytest.mark.parametrize(
    "algorithm",
    [
        *("adaptive-revision", "adaptive-revision(shards=2)", "downpour(apply=sgd)"),
        *("downpour(push=2)", "downpour(apply=user, shards=2)"),
    ],
)
def test_methods_with_servers_of_their_own_rules(algorithm, fetched):
    ends_alike(algorithm)
    assert fetched


@pytest.mark.parametrize(
    "algorithm",
    ["adaptive-revision(revision_state=snapshot)", "downpour(overlap=true, apply=sgd)", "downpour(fetch=2, apply=sgd)"],
)
def test_whole_tables_stay_where_one_version_of_all_is_needed(algorithm, fetched):
    """Snapshots of sums belong to a version; with overlap, an answer is under way during the forward pass."""
    if "fetch" not in algorithm:
        ends_alike(algorithm)
    else:
        pl.simulate(Loop(True), cluster=CLUSTER, algorithm=algorithm)
    assert bool(fetched) == ("fetch" in algorithm)


class Worker:
    """What a worker of downpour has, by the definition: each row as the server had it when a batch first needed it."""

    def __init__(self):
        self.model, self.held, self.accrued, self.step = None, [set(), set()], None, 0

    def fetch(self, server):
        self.model, self.held = copy.deepcopy(server), [set(), set()]

    def look_up(self, pairs, server):
        for column, held, own, theirs in zip(
            (0, 1), self.held, self.model.parameters(), server.parameters(), strict=False
        ):
            for row in set(pairs[:, column].tolist()) - held:
                own.data[row] = theirs.data[row]
                held.add(row)


def downpour_by_definition(fetch, push, number=24, rate=0.3):
    """The parameters after a run on CLUSTER: the next to finish a gradient is the one whose time is least."""
    server, workers = Recommender(False), [Worker() for _ in range(3)]
    data, at_s, under_way = batches(number), [0.0] * 3, [None] * 3
    taken = 0

    def begin(one):
        nonlocal taken
        under_way[one] = None
        if taken < number:
            pairs, taken = data[taken], taken + 1
            workers[one].look_up(pairs, server)
            loss = (workers[one].model(pairs) - (pairs[:, 0] - pairs[:, 1]).sign()).square().mean()
            under_way[one] = torch.autograd.grad(loss, list(workers[one].model.parameters()))
            at_s[one] += (1.0, 1.37, 1.83)[one]

    def step_on(model, gradients):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= rate * gradient

    for one, worker in enumerate(workers):
        worker.fetch(server)
        begin(one)
    while any(one is not None for one in under_way):
        one = min((n for n in range(3) if under_way[n] is not None), key=at_s.__getitem__)
        worker, gradients = workers[one], under_way[one]
        worker.step += 1
        before = worker.accrued or [0.0] * len(gradients)
        worker.accrued = [a + b for a, b in zip(before, gradients, strict=True)]
        if worker.step % fetch:
            step_on(worker.model, gradients)
        if worker.step % push == 0:
            step_on(server, worker.accrued)
            worker.accrued = None
        if worker.step % fetch == 0:
            worker.fetch(server)
        begin(one)
        if under_way[one] is None and worker.accrued is not None:
            step_on(server, worker.accrued)
    return [parameter.detach() for parameter in server.parameters()]


@pytest.mark.parametrize(("fetch", "push", "shards"), [(2, 1, 1), (3, 1, 2), (2, 3, 2), (3, 2, 1)])
def test_downpours_rows_are_those_of_their_first_use_after_a_fetch(fetch, push, shards, fetched):
    algorithm = f"downpour(fetch={fetch}, push={push}, apply=sgd, shards={shards})"
    run = pl.simulate(Loop(True), cluster=CLUSTER, algorithm=algorithm)
    expected = downpour_by_definition(fetch, push)
    for found, _ in run.returned.values():
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    assert fetched


@pytest.mark.parametrize("model", [{"bags": True}, {"tied": True}, {"padding_idx": 3}])
@pytest.mark.parametrize("algorithm", [SERVER, "downpour(push=3, shards=2)"])
def test_kinds_of_embeddings(model, algorithm, fetched):
    ends_alike(algorithm, **model)
    assert fetched


@pytest.mark.parametrize("algorithm", [SERVER, "downpour(apply=sgd)"])
def test_half_types(algorithm, fetched):
    ends_alike(algorithm, dtype=torch.bfloat16, number=6, rtol=2e-2, atol=2e-2)
    assert fetched


class Uses(Loop):
    """Uses the tables in another way than by looking rows up, in each step, after some, or between epochs."""

    def __init__(self, sparse, during=None, between=None, epochs=1):
        super().__init__(sparse)
        self.during, self.between, self.epochs = during, between, epochs

    def __call__(self):
        model = Recommender(self.sparse)
        optimizer, seen, kinds = torch.optim.SGD(model.parameters(), lr=0.3), [], []
        with pl.attach(model, optimizer) as worker:
            for epoch in range(self.epochs):
                for n, pairs in enumerate(worker.batches(batches(self.number))):
                    optimizer.zero_grad()
                    loss = (model(pairs) - (pairs[:, 0] - pairs[:, 1]).sign()).square().mean()
                    if self.during is not None and n >= 4:
                        loss = loss + self.during(model, seen)
                    loss.backward()
                    optimizer.step()
                if self.between is not None and epoch < self.epochs - 1:
                    seen.append(self.between(model))
            kinds.append(type(model.users.weight) is LookedUpTable)
        assert type(model.users.weight) is nn.Parameter
        return [parameter.detach().clone() for parameter in model.parameters()], seen, kinds[0]


def penalty(model, seen):
    return 1e-3 * model.users.weight.square().sum()


def penalty_by_functions(model, seen):
    return 1e-3 * torch.einsum("rw,rw->", model.items.weight, model.items.weight)


def tied_layer(model, seen):
    return F.linear(torch.ones(1, WIDTH, dtype=torch.float64), model.users.weight).square().mean()


def sums(model, seen):
    seen.append(sum(p.sum().item() for p in model.parameters()))
    return 0.0


def copied(model, seen):
    seen.append(copy.deepcopy(model).items.weight.sum().item())
    return 0.0


def pickled(model, seen):
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    seen.append(float(torch.load(memory)["users.weight"].sum()))
    return 0.0


def dense_lookup(model, seen):
    return F.embedding(torch.tensor([1, 5]), model.users.weight).square().mean()


@pytest.mark.parametrize(
    ("during", "algorithm"),
    [
        *((one, SERVER) for one in (penalty, penalty_by_functions, tied_layer, dense_lookup, sums, copied, pickled)),
        *((penalty, one) for one in ("parameter-server(mode=sync(backups=0))", "adaptive-revision")),
    ],
)
def test_other_uses_get_whole_tables(during, algorithm, fetched):
    """From the fifth step on; until then, rows are looked up."""
    runs = [pl.simulate(Uses(sparse, during), cluster=CLUSTER, algorithm=algorithm) for sparse in (False, True)]
    dense, sparse = (run.returned.values() for run in runs)
    for (expected, seen, _), (found, also_seen, is_looked_up) in zip(dense, sparse, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(also_seen, seen, rtol=1e-12, atol=1e-13)
        assert not is_looked_up
    assert max(fetched) > 40, "whole tables"


def whole(model):
    return [one.clone() for one in model.state_dict().values()]


def looked_up(model):
    with torch.no_grad():
        every = torch.arange(ROWS)
        return [model.users(every), model.items(every), F.embedding(every, model.users.weight, sparse=True)]


@pytest.mark.parametrize("between", [whole, looked_up])
@pytest.mark.parametrize("algorithm", ["parameter-server(mode=sync(backups=0), shards=2)", "downpour"])
def test_between_two_epochs_a_loop_sees_the_newest_parameters(between, algorithm, fetched):
    runs = [pl.simulate(Uses(one, None, between, 2), cluster=CLUSTER, algorithm=algorithm) for one in (False, True)]
    dense, sparse = (run.returned.values() for run in runs)
    for (expected, seen, _), (found, also_seen, is_looked_up) in zip(dense, sparse, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(also_seen, seen, rtol=1e-12, atol=1e-13)
        assert is_looked_up == (between is looked_up)
    assert fetched


def test_sparse_adam(fetched):
    two = pl.Cluster(workers=2)
    algorithm = "parameter-server(mode=sync(backups=0), shards=2)"
    runs = []
    for least in (0, 1 << 40):
        with mock.patch("paceline.loop.looked_up_tables.LEAST_BYTES", least):
            runs.append(pl.simulate(SparseAdam(True), cluster=two, algorithm=algorithm))
    assert torch.equal(runs[0].returned[0], runs[1].returned[0])
    assert fetched


class Changes(Loop):
    """Changes a table by hand in its twelfth step."""

    def __init__(self, change):
        self.change = change

    def __call__(self):
        model = Recommender(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with pl.attach(model, optimizer) as worker:
            for n, pairs in enumerate(worker.batches(batches(60))):
                optimizer.zero_grad()
                model(pairs).sum().backward()
                if n >= 12:
                    self.change(model)
                optimizer.step()


@torch.no_grad()
def one_row(model):
    model.users.weight[50] = 0.0


def by_data(model):
    model.items.weight.data.mul_(0.9)


def replaced(model):
    model.items.weight.data = torch.ones(ROWS, WIDTH, dtype=torch.float64)


def bounded(model):
    F.embedding(torch.arange(ROWS), model.users.weight, max_norm=0.01, sparse=True)


@pytest.mark.parametrize("change", [one_row, by_data, replaced, bounded])
@pytest.mark.parametrize("algorithm", ["parameter-server(mode=async)", "downpour(fetch=2)"])
def test_changes_by_hand_are_refused(change, algorithm):
    with pytest.raises(pl.UsageError, match="has changed its parameters"):
        pl.simulate(Changes(change), cluster=CLUSTER, algorithm=algorithm)


def test_rows_that_do_not_exist_are_pytorchs_error():
    def look(model):
        model.users(torch.tensor([ROWS]))

    with pytest.raises(IndexError):
        pl.simulate(Changes(look), cluster=CLUSTER, algorithm="parameter-server(mode=async)")


def test_a_worker_that_fails_has_no_half_tables():
    models = []

    def fail():
        model = Recommender(True)
        models.append(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        with pl.attach(model, optimizer) as worker:
            for pairs in worker.batches(batches(24)):
                model(pairs).sum().backward()
                optimizer.step()
                raise KeyError("the loop's own")

    with pytest.raises(KeyError):
        pl.simulate(fail, cluster=CLUSTER, algorithm="parameter-server(mode=async)")
    assert models[0].users.weight.shape == (ROWS, WIDTH)
    with pytest.raises(pl.UsageError, match="has only some rows of the table of shape"):
        models[0].users.weight.sum()


def test_bytes_are_those_of_the_rows_of_the_request_and_of_its_answer():
    rows_numbers_and_numbers = 40 * 200 * (16 * 4 + 4 + 4)
    assert rows_numbers_and_numbers < bytes_sent() < 1.15 * rows_numbers_and_numbers
