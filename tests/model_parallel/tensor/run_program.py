"""A worker of test_run_gloo.py: `python run_program.py FOLDER LAYOUT ALGORITHM REPLICAS [RANK STEP]`: who dies, and when."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from model_parallel.tensor.run_loops import loop

folder, layout, algorithm, replicas, *kill = sys.argv[1:]
clip = 1.0 if algorithm == "all-reduce" else None
loop(layout, folder, algorithm=algorithm, replicas=int(replicas), clip=clip, kill=tuple(map(int, kill)) or None)
