"""Sphinx configuration: furo, MyST Markdown, doctests; the byte diagrams are drawn from the format table."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from draw_formats import draw_all

project = "kvcore"
author = "the kvcore developers"
copyright = author
extensions = ["myst_parser", "sphinx.ext.doctest", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = "kvcore"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
doctest_global_setup = "import numpy as np, kvcore\nfrom kvcore.spec import *"
napoleon_use_ivar = True  # attributes are described once, in the class docstring

draw_all(Path(__file__).parent / "formats")
