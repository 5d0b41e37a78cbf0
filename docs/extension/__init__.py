"""Pages and pictures that are made of the code: cards, verbs, figures of runs; all are written before Sphinx reads."""

from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from . import cards, drawings, measured, specs, verbs

MAKERS = (cards, drawings, measured, specs, verbs)


def write(source: Path) -> None:
    """Write everything that is generated below the site's folder; what has not changed is left as it is."""
    wanted = {path: text for maker in MAKERS for path, text in maker.files().items()}
    for folder in ("cards", "generated", "measured"):
        for path in (source / folder).glob("*"):
            if path.relative_to(source).as_posix() not in wanted:
                path.unlink()
    for name, text in wanted.items():
        path = source / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


class Drawing(SphinxDirective):
    """A generated picture, by its name, which scrolls where a phone is narrower than its letters need."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The picture as part of the page, so that it has the page's colours."""
        path = Path(self.env.srcdir) / "generated" / f"drawing-{self.arguments[0]}.svg"
        self.env.note_dependency(str(path))
        svg = path.read_text(encoding="utf-8")
        return [nodes.raw("", f'<div class="wide-drawing">{svg}</div>', format="html")]


def setup(app: object) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_directive("drawing", Drawing)  # type: ignore[attr-defined]
    app.connect("builder-inited", lambda app: write(Path(app.srcdir)))  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
