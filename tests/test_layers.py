"""Imports go down the house, never up: this reads them all."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from s3prefetchfs.cli import VERBS
from s3prefetchfs.cli.plan import VERBS as PLAN_VERBS

PACKAGE = Path(__file__).parents[1] / "s3prefetchfs"

FLOORS = [
    ["__main__"],
    ["cli"],
    ["daemon"],
    ["control", "plans", "resolution", "fuse.adapter", "fuse.directories", "fuse.kernel"],
    ["catalog", "engine", "simulation"],
    ["s3.pool", "store"],
    ["s3", "plan_file"],
    ["core"],
    ["fuse.handmount", "fuse.open_reply", "fuse.passthrough"],
    ["fuse.mounts", "fuse.holders", "metrics", "wire", "sources", "config", "log", "notify"],
    ["units", "errors"],
]
"""From the roof down. A name stands for a module, or for what is left of a package. Neighbours on a floor may
know each other, but not in a circle."""

IMPURE = {
    "asyncio", "boto3", "botocore", "ctypes", "logging", "multiprocessing", "os", "pathlib", "pyfuse3", "random",
    "select", "selectors", "signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "trio",
}  # fmt: skip
"""What a decision may not know: clocks, files, processes, chance, and those who do the work."""


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")


MODULES = {_name(path): path for path in PACKAGE.rglob("*.py")}
"""Module by name inside the package; the package itself is the empty name."""


def _imported(tree: ast.AST, *, at_module_level: bool) -> set[str]:
    """The dotted names that a module imports, from functions too unless told otherwise."""
    names = set()
    nodes = list(ast.iter_child_nodes(tree)) if at_module_level else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif at_module_level and isinstance(node, ast.If | ast.Try | ast.With):
            names |= _imported(node, at_module_level=True)
    return names


@cache
def ours(module: str, at_module_level: bool = False) -> frozenset[str]:
    """The modules of the package that `module` imports."""
    found = set()
    for name in _imported(ast.parse(MODULES[module].read_text()), at_module_level=at_module_level):
        parts = name.split(".")
        if parts[0] != PACKAGE.name:
            continue
        # `from package.module import thing`: the thing may be a module, too.
        candidates = [".".join(parts[1:]), ".".join(parts[1:-1])]
        found.add(next((candidate for candidate in candidates if candidate in MODULES), candidates[0]))
    return frozenset(found - {""})


@cache
def theirs(module: str, at_module_level: bool = False) -> frozenset[str]:
    """The top-level names of other people's packages that `module` imports."""
    names = _imported(ast.parse(MODULES[module].read_text()), at_module_level=at_module_level)
    return frozenset({name.split(".")[0] for name in names} - {PACKAGE.name})


def below(module: str, at_module_level: bool = False) -> set[str]:
    """`module` and all of ours that it leads to."""
    reached: set[str] = set()
    waiting = {module}
    while waiting:
        current = waiting.pop()
        reached.add(current)
        if current in MODULES:
            waiting |= ours(current, at_module_level) - reached
    return reached


def floor(module: str) -> int:
    """The number of the floor, from the roof down."""
    for number, rooms in enumerate(FLOORS):
        if any(module == room or module.startswith(f"{room}.") for room in rooms):
            return number
    raise AssertionError(f"{module} has no floor: say in FLOORS where it belongs")


CODE = sorted(name for name, path in MODULES.items() if ours(name) or theirs(name) or path.name != "__init__.py")


def test_the_house_is_found() -> None:
    """The rules below are about something."""
    assert {"config", "errors", "wire", "core.extent", "cli"} <= set(CODE)


@pytest.mark.parametrize("module", CODE)
def test_imports_go_down(module: str) -> None:
    """A module knows its own floor and those below it."""
    for imported in ours(module):
        assert floor(imported) >= floor(module), f"{module} imports {imported}, which is above it"


def test_no_circles() -> None:
    """No module leads back to itself."""
    TopologicalSorter({module: ours(module) - {module} for module in CODE}).prepare()


@pytest.mark.parametrize("module", [name for name in CODE if name.split(".")[0] == "core"])
def test_the_core_is_pure(module: str) -> None:
    """It imports itself, the errors, cachetools and what of the standard library has no side."""
    assert {name for name in ours(module) if name.split(".")[0] != "core"} <= {"errors"}
    others = theirs(module) - {"cachetools"}
    assert others <= sys.stdlib_module_names
    assert not others & IMPURE


@pytest.mark.parametrize("module", ["s3.worker", "s3.client"])
def test_workers_stay_small(module: str) -> None:
    """What runs in a worker process leads neither to trio nor to pyfuse3."""
    for reached in below(module) & set(MODULES):
        assert not theirs(reached) & {"trio", "pyfuse3"}, f"{module} leads to {reached}"


def test_only_workers_speak_boto3() -> None:
    """Nobody else in the package imports it, but for the demo, which uploads what it then reads."""
    speakers = {module for module in CODE if theirs(module) & {"boto3", "botocore"}}
    assert speakers <= (below("s3.worker") | {"cli.demo"})


def test_commands_start_light() -> None:
    """Loading a verb loads neither the daemon nor what is heavy."""
    for verb in [*VERBS, *(f"plan.{verb}" for verb in PLAN_VERBS)]:
        for module in below(f"cli.{verb}", at_module_level=True):
            assert module != "daemon"
            assert not theirs(module, at_module_level=True) & {"trio", "boto3", "pyfuse3"}, module


def test_commands_start_light_in_fact() -> None:
    """The same, asked of the interpreter: after `mount --help` nothing is loaded that takes long."""
    program = """if True:
        import sys
        from s3prefetchfs.cli import main
        main(["mount", "--help"], standalone_mode=False)
        print("loaded:", *sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    loaded = {name.split(".")[0] for name in done.stdout.partition("loaded:")[2].split()}
    assert "s3prefetchfs" in loaded
    assert not loaded & {"trio", "boto3", "botocore", "pyfuse3", "rich", "awscrt", "sqlite3"}
