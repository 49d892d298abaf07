"""The layers of the package: who may import whom. Read from the source, so that a lazy import counts too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvtier

ROOT = Path(kvtier.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

# The map of docs/architecture.md, lowest room first: a room may import only rooms of the lines above it here. A room is
# a folder, or a module of the package's root.
ROOMS = (
    ("errors", "figures", "folders", "formats"),  # what every room shares
    ("sizes", "outputs", "machine"),
    ("settings", "trace"),
    ("model",),
    ("policies",),
    ("simulator",),
    ("native",),
    ("placement",),
    ("lossy",),
    ("engine",),
    ("doctor",),
    ("scorer",),
    ("measuring",),
    ("bench",),
    ("evaluation",),
    ("cli",),
    ("__init__", "__main__"),
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}
ONLY_HOME = {"cffi": {"native/binding"}, "rich": {"cli/ui"}}


def _imports(path: Path) -> Iterator[str]:
    """Absolute names of everything that a module imports, modules of the package as "kvtier/x"."""
    folder = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.replace(".", "/") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "/".join(("kvtier", *folder[: len(folder) - node.level + 1])) if node.level else ""
            name = "/".join(part for part in (base, (node.module or "").replace(".", "/")) if part)
            yield name
            yield from (f"{name}/{alias.name}" for alias in node.names)


def _own_imports(module: str) -> set[str]:
    """Modules of the package that a module imports."""
    found = {name.removeprefix("kvtier/") for name in _imports(MODULES[module]) if name.startswith("kvtier/")}
    return {name for name in found if name in MODULES}


def test_the_walk_sees_imports() -> None:
    assert len(MODULES) > 20
    assert "figures" in _own_imports("native/binding")
    assert "engine/chat" in _own_imports("cli/run") | _own_imports("cli/chat")
    assert "engine/llama" in _own_imports("cli/run")  # imported inside a function


def test_one_module_per_outside_world() -> None:
    for package, homes in ONLY_HOME.items():
        users = {
            module for module, path in MODULES.items() if any(name.split("/")[0] == package for name in _imports(path))
        }
        assert users == homes, f"{package} may be imported by {homes} only"


def _room(module: str) -> str:
    return module.split("/")[0]


def test_every_module_has_a_room_and_every_room_modules() -> None:
    assert {_room(module) for module in MODULES} == set(FLOOR)


def test_rooms_point_one_way() -> None:
    for module in MODULES:
        for imported in _own_imports(module):
            here, there = _room(module), _room(imported)
            assert here == there or FLOOR[there] < FLOOR[here], f"{module} imports {imported}, which is not below it"


def test_no_modules_import_in_a_circle() -> None:
    left = {module: _own_imports(module) - {module} for module in MODULES}
    while ready := [module for module, imported in left.items() if not imported & left.keys()]:
        for module in ready:
            del left[module]
    assert not left, f"in a circle, or above one: {sorted(left)}"


def test_the_map_has_every_room() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^      (\w+(?:/, \w+)*)/ ", page, flags=re.M)
    drawn = [room for row in rows for room in row.split("/, ")]
    folders = [room for rooms in ROOMS for room in rooms if (ROOT / room).is_dir()]
    assert drawn == folders


# A policy gets arrays: it knows nothing of the library, of llama.cpp, or of files. The simulator and traces need no
# engine either.
ENGINE = {module for module in MODULES if module.startswith(("native/", "engine/")) and module != "native/__init__"}


def _reachable(module: str) -> set[str]:
    """Modules of the package that importing a module brings in, lazily or not."""
    found: set[str] = set()
    todo = [module]
    while todo:
        for name in _own_imports(todo.pop()) - found:
            found.add(name)
            todo.append(name)
    return found


def test_policies_know_no_engine() -> None:
    policies = [module for module in MODULES if module.startswith(("policies/", "simulator/"))]
    assert len(policies) > 12
    for module in [*policies, "trace"]:
        assert not _reachable(module) & ENGINE, f"{module} reaches {_reachable(module) & ENGINE}"
        assert not any(name.split("/")[0] in {"llama_cpp", "cffi"} for name in _imports(MODULES[module]))


def test_nothing_below_knows_the_command_line() -> None:
    for module, path in MODULES.items():
        if not module.startswith("cli/") and module != "__main__":
            names = set(_imports(path))
            assert not any(name.startswith("kvtier/cli") for name in names), f"{module} imports the command line"
            assert "click" not in {name.split("/")[0] for name in names}, f"{module} imports click"


def test_import_alone_loads_no_engine() -> None:
    code = "import sys, kvtier, kvtier.cli; print([m for m in ('llama_cpp', 'cffi', 'numpy') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_public_names() -> None:
    for name in kvtier.__all__:
        assert getattr(kvtier, name) is not None
    assert not hasattr(kvtier, "no_such_name")
    assert set(kvtier.__all__) <= set(dir(kvtier))
