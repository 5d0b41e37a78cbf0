"""Writes the table into docs/your_loop.md: `python -m loops.page`, from the folder of tests."""

from pathlib import Path

from loops import table
from loops.families import ALL

PAGE = Path(__file__).parents[2] / "docs" / "your_loop.md"
BEGIN, END = "<!-- the table -->\n", "<!-- the end of the table -->\n"


def names(algorithms):
    return ", ".join(f"`{one}`" for one in algorithms)


def row(habit):
    """One habit: what it is, where it simply works, and what is said elsewhere."""
    other = [cell for cell in table.OTHER if habit in cell.habits]
    elsewhere = [one for cell in other for one in cell.algorithms if one != table.ALONE]
    works = [one for one in ALL if one not in elsewhere]
    where = (
        "everywhere"
        if not elsewhere
        else "nowhere"
        if not works
        else names(works)
        if len(works) < 8
        else "all but these:"
    )
    says = "; ".join(
        f"{'warned' if cell.is_warning else 'refused'} under {_under(cell)}: “… {cell.says} …”" for cell in other
    )
    return f"| {table.module_of(habit).__doc__.strip()} | {where} | {says or ' '} |"


def _under(cell):
    algorithms = [one for one in cell.algorithms if one != table.ALONE]
    return "all" if len(algorithms) == len(ALL) else names(algorithms)


def rendered():
    lines = ["| what a loop does | works | elsewhere |", "|---|---|---|", *map(row, table.HABITS)]
    return "\n".join([*lines, ""])


def filled(page):
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + rendered() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
