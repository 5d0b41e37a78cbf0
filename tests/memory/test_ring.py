import itertools
import struct

import pytest

from memory import programs
from paceline.memory.atomics import store
from paceline.memory.ring import RecordRing
from paceline.memory.segment import Layout, Segment
from paceline.records.step_record import RECORD_DTYPE


def ring_of(capacity):
    layout = Layout()
    stop = layout.words("stop", 1)
    plan = RecordRing.reserve(layout, capacity=capacity)
    return Segment.create(layout.size_bytes), plan, stop


def are_whole(records):
    rows = [tuple(record) for record in records.tolist()]
    return all(len(set(row)) == 1 for row in rows)


def test_records_arrive_once_and_in_order_around_the_ring():
    segment, plan, _ = ring_of(8)
    reader = RecordRing(segment, plan)
    assert len(reader.drain()) == 0
    for first, count in ((0, 5), (5, 7), (12, 1)):
        programs.append_records(segment, plan, first, count)
        records = reader.drain()
        assert records.dtype == RECORD_DTYPE
        assert records["step"].tolist() == list(range(first, first + count))
        assert are_whole(records)
    assert reader.lost == 0


def test_a_reader_that_comes_late_knows_how_many_it_lost():
    segment, plan, _ = ring_of(8)
    reader = RecordRing(segment, plan)
    programs.append_records(segment, plan, 0, 20)
    records = reader.drain()
    assert records["step"].tolist() == list(range(13, 20))  # a whole ring back lies the one that may be being written
    assert reader.lost == 13
    assert len(reader.drain()) == 0


def test_a_record_that_a_kill_cut_short_is_never_seen(workers):
    segment, plan, _ = ring_of(8)
    process = workers.start(programs.append_half_a_record, segment, plan)
    process.join(60)
    workers.processes.remove(process)
    reader = RecordRing(segment, plan)
    assert reader.drain()["step"].tolist() == [0, 1, 2]
    programs.append_records(segment, plan, 3, 2)  # the worker came back
    assert reader.drain()["step"].tolist() == [3, 4]


def test_a_reader_that_is_overrun_gets_whole_records_only(workers):
    segment, plan, stop = ring_of(64)
    workers.start(programs.append_records_until_told, segment, plan, stop)
    reader = RecordRing(segment, plan)
    seen = []
    while reader.lost < 500 or len(seen) < 500:
        records = reader.drain()
        assert are_whole(records)
        seen += records["step"].tolist()
    store(segment.address + stop, 1)
    workers.join()
    seen += reader.drain()["step"].tolist()
    assert all(one < next_one for one, next_one in itertools.pairwise(seen))
    assert len(seen) + reader.lost == seen[-1] + 1


def test_a_record_of_the_wrong_length_is_refused():
    segment, plan, _ = ring_of(4)
    ring = RecordRing(segment, plan)
    with pytest.raises(struct.error):
        ring.append(1, 2, 3)
    assert len(ring.drain()) == 0
    with pytest.raises(ValueError, match="at least 2"):
        ring_of(1)
