"""Results of runs, and how they are shown.

`summarize` turns step records into figures, `RunData` keeps a run in a folder. Traces, reports, live progress, tables
and pictures of lanes are imported from their own modules, since they need Plotly or Rich.
"""

from __future__ import annotations

from paceline.records.run_data import RunData, read_events, write_events
from paceline.records.summary import summarize

__all__ = ["RunData", "read_events", "summarize", "write_events"]
