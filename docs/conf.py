"""How Sphinx makes the site: `make docs`. Pages lie beside this file; `extension/` makes cards, tables and figures."""

import sys
from pathlib import Path

import paceline

sys.path.insert(0, str(Path(__file__).parent))

project, author, release = "Paceline", "The Paceline authors", paceline.__version__
copyright = f"{author}, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "extension"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["generated"]
nitpicky = True
nitpick_ignore = [
    ("py:exc", "DivergedError"),
    ("py:exc", "NotWrittenError"),
    ("py:exc", "ReplayMismatchError"),
    ("py:class", "torch.nn.modules.module.Module"),
]  # named in docstrings, and documented elsewhere or in the sources
nitpick_ignore_regex = [("py:class", "What may happen to a worker.*|the others")]  # a comment that is taken for a type

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing_text"]

# Docstrings are written as Markdown is: what stands between backticks is code.
default_role = "code"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
smartquotes = False

html_theme = "furo"
html_title = "Paceline"
html_static_path = ["_static"]
html_css_files = ["paceline.css"]
html_show_search_summary = False  # a page from a disk may not fetch others; without summaries search works there, too
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
