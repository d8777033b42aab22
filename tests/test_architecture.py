"""The shape of the package: rooms and import arrows, silence on import, and a documented surface.

Every check is a function from source text to a list of complaints, so that the last part of this
file can show each of them complaining.
"""

import ast
import graphlib
import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "numpyro_dppvi"

# The rooms, from top to bottom, as the picture in docs/design.md has them. A room may import from
# lower floors only; those of one floor do not know each other. Within a room imports are free, but
# for circles.
_FLOOR = re.compile(r"^ +\d+  ((?:\w+ *)+)$", re.MULTILINE)
_MAP = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
FLOORS: tuple[frozenset[str], ...] = (
    frozenset({"__init__"}),
    *(frozenset(names.split()) for names in _FLOOR.findall(_MAP)),
)
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}

# privacy/ stands beside the floors, so that it can be audited alone.
PRIVACY_MAY_IMPORT = frozenset({"_device", "_disk", "_html", "_typing", "_validate"})
MAY_IMPORT_PRIVACY = frozenset(
    {"__init__", "flower", "silo", "analysis", "run", "protocol", "methods"}
)

# Tracing a model happens in one place, reading a guide in another, and nowhere else.
MAY_IMPORT_HANDLERS = frozenset({"latents", "guides"})

# Third parties that a function may import when it is called: optional, or slow to import.
LAZY = frozenset({"arviz", "flwr", "matplotlib", "opendp", "orbax", "tqdm", "xarray"})
# Those that a plain installation lacks: nothing may need them on import, but for flower/ itself.
OPTIONAL = {"flwr": "flower", "matplotlib": None, "opendp": None, "orbax": None}

Sources = Mapping[str, str]  # dotted module name inside the package -> source text


def read_package(folder: Path) -> dict[str, str]:
    """Reads every module under `folder`, named as `fit`, `privacy.ledger` or `privacy.__init__`."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(folder.rglob("*.py"))
    }


def top_level(module: str) -> str:
    """Names the room that a module belongs to: `privacy.ledger` to `privacy`."""
    return module.split(".", maxsplit=1)[0]


def absolute_name(module: str, node: ast.ImportFrom) -> str:
    """Resolves `from .x import y` in `module` to `numpyro_dppvi.x`."""
    if not node.level:
        return node.module or ""
    # `__init__` counts as a level of its own: one dot in it means the package that it is.
    parents = [PACKAGE, *module.split(".")][: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def imported_names(module: str, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields line and absolute dotted name of all that is imported anywhere, also for types."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_name(module, node)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def package_imports(sources: Sources, module: str) -> Iterator[tuple[int, str]]:
    """Yields line and room of every import of the package by one of its modules."""
    members = {top_level(name) for name in sources} | LEVEL.keys() | {"privacy"}
    for line, name in imported_names(module, ast.parse(sources[module])):
        root, *rest = name.split(".")
        if root == PACKAGE:
            yield line, rest[0] if rest and rest[0] in members else "__init__"


def unplaced_modules(sources: Sources) -> list[str]:
    """Complains of modules that are on no floor."""
    known = LEVEL.keys() | {"privacy"}
    return [f"{name}: is on no floor" for name in sources if top_level(name) not in known]


def allowed(importer: str, imported: str) -> bool:
    """Says whether one room may import another."""
    if importer == imported:
        return True
    if importer == "privacy":
        return imported in PRIVACY_MAY_IMPORT
    if imported == "privacy":
        return importer in MAY_IMPORT_PRIVACY
    return LEVEL.get(importer, -1) < LEVEL.get(imported, -1)


def wrong_arrows(sources: Sources) -> list[str]:
    """Complains of imports within the package that do not point downward."""
    return [
        f"{module}:{line}: imports {imported}, which is not below it"
        for module in sources
        for line, imported in package_imports(sources, module)
        if not allowed(top_level(module), imported)
    ]


def circles(sources: Sources) -> list[str]:
    """Complains of modules that import each other in a circle, within a room too."""
    arrows: dict[str, set[str]] = {}
    for module, source in sources.items():
        if module.endswith("__init__"):
            continue
        names = (name for _, name in imported_names(module, ast.parse(source)))
        dotted = {name.removeprefix(f"{PACKAGE}.") for name in names}
        # `from a.b import c` names a.b.c, which is a module or something inside of one.
        inside = {name.rpartition(".")[0] for name in dotted}
        arrows[module] = (dotted | inside) & set(sources)
    try:
        graphlib.TopologicalSorter(arrows).prepare()
    except graphlib.CycleError as error:
        return [f"{' -> '.join(error.args[1])}: is a circle"]
    return []


def handler_imports(sources: Sources) -> list[str]:
    """Complains of `numpyro.handlers` outside the modules that may trace a model or a guide."""
    complaints = []
    for module, source in sources.items():
        if top_level(module) in MAY_IMPORT_HANDLERS:
            continue
        tree = ast.parse(source)
        aliases = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name == "numpyro"
        }
        lines = [
            line
            for line, name in imported_names(module, tree)
            if name.split(".")[:2] == ["numpyro", "handlers"]
        ]
        lines += [
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "handlers"
            and isinstance(node.value, ast.Name)
            and node.value.id in aliases
        ]
        complaints += [f"{module}:{line}: uses numpyro.handlers" for line in lines]
    return complaints


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def hidden_imports(sources: Sources) -> list[str]:
    """Complains of imports inside functions, unless they are of a third party named in LAZY."""
    return sorted(
        {
            f"{module}:{line}: imports {name} inside a function"
            for module, source in sources.items()
            for function in functions(ast.parse(source))
            for line, name in imported_names(module, function)
            if top_level(name) not in LAZY
        }
    )


def statements_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run on import: not those for type checkers, nor in functions."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements_on_import(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from statements_on_import(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from statements_on_import(handler.body)


def needed_extras(sources: Sources) -> list[str]:
    """Complains of modules that cannot be imported without an optional third party."""
    return [
        f"{module}:{line}: cannot be imported without {name}"
        for module, source in sources.items()
        for node in statements_on_import(ast.parse(source).body)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for line, name in imported_names(module, node)
        if top_level(name) in OPTIONAL and OPTIONAL[top_level(name)] != top_level(module)
    ]


def surface_faults(public: Mapping[str, Any], names: list[str]) -> list[str]:
    """Complains of names in `__all__` that are listed twice, missing or undocumented."""
    complaints = []
    for name in sorted(set(names)):
        if names.count(name) > 1:
            complaints.append(f"{name}: is listed twice")
        if name not in public:
            complaints.append(f"{name}: does not exist")
        elif callable(public[name]):
            text = getattr(public[name], "__doc__", None) or ""
            # Dataclasses and NamedTuples write their own signature where nobody wrote a docstring.
            if not text.strip() or text.startswith(f"{getattr(public[name], '__name__', name)}("):
                complaints.append(f"{name}: has no docstring")
    return complaints


def commands(document: str) -> Iterator[str]:
    """Yields the lines of code in a Markdown text, and its code between backquotes."""
    fenced = False
    for line in document.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield line.strip().removeprefix("$ ")
        else:
            yield from re.findall(r"`([^`]+)`", line)


def missing_targets(document: str, makefile: str) -> list[str]:
    """Complains of `make` commands in a document that the Makefile does not have."""
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    shown = (re.match(r"make((?: +[a-z]+)+)", command) for command in commands(document))
    asked = {target for match in shown if match for target in match[1].split()}
    return [f"make {target}: is no target" for target in sorted(asked - targets)]


# ---------------------------------------------------------------------------------------------
# The package passes every check.


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    found = read_package(ROOT / PACKAGE)
    assert "__init__" in found
    return found


@pytest.mark.parametrize(
    "check",
    [unplaced_modules, wrong_arrows, circles, handler_imports, hidden_imports, needed_extras],
)
def test_the_package_keeps_its_shape(check, sources):
    assert check(sources) == []


def test_the_public_surface_is_complete_and_documented():
    package = importlib.import_module(PACKAGE)
    assert surface_faults(vars(package), list(package.__all__)) == []


def test_a_name_that_has_moved_still_works_and_says_where_it_is():
    package = importlib.import_module(PACKAGE)
    for name, room in package._MOVED.items():
        assert name not in package.__all__
        with pytest.warns(DeprecationWarning, match=rf"write {PACKAGE}\.{room}\.{name}\.$"):
            found = getattr(package, name)
        assert found is getattr(importlib.import_module(f"{PACKAGE}.{room}"), name)


def shadowed_modules(package: types.ModuleType) -> Iterator[str]:
    """Yields the submodules that an attribute of the same name hides."""
    for info in pkgutil.iter_modules(package.__path__):
        found = getattr(package, info.name, None)
        if not isinstance(found, types.ModuleType):
            yield f"{package.__name__}.{info.name}"
        elif info.ispkg:
            yield from shadowed_modules(found)


def test_no_function_hides_a_module():
    package = importlib.import_module(PACKAGE)
    absent = {f"{PACKAGE}.{room}" for name, room in OPTIONAL.items() if room and not has(name)}
    for info in pkgutil.walk_packages(package.__path__, f"{PACKAGE}.", onerror=lambda name: None):
        if not any(info.name == room or info.name.startswith(f"{room}.") for room in absent):
            importlib.import_module(info.name)
    assert set(shadowed_modules(package)) == absent


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


SILENT_IMPORT = f"""
import jax, numpyro, optax  # what these do on import is theirs
before = dict(jax.config.values)
import {PACKAGE}
changed = [name for name, value in jax.config.values.items() if before.get(name, value) != value]
assert not changed, f"import changed {{changed}}"
assert jax.config.jax_enable_x64 is before["jax_enable_x64"]
from jax._src import xla_bridge
backends = getattr(xla_bridge, "_backends", None)
print("unknown" if backends is None else sorted(backends))
"""


@pytest.mark.slow
@pytest.mark.parametrize("x64", [pytest.param("0", marks=pytest.mark.slow), "1"])
def test_import_changes_no_setting_and_starts_no_backend(x64, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", x64)
    process = subprocess.run(
        [sys.executable, "-c", SILENT_IMPORT], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert process.returncode == 0, process.stderr
    if process.stdout.strip() == "unknown":
        pytest.skip("this JAX keeps its backends elsewhere")
    assert process.stdout.strip() == "[]"


def test_every_file_that_the_map_names_is_there():
    named = re.findall(r"`([a-z_/]+(?:\.py|/))`", _MAP)
    assert len(named) > 40
    missing = [
        name for name in named if not any((p / name).exists() for p in (ROOT, ROOT / PACKAGE))
    ]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_command_shown_exists(document):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert missing_targets((ROOT / document).read_text(encoding="utf-8"), makefile) == []


# ---------------------------------------------------------------------------------------------
# Every check can fail.


def test_modules_are_named_by_their_path(tmp_path):
    (tmp_path / "privacy").mkdir()
    (tmp_path / "privacy" / "__init__.py").write_text("x = 1\n")
    (tmp_path / "fit.py").write_text("y = 2\n")
    assert read_package(tmp_path) == {"fit": "y = 2\n", "privacy.__init__": "x = 1\n"}


def test_a_module_on_no_floor_is_found():
    assert unplaced_modules({"utils": "", "run.loop": "", "privacy.ledger": ""}) == [
        "utils: is on no floor"
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("methods.local_solve", "from numpyro_dppvi import run"),
        ("methods.local_solve", "from numpyro_dppvi.run.fitting import FitResult"),
        ("methods.local_solve", "import numpyro_dppvi.run.fitting"),
        ("methods.local_solve", "from ..run import fitting"),
        ("posterior.prior", "from ..methods import objective"),  # neighbours
        ("families.base", "from ..run.fitting import FitResult"),
        ("families.__init__", "from ..run.fitting import FitResult"),
        ("families.__init__", "from .. import run"),
        ("run.loop", "import numpyro_dppvi"),  # the top, and so a circle
        ("run.loop", "from numpyro_dppvi import __version__"),
        ("run.loop", "from .. import __version__"),
        ("__init__", "from . import utils"),  # on no floor, and so below nothing
        ("methods.local_solve", "if TYPE_CHECKING:\n    from ..run.fitting import FitResult"),
        ("methods.local_solve", "def solve():\n    from ..run.fitting import FitResult"),
        ("privacy.ledger", "from ..families import factors"),
        ("privacy.ledger", "from numpyro_dppvi.run.history import Status"),
        ("posterior.file", "from ..privacy import ledger"),
        ("records", "from numpyro_dppvi.privacy.sampling import Poisson"),
    ],
)
def test_an_arrow_that_does_not_point_downward_is_found(module, source):
    made_up = {"utils": "", module: source}
    assert len(wrong_arrows(made_up)) == 1
    assert wrong_arrows(made_up)[0].startswith(f"{module}:")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("__init__", "from .run import fit\nfrom .privacy import PrivacyBudget"),
        ("run.fitting", "from numpyro_dppvi.protocol import server\nfrom ..privacy import Ledger"),
        ("protocol.rounds", "from . import server\nfrom .._typing import Natural"),
        ("families.diagonal_normal", "from .base import Family\nfrom .factors import total"),
        ("families.__init__", "from .base import Family\nfrom . import factors"),
        ("privacy.ledger", "from .accounting import epsilon\nfrom .._validate import positive"),
        ("posterior.posterior", "import numpyro\nfrom .to_arviz import to_arviz"),
    ],
)
def test_an_arrow_that_points_downward_is_left_alone(module, source):
    assert wrong_arrows({module: source}) == []


def test_a_circle_is_found():
    made_up = {
        "run.a": "from numpyro_dppvi.run import b",
        "run.b": "from numpyro_dppvi.run.c import name",
        "run.c": "import numpyro_dppvi.run.a",
    }
    assert len(circles(made_up)) == 1
    assert circles({**made_up, "run.c": "import json"}) == []


@pytest.mark.parametrize(
    "source",
    [
        "import numpyro.handlers",
        "from numpyro import handlers",
        "from numpyro.handlers import seed",
        "import numpyro\ntrace = numpyro.handlers.trace",
        "import numpyro as npr\ntrace = npr.handlers.trace",
    ],
)
def test_a_use_of_the_handlers_is_found(source):
    assert len(handler_imports({"fit": source})) == 1
    assert handler_imports({"latents": source}) == []


@pytest.mark.parametrize(
    "source",
    [
        "def fit():\n    from .methods import solve",
        "def fit():\n    import numpyro_dppvi.methods",
        "class Fit:\n    def run(self):\n        import pandas",
        "async def fit():\n    def inner():\n        import json",
    ],
)
def test_an_import_inside_a_function_is_found(source):
    assert len(hidden_imports({"fit": source})) == 1


def test_a_lazy_import_of_a_third_party_is_left_alone():
    assert hidden_imports({"fit": "import json\ndef show():\n    from tqdm.auto import tqdm"}) == []


@pytest.mark.parametrize(
    "source",
    [
        "import matplotlib.pyplot as plt",
        "from matplotlib import pyplot",
        "try:\n    import x\nexcept ImportError:\n    import matplotlib",
        "class Plot:\n    import matplotlib",
    ],
)
def test_an_extra_that_is_needed_on_import_is_found(source):
    assert len(needed_extras({"plots": source})) == 1


def test_an_extra_that_is_not_needed_on_import_is_left_alone():
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import matplotlib"
    lazy = "def plot():\n    import matplotlib.pyplot as plt"
    assert needed_extras({"plots": for_types, "fit": lazy, "flower.app": "import flwr"}) == []


def test_a_fault_of_the_surface_is_found():
    from dataclasses import dataclass
    from typing import NamedTuple

    @dataclass(frozen=True)
    class Silent:
        x: int

    class Pair(NamedTuple):
        x: int

    class Told(NamedTuple):
        """Says what it is."""

        x: int

    public = {"Silent": Silent, "Pair": Pair, "Told": Told, "f": lambda: None, "number": 3}
    assert surface_faults(public, ["Silent", "Pair", "Told", "Told", "f", "number", "gone"]) == [
        "Pair: has no docstring",
        "Silent: has no docstring",
        "Told: is listed twice",
        "f: has no docstring",
        "gone: does not exist",
    ]


@pytest.mark.parametrize(
    "document", ["    make lint typos  # see below", "```\n$ make typos\n```", "Run `make typos`."]
)
def test_a_command_that_does_not_exist_is_found(document):
    assert missing_targets(document, "test: setup\nlint:\n") == ["make typos: is no target"]
    assert missing_targets("Words make sense.\n\n    make test X=1\n", "test: setup\n") == []
