"""The documentation site: `make docs` builds it with Sphinx; a warning is an error."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from flashwright import __version__

project = "Flashwright"
author = "the Flashwright authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "docs.make.site"]
source_suffix = {".md": "markdown"}
# Runs that models made, as they came; they are reached as files, not as pages.
exclude_patterns = ["results/*/*/**", "make"]
# Types in docstrings go by their short names, which several classes may share.
suppress_warnings = ["ref.python"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
default_role = "code"  # docstrings put code in single backquotes

html_theme = "furo"
html_title = f"Flashwright {__version__}"
html_show_copyright = False
html_copy_source = True
