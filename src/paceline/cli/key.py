"""`paceline key`: a key file for runs over several machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.console import say
from paceline.system.paths import check_new_file


def key(file: Annotated[Path, typer.Argument(help="Key file to create, readable by its owner only.")]) -> None:
    """Create a key file for all machines of a run, which encrypts their traffic and keeps others out.

    Example: paceline key run.key
    """
    from paceline.transport.keys import create_keys

    check_new_file(file, f"The key file {file}")
    create_keys(file)
    say(
        f"Wrote {file}. Copy it to every machine of the run (scp keeps it private), and give --key {file} or PACELINE_KEY."
    )
