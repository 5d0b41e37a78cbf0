"""The measured pages: what the benchmarks have written, as pages of the site."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = {"results": "benchmarks/results", "fidelity": "benchmarks/fidelity"}


def files() -> dict[str, str]:
    """Every page of the benchmarks, and the list of all."""
    made, lists = {}, []
    for kind, folder in FOLDERS.items():
        rows = []
        for path in sorted((ROOT / folder).glob("*.md")):
            text = path.read_text(encoding="utf-8")
            title, headline = _title(path, text)
            name = f"{kind}-{path.stem}"
            body = text if text.startswith("# ") else f"# {title}\n\n{text}"
            made[f"measured/{name}.md"] = _links(body, path, kind)
            rows.append(f"- [{headline}](measured/{name}.md)")
        lists.append("\n".join(rows))
        made[f"generated/measured-{kind}.md"] = "\n".join([*rows, ""])
    return made


def _title(path: Path, text: str) -> tuple[str, str]:
    found = re.match(r"# (.+)", text)
    title = found[1] if found else path.stem.replace("_", " ").capitalize()
    return title, title


def _links(text: str, path: Path, kind: str) -> str:
    """Links to pages of the site lead there; those to other files of the repository become their names."""

    def target(found: re.Match[str]) -> str:
        words, to = found[1], found[2]
        if to.startswith(("https://", "#")):
            return found[0]
        file = Path(os.path.normpath(path.parent / to.partition("#")[0]))
        if file.suffix == ".md" and file.parent == ROOT / "docs":
            return f"[{words}](../{file.name})"
        for other, folder in FOLDERS.items():
            if file.suffix == ".md" and file.parent == ROOT / folder:
                return f"[{words}]({other}-{file.stem}.md)"
        return f"{words} (`{file.relative_to(ROOT)}`)"

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", target, text)
