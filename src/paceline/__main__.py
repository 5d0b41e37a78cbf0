"""`python -m paceline`: the command, for launchers that start Python modules."""

from paceline.cli.app import main

if __name__ == "__main__":
    main()
