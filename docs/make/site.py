"""What the site has beyond Markdown: pages made from the code, TL in colour, and llms.txt.

A Sphinx extension. A page asks for generated text with a directive, ```` ```{spec-keys} ````; the
text is made while the site is built and is in no file of the repository.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from pygments.lexer import RegexLexer, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Text
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from docs.make import reference
from flashwright.program.vocabulary import FUNCTIONS, VERBS

LLMS = "llms.txt"
ABOUT = "Attention kernels from a small language, TL: checked, emulated, judged, measured."


class Generated(SphinxDirective):
    """Text that a function of reference.py makes; words after the directive are its arguments."""

    optional_arguments = 1
    final_argument_whitespace = True
    make: ClassVar[Callable[..., str]]

    def run(self) -> list[nodes.Node]:
        """The text as a part of the page."""
        told = type(self).make(*(self.arguments[0].split() if self.arguments else ()))
        return self.parse_text_to_nodes(told, allow_section_headings=True)


DIRECTIVES = {
    "spec-keys": reference.spec_keys,
    "command-reference": reference.command,
    "diagnostic-codes": reference.codes,
    "explained": reference.explained,
    "gpu-table": reference.gpus,
}


class TlLexer(RegexLexer):
    """TL for Pygments: words and numbers, as the checker knows them."""

    name = "TL"
    aliases: ClassVar[list[str]] = ["tl"]
    tokens: ClassVar[dict[str, Any]] = {
        "root": [
            (r"//.*?$", Comment),
            (words(("param", "dim", "let", "grid", "for", "in", "if", "else", "end",
                    "Allocate", "Copy", "Compute", "Reshape"), prefix=r"\b", suffix=r"\b"),
             Keyword),
            (words(("from", "to", "and", "or", "not", "get", "new", "accumulate", "with", "where",
                    "rescale", "coordinate", "as", "at", "stages", "offset", "along"),
                   prefix=r"\b", suffix=r"\b"), Keyword.Pseudo),
            (words((*VERBS, *FUNCTIONS), prefix=r"\b", suffix=r"\b"), Name.Builtin),
            (r"\d+(\.\d+)?(e[+-]?\d+)?\b", Number),
            (r"[-+*/%<>=!:]+", Operator),
            (r"\w+|[\s\S]", Text),
        ]
    }  # fmt: skip


def write_llms(app: Sphinx, failure: Exception | None) -> None:
    """llms.txt at the site's root: every page with its title and its source in Markdown, or the
    page itself where its text is generated."""
    if failure or app.builder.name != "html":
        return
    lines = [f"# {app.config.project}", "", f"> {ABOUT}", "", "## Pages", ""]
    order = app.env.toctree_includes
    for page in _in_order(app.config.root_doc, order):
        title = app.env.titles[page].astext()
        generated = "```{" in app.env.doc2path(page).read_text(encoding="utf-8")
        where = f"{page}.html" if generated else f"_sources/{page}.md.txt"
        lines.append(f"- [{title}]({where})")
    (Path(app.outdir) / LLMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _in_order(page: str, includes: dict[str, list[str]]) -> list[str]:
    """A page and all below it, as the contents list them."""
    return [page, *(p for below in includes.get(page, ()) for p in _in_order(below, includes))]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    for name, make in DIRECTIVES.items():
        made = type(f"Generated{name}", (Generated,), {"make": staticmethod(make)})
        app.add_directive(name, made)
    app.add_lexer("tl", TlLexer)
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
