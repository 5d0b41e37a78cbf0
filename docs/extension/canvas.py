"""Boxes, arrows and words as SVG that takes its colours from the page, in light and dark."""

from html import escape

LINE = 17  # between two lines of text


class Canvas:
    """A drawing of so many units; a page shows it as wide as its text, or as wide as a phone.

    Args:
        width: in units; text is 13 units high.
        height: in units.
        title: what it shows, for who cannot see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "label") -> "Canvas":
        """Words whose base line is at `y`; `kind` has `middle` or `end` to say what `x` is."""
        for number, line in enumerate(words.split("\n")):
            self._parts.append(f'<text class="{kind}" x="{x:g}" y="{y + number * LINE:g}">{escape(line)}</text>')
        return self

    def box(self, x: float, y: float, width: float, height: float, words: str = "", kind: str = "box") -> "Canvas":
        """A box with words in its middle."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        lines = words.count("\n")
        return (
            self.text(x + width / 2, y + height / 2 + 4.5 - lines * LINE / 2, words, "label middle") if words else self
        )

    def arrow(self, *points: tuple[float, float], words: str = "", kind: str = "arrow", at: float = 0.5) -> "Canvas":
        """A line through points with a head at its end; words stand above its middle, or elsewhere `at` its way."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        self._parts.append(f'<path class="{kind}" d="M{path}" marker-end="url(#head)"/>')
        if words:
            (x, y), (to_x, to_y) = points[0], points[-1]
            self.text(x + (to_x - x) * at, y + (to_y - y) * at - 6, words, "label small middle")
        return self

    def line(self, *points: tuple[float, float], kind: str = "line") -> "Canvas":
        """A line through points."""
        self._parts.append(f'<path class="{kind}" d="M{"L".join(f"{x:g} {y:g}" for x, y in points)}"/>')
        return self

    def svg(self) -> str:
        """The text of the drawing."""
        head = '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        head += '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>'
        return (
            f'<svg class="drawing" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">\n'
            + "\n".join([head, *self._parts])
            + "\n</svg>\n"
        )
