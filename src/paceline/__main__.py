"""The command `paceline`, and `python -m paceline`: Ctrl-C and SIGTERM are heard from the first import on."""

from __future__ import annotations

from paceline.system import interrupts
from paceline.system.tagged_output import open_closed_streams


def main() -> None:
    """Entry point of the installed command."""
    interrupts.install()
    open_closed_streams()
    from paceline.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
