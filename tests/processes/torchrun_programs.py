"""What the workers of test_torchrun.py run: `python torchrun_programs.py PROGRAM`. Each prints one line of JSON."""

import dataclasses
import functools
import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import paceline as pl
from paceline.compression.coded_mean import CodedMean
from paceline.data.plan import BatchPlan
from paceline.errors import ClippingWarning
from paceline.membership.environment import current_environment, set_environment
from paceline.membership.launched import LaunchedRun
from paceline.transport import collectives

NUM_SAMPLES, BATCH_SIZE = 96, 8
if "PACELINE_TEST_LAZY_COPIES" in os.environ:  # the model counts as one on a device whose copies take their time
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import lazy_copies
    import paceline.worker.memberships.memory

    COPIES = lazy_copies.LazyCopies()
    paceline.worker.memberships.memory.device_copies = lambda device: COPIES
RANK = int(os.environ.get("RANK", os.environ.get("PACELINE_TEST_RANK", "0")))


def tell(result):
    """One line in one write: workers share torchrun's pipe, and `print` writes the line's end by itself."""
    os.write(1, (json.dumps(result) + "\n").encode())


def make(seed=None):
    """Every worker begins elsewhere, unless a seed is given: the run begins where worker 0 does."""
    torch.manual_seed(RANK if seed is None else seed)
    model = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def data():
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(
        torch.randn(NUM_SAMPLES, 4, generator=generator), torch.randint(0, 3, (NUM_SAMPLES,), generator=generator)
    )


def report(model, **more):
    tell({"rank": RANK, "x": [p.flatten().tolist() for p in model.parameters()], **more})


def public_loop(model, optimizer, batches, accumulate=2, clips=True):
    """A loop as tutorials write it: a scheduler, gradient accumulation, clipping. Nothing in it knows of workers."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    for _ in range(3):
        for number, (x, y) in enumerate(batches(), start=1):
            (nn.functional.cross_entropy(model(x), y) / accumulate).backward()
            if number % accumulate == 0:
                if clips:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()


def train(clips=True):
    warnings.simplefilter("ignore", ClippingWarning)  # under most algorithms each worker clips its own gradient
    model, optimizer = make()
    keys = list(model.state_dict())
    loader = torch.utils.data.DataLoader(data(), batch_size=BATCH_SIZE, shuffle=True)
    with pl.attach(model, optimizer) as worker:
        public_loop(model, optimizer, lambda: worker.batches(loader), clips=clips)
    report(model, algorithm=pl.spec(worker.algorithm), same_keys=keys == list(model.state_dict()))


def train_with_buffers():
    """Two epochs of a model with running statistics, and the mean of all at the end; how many buffers a device would need."""
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Tanh(), nn.Linear(300, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with pl.attach(model, optimizer) as worker:
        for _ in range(2):
            for x, y in worker.batches(torch.utils.data.DataLoader(data(), batch_size=BATCH_SIZE)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    seen = int(model[1].num_batches_tracked), model[1].running_mean.tolist()
    report(model, seen=seen, buffers=COPIES.num_pinned if "PACELINE_TEST_LAZY_COPIES" in os.environ else None)


def begins():
    """What each worker's model holds as it is attached, and after; nothing in it is seeded."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from loops.unseeded import Net, values

    warnings.simplefilter("ignore")
    model = Net()
    own = values(model)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.0)  # a server may have the other worker's updates by then
    with pl.attach(model, optimizer) as worker:
        begun = values(model)
        for x in worker.batches([torch.ones(2, 4)] * 4):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    tell({"rank": RANK, "own": repr(own), "begun": repr(begun)})


def loads_its_optimizer_on_worker_0():
    model, optimizer = make()
    if RANK == 0:
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    with pl.attach(model, optimizer):
        raise AssertionError("it began")


def train_coded():
    """Thirty steps; of the fourteen batches of an epoch, three workers take five rounds, the last of which lacks one."""
    model, optimizer = make()
    loader = torch.utils.data.DataLoader(data(), batch_size=7, shuffle=True)
    started = []
    start = CodedMean.start

    def noted(self, number, *args, **options):
        started.append(number)
        return start(self, number, *args, **options)

    CodedMean.start = noted
    steps = 0
    with pl.attach(model, optimizer) as worker:
        for _ in range(6):
            for x, y in worker.batches(loader):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
    report(model, steps=steps, started=started)


def restores_its_best():
    """Every worker keeps its model after its second step, running statistics and all, and restores it at the end."""
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    with pl.attach(model, optimizer):
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            if step == 1:
                best = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(best)
    left, after = ([value.tolist() for value in state.values()] for state in (best, model.state_dict()))
    tell({"rank": RANK, "left": left, "after": after})


def ends_early():
    """Worker 1 makes fewer rounds than the others."""
    wait_for_answers(60.0)  # nobody does: it says that it has ended
    model, optimizer = make(seed=0)
    with pl.attach(model, optimizer):
        for _ in range(5 - (RANK == 1)):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()


def train_without_clipping():
    train(clips=False)


def one_worker_with(num_workers, clips=True):
    """The same training in one process: its batches are those of all workers in a round."""
    model, optimizer = make(seed=0)
    inputs, targets = data().tensors
    plan = BatchPlan(num_samples=NUM_SAMPLES, batch_size=BATCH_SIZE)
    epochs = iter(range(3))

    def batches():
        first = next(epochs) * plan.batches_per_epoch
        for number in range(first, first + plan.batches_per_epoch, num_workers):
            indices = torch.cat([plan.indices(k) for k in range(number, number + num_workers)])
            yield inputs[indices], targets[indices]

    public_loop(model, optimizer, batches, clips=clips)
    return [p.flatten() for p in model.parameters()]


def wait_for_answers(answer_s):
    """A worker that is there, and waits for a core, would be missing after two seconds."""
    collectives.RollCall = functools.partial(collectives.RollCall, answer_s=answer_s)


def train_until(instant):
    """Trains; at step 3, `instant` happens in worker 1."""
    model, optimizer = make()
    batches = list(data()) * 4
    with pl.attach(model, optimizer) as worker:
        for step, (x, _) in enumerate(worker.batches(batches), start=1):
            if worker.worker_id == 1 and step == 3:
                instant()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def killed():
    wait_for_answers(10.0)  # all of it, as the one that was killed gives none
    train_until(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped():
    """The deadline is a short one only once all have met, however late one of them has started."""
    with pl.attach(*make()):
        pass
    os.environ["PACELINE_DEADLINE_S"] = "10"  # which no other worker may wait for a core
    train_until(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def raises():
    wait_for_answers(60.0)

    def fail():
        raise KeyError("mine")

    train_until(fail)


def other_model():
    torch.manual_seed(0)
    model = nn.Linear(4, 3 if RANK == 2 else 2)
    with pl.attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass


def other_algorithm():
    model, optimizer = make()
    with pl.attach(model, optimizer, algorithm="lockstep" if RANK == 0 else "all-reduce"):
        pass


def never_attaches():
    model, optimizer = make()
    if RANK == 0:
        with pl.attach(model, optimizer):
            pass


def on_one_gpu():
    """All but worker 0 have named the same; there is no NCCL here, and none is needed to see it."""
    dist.is_nccl_available = lambda: True
    LaunchedRun(current_environment(), {"algorithm": "none"}, gpu=f"GPU-{min(RANK, 1)}")


def without_nccl():
    LaunchedRun(current_environment(), {"algorithm": "none"}, gpu=f"GPU-{RANK}")


def on_other_kinds_of_devices():
    LaunchedRun(current_environment(), {"kind of device": "cuda" if RANK else "cpu"})


def hogwild():
    model, optimizer = make()
    with pl.attach(model, optimizer, algorithm="hogwild"):
        pass


def twice_beside_a_group_of_the_users():
    """The user's process group is used and left alone; attach works as often as it is called."""
    dist.init_process_group("gloo")
    for algorithm in ("lockstep", "local-sgd(period=2)"):
        model, optimizer = make()
        with pl.attach(model, optimizer, algorithm=algorithm) as worker:
            for x, _ in worker.batches(list(data())):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    number = torch.tensor([RANK + 1.0])
    dist.all_reduce(number)
    report(model, sum=number.item())
    dist.destroy_process_group()


def overflow():
    """In step 2 worker 1's loss is too large for its gradients: GradScaler must skip the step on all workers or on none."""
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    steps = []
    with pl.attach(model, optimizer) as worker:
        for number, (x, _) in enumerate(worker.batches(list(data())[:8])):
            before = model[0].weight.detach().clone()
            optimizer.zero_grad()
            too_large = torch.finfo(torch.float32).max if (number, RANK) == (2, 1) else 1.0
            scaler.scale(model(x).square().mean() * too_large).backward()
            scaler.step(optimizer)
            scaler.update()
            steps.append(not torch.equal(before, model[0].weight))
    report(model, scale=scaler.get_scale(), steps=steps)


def restarted():
    """Trains 3 epochs; in its first life worker 1 dies in the middle of the third, by when the second is a checkpoint."""
    model, optimizer = make()
    first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and "PACELINE_TEST_KILL" in os.environ
    steps = 0
    with pl.attach(model, optimizer) as worker:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for epoch in range(3):
            for number, (x, y) in enumerate(worker.batches(list(data())[:24])):
                if first_life and (epoch, number, RANK) == (2, 9, 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
            scheduler.step()
    bits = [
        t.detach().numpy().tobytes() for p in model.parameters() for t in (p, optimizer.state[p]["momentum_buffer"])
    ]
    tell({"rank": RANK, "steps": steps, "bits": hashlib.sha256(b"".join(bits)).hexdigest()})


def replaced():
    """A worker's first process dies after 20 steps. All train until its second one has taken part."""
    model, optimizer = make()
    dies, is_second = "PACELINE_TEST_KILL" in os.environ, os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
    steps = 0
    with pl.attach(model, optimizer) as worker:
        while not worker.sum(int(is_second and steps > 0)):
            for x, y in worker.batches(list(data())[:24]):
                if (dies, is_second, steps) == (True, False, 20):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
    report(model, steps=steps)


def large_and_small(worker, n):
    """Sums of bfloat16 in which ones are lost if they come after what is large; each worker has that at some places."""
    return torch.where(torch.arange(18) % n == worker, 256.0, 1.0).bfloat16()


def operations():
    """Every operation, on its own collectives; the results as lists."""
    environment = current_environment()
    run = LaunchedRun(environment, {"algorithm": "none"})
    collectives, n = run.collectives, environment.num_workers

    def vector(worker, length=6):
        return torch.arange(1.0, length + 1) * 10**worker

    summed, x, part, gathered = vector(RANK), vector(RANK), torch.empty(6 // n), torch.empty(6)
    given, taken = torch.arange(3 * n, dtype=torch.uint8) + 100 * RANK, torch.empty(3 * n, dtype=torch.uint8)
    handles = [
        collectives.start_all_to_all(given, taken),
        collectives.start_all_reduce(summed),
        collectives.start_reduce_scatter(x, part),
        collectives.start_all_gather(torch.full((6 // n,), float(RANK)), gathered),
    ]
    for handle in reversed(handles):
        handle.wait()
    mean, lone, none = vector(RANK), vector(RANK), vector(RANK)
    sent_before = collectives.counts.sent_bytes
    numbers = [collectives.all_reduce_mean(mean, RANK + 1, (RANK + 0.5, RANK, 0, 1))]
    sent_bytes = collectives.counts.sent_bytes - sent_before
    collectives.all_reduce_mean(lone, weight=float(RANK == 1))
    numbers.append(collectives.all_reduce_mean(none, 0, (2.0, 0, 0, 0)))
    half = large_and_small(RANK, n)
    collectives.all_reduce_mean(half, weight=1.0)
    claim = run.claims()
    claimed = [claim.claim(0) for _ in range(10)]
    run.close(failed=False)
    results = {
        "summed": summed,
        "part": part,
        "gathered": gathered,
        "taken": taken,
        "mean": mean,
        "lone": lone,
        "none": none,
        "half": half,
    }
    lists = {name: tensor.tolist() for name, tensor in results.items()}
    tell({"rank": RANK, "claimed": claimed, "sent_bytes": sent_bytes, "numbers": numbers, **lists})


def own_rows(rank):
    """Rows that no other worker has, of which rank 0 has 5, rank 1 has 2, and rank 2 has 9."""
    generator = torch.Generator().manual_seed(rank)
    num_rows = (5, 2, 9)[rank]
    return torch.randn(num_rows, 4, generator=generator), torch.randint(0, 3, (num_rows,), generator=generator)


def own_data():
    """Loaders of each worker's own, of 2, 1 and 3 batches."""
    set_environment(dataclasses.replace(current_environment(), own_data=True))
    model, optimizer = make()
    rows = torch.utils.data.TensorDataset(*own_rows(RANK))
    seen = []
    with pl.attach(model, optimizer) as worker:
        for _ in range(2):
            batches = worker.batches(torch.utils.data.DataLoader(rows, batch_size=3))
            seen.append(len(batches))
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                seen.append(len(y))
    report(model, seen=seen)


def own_data_steps_twice_a_batch():
    _own_data_uneven(lambda step, **_: (step(), step()))


def own_data_accumulated():
    _own_data_uneven(lambda step, number, last: step() if number % 2 or last else None)


def own_data_left():
    _own_data_uneven(lambda step, number, **_: number == 1 or step())


def _own_data_uneven(after_backward):
    """Loaders of 2 batches and 1; the loop ends an epoch where `after_backward` returns True."""
    set_environment(dataclasses.replace(current_environment(), own_data=True))
    model, optimizer = make()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*own_rows(RANK)), batch_size=3)
    with pl.attach(model, optimizer) as worker:
        for _ in range(2):
            for number, (x, y) in enumerate(worker.batches(loader)):
                with worker.accumulate():
                    nn.functional.cross_entropy(model(x), y).backward()
                if after_backward(step=optimizer.step, number=number, last=number == len(loader) - 1) is True:
                    break


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]]()
