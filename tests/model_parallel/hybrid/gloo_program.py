"""A worker of test_gloo.py: `python gloo_program.py FOLDER GROUPS EPOCHS [RANK STEP]`, the last two: who dies, and when."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from model_parallel.hybrid.cut_loops import loop

folder, groups, epochs, *kill = sys.argv[1:]
loop(int(groups) or None, folder, rows=48, epochs=int(epochs), clip=0.5, kill=tuple(map(int, kill)) or None)
