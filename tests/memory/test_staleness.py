from paceline.memory.segment import Layout, Segment
from paceline.memory.staleness import NUM_BINS, SharedStalenessCounts


def test_shares_count_what_is_strictly_smaller():
    layout = Layout()
    offset = SharedStalenessCounts.reserve(layout)
    segment = Segment.create(layout.size_bytes)
    counts = SharedStalenessCounts(segment, offset)
    assert (counts.total(), counts.share_below(5)) == (0, 0.0)
    for staleness in (0, 0, 3, 10**9):
        counts.add(staleness)
    other = SharedStalenessCounts(segment, offset)
    assert [other.share_below(s) for s in (0, 1, 3, 4, NUM_BINS - 1, 10**9)] == [0.0, 0.5, 0.5, 0.75, 0.75, 1.0]
    assert other.total() == 4
    assert other.counts()[NUM_BINS - 1] == 1
