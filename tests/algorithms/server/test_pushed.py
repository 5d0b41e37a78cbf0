"""What a worker pushes to servers through a codec: what it remembers, what it leaves out, and what becomes of that."""

import math
import warnings
from types import SimpleNamespace

import pytest
import torch

import paceline as pl
from compression.worlds import gaussian, ports_of
from contracts.runs import run_task
from contracts.table import Row
from paceline.algorithms.server.pushed import PushCodec
from paceline.compression.bf16 import BFloat16
from paceline.compression.qsgd import QSGD
from paceline.compression.sign import Sign
from paceline.compression.top_k import TopK
from paceline.errors import NotFiniteWarning
from paceline.records import checkpoint_contents as contents
from paceline.records import checkpoint_files as files
from processes.drill import Drill

RANGES = ((0, 120), (120, 200))
WITH_MEMORY = [Sign(), TopK(fraction=0.1), BFloat16(feedback=True)]


class Storage:
    """What a checkpoint would hold."""

    def __init__(self, kept=None):
        self.kept, self.state = kept, None

    def restore(self):
        return self.kept

    def keep(self, state, version):
        self.state = state


def pushing(codec, *, storage=None, incarnation=0, worker=1):
    ports = ports_of(worker, 3)
    ports.shared = SimpleNamespace(ranges=RANGES, x=torch.zeros(200))
    ports.storage, ports.incarnation = storage, incarnation
    return PushCodec(codec, ports)


def memories(own):
    return [one.memory for one in own.feedbacks]


def applied(own, gradient):
    """What servers are sent of a gradient, which all of them apply."""
    payloads = own.encode(gradient)
    for shard in range(len(RANGES)):
        own.settle(shard, is_applied=True)
    return payloads


def received(codec, payloads):
    """What the servers decode, (200,)."""
    sizes = [end - begin for begin, end in RANGES]
    parts = [codec.decode(one, size, torch.float32) for one, size in zip(payloads, sizes, strict=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("codec", WITH_MEMORY, ids=str)
def test_what_servers_get_and_what_is_left_at_the_end_is_all_there_was(codec):
    own, total, sent = pushing(codec), torch.zeros(200), torch.zeros(200)
    for step in range(10):
        total += gaussian(step, 200)
        sent += received(codec, applied(own, gaussian(step, 200)))
    torch.testing.assert_close(sent + torch.cat(memories(own)), total, rtol=1e-5, atol=1e-4)
    assert not torch.allclose(sent, total, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("codec", [*WITH_MEMORY, QSGD(bits=4)], ids=str)
def test_a_gradient_that_is_not_finite_is_sent_as_zeros_and_it_is_said_once(codec, bad):
    """It is in the second shard alone, and the first one leaves it out, too: a step has all of a gradient or none."""
    own = pushing(codec)
    applied(own, gaussian(0, 200))
    before = [None if one is None else one.clone() for one in memories(own)]
    gradient = gaussian(1, 200)
    gradient[150] = bad
    with pytest.warns(NotFiniteWarning, match=r"worker 1 is not finite: zeros are sent.*stays unchanged") as said:
        found = [received(codec, applied(own, gradient)) for _ in range(3)]
    assert len(said) == 1
    assert not any(one.any() for one in found)
    for now, then in zip(memories(own), before, strict=True):
        assert now is then is None or torch.equal(now, then)
    assert received(codec, applied(own, gaussian(2, 200))).isfinite().all()


@pytest.mark.parametrize("codec", ["sign", "none"])
def test_a_run_goes_on_after_gradients_that_are_not_finite(codec):
    """Those of two steps of each worker; without a codec they are what the servers' model becomes."""
    finals, spoilt = [], set()  # which worker takes how many of the batches is a matter of timing

    def loop():
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with pl.attach(model, optimizer) as worker:
            for step, x in enumerate(worker.batches([gaussian(number, (8, 4)) for number in range(40)])):
                optimizer.zero_grad()
                (model(x) - x[:, :3]).square().mean().backward()
                if step in (3, 5):
                    model.weight.grad[1, 2] = math.nan
                    spoilt.add(worker.worker_id)
                optimizer.step()
        finals.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        algorithm = f"parameter-server(mode=async, codec={codec})"
        result = pl.launch(loop, workers=2, algorithm=algorithm, backend="threads").result
    said = sorted(str(one.message) for one in caught if issubclass(one.category, NotFiniteWarning))
    assert result["workers_lost"] == []
    assert spoilt
    assert all(bool(final.isfinite().all()) == (codec == "sign") for final in finals)
    assert [one[:22] for one in said] == [
        f"A gradient of worker {worker}" for worker in sorted(spoilt) if codec == "sign"
    ]


@pytest.mark.parametrize("codec", [*WITH_MEMORY, QSGD(bits=4)], ids=str)
def test_a_checkpoint_has_the_memory(codec):
    storage = Storage()
    straight = pushing(codec, storage=storage)
    for step in range(5):
        applied(straight, gaussian(step, 200))
    kept = {
        **storage.state(),
        "memories": [None if one is None else one.clone() for one in storage.state()["memories"]],
    }
    resumed, anew = pushing(codec, storage=Storage(kept)), pushing(codec)
    expected, found, other = (received(codec, applied(one, gaussian(9, 200))) for one in (straight, resumed, anew))
    assert torch.equal(found, expected)
    assert not torch.equal(other, expected), "it makes no difference what is remembered"


def test_a_checkpoint_of_another_codec_is_left_out_and_it_is_said():
    storage = Storage()
    applied(pushing(Sign(), storage=storage), gaussian(0, 200))
    with pytest.warns(UserWarning, match="with another codec or other shards: its error-feedback memory"):
        own = pushing(TopK(), storage=Storage(storage.state()))
    assert not any(one.any() for one in memories(own))


def test_one_that_takes_a_dead_workers_place_begins_with_nothing_and_it_is_said():
    storage = Storage()
    applied(pushing(Sign(), storage=storage), gaussian(0, 200))
    with pytest.warns(UserWarning, match="Worker 1 replaces a dead worker: .*lost"):
        own = pushing(Sign(), storage=Storage(storage.state()), incarnation=1)
    assert not any(one.any() for one in memories(own))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pushing(QSGD(), incarnation=1)  # nothing is lost


def programs(folder):
    """What the workers' programs have in the newest checkpoint."""
    newest = files.newest(folder / "checkpoint")
    return [contents.load_program(newest, worker) for worker in range(2)]


@pytest.mark.parametrize(
    ("spec", "pushes"),
    [("parameter-server(codec=sign, shards=2)", 24), ("downpour(codec=sign, push=2)", 12)],
    ids=["ps", "downpour"],
)
def test_a_resumed_run_goes_on_with_every_workers_memory(spec, pushes, tmp_path):
    """Which worker takes which of the batches is a matter of timing, so two runs are never equal bit for bit.

    Each makes 24 steps: of an epoch's batches, one worker may take all before the other begins.
    """
    row, settings = Row(pl.parse(spec)), {"workers": 2, "backend": "processes", "batch_size": 30, "learning_rate": 0.05}
    run_task(row, out=tmp_path, steps=24, **settings)
    first = programs(tmp_path)
    assert all(any(memory.any() for memory in one["memories"]) for one in first)
    assert [one["count"] for one in first] == [pushes] * 2
    run_task(row, resume=tmp_path, out=tmp_path, steps=48, **settings)
    second = programs(tmp_path)
    assert [one["count"] for one in second] == [2 * pushes] * 2


def test_what_a_killed_workers_codec_had_kept_back_is_said_to_be_lost():
    notes = {}
    for codec in ("sign", "qsgd(bits=4)"):
        drill = Drill(f"parameter-server(mode=async, codec={codec})", kill={1: 20}, until=200)
        result = drill.run().result
        assert result["outcome"] == "stopped"
        assert result["workers_lost"] == [1]
        notes[codec] = [note for note in result["notes"] if "codec" in note]
    assert notes == {"sign": ["What the codec of worker 1 had kept back of gradients is lost."], "qsgd(bits=4)": []}
