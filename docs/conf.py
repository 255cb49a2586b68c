"""Sphinx configuration: furo, MyST Markdown, doctests.

The byte diagrams are drawn from the format table, the landing page's picture by a script, and the example report is
rendered from the committed records.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from draw_formats import draw_all
from draw_way import draw

from kvcore import parity, plugins
from kvcore.ops import Backend
from kvcore.parity.html import render

project = "kvcore"
author = "the kvcore developers"
copyright = author
extensions = ["myst_parser", "sphinx.ext.doctest", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["build", "rendered"]
html_theme = "furo"
html_title = "kvcore"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
doctest_global_setup = "import numpy as np, kvcore\nfrom kvcore.spec import *"
vars(plugins)["Backend"] = Backend  # there for types alone: a list of backends loads no arrays
napoleon_use_ivar = True  # attributes are described once, in the class docstring

draw_all(Path(__file__).parent / "formats")
pictures = Path(__file__).parent / "pictures"
pictures.mkdir(exist_ok=True)
draw(pictures / "way.svg")

html_extra_path = ["rendered"]
rendered = Path(__file__).parent / "rendered"
rendered.mkdir(exist_ok=True)
records = Path(__file__).parent.parent / "records"
(rendered / "parity.html").write_text(render(parity.read(records / "parity.json.gz")), encoding="utf-8")
