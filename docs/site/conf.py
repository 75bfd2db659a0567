"""Sphinx: the pages, the notebooks as committed, and the reference from the docstrings.

The sources stand where they are read on a forge, so the repository itself is the source folder
and relative links mean the same in both places. The pages in Chinese are a build of their own, with
the tag zh, in the folder zh of the other one; links between the two are made here.
"""

import posixpath
import re
import sys
import xml.etree.ElementTree as ET
from importlib import import_module
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import sdpa

sys.path.insert(0, str(Path(__file__).parent))
from chinese_search import SearchChinese

project = "sdpa"
version = release = sdpa.__version__
chinese = tags.has("zh")  # noqa: F821, by Sphinx
language = "zh_CN" if chinese else "en"
root_doc = "docs/zh/why" if chinese else "docs/why"
include_patterns = (
    ["docs/zh/*.md"]
    if chinese
    else [
        "*.md",
        "docs/*.md",
        "docs/history/*.md",
        "docs/performance/*.md",
        "docs/site/*.rst",
        "docs/site/reference/*.rst",
        "notebooks/README.md",
        "notebooks/*.ipynb",
    ]
)
exclude_patterns = [".*", "build", "dist", "*.egg-info"]

extensions = ["myst_nb", "numpydoc", "sphinx.ext.autodoc"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # `make notebooks` runs them
nb_ipywidgets_js = {}  # knobs without a kernel do nothing, and would be fetched from a network
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]  # formulas of the notebooks

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings name types and shapes
autosummary_generate = False  # it would import every bridge
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# numpydoc's validator reads every docstring of the reference, the compiled ones included. Off are:
numpydoc_validation_checks = {
    "all",
    # Sections that numpydoc itself calls optional. Examples that are there run as tests.
    *("ES01", "EX01", "SA01"),
    # Named tuples, and functions that take the options of another one, which documents them.
    *("GL08", "PR01", "PR02", "RT01"),
    # Arguments alike share an entry, so that their order is not that of the signature.
    "PR03",
    # "seed : int" says all; so does the name of an argument that is passed on.
    *("PR04", "PR07", "RT03"),
    # Descriptions that begin with a formula or with the name of a variable.
    *("PR08", "RT04", "SA03", "SS02"),
    # Docstrings of plots, which are completed where they are decorated.
    "GL02",
    # It takes plural nouns for verbs: "Gradients of ...".
    "SS05",
}
# Of other libraries: autodoc reads them and leaves them out.
numpydoc_validation_exclude = {r"\.style\.wraps$", r"\.transformers\.Attention\w*Interface$"}

html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = f"sdpa {version}"
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}
if not chinese:
    html_theme_options["header_links_before_dropdown"] = 7
html_context = {"default_mode": "auto"}  # light or dark as the reader's browser is
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False


NAVIGATION = """

```{toctree}
:hidden:

Start </docs/site/index>
/docs/site/recipes
/docs/site/functions
/docs/site/bridges
/docs/site/speed
Laboratory </docs/site/laboratory>
Maintainers </docs/site/maintainers>
```
"""


def add_navigation(_app, page, source):
    """Let the first page lead to all others: as a file on a forge it has no such list."""
    if page == root_doc and not chinese:
        source[0] += NAVIGATION


def link_other_build(_app, page, source):
    """Lead links between pages in Chinese and all others to the build that has them."""
    here = "zh" if chinese else "."

    def link(match):
        text, path, anchor = match.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        there = "zh" if path.startswith("docs/zh/") else "."
        if there == here:
            return match[0]
        target = posixpath.join(there, re.sub(r"\.\w+$", ".html", path))
        address = posixpath.relpath(target, posixpath.join(here, posixpath.dirname(page)))
        return f'<a href="{address}{anchor or ""}">{text}</a>'

    pattern = r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#]+\.(?:md|ipynb|rst))(#[^)]*)?\)"
    source[0] = re.sub(pattern, link, source[0])


def describe(directive):
    """The directive, or where a bridge's library is missing a sentence that says so."""
    try:
        import_module(directive[1])
    except ImportError as error:
        return f"Left out: ``{error}``\n"
    return directive[0]


def leave_out_bridges(_app, page, source):
    """Describe the bridges to the libraries that are installed: the others cannot be imported."""
    if page == "docs/site/reference/interop":
        source[0] = re.sub(r"\.\. automodule:: (.*)\n +:members:\n", describe, source[0])


def mark_literal(_app, _what, _name, _object, _options, lines):
    """Let an indented block below a paragraph be taken as it is: formulas, pieces of code."""
    result, outer, blank, literal = [], 0, False, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if not line:
            blank = True
            continue
        literal = literal and indent > outer
        if blank and result:
            if indent > outer and not literal:
                literal = True
                result += ["", " " * outer + "::"]
            result.append("")
        if not literal:
            outer = indent
        result.append(line)
        blank = False
    lines[:] = [*result, ""]


def escape_bars(_app, _what, _name, _object, _options, lines):
    """Let |x| be an absolute value, which docutils would take for a substitution."""
    literal, example = -1, False
    for i, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent <= literal:
            literal = -1
        if line.strip() == "::":
            literal = indent
        example = line.strip() != "" and (example or line.lstrip().startswith(">>>"))
        if literal < 0 and not example:
            lines[i] = re.sub(r"(`[^`]*`)|\|", lambda match: match[1] or r"\|", line)


def forget_aliases(_app, what, _name, tuple_type, _options, _lines):
    """Leave out fields of named tuples of which nothing is said but their number."""
    if what == "class":
        for field in getattr(tuple_type, "_fields", ()):
            getattr(tuple_type, field).__doc__ = None


MATHML = "{http://www.w3.org/1998/Math/MathML}"
APPLIED = "\u2061"  # follows the name of a function
ET.register_namespace("", MATHML[1:-1])


def lower_subscripts(tree):
    """Give the bases of subscripts some depth, below which a browser sets the subscripts.

    Where no font for formulas is installed, as on most phones, chromium goes by that depth alone:
    the t of k_t, which has none, would stand beside the k.
    """
    for script in (*tree.iter(f"{MATHML}msub"), *tree.iter(f"{MATHML}msubsup")):
        base = script[0]
        if base.tag != f"{MATHML}mo":
            script[0] = ET.Element(f"{MATHML}mrow")
            script[0].extend([base, ET.Element(f"{MATHML}mspace", depth="0.2em")])


def space_functions(tree):
    """Set names of functions apart from letters beside them, as TeX does: ln n, not lnn."""
    for parent in tree.iter():
        children = []
        for child in parent:
            after_name = children and children[-1].text == APPLIED
            if after_name and child.text != "(":
                children.append(ET.Element(f"{MATHML}mspace", width="0.167em"))
            if child.text == APPLIED and len(children) > 1 and children[-2].tag != f"{MATHML}mo":
                children.insert(-1, ET.Element(f"{MATHML}mspace", width="0.167em"))
            children.append(child)
        parent[:] = children


def write_formula(translator, node):
    """Write MathML, which browsers draw by themselves: the pages need no network."""
    block = isinstance(node, nodes.math_block)
    formula = tex2mathml(node.astext(), as_block=block).replace("&ApplyFunction;", APPLIED)
    tree = ET.fromstring(formula)
    space_functions(tree)
    lower_subscripts(tree)
    formula = ET.tostring(tree, encoding="unicode").strip()
    translator.body.append(f'<div class="formula">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app):
    """Connect before and after numpydoc, whose priority is 500."""
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.add_search_language(SearchChinese)
    app.connect("source-read", leave_out_bridges)
    app.connect("source-read", add_navigation)
    app.connect("source-read", link_other_build)
    app.connect("autodoc-process-docstring", mark_literal, priority=400)
    app.connect("autodoc-process-docstring", escape_bars, priority=600)
    app.connect("autodoc-process-docstring", forget_aliases)
