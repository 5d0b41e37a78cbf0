"""The functions of `benchmarks/fidelity/mixing.py`."""

import runpy
from pathlib import Path

globals().update(runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "fidelity" / "mixing.py")))
