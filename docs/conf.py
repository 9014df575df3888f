"""Sphinx makes the documentation site of these pages: `make docs`."""

from __future__ import annotations

import re
from typing import Any

import mla_rt

project = "mla_rt"
copyright = "mla_rt authors"
release = mla_rt.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4  # links to headings, as GitHub has them
smartquotes = False  # "auto" is a value
html_theme_options = {
    "description": "MLA decode for AMD GPUs, without PyTorch",
    "page_width": "80rem",
    "body_max_width": "none",
    "code_font_size": "0.75em",
}
html_show_sphinx = False
maximum_signature_line_length = 100
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
autodoc_type_aliases = {"DTypeLike": "DTypeLike", "NDArray": "NDArray"}


def plain_text(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text. Paragraphs with columns or indentation are shown as they are, others as text; what is in backquotes is code."""
    paragraphs = "\n".join(lines).strip().split("\n\n")
    lines.clear()
    for paragraph in paragraphs:
        if re.search(r"^ |\S {2,}\S", paragraph, re.MULTILINE):
            lines += [".. code-block:: text", "", *("    " + line for line in paragraph.splitlines()), ""]
        else:
            pieces = re.split(r"`([^`]+)`", paragraph)  # every other one was in backquotes
            pieces[0::2] = [re.sub(r"([\\*_|`])", r"\\\1", piece) for piece in pieces[0::2]]
            pieces[1::2] = [f"``{piece}``" for piece in pieces[1::2]]
            lines += [*"".join(pieces).splitlines(), ""]


def plain_names(app: Any, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None) -> tuple[str | None, str | None]:
    """Aliases of types by their names, which newer versions of Sphinx wrap."""
    return re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", signature or "") or None, returns


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", plain_names)
    app.connect("autodoc-process-docstring", plain_text)
