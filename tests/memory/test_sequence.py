"""Copies of a vector that is being written: whole, whatever the writer does between the copy's two halves."""

import pytest
import torch

from paceline.memory import sequence
from paceline.memory.replicated import ReplicatedVector
from paceline.memory.segment import Layout, Segment
from paceline.memory.served import ServedVector

SIZE = 4


class InTwoHalves(torch.Tensor):
    """A tensor that is copied into half by half; `between` runs once, after a first half."""

    def copy_(self, source, *_):
        plain = self.as_subclass(torch.Tensor)
        plain[: SIZE // 2].copy_(source[: SIZE // 2])
        self.between.pop()() if self.between else None
        plain[SIZE // 2 :].copy_(source[SIZE // 2 :])
        return self

    def __getitem__(self, part):
        found = super().__getitem__(part)
        found.between = self.between
        return found


def target(between):
    out = torch.zeros(SIZE).as_subclass(InTwoHalves)
    out.between = [between]
    return out


def replicated():
    plan = ReplicatedVector.reserve(layout := Layout(), SIZE, 2, num_evaluators=1)
    segment = Segment.create(layout.size_bytes)
    return [ReplicatedVector(segment, plan, who) for who in (0, 1)]


def served():
    plan = ServedVector.reserve(layout := Layout(), SIZE, 3, num_evaluators=1, num_servers=1, averaged=True)
    segment = Segment.create(layout.size_bytes)
    writer, onlooker = (ServedVector(segment, plan, who) for who in (1, 2))
    writer.initialise(torch.zeros(SIZE))
    return writer, onlooker


def averaged():
    writer, onlooker = served()
    writer.x, onlooker.snapshot = writer.average, onlooker.snapshot_average
    return writer, onlooker


def write(vector, value, *, counted):
    with vector.writing():
        vector.x.fill_(value)
    if counted:
        vector.advance()


@pytest.mark.parametrize("vectors", [replicated, served, averaged])
@pytest.mark.parametrize("counted", [True, False])
def test_a_copy_across_a_write_is_not_taken(vectors, counted):
    """Counted: after the write has ended, as local SGD did. A version that only the count moves does not see it."""
    writer, onlooker = vectors()
    out = target(lambda: write(writer, 1.0, counted=counted))
    onlooker.snapshot(out)
    assert out.tolist() == [1.0] * SIZE


@pytest.mark.parametrize("vectors", [replicated, served])
def test_a_copy_across_a_restored_vector_is_not_taken(vectors):
    writer, onlooker = vectors()
    x = torch.full((SIZE,), 3.0)
    out = target(lambda: writer.restore(5, x) if vectors is replicated else writer.restore(x, 5))
    assert onlooker.snapshot(out) == 5
    assert out.tolist() == [3.0] * SIZE


def dies_while_writing(vector):
    """As far as memory is concerned."""
    sequence.begin(vector._own_lock._word)
    vector.x[: SIZE // 2] = 9.0


@pytest.mark.parametrize(("vectors", "dead"), [(replicated, 0), (served, 1)])
def test_a_dead_writer_is_found_once_and_its_successor_is_seen_again(vectors, dead):
    writer, onlooker = vectors()
    dies_while_writing(writer)
    assert [onlooker.recover(dead, 0), onlooker.recover(dead, 0)] == [True, False]
    out = target(lambda: write(writer, 1.0, counted=False))
    onlooker.snapshot(out)
    assert out.tolist() == [1.0] * SIZE


@pytest.mark.parametrize("vectors", [replicated, served, averaged])
def test_a_successor_that_nobody_recovered_for_is_seen_all_the_same(vectors):
    """Its first write must not leave the word as its predecessor's had it."""
    writer, onlooker = vectors()
    dies_while_writing(writer)
    write(writer, 1.0, counted=False)
    out = target(lambda: (dies_while_writing(writer), write(writer, 2.0, counted=False)))
    onlooker.snapshot(out)
    assert out.tolist() == [2.0] * SIZE
