"""Studies: designed sets of runs, which can be interrupted and resumed, as one table and one report.

Nothing is imported until it is used, as in `paceline` itself.

>>> from paceline.study import Study
>>> Study(name="two", factors={"algorithm": ("hogwild", "leashed")}, seeds=(0, 1)).design.kind
'grid'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.study.runner import run_study
    from paceline.study.study_file import Design, Limits, Range, Study, read_study
    from paceline.study.table import load_table

__all__ = ["Design", "Limits", "Range", "Study", "load_table", "read_study", "run_study"]

_ELSEWHERE = {"load_table": "table", "run_study": "runner"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'paceline.study' has no attribute {name!r}")
    return getattr(importlib.import_module(f"paceline.study.{_ELSEWHERE.get(name, 'study_file')}"), name)
