"""A gradient in buckets: complete, in order, and each once."""

import gc
import weakref

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.loop.buckets import GradientBuckets, bucket_bytes_for
from paceline.optim.flat import FlatBinding


class Net(nn.Module):
    """Three layers used in an order that is not theirs, and a parameter that is not used at all."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(6, 20)
        self.unused = nn.Parameter(torch.ones(5))
        self.middle = nn.Linear(40, 6)
        self.first = nn.Linear(7, 40)

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh())


class Watch:
    """Owns buckets and remembers what was handed out, and whether backward was still running."""

    def __init__(self, model, bucket_bytes):
        self.binding = FlatBinding(model.parameters())
        self.g = torch.zeros(self.binding.num_elements)
        self.buckets = GradientBuckets(self.binding, self.g, self.complete, bucket_bytes)
        self.seen = []
        self.during_backward = 0

    def complete(self, index):
        self.buckets.complete(index)
        self.during_backward = len(self.seen)

    def backward(self, loss):
        self.buckets.begin(lambda bucket: self.seen.append((bucket.data_ptr(), bucket.clone())))
        loss.backward()
        self.buckets.complete_all()


def pieces(bucket_bytes):
    torch.manual_seed(0)
    model = Net()
    return model, Watch(model, bucket_bytes), torch.randn(9, 7)


@pytest.mark.parametrize("bucket_bytes", [1, 100, 600, 1 << 20])
def test_buckets_cover_the_gradient_from_its_end(bucket_bytes):
    model, watch, x = pieces(bucket_bytes)
    watch.backward(model(x).square().mean())
    end = watch.g.data_ptr() + watch.g.nbytes
    for address, bucket in watch.seen:
        assert address + bucket.nbytes == end
        end = address
    assert end == watch.g.data_ptr()
    expected = torch.zeros_like(watch.g)
    watch.binding.gather_gradients(expected)
    assert torch.equal(torch.cat([bucket for _, bucket in reversed(watch.seen)]), expected)
    assert len(watch.seen) == {1: 7, 100: 6, 600: 4, 1 << 20: 1}[bucket_bytes]


def test_early_buckets_leave_while_backward_computes():
    model, watch, x = pieces(1)
    watch.backward(model(x).square().mean())
    assert watch.during_backward == 6  # all but the unused parameter's, which comes first in the model and so goes last


def test_what_backward_leaves_out_stays():
    model, watch, x = pieces(1)
    model.unused.grad = torch.full((5,), 7.0)
    watch.backward(model(x).square().mean())
    assert torch.equal(watch.binding.views(watch.g)[0], model.unused.grad)


def test_a_gradient_that_is_completed_twice_is_refused():
    model, watch, x = pieces(1 << 20)
    inner = torch.utils.checkpoint.checkpoint(model.middle, model.first(x), use_reentrant=True)
    with pytest.raises(pl.UsageError, match="use_reentrant=False"):
        watch.backward((model.last(inner) + model.last(model.middle(model.first(x)))).mean())


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 3, sparse=True)
    with pytest.raises(pl.UsageError, match="sparse=False"):
        Watch(model, 1).backward(model(torch.tensor([1])).sum())


def test_nothing_keeps_a_model_alive():
    model, watch, _ = pieces(1)
    alive = weakref.ref(watch), weakref.ref(model.first.weight)
    del model, watch
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_removed_hooks_are_silent():
    model, watch, x = pieces(1)
    watch.buckets.remove()
    model(x).sum().backward()
    assert watch.seen == []


@pytest.mark.parametrize(("workers", "megabytes"), [(1, 1), (2, 1), (16, 1), (17, 1.0625), (128, 8)])
def test_buckets_of_many_workers_are_larger(workers, megabytes):
    assert bucket_bytes_for(workers) == megabytes * 2**20
    binding = FlatBinding([nn.Parameter(torch.zeros(64 * 1024)) for _ in range(100)])  # 256 KiB each
    buckets = GradientBuckets(binding, binding.zeros(), binding.release, bucket_bytes_for(workers))
    *full, last = [one.nbytes for one in buckets.vectors]
    assert all(megabytes * 2**20 <= one <= megabytes * 2**20 + 2**18 for one in full)
    assert sum(full) + last == 4 * binding.num_elements
