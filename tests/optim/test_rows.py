"""Selections of rows against plain indexing, sums of them against dense sums, and what is refused as rows."""

import random
import struct

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.flat import FlatBinding
from paceline.optim.flat_optimizer import FlatOptimizer
from paceline.optim.rows import Selection, Table, sum_selected, whole_but
from paceline.optim.settings import check_rows, settings_of

LENGTH = 100
TABLES = (Table(3, 33, 5), Table(40, 80, 8), Table(80, 99, 1))


def drawn_rows(draw):
    """Some rows of some of the tables."""
    rows = {}
    for table in TABLES:
        if draw.random() < 0.8:
            count = (table.end - table.begin) // table.width
            numbers = draw.sample(range(count), draw.randint(0, min(4, count)))
            rows[table] = torch.tensor(sorted(numbers), dtype=torch.int64) if draw.random() < 0.8 else None
    return rows


def selected(rows, begin, end):
    """The selected elements of begin..end, one by one."""
    found = []
    for element in range(begin, end):
        of = [(table, numbers) for table, numbers in rows.items() if table.begin <= element < table.end]
        if not of or (of[0][1] is not None and (element - of[0][0].begin) // of[0][0].width in of[0][1].tolist()):
            found.append(element - begin)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_a_selection_has_the_rows_elements_and_all_outside_the_tables(seed):
    draw = random.Random(seed)
    rows = drawn_rows(draw)
    cut = draw.randint(1, LENGTH - 1)  # also within a row
    for begin, end in ((0, cut), (cut, LENGTH), (0, LENGTH)):
        expected = selected(rows, begin, end)
        whole = Selection(rows, begin, end)
        for one in (whole, Selection.from_bytes(whole.to_bytes(), begin, end)):
            assert one.index().tolist() == expected
            assert one.count == len(expected)
            x = torch.arange(float(end - begin))
            assert one.take(x).tolist() == expected
            one.put(x, torch.full((len(expected),), -1.0))
            assert (x == -1).nonzero().flatten().tolist() == expected
            found = []
            for where, index, values in one.each(one.take(torch.arange(float(end - begin)))):
                elements = range(where.start, where.stop) if index is None else (index + where.start).tolist()
                assert values.tolist() == list(elements)
                found += elements
            assert found == expected
            in_tables = [e for e in expected if any(table.begin <= e + begin < table.end for table in rows)]
            assert one.row_elements().tolist() == in_tables


@pytest.mark.parametrize("seed", range(40))
def test_sums_of_selections_equal_dense_sums(seed):
    """The first may be dense, but for a parameter without a gradient."""
    draw = random.Random(seed)
    begin, end = sorted(draw.sample(range(LENGTH), 2))
    total, parts, all_rows = torch.zeros(end - begin, dtype=torch.float64), [], []
    for number in range(3):
        missing = [
            own
            for own in (tuple(sorted((max(t.begin, begin), min(t.end, end)))) for t in TABLES[:2])
            if begin <= own[0] < own[1] <= end
        ]  # as a shard knows them
        rows = drawn_rows(draw) if number or draw.random() < 0.7 else whole_but(missing)
        one = Selection(rows, begin, end)
        values, factor = torch.tensor([draw.random() for _ in range(one.count)], dtype=torch.float64), draw.random()
        total.index_add_(0, one.index(), values, alpha=factor)
        parts.append((values, one, factor))
        all_rows.append(rows)
    found, selection = sum_selected(parts, torch.float64)
    assert selection.index().tolist() == sorted({e for rows in all_rows for e in selected(rows, begin, end)}), all_rows
    dense = torch.zeros_like(total)
    selection.put(dense, found)
    torch.testing.assert_close(dense, total)


def as_bytes(*tables, rows=()):
    head = struct.pack("<q", len(tables)) + b"".join(struct.pack("<4q", *one) for one in tables)
    return torch.frombuffer(bytearray(head + struct.pack(f"<{len(rows)}i", *rows)), dtype=torch.uint8)


@pytest.mark.parametrize(
    "sent",
    [
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(16),
        as_bytes((0, 10, 5, 1)),
        as_bytes((0, 10, 5, -2)),
        as_bytes((0, 10, 5, 1), rows=[2]),
        as_bytes((0, 10, 5, 1), rows=[-1]),
        as_bytes((0, 10, 5, 2), rows=[1, 0]),
        as_bytes((0, 10, 5, 2), rows=[1, 1]),
        as_bytes((0, 10, 3, 1), rows=[1]),
        as_bytes((0, 10, 0, 1), rows=[1]),
        as_bytes((10, 20, 5, 1), (0, 10, 5, 1), rows=[1, 1]),
        as_bytes((100, 110, 5, 1), rows=[1]),
        as_bytes((1 << 62, 1 << 62, 5, 1), rows=[1]),
        torch.frombuffer(bytearray(struct.pack("<q", 1 << 60)), dtype=torch.uint8),
        torch.frombuffer(bytearray(struct.pack("<q", -1)), dtype=torch.uint8),
    ],
)
def test_malformed_rows_are_refused(sent):
    with pytest.raises(ValueError, match=r"rows|table"):
        Selection.from_bytes(sent, 0, 50)


def embeddings(**options):
    torch.manual_seed(0)
    return nn.ModuleList([nn.Embedding(7, 3, sparse=True, **options), nn.Linear(3, 2), nn.Embedding(5, 2, sparse=True)])


def test_a_models_sparse_gradients_are_gathered_as_rows():
    model = embeddings()
    first, linear, _ = model
    linear(first(torch.tensor([4, 1, 4]))).sum().backward()  # row 4 twice; the second embedding has no gradient
    binding = FlatBinding(model.parameters())
    rows = binding.sparse_rows()
    assert [None if numbers is None else numbers.tolist() for numbers in rows.values()] == [[1, 4], None]
    g, dense = binding.gather_rows(rows), binding.zeros()
    gradients = [first.weight.grad.to_dense(), linear.weight.grad, linear.bias.grad]
    for view, gradient in zip(binding.views(dense), gradients, strict=False):
        view.copy_(gradient)
    selection = Selection(rows, 0, binding.num_elements)
    assert torch.equal(selection.take(dense), g)
    assert selection.count < binding.num_elements


def test_gradients_without_a_sparse_one_have_no_rows():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    assert FlatBinding(model.parameters()).sparse_rows() is None


def test_sparse_gradients_that_are_no_rows_are_refused():
    parameter = nn.Parameter(torch.zeros(3, 3))
    parameter.grad = torch.eye(3).to_sparse()
    with pytest.raises(UsageError, match="must consist of rows"):
        FlatBinding([parameter]).sparse_rows()


def sgd(model):
    return [torch.optim.SGD(model.parameters(), lr=0.1)]


def adagrad(model):
    """Counts steps, as its rate falls."""
    return [torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)]


def sparse_adam_and_adam(model):
    tables = [one.weight for one in model if isinstance(one, nn.Embedding)]
    groups = [{"params": [model[1].weight], "lr": 0.02}, {"params": [model[1].bias]}]
    return [torch.optim.SparseAdam(tables, lr=0.1), torch.optim.Adam(groups, lr=0.1)]


def adagrad_and_momentum(model):
    tables = [one.weight for one in model if isinstance(one, nn.Embedding)]
    return [torch.optim.Adagrad(tables, lr=0.1), torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)]


@pytest.mark.parametrize("make", [sgd, adagrad, sparse_adam_and_adam, adagrad_and_momentum])
@pytest.mark.parametrize("cut", [None, 20])  # 20: within a row
def test_optimizers_on_parts_of_a_vector_step_as_pytorchs_on_sparse_gradients(make, cut):
    model, mine = embeddings(), embeddings()
    optimizers, binding = make(model), FlatBinding(mine.parameters())
    x = binding.zeros()
    binding.read(x)
    where = dict(zip(binding.parameters, binding.ranges, strict=True))
    settings = settings_of(make(mine), where.get)
    parts = [(0, binding.num_elements)] if cut is None else [(0, cut), (cut, binding.num_elements)]
    owners = [FlatOptimizer(settings, x[begin:end], begin) for begin, end in parts]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model[0](torch.tensor([1, 1, step])).sum() ** 2 + model[1](torch.ones(1, 3)).square().sum()
        (loss + (model[2](torch.tensor([3, step % 5])).sum() if step % 2 else 0)).backward()
        for one, other in zip(model.parameters(), mine.parameters(), strict=True):
            other.grad = one.grad
        rows = binding.sparse_rows()
        g = binding.gather_rows(rows)
        selections = [Selection(rows, begin, end) for begin, end in parts]
        with torch.no_grad():
            for owner, selection, own in zip(owners, selections, g.split([s.count for s in selections]), strict=True):
                owner.step(own, settings, selection=selection)
        for optimizer in optimizers:
            optimizer.step()
        for view, parameter in zip(binding.views(x), model.parameters(), strict=True):
            torch.testing.assert_close(view, parameter.detach())
        if step in (0, 2):  # a successor goes on
            for number, (begin, end) in enumerate(parts):
                state, owners[number] = owners[number].state(), FlatOptimizer(settings, x[begin:end], begin)
                owners[number].load(state)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), r"not by SGD with momentum\.$"),
        (lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1), r"not by Adagrad with weight_decay\.$"),
        (lambda p: torch.optim.Adam(p, lr=0.1), r"not by Adam\.$"),
        (lambda p: torch.optim.SparseAdam(list(p), lr=0.1), "SparseAdam takes sparse gradients only"),
    ],
)
def test_optimizers_without_steps_on_rows_are_refused(make, says):
    model = embeddings()
    model[1](model[0](torch.tensor([1]))).sum().backward()
    model[2].weight.grad = torch.zeros_like(model[2].weight)
    binding = FlatBinding(model.parameters())
    where = dict(zip(binding.parameters, binding.ranges, strict=True))
    with pytest.raises(UsageError, match=says):
        check_rows(settings_of(make(model.parameters()), where.get), binding.sparse_rows())


def test_one_row_of_a_batch_with_columns_is_sent():
    """PyTorch's only index has then the stride of the batch."""
    rows = torch.tensor([[3, 4]])[:, 0]
    assert rows.stride() == (2,)
    selection = Selection({Table(0, 20, 4): rows}, 0, 20)
    assert Selection.from_bytes(selection.to_bytes(), 0, 20).index().tolist() == [12, 13, 14, 15]
