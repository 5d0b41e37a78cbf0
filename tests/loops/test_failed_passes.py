"""A backward pass that raises, which the loop makes again, and a step without any gradient: as in plain PyTorch."""

import pytest
import torch

import paceline as pl
from loops import families
from loops.coder import batches, made, own_id, vector
from loops.habits import plain_attach

SENT = "after some of its gradients were sent"


class Refusing(torch.autograd.Function):
    """Raises in backward, where it is told to."""

    @staticmethod
    def forward(ctx, x, raises):
        ctx.raises = raises
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        if ctx.raises:
            raise MemoryError
        return g, None


def trained(attach, own, *, failing=(), skipped=(), lone=False):
    model, optimizer = made()
    with attach(model, optimizer) as worker:
        for number, x in enumerate(worker.batches(own)):
            optimizer.zero_grad()
            passes = [] if number in skipped else [True, False] if number in failing else [False]
            for raises in passes:
                try:
                    z = Refusing.apply(model.encode(x), raises and not (lone and own_id()))
                    (model.decode(z) - x).square().mean().backward()
                    break
                except MemoryError:
                    optimizer.zero_grad()
            optimizer.step()
    return vector(model)


def in_pairs(own):
    return [torch.cat(own[n : n + 2]) for n in range(0, len(own), 2)]


@pytest.mark.parametrize("settings", [{"failing": (2,)}, {"failing": (0, 3)}, {"skipped": (2,)}, {"skipped": (0,)}])
@pytest.mark.parametrize("algorithm", families.SHARED_LOCKSTEP)
def test_it_is_the_plain_loop_with_the_whole_batch(algorithm, settings):
    own = batches(12, worker=0)
    plain = trained(plain_attach, in_pairs(own), **settings)
    for x in pl.simulate(lambda: trained(pl.attach, own, **settings), workers=2, algorithm=algorithm).returned.values():
        torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", families.SHARED_LOCKSTEP)
def test_on_one_worker_only(algorithm):
    own = batches(12, worker=0)
    plain = trained(plain_attach, in_pairs(own))
    run = pl.simulate(lambda: trained(pl.attach, own, failing=(2,), lone=True), workers=2, algorithm=algorithm)
    for x in run.returned.values():
        torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["all-reduce(bucket_bytes=64)", "all-reduce(sharded=true, bucket_bytes=64)"])
def test_what_has_been_sent_cannot_be_taken_back(algorithm):
    with pytest.raises(pl.UsageError, match=SENT):
        pl.simulate(lambda: trained(pl.attach, batches(12, worker=0), failing=(2,)), workers=2, algorithm=algorithm)
