"""Figures of marathons: kept where PACELINE_SOAK_RESULTS names a folder, as `make soak` does, and nowhere else."""

import json
import os
from pathlib import Path


def keep(name, what, figures):
    """Puts what became of one marathon into a file of that folder, beside the others."""
    if not os.environ.get("PACELINE_SOAK_RESULTS"):
        return
    path = Path(os.environ["PACELINE_SOAK_RESULTS"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    written = json.loads(path.read_text()) if path.exists() else {}
    written[what] = figures
    path.write_text(json.dumps(written, indent=2) + "\n")
