"""What workers print, and figures of the whole run: lines are whole and tagged, sums are of all workers that take part."""

import io
import math
import os
import pickle

import numpy as np
import pytest
import torch
from tqdm import tqdm

import paceline as pl
from loops import families
from loops.coder import batches, loss_of, made, own_id
from paceline.system.tagged_output import TaggedOutput
from paceline.worker.gathering import StoreGatherer


class Terminal(io.StringIO):
    def isatty(self):
        return True


def written(stream, *texts, clock=None, ends=False):
    """What comes out after each text, which is flushed."""
    now = iter(clock or [0.0] * 100)
    tagged, outs = TaggedOutput(stream, "[2] ", lambda: next(now)), []
    for text in texts:
        before = len(stream.getvalue())
        tagged.write(text)
        tagged.flush()
        outs.append(stream.getvalue()[before:])
    if ends:
        tagged.end()
    return outs


def test_lines_are_written_when_they_are_whole():
    assert written(io.StringIO(), "epoch", " 1\nloss", " 2\n\nthree\nfo") == [
        "",
        "[2] epoch 1\n",
        "[2] loss 2\n[2] \n[2] three\n",
    ]
    stream = io.StringIO()
    written(stream, "no end", ends=True)
    assert stream.getvalue() == "[2] no end\n"


def test_each_line_is_one_write(tmp_path):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb", buffering=0) as end:
        tagged = TaggedOutput(stream, "[7] ")
        for number in range(3):
            print("step", number, "é", sep=" ", file=tagged)
            assert end.read(1000) == f"[7] step {number} é\n".encode()


def test_a_bar_moves_in_its_place_on_a_terminal():
    clear = "\x1b[K"
    found = written(Terminal(), "\r 10%", "\r 20%", "\r100%\n", "next\n")
    assert found == [f"\r[2]  10%{clear}", f"\r[2]  20%{clear}", f"\r{clear}[2] 100%\n", f"\r{clear}[2] next\n"]


def test_a_bar_that_goes_away_leaves_nothing():
    assert written(Terminal(), "\r 10%", "\r     \r", "x\n")[1:] == ["\r\x1b[K", "\r\x1b[K[2] x\n"]
    assert written(io.StringIO(), "\r 10%", "\r     \r", "x\n")[1:] == ["", "[2] x\n"]


def test_elsewhere_a_bar_becomes_lines_now_and_then_and_its_last_state_always():
    bars = [f"\r{percent}%" for percent in range(6)]
    found = written(io.StringIO(), *bars, "\r100%\n", clock=[0, 0, 1, 2, 4.9, 5, 5, 6])
    assert found == ["[2] 0%\n", "", "", "", "[2] 4%\n", "", "[2] 100%\n"]


def test_tqdm_is_shown():
    stream = Terminal()
    tagged = TaggedOutput(stream, "[1] ")
    for _ in tqdm(range(3), file=tagged, mininterval=0, miniters=1, ascii=True):
        print("between", file=tagged)
    shown = stream.getvalue()
    assert all(f"{share}%" in shown for share in (0, 33, 67, 100))
    assert shown.endswith("\n")
    assert all(part.startswith(("[1] ", "\x1b[K[1] ", "\x1b[K")) for part in shown.split("\r") if part.strip())


def sums(values, kept, uses_batches=True):
    """Each worker brings what `values` maps it to, after every epoch."""

    def loop():
        model, optimizer = made(lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for _ in range(2):
                for x in worker.batches(batches(7, worker=9)) if uses_batches else batches(3):
                    optimizer.zero_grad()
                    loss_of(model, x).backward()
                    optimizer.step()
                value = values(own_id())
                kept.setdefault(own_id(), []).append((worker.sum(value), worker.mean(value)))

    return loop


def simulated(loop, algorithm, workers=3):
    pl.simulate(loop, workers=workers, algorithm=algorithm)


def in_threads(loop, algorithm, workers=3):
    assert pl.launch(loop, workers=workers, algorithm=algorithm, backend="threads").result["outcome"] == "stopped"


@pytest.mark.parametrize(("start", "uses_batches"), [(simulated, True), (in_threads, False)])
@pytest.mark.parametrize("algorithm", families.ALL)
def test_all_workers_get_the_sum_and_the_mean_of_all(algorithm, start, uses_batches):
    kept = {}
    start(sums(lambda worker: 0.1 * 3**worker, kept, uses_batches), algorithm)
    total = 0.1 + 0.1 * 3 + 0.1 * 9
    assert kept == dict.fromkeys(range(3), [(total, total / 3)] * 2)


@pytest.mark.parametrize("start", [simulated, in_threads])
def test_tensors_keep_their_type_and_whole_numbers_add_up(start):
    kept = {}

    def values(worker):
        return torch.tensor([[100 + worker, worker]], dtype=torch.uint8)

    start(sums(values, kept), "hogwild")
    assert all(torch.equal(found, torch.tensor([[303, 3]])) for rows in kept.values() for found, _ in rows)
    assert all(torch.equal(mean, torch.tensor([[101.0, 1.0]])) for rows in kept.values() for _, mean in rows)
    kept = {}
    start(sums(lambda worker: torch.full((2,), 1 / 3, dtype=torch.bfloat16, requires_grad=True), kept), "hogwild")
    third = torch.full((2,), 1 / 3, dtype=torch.bfloat16)
    assert all(torch.equal(found, (3 * third.float()).bfloat16()) for rows in kept.values() for found, _ in rows)
    kept = {}
    start(sums(lambda worker: worker, kept), "hogwild")
    assert kept[0] == [(3, 1.0)] * 2
    assert type(kept[0][0][0]) is int


@pytest.mark.parametrize("start", [simulated, in_threads])
def test_different_shapes_are_refused(start):
    with pytest.raises(pl.UsageError, match=r"different shapes by different workers: \(0,\) and \(1,\)"):
        start(sums(lambda worker: torch.zeros(worker), {}), "hogwild", workers=2)


def leaves_early(kept):
    """Worker 0 makes two sums, the others three."""

    def loop():
        model, optimizer = made(lr=0.01)
        with pl.attach(model, optimizer) as worker:
            for number in range(2 + (own_id() > 0)):
                loss_of(model, batches(1)[0]).backward()
                optimizer.step()
                kept.setdefault(own_id(), []).append(worker.mean(10.0**number * (1 + own_id())))

    return loop


@pytest.mark.parametrize("start", [simulated, in_threads])
@pytest.mark.parametrize("algorithm", ["hogwild", "ad-psgd", "parameter-server(mode=async)"])
def test_a_worker_whose_loop_has_ended_is_not_waited_for(algorithm, start):
    kept = {}
    start(leaves_early(kept), algorithm)
    assert kept == {0: [2.0, 20.0], 1: [2.0, 20.0, 250.0], 2: [2.0, 20.0, 250.0]}


def test_a_simulated_worker_that_is_killed_is_not_waited_for():
    kept = {}
    faults = pl.Faults().kill(worker=1, step=3)
    pl.simulate(
        sums(lambda worker: 1.0 + worker, kept, uses_batches=False), workers=3, algorithm="hogwild", faults=faults
    )
    assert kept == {0: [(4.0, 2.0)] * 2, 2: [(4.0, 2.0)] * 2}


def test_alone_it_is_the_value_and_outside_it_is_refused():
    kept = {}
    sums(lambda worker: 2.5, kept)()
    assert kept[0] == [(2.5, 2.5)] * 2
    model, optimizer = made()
    with pytest.raises(pl.UsageError, match="inside `with"):
        pl.simulate(lambda: pl.attach(model, optimizer).sum(1.0), workers=1)


def test_through_a_store_whose_workers_end_or_do_not_come():
    store = torch.distributed.HashStore()
    first, second, third = (StoreGatherer(store, worker, 3, deadline_s=0.05) for worker in range(3))
    third.leave()
    with pytest.raises(pl.WorkerLostError, match="for worker 1: all workers must call it"):
        first.gather(1.0)
    first = StoreGatherer(store, 0, 3, deadline_s=60.0)
    store.set("sum/1/1", store.get("sum/1/0"))  # as worker 1 would say it
    assert first.gather(1.0) == [1.0, 1.0]
    assert second.gather(1.0) == [1.0, 1.0]


def pickled_by_pytorch(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize(
    "put",
    [pickled_by_pytorch(1.0), pickle.dumps(1.0), b'"one"', b"[1.0]", b"PK nothing", b"[" * 100_000, b"\xff"],
    ids=["by PyTorch", "pickle", "text", "list", "no archive", "brackets", "no text"],
)
def test_what_others_have_put_into_the_store_is_not_unpickled(put):
    store = torch.distributed.HashStore()
    store.set("sum/1/1", put.hex())
    with pytest.raises(pl.UsageError, match="something else writes to this run's store"):
        StoreGatherer(store, 0, 2, deadline_s=60.0).gather(1.0)


@pytest.mark.parametrize(
    "value",
    [
        3,
        2**70,
        0.1,
        -math.inf,
        True,
        np.float32(0.5),
        np.int64(7),
        torch.tensor(2),
        torch.rand(3),
        torch.ones(2).bfloat16(),
    ],
)
def test_values_travel_through_a_store_bit_for_bit(value):
    (one,) = StoreGatherer(torch.distributed.HashStore(), 0, 1, deadline_s=60.0).gather(value)
    if isinstance(value, torch.Tensor):
        assert torch.equal(one, value)
        assert one.dtype == value.dtype
    else:
        assert one == value


@pytest.mark.parametrize("value", [{1.0}, "one", 1j, None])
def test_what_is_no_number_is_refused_with_its_kind(value):
    with pytest.raises(pl.UsageError, match=f"a number or a tensor, not {type(value).__name__}"):
        StoreGatherer(torch.distributed.HashStore(), 0, 1, deadline_s=60.0).gather(value)


@pytest.mark.parametrize("algorithm", families.ALL)
def test_samples_count_accumulation(algorithm):
    """Two passes of 4 in each step, marked or not."""

    def loop(marks, uses_batches):
        def train():
            model, optimizer = made(lr=0.01)
            with pl.attach(model, optimizer) as worker:
                given = worker.batches(batches(24, worker=9)) if uses_batches else batches(8)
                for number, x in enumerate(given):
                    if marks and number % 2 == 0:
                        with worker.accumulate():
                            loss_of(model, x).backward()
                    else:
                        loss_of(model, x).backward()
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()

        return train

    for marks in (True, False):
        for uses_batches in (True, False):
            run = pl.simulate(loop(marks, uses_batches), workers=3, algorithm=algorithm)
            made_with = [n for rows in run.records.values() for n in rows["samples"].tolist() if n]
            assert made_with == [8] * 12, (marks, uses_batches)
            assert run.result["samples"] == 96
