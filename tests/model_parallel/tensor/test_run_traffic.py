"""What a run sends for a block is `block_traffic`'s, to the byte: the difference of two runs, one with a block more."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest

import paceline as pl
from chosen import soaked
from model_parallel import gloo_workers
from model_parallel.tensor.model import BATCH, HIDDEN, LENGTH
from model_parallel.tensor.run_loops import found, loop
from paceline.model_parallel.tensor.traffic import block_traffic

PROGRAM = Path(__file__).with_name("run_program.py")
BLOCKS, STEPS, ELEMENT_BYTES = (1, 2), 3, 8
SETTINGS = {"dropout": 0.0, "steps": STEPS, "optimizer": "momentum"}
LAYOUTS = [
    pl.TensorParallel(line=2),
    pl.TensorParallel(line=3),
    pl.TensorParallel(q=2),
    pl.TensorParallel(q=2, mode="summa"),
    pl.TensorParallel(q=1, depth=2),
    pl.TensorParallel(q=2, depth=2),
    pl.TensorParallel(q=2, depth=2, mode="summa"),
]


def plan_of(layout):
    return block_traffic(layout.shape, BATCH, LENGTH, HIDDEN, mode=layout.mode)


def check_difference(layout, one, two, worker):
    """Bytes of all operations, and how many there are of each kind; sums of gradients travel with the other blocks'."""
    plan = plan_of(layout)
    expected = sum(traffic.elements for traffic in plan.values()) * ELEMENT_BYTES * STEPS
    (_, few_bytes, few), (_, more_bytes, more) = one["sent"], two["sent"]
    assert more_bytes - few_bytes == expected, f"worker {worker}"
    sums = {("row", "all-reduce"), ("depth", "all-reduce")}
    calls = Counter(more)
    calls.subtract(few)
    assert {key: number for key, number in calls.items() if number} == {
        key: STEPS * traffic.calls for key, traffic in plan.items() if key not in sums
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_launch(layout, tmp_path):
    workers = layout.shape.workers
    runs = {}
    for blocks in BLOCKS:
        out = tmp_path / str(blocks)
        out.mkdir()
        runs[blocks] = pl.launch(
            partial(loop, layout, out, blocks=blocks, **SETTINGS), workers=workers, backend="threads"
        )
    for worker in range(workers):
        check_difference(layout, *(found(tmp_path / str(blocks), worker) for blocks in BLOCKS), worker)
    few, more = (sum(records["sent_bytes"].sum() for records in runs[blocks].records.values()) for blocks in BLOCKS)
    assert more - few == workers * STEPS * ELEMENT_BYTES * sum(one.elements for one in plan_of(layout).values())


@pytest.mark.parametrize("layout", ["tensor(q=2)", *soaked("tensor(q=2, mode=summa)")])
def test_torchrun(layout, tmp_path):
    for blocks in BLOCKS:
        (tmp_path / str(blocks)).mkdir()
        words = [tmp_path / str(blocks), layout, "all-reduce", 1, {"blocks": blocks, **SETTINGS}]
        codes, said = gloo_workers.ends(PROGRAM, words, 4)
        assert codes == [0] * 4, said
    for worker in range(4):
        one, two = (found(tmp_path / str(blocks), worker) for blocks in BLOCKS)
        mode = "summa" if "summa" in layout else "allgather"
        check_difference(pl.TensorParallel(q=2, mode=mode), one, two, worker)
