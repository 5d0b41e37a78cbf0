"""A worker of test_run_gloo.py: `python run_program.py FOLDER LAYOUT ALGORITHM REPLICAS [KEYWORDS]`, as Python writes them.

Who is killed is killed once: not where torchrun has started the workers again.
"""

import ast
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from model_parallel.tensor.run_loops import loop

folder, layout, algorithm, replicas, *more = sys.argv[1:]
settings = {"clip": 1.0 if algorithm == "all-reduce" else None, **(ast.literal_eval(more[0]) if more else {})}
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    settings.pop("kill", None)
loop(layout, folder, algorithm=algorithm, replicas=int(replicas), **settings)
