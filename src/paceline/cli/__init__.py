"""The command `paceline`: one file per verb."""
