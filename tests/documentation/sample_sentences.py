"""Draws sentences for a reader to judge, by the current commit: `python tests/documentation/sample_sentences.py [NUMBER]`."""

import ast
import random
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = (r"<!-- the table.*?<!-- the end of", r"<!-- \w+: begin -->.*?<!-- \w+: end", r"^```.*?^```$")
SPOKEN = re.compile(r"Error$|Warning$|^complain$|^refuse")


def sentences(texts):
    """Sentences with at least five words besides code."""
    for text in texts:
        for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\"\[])", " ".join(text.split())):
            if len(re.sub(r"`[^`]*`|\]\([^)]*\)", "", one).split()) >= 5:
                yield one


def of_page(path):
    """A page's paragraphs, list items and table cells, without code blocks and generated tables."""
    text = path.read_text(encoding="utf-8")
    for pattern in GENERATED:
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.|\|) ?)", text):
        if block.lstrip().startswith("|"):
            yield from re.split(r" ?\| ?", block)
        elif not block.lstrip().startswith(("#", "<")):
            yield block


def text_of(node):
    """The text of a string in code, with `{}` where a value is inserted; None for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or "{}" for part in parts)
    return None


def of_code():
    """Docstrings, and the texts of errors and warnings."""
    docstrings, errors = [], []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (found := ast.get_docstring(node)):
                docstrings += found.split("\n\n")
            if isinstance(node, ast.Call) and SPOKEN.search(ast.unparse(node.func).split(".")[-1]):
                errors += filter(None, map(text_of, node.args))
    return docstrings, errors


def main(number=10):
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    pages = [
        one for one in sorted((ROOT / "docs").rglob("*.md")) if not {"cards", "generated", "measured"} & {*one.parts}
    ]
    docstrings, errors = of_code()
    texts = {
        "README": of_page(ROOT / "README.md"),
        "docs": (text for page in pages for text in of_page(page)),
        "docstrings": docstrings,
        "errors": errors,
    }
    print(f"commit {commit}")
    for place, found in texts.items():
        drawn = random.Random(f"{commit} {place}").sample(sorted({*sentences(found)}), number)
        print(f"\n{place}", *drawn, sep="\n  ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
