"""How Sphinx builds the site: `make docs`, with every warning an error, online or not."""

import http.client
import importlib.metadata
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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

# Where types say they live, and the names under which their projects' pages have them.
PUBLIC_NAMES = {
    "jax.jaxlib._jax.Array": "jax.Array",
    "jaxlib._jax.Array": "jax.Array",
    "optax._src.base.GradientTransformation": "optax.GradientTransformation",
}
THIRD_PARTIES = ("arviz.", "dp_accounting.", "jax.", "numpy.", "numpyro.", "optax.")

# Names of other projects, and the aliases of ours that stand for Any, have no page here.
nitpick_ignore_regex = [
    ("py:.*", r"(jax|jaxlib|numpy|numpyro|optax|arviz|xarray|matplotlib|scipy|dp_accounting)\..*"),
    ("py:.*", r"(collections|typing|types|os|pathlib|enum|dataclasses|datetime)(\..*)?"),
    ("py:.*", r"(None|Ellipsis|bool|bytes|float|int|str|object|type|tuple|list|dict|set|range)"),
    ("py:.*", r".*(Error|Warning|Exception|Interrupt)"),
    ("py:mod", r"numpyro_dppvi\..*"),  # modules of ours that are no part of the reference
    ("py:class", r"numpyro_dppvi\._typing\.(Parameters|Tree)"),  # type variables
    ("py:.*", "ArrayTree"),  # optax's name for any tree of arrays
]


def inventory(address: str) -> bytes | None:
    """A site's index of names, whole and readable; ``None`` if it does not answer with one."""
    # Some hosts turn away what calls itself Python's urllib.
    request = urllib.request.Request(f"{address}objects.inv", headers={"User-Agent": "Sphinx"})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            content: bytes = answer.read()
        first, *_, names = content.split(b"\n", 4)
        zlib.decompress(names)
    except (OSError, http.client.HTTPException, ValueError, zlib.error):
        return None
    return content if first == b"# Sphinx inventory version 2" else None


def reachable(sites: dict[str, str], folder: Path) -> dict[str, tuple[str, str]]:
    """Those sites whose index could be fetched into a folder; the others are left out in silence.

    Sphinx then reads the files, so that a network that fails halfway is no warning either.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        answers = dict(zip(sites, pool.map(inventory, sites.values()), strict=True))
    found = {}
    for name, content in answers.items():
        if content is not None:
            (folder / f"{name}.inv").write_bytes(content)
            found[name] = (sites[name], str(folder / f"{name}.inv"))
    return found


intersphinx_mapping = reachable(
    {
        "python": "https://docs.python.org/3/",
        "numpy": "https://numpy.org/doc/stable/",
        "numpyro": "https://num.pyro.ai/en/stable/",
        "jax": "https://docs.jax.dev/en/latest/",
        "optax": "https://optax.readthedocs.io/en/latest/",
        "arviz": "https://python.arviz.org/en/stable/",
    },
    Path(__file__).parent / "_build" / "inventories",
)


def skip_field(_app: Any, _what: str, _name: str, member: Any, skip: bool, _options: Any) -> bool:
    """Leaves out a NamedTuple's fields, which its docstring has explained."""
    return skip or type(member).__name__ == "_tuplegetter"


def tidy_signature(
    _app: Any, what: str, _name: str, _obj: Any, _options: Any, signature: str | None, result: Any
) -> tuple[str | None, Any] | None:
    """Spares the reader signatures that say nothing: protocols', enumerations', a posterior's."""
    nothing = ("<factory>", "*args", "(value)")
    if what == "class" and signature and any(piece in signature for piece in nothing):
        return "", None
    return None


def use_public_name(_app: Any, _env: Any, node: Any, _contnode: Any) -> None:
    """Lets intersphinx look for the name that a project's pages use."""
    node["reftarget"] = PUBLIC_NAMES.get(node["reftarget"], node["reftarget"])


def resolve_by_last_name(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Finds a documented name by its last part, wherever the text that uses it stands."""
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
    """Registers the rules above, and calls attributes so."""
    for kind in PyObject.doc_field_types:
        if kind.name == "variable":
            kind.label = "Attributes"
    app.connect("autodoc-skip-member", skip_field)
    app.connect("autodoc-process-signature", tidy_signature)
    app.connect("missing-reference", use_public_name, priority=400)  # before intersphinx
    app.connect("missing-reference", resolve_by_last_name)
