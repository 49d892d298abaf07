"""The layers of the package: who may import whom. Read from the source, so that a lazy import counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvtier

ROOT = Path(kvtier.__file__).parent
MODULES = {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in sorted(ROOT.rglob("*.py"))}

# Modules of the core may import only modules of a lower line, and of their own line if the set says so.
LAYERS = (
    {"errors", "figures", "sizes", "folders", "outputs", "native/summary"},
    {"machine/hardware", "machine/processors"},
    {"engine/threads"},
    {"engine/pace"},
    {"settings", "trace"},
    {"model/gguf", "model/names", "model/hub"},
    {"model/shape"},
    {"model/cachetypes", "model/plan"},
    {"native/binding"},
    {"native/kv", "native/runtime"},
    {"policies/base", "policies/parameters"},
    {"policies/apply", "policies/validate", "policies/looks", "policies/registry"},
    {"native/pagekeys"},
    {"placement/placement"},
    {"lossy/batch", "lossy/budget", "lossy/compress", "lossy/levels", "lossy/online", "lossy/streaming"},
    {"lossy/settings"},
    {"lossy/stand_ins"},
    {"lossy/memory"},
    {"engine/llama"},
    {"engine/chat", "engine/generation", "engine/recording"},
)
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


def test_core_layers_point_one_way() -> None:
    rank = {module: i for i, layer in enumerate(LAYERS) for module in layer}
    for module, level in rank.items():
        for imported in _own_imports(module):
            assert imported in rank, f"{module} imports {imported}, which is not in the core"
            same_line = rank[imported] == level and module in {"model/names", "model/hub", "sizes", "outputs"}
            assert rank[imported] < level or same_line, f"{module} imports {imported}, which is not below it"


# A policy gets arrays: it knows nothing of the library, of llama.cpp, or of files. The simulator and traces need no engine either.
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
