"""What Accelerate's `prepare` and Fabric's `setup` return: stand-ins of the same names and shapes."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

import paceline as pl
from chosen import each_value
from loops import families
from loops.coder import HELD_OUT, loss_of, made, own_id, vector

DATA = TensorDataset(HELD_OUT, torch.arange(64))


class AcceleratedOptimizer(torch.optim.Optimizer):
    """Never calls the constructor of its base, and steps by itself only where gradients are accumulated to the end."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizer.step(closure)


class DataLoaderShard:
    """Pretends to be a DataLoader, looks one batch ahead, and brings batches to a device."""

    def __init__(self, loader, device=None):
        self.base_dataloader = loader
        self.device = device
        self.__class__ = type("DataLoaderShard", (DataLoaderShard,), {"__class__": DataLoader})

    def __getattr__(self, name):
        return getattr(self.__dict__["base_dataloader"], name)

    def __len__(self):
        return len(self.base_dataloader)

    def __iter__(self):
        return iter(list(self.base_dataloader))


class _FabricOptimizer:
    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("FabricSGD", (_FabricOptimizer, type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None):
        return self.optimizer.step() if closure is None else self.optimizer.step(closure=closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class _FabricModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._forward_module = module

    @property
    def module(self):
        return self._forward_module

    def forward(self, *args):
        return self._forward_module(*args)


class _FabricDataLoader:
    def __init__(self, loader, device=None):
        self.__dict__.update(loader.__dict__)
        self._dataloader = loader
        self._device = device

    def __len__(self):
        return len(self._dataloader)

    def __iter__(self):
        yield from self._dataloader


def plain(model, optimizer, loader):
    return model, optimizer, loader


def prepared(model, optimizer, loader):
    return model, AcceleratedOptimizer(optimizer), DataLoaderShard(loader)


def set_up(model, optimizer, loader):
    return _FabricModule(model), _FabricOptimizer(optimizer), _FabricDataLoader(loader)


def loop_with(wrap, seen, loader=None):
    def loop():
        own, inner = made(momentum=0.9)
        data = loader() if loader is not None else DataLoader(DATA, batch_size=4, shuffle=True)
        model, optimizer, data = wrap(own, inner, data)
        with pl.attach(model, optimizer) as worker:
            for _ in range(2):
                for x, numbers in worker.batches(data):
                    seen.append(numbers.tolist())
                    optimizer.zero_grad()
                    (model(x) - x).square().mean().backward()
                    optimizer.step()
        return vector(own)

    return loop


@pytest.mark.parametrize(("algorithm", "wrap"), each_value(families.ALL, [prepared, set_up]))
def test_wrapped_equals_plain(algorithm, wrap):
    seen, expected = [], []
    runs = [
        pl.simulate(loop_with(how, batches), workers=3, algorithm=algorithm, seed=5)
        for how, batches in ((wrap, seen), (plain, expected))
    ]
    assert seen == expected
    for worker, x in runs[0].returned.items():
        assert torch.equal(x, runs[1].returned[worker])
    assert runs[0].result["samples"] == 128


@pytest.mark.parametrize("wrap", [prepared, set_up])
@pytest.mark.parametrize("algorithm", ["hogwild", "all-reduce"])
def test_real_workers(algorithm, wrap):
    seen = []
    run = pl.launch(loop_with(wrap, seen), workers=2, algorithm=algorithm, backend="threads")
    assert run.result["samples"] == 128
    assert sorted(number for batch in seen for number in batch) == sorted([*range(64)] * 2)


@pytest.mark.parametrize("wrap", [prepared, set_up])
def test_alone(wrap):
    results = []
    for how in (wrap, plain):
        torch.manual_seed(1)
        results.append(loop_with(how, [])())
    assert torch.equal(*results)


def test_evaluations_get_the_model_itself():
    kinds = set()

    def evaluate(model):
        kinds.add(type(model).__name__)
        return 0.5

    def loop():
        own, inner = made()
        model, optimizer, data = set_up(own, inner, DataLoader(DATA, batch_size=4))
        with pl.attach(model, optimizer, evaluate=evaluate) as worker:
            for x, _ in worker.batches(data):
                optimizer.zero_grad()
                loss_of(own, x).backward()
                optimizer.step()

    pl.simulate(loop, workers=2, algorithm="hogwild", target_accuracy=0.9)
    assert kinds == {"Coder"}


def test_batches_come_to_the_wrapper_s_device():
    devices = set()

    def loop():
        model, optimizer = made()
        data = DataLoader(DATA, batch_size=32)
        wrapped = DataLoaderShard(data, "meta") if own_id() else _FabricDataLoader(data, torch.device("meta"))
        with pl.attach(model, optimizer) as worker:
            for x, numbers in worker.batches(wrapped):
                devices.update([x.device.type, numbers.device.type])
                optimizer.zero_grad()
                loss_of(model, HELD_OUT).backward()
                optimizer.step()

    pl.simulate(loop, workers=2, algorithm="lockstep")
    assert devices == {"meta"}


class BatchSamplerShard(BatchSampler):
    """Accelerate's under several processes: each has its own part."""

    def __init__(self, batch_sampler, rank):
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, 2, rank

    def __iter__(self):
        return (one for index, one in enumerate(self.batch_sampler) if index % 2 == self.process_index)


class SeedableRandomSampler(RandomSampler):
    """Accelerate's; its order follows from the process's seed."""


def test_a_prepared_loader_s_parts_are_put_together():
    seen = []

    def loader():
        sampler = BatchSampler(SeedableRandomSampler(DATA), 4, False)
        return DataLoader(DATA, batch_sampler=BatchSamplerShard(sampler, own_id()))

    with pytest.warns(UserWarning, match=r"BatchSamplerShard was ignored"):
        pl.simulate(loop_with(prepared, seen, loader), workers=2, algorithm="lockstep")
    assert sorted(number for batch in seen[:16] for number in batch) == [*range(64)]


class IterableDatasetShard(IterableDataset):
    num_processes = 2

    def __iter__(self):
        return iter([])


def test_a_prepared_stream_s_parts_are_refused():
    with pytest.raises(pl.UsageError, match=r"Both IterableDatasetShard and worker\.batches divide the data"):
        pl.simulate(loop_with(plain, [], lambda: DataLoader(IterableDatasetShard())), workers=2, algorithm="hogwild")


def test_distributed_data_parallel_is_refused():
    model, optimizer = made()
    wrapped = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    with pytest.raises(pl.UsageError, match="DistributedDataParallel would average the workers' gradients"):
        pl.attach(wrapped, optimizer)
    with pytest.raises(pl.UsageError, match="DistributedDataParallel"):
        pl.attach((model, wrapped), optimizer, "hogwild")
