"""What is said twice agrees: exports, floors, and where each module runs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ddpnb

PACKAGE = Path(ddpnb.__file__).parent
WORKER_SIDE = (
    "context",
    "worker",
    "group",
    "preload",
    "payload",
    "channel",
    "agreement",
    "settings",
    "messages",
    "names",
    "world",
    "errors",
    "checkpoints",
    "lifeline",
    "stopwatch",
)
NOT_IN_A_WORKER = {"IPython", "ipywidgets", "matplotlib", "ipykernel"}


def modules() -> dict[str, ast.Module]:
    """{dotted name without "ddpnb.": its syntax tree}."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        found["" if name == "__init__" else name] = ast.parse(path.read_text())
    return found


def imports(module: str, tree: ast.AST) -> Iterator[str]:
    """Dotted names that it imports: ours start with a dot."""
    is_package = (PACKAGE / module.replace(".", "/") / "__init__.py").exists()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0):
                yield str(node.module)
            case ast.ImportFrom():
                parts = [part for part in module.split(".") if part]
                base = parts[: len(parts) - node.level + (1 if is_package else 0)] if parts else []
                home = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{home}.{alias.name}".lstrip(".")
                    yield f".{inner if inner in MODULES else home}"


def at_import(tree: ast.Module) -> ast.Module:
    """What runs when the module is imported: neither the bodies of functions nor what only a type checker sees."""

    class Lazy(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            checks_types = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            return None if checks_types else self.generic_visit(node)

    return Lazy().visit(tree)


MODULES = modules()


def test_public_names_are_those_that_a_type_checker_sees() -> None:
    tree = MODULES[""]
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        (str(node.module), alias.name)
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    table = {(home, name) for home, names in ddpnb._HOMES.items() for name in names}

    assert table == seen
    assert sorted(ddpnb.__all__) == sorted({name for _, name in table} | {"__version__"})


@pytest.mark.parametrize("name", ddpnb.__all__)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(ddpnb, name)

    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ddpnb' has no attribute 'lanch'"):
        ddpnb.lanch  # noqa: B018


def test_importing_the_package_is_light() -> None:
    heavy_ones = ("torch", "numpy", "matplotlib", "IPython")
    code = f"import sys, ddpnb; print([name for name in {heavy_ones} if name in sys.modules])"

    heavy = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "[]" == heavy.strip()


def test_the_worker_side_loads_neither_widgets_nor_figures() -> None:
    names = ", ".join(f"ddpnb.{name}" for name in WORKER_SIDE if name != "preload")
    code = f"import sys, {names}; print([name for name in {NOT_IN_A_WORKER!r} if name in sys.modules])"

    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert "[]" == loaded.strip()


@pytest.mark.parametrize("module", WORKER_SIDE)
def test_a_worker_side_module_imports_no_kernel_side_one(module: str) -> None:
    named = {name.partition(".")[0] for name in imports(module, MODULES[module])}
    ours = {name[1:] for name in imports(module, MODULES[module]) if name.startswith(".")}

    assert not named & NOT_IN_A_WORKER
    assert {name for name in ours if not name.startswith("train.")} <= {*WORKER_SIDE}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_every_module_says_where_it_runs(module: str) -> None:
    last = (ast.get_docstring(MODULES[module]) or "").splitlines()[-1:]

    assert last
    assert last[0].startswith("Runs in: ")


def test_imports_make_no_circle() -> None:
    graph = {
        name: {other[1:] for other in imports(name, at_import(tree)) if other.startswith(".")} - {name}
        for name, tree in modules().items()
    }

    assert list(TopologicalSorter(graph).static_order())


FLOORS = {
    found[2]: int(found[1])
    for found in re.finditer(r"^\| (\d) \| `(\w+)` \|", (PACKAGE / "README.md").read_text(), re.MULTILINE)
}


def test_every_module_has_a_floor_in_the_architecture_note() -> None:
    assert set(FLOORS) == {name.partition(".")[0] for name in MODULES if name}


@pytest.mark.parametrize("module", [name for name in MODULES if name])
def test_imports_go_down_the_floors_of_the_architecture_note(module: str) -> None:
    own = module.partition(".")[0]
    imported = {name[1:].partition(".")[0] for name in imports(module, MODULES[module]) if name.startswith(".")}

    upwards = {name for name in imported if FLOORS[name] > FLOORS[own]}

    assert not upwards
