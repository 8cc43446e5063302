"""Settings of the site that `make docs` builds in build/site from the repository's Markdown files.

The source folder is the repository's root, so that a link that works on GitHub works in the site.
A linked file that is not a page can be downloaded from the site.
"""

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# Maps each section to its entries in the table of contents: a page, or `title <page>`.
NAVIGATION = {
    "Guides": [
        "Installation and first example </README>",
        "/docs/usage",
        "/docs/models",
        "/docs/encoder",
        "/docs/families",
        "/docs/eight_bits",
        "/docs/text",
        "/docs/embed",
        "/docs/search",
        "/docs/performance",
        "/docs/check",
        "/docs/tune",
        "/docs/blackwell",
        "/docs/api",
    ],
    "How it works": [
        "/docs/backends",
        "/docs/kernels",
        "/docs/numerics",
        "/docs/verification",
        "/docs/glossary",
    ],
    "Development": ["/docs/development", "/CONTRIBUTING", "/CHANGELOG"],
    "Measurements and experiments": [
        "/docs/experiments/cuda",
        "/docs/experiments/hopper",
        "/docs/experiments/blackwell",
        "/docs/experiments/triton",
        "/docs/experiments/xla",
        "/docs/experiments/encoder",
        "/docs/experiments/embed",
        "/docs/experiments/slices",
        "/docs/experiments/tune",
        "/docs/experiments/repeated",
        "/docs/predictions",
        "/docs/upstream",
    ],
}

project = "pallas_patch_embed"
author = "The maintainers of pallas_patch_embed"
version = release = re.search(
    r'__version__ = "(.*)"', (ROOT / "pallas_patch_embed/__init__.py").read_text()
)[1]

root_doc = "docs/index"
include_patterns = ["*.md", "**/*.md"]
exclude_patterns = [".*", "bench", "build", "dist"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Headings down to this level have an anchor, the same as on GitHub.
myst_heading_anchors = 4
# Indented blocks have no language, so they are not highlighted.
highlight_language = "none"

# Docstrings have `code` in single backticks, and sections in Google's style.
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"
add_module_names = False
# Modules of the package import these frameworks, but the site is built without them.
autodoc_mock_imports = ["equinox", "flax", "keras"]
toc_object_entries_show_parents = "hide"

html_theme = "furo"
smartquotes = False
html_title = f"{project} {version}".replace("_", "_<wbr>")
html_static_path = html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def switch_pictures(app, name, source):
    """Replaces the elements of a picture for light and dark pages by images of the theme's classes.

    Sphinx does not copy the images of HTML elements.
    """
    pattern = r'<picture>.*?srcset="(.*?)".*?alt="(.*?)" src="(.*?)".*?</picture>'
    images = "\n\n".join(
        f"```{{image}} {path}\n:alt: \\2\n:class: only-{shade}\n```"
        for path, shade in (("\\3", "light"), ("\\1", "dark"))
    )
    source[0] = re.sub(pattern, images, source[0], flags=re.DOTALL)


def add_navigation(app, name, source):
    """Adds the table of contents to the first page. GitHub would show it as code."""
    if name == root_doc:
        for section, entries in NAVIGATION.items():
            options = f":hidden:\n:caption: {section}"
            lines = "\n".join(entries)
            source[0] += f"\n\n```{{toctree}}\n{options}\n\n{lines}\n```\n"
    elif "/" in name and not name.startswith("docs/"):
        # The README of another folder is reachable only by links.
        source[0] = f"---\norphan: true\n---\n{source[0]}"


def unlink_folders(app, document):
    """Replaces links to folders, which the site does not have, by plain text."""
    folder = Path(app.env.doc2path(app.env.current_document.docname)).parent
    for link in list(document.findall(addnodes.pending_xref)):
        if link["reftype"] == "myst" and (folder / link["reftarget"]).is_dir():
            link.replace_self(nodes.inline("", "", *link[0].children))


def write_index(app, exception):
    """Writes an index that redirects a reader to the first page."""
    if exception is None:
        redirect = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        (Path(app.outdir) / "index.html").write_text(redirect)


def setup(app):
    app.connect("source-read", switch_pictures)
    app.connect("source-read", add_navigation)
    app.connect("doctree-read", unlink_folders)
    app.connect("build-finished", write_index)
