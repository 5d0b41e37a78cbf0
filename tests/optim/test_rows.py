"""Selections of rows against plain indexing, sums of them against dense sums, and what is refused as rows."""

import random
import struct

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.optim.flat import FlatBinding
from paceline.optim.flat_optimizer import FlatOptimizer
from paceline.optim.rows import Selection, Table, sum_selected, union
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
            rows[table] = torch.tensor(sorted(numbers), dtype=torch.int64)
    return rows


def selected(rows, begin, end):
    """The selected elements of begin..end, one by one."""
    found = []
    for element in range(begin, end):
        of = [(table, numbers) for table, numbers in rows.items() if table.begin <= element < table.end]
        if not of or (element - of[0][0].begin) // of[0][0].width in of[0][1].tolist():
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
            pieces = [
                (where.start if index is None else 0, where, index, v) for where, index, v in one.each(one.take(x))
            ]
            assert sum(len(values) for *_, values in pieces) == len(expected)


@pytest.mark.parametrize("seed", range(40))
def test_sums_of_selections_equal_dense_sums(seed):
    draw = random.Random(seed)
    begin, end = sorted(draw.sample(range(LENGTH), 2))
    total, parts, all_rows = torch.zeros(end - begin, dtype=torch.float64), [], []
    for number in range(3):
        rows = drawn_rows(draw) if number or draw.random() < 0.7 else None
        one = Selection(rows, begin, end) if rows is not None else None
        count = one.count if one is not None else end - begin
        values, factor = torch.tensor([draw.random() for _ in range(count)], dtype=torch.float64), draw.random()
        index = one.index() if one is not None else torch.arange(count)
        total.index_add_(0, index, values, alpha=factor)
        parts.append((values, one, factor))
        all_rows.append(rows)
    found, selection = sum_selected(parts, torch.float64)
    if None in all_rows:
        assert selection is None
    else:
        assert set(selected(union(all_rows), begin, end)) == {e for r in all_rows for e in selected(r, begin, end)}
        dense = torch.zeros_like(total)
        selection.put(dense, found)
        found = dense
    torch.testing.assert_close(found, total)


def as_bytes(*tables, rows=()):
    head = struct.pack("<q", len(tables)) + b"".join(struct.pack("<4q", *one) for one in tables)
    return torch.frombuffer(bytearray(head + struct.pack(f"<{len(rows)}i", *rows)), dtype=torch.uint8)


@pytest.mark.parametrize(
    "sent",
    [
        torch.zeros(3, dtype=torch.uint8),
        torch.zeros(16),
        as_bytes((0, 10, 5, 1)),
        as_bytes((0, 10, 5, -1)),
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
    assert [numbers.tolist() for numbers in rows.values()] == [[1, 4], []]
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


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "sparse adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("cut", [None, 20])  # 20: within a row
def test_an_optimizer_on_parts_of_a_vector_steps_as_pytorchs_on_sparse_gradients(name, cut):
    model, mine = embeddings(), embeddings()
    if name == "sparse adam":
        model, mine = (nn.ModuleList([one[0], one[2]]) for one in (model, mine))
    optimizer, binding = OPTIMIZERS[name](model.parameters()), FlatBinding(mine.parameters())
    x = binding.zeros()
    binding.read(x)
    where = dict(zip(binding.parameters, binding.ranges, strict=True))
    settings = settings_of(OPTIMIZERS[name](mine.parameters()), where.get)
    parts = [(0, binding.num_elements)] if cut is None else [(0, cut), (cut, binding.num_elements)]
    owners = [FlatOptimizer(settings, x[begin:end], begin) for begin, end in parts]
    for step in range(4):
        optimizer.zero_grad()
        loss = model[0](torch.tensor([1, 1, step])).sum() ** 2 + (
            model[-1](torch.tensor([3, step])).sum() if step else 0
        )
        loss.backward()
        for one, other in zip(model.parameters(), mine.parameters(), strict=True):
            other.grad = one.grad
        rows = binding.sparse_rows()
        g = binding.gather_rows(rows)
        selections = [Selection(rows, begin, end) for begin, end in parts]
        with torch.no_grad():
            for owner, selection, own in zip(owners, selections, g.split([s.count for s in selections]), strict=True):
                owner.step(own, settings, selection=selection)
        optimizer.step()
        for view, parameter in zip(binding.views(x), model.parameters(), strict=True):
            torch.testing.assert_close(view, parameter.detach())
        if step == 2:  # a successor goes on
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
