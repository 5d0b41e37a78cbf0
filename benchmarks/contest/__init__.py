"""The runs of `benchmarks/head_to_head.py`: one course, and every system's own program over it."""
