"""Configuration of Sphinx; `make docs` builds the site with warnings as errors."""

import importlib.metadata
import os
from typing import Any

from sphinx.domains.python import PyObject
from sphinx.util.nodes import make_refnode

project = "numpyro_dppvi"
author = "The numpyro_dppvi developers"
copyright = "The numpyro_dppvi developers, Apache-2.0"  # noqa: A001  # Sphinx's name
release = importlib.metadata.version("numpyro-dppvi")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
default_role = "code"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "numpyro_dppvi"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_theme_options = {
    "source_repository": "https://github.com/numpyro-dppvi/numpyro_dppvi/",
    "source_branch": "main",
    "source_directory": "docs/",
}

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
maximum_signature_line_length = 72
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_attr_annotations = False
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False

# Names as modules define them, and as the other projects' pages document them.
PUBLIC_NAMES = {
    "jax.jaxlib._jax.Array": "jax.Array",
    "jaxlib._jax.Array": "jax.Array",
    "optax._src.base.GradientTransformation": "optax.GradientTransformation",
}
THIRD_PARTIES = ("arviz.", "dp_accounting.", "jax.", "numpy.", "numpyro.", "optax.")

# Names of other projects, and our aliases of Any, have no page here.
nitpick_ignore_regex = [
    ("py:.*", r"(jax|jaxlib|numpy|numpyro|optax|arviz|xarray|matplotlib|scipy|dp_accounting)\..*"),
    ("py:.*", r"(collections|typing|types|os|pathlib|enum|dataclasses|datetime)(\..*)?"),
    ("py:.*", r"(None|Ellipsis|bool|bytes|float|int|str|object|type|tuple|list|dict|set|range)"),
    ("py:.*", r".*(Error|Warning|Exception|Interrupt)"),
    ("py:mod", r"numpyro_dppvi\..*"),  # modules that are not part of the reference
    ("py:class", r"numpyro_dppvi\._typing\.(Parameters|Tree|RowProduct)"),  # of our own use
    ("py:class", r"numpyro_dppvi\.(methods\.visits\._Rows|latents\.space\.Fact)"),
    ("py:.*", "ArrayTree"),  # optax's name for any tree of arrays
]


# Links to other projects need a network, which only the published build relies on.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", None),
    "numpy": ("https://numpy.org/doc/stable/", None),
    "numpyro": ("https://num.pyro.ai/en/stable/", None),
    "jax": ("https://docs.jax.dev/en/latest/", None),
    "optax": ("https://optax.readthedocs.io/en/latest/", None),
    "arviz": ("https://python.arviz.org/en/stable/", None),
}
if "READTHEDOCS" not in os.environ:
    intersphinx_mapping = {}


def skip_field(_app: Any, _what: str, _name: str, member: Any, skip: bool, _options: Any) -> bool:
    """Omits a NamedTuple's fields, which its docstring explains."""
    return skip or type(member).__name__ == "_tuplegetter"


def tidy_signature(
    _app: Any, what: str, _name: str, _obj: Any, _options: Any, signature: str | None, result: Any
) -> tuple[str | None, Any] | None:
    """Omits uninformative signatures of protocols, enumerations and posteriors."""
    nothing = ("<factory>", "*args", "(value)")
    if what == "class" and signature and any(piece in signature for piece in nothing):
        return "", None
    return None


def use_public_name(_app: Any, _env: Any, node: Any, _contnode: Any) -> None:
    """Makes intersphinx look for the documented name."""
    node["reftarget"] = PUBLIC_NAMES.get(node["reftarget"], node["reftarget"])


def resolve_by_last_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Finds a documented name by its last part."""
    if node.get("refdomain") != "py" or node["reftarget"].startswith(THIRD_PARTIES):
        return None
    parts = 2 if "." in node["reftarget"] and node["reftype"] in ("meth", "attr") else 1
    ending = "." + ".".join(node["reftarget"].split(".")[-parts:])
    found = [
        entry
        for name, entry in env.get_domain("py").objects.items()
        if name.endswith(ending) and not entry.aliased
    ]
    if len(found) != 1:
        return None
    place = found[0]
    return make_refnode(app.builder, node["refdoc"], place.docname, place.node_id, contnode)


def setup(app: Any) -> None:
    """Registers the functions above, and labels attributes."""
    for kind in PyObject.doc_field_types:
        if kind.name == "variable":
            kind.label = "Attributes"
    app.connect("autodoc-skip-member", skip_field)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("missing-reference", use_public_name, priority=400)  # before intersphinx
    app.connect("missing-reference", resolve_by_last_name)
