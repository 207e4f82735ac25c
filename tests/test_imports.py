"""Who may import whom, and what the command line may load before it is asked to work."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "compress"
DRAWERS = {"utils", "util", "helpers", "helper", "base", "common", "misc", "manager"}
TECHNIQUES = ("quant", "prune", "distill", "kvconvert")
HEAVY = ("torch", "transformers", "numpy", "scipy", "pyarrow", "matplotlib", "pydantic", "rich")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def sources() -> dict[str, Path]:
    """Every module of the package by name; the links to kernels and runtime are followed."""
    folders = [ROOT, ROOT / "kernels", ROOT / "runtime"]
    paths = {path for folder in folders for path in folder.rglob("*.py")}
    return {module_name(path): path for path in sorted(paths)}


def imported(name: str, path: Path) -> Iterator[str]:
    """Modules that a file names in an import anywhere: at the top, in a function, or for type checking."""
    yield from imports_of(path.read_text(), name if path.name == "__init__.py" else name.rpartition(".")[0])


def imports_of(source: str, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            yield base
            # `from compress import runtime` names a module only by its alias.
            yield from (f"{base}.{alias.name}" for alias in node.names)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def internal(module: str) -> str | None:
    """The module of this project that a dotted name belongs to; None outside it."""
    known = sources()
    while module.startswith("compress"):
        if module in known:
            return module
        module = module.rpartition(".")[0]
    return None


@cache
def edges() -> dict[str, set[str]]:
    """module → modules of this project that it names. A package counts only where nothing inside it is meant."""
    found: dict[str, set[str]] = {}
    for name, path in sources().items():
        named = {internal(target) for target in imported(name, path)} - {None, "compress", name}
        found[name] = {target for target in named if target}
    return found


def test_parser_sees_every_form_of_import() -> None:
    """The rules below can fail: each way of writing an import is found."""
    found = {
        "compress.kernels.norm": "from . import norm",
        "compress.runtime.engine": "def f():\n    from ..runtime import engine",
        "compress.quant": "if True:\n    from compress import quant",
        "compress.evaluate.report": "class A:\n    import compress.evaluate.report",
    }
    for target, source in found.items():
        assert target in set(imports_of(source, "compress.kernels")), source


def test_kernels_need_torch_triton_and_numpy_alone() -> None:
    allowed = (*sys.stdlib_module_names, "torch", "triton", "numpy", "compress.kernels")
    for name, path in sources().items():
        if within(name, ("compress.kernels",)):
            strangers = [target for target in imported(name, path) if not within(target, allowed)]
            assert not strangers, f"{name} imports {strangers}"


FORMATS = ("compress.quant.scheme", "compress.kernels", "compress.checkpoint", "compress.arch", "compress.errors")
RULES = {
    "compress.formats": (*FORMATS, "compress.tensorfile", "compress.formats"),
    "compress.runtime": (
        "compress.runtime",
        "compress.kernels",
        "compress.formats",
        "compress.quant.scheme",
        "compress.checkpoint",
        "compress.tensorfile",
        "compress.arch",
        "compress.rope",
        "compress.errors",
    ),
}
EXTRA = {"compress.runtime.server": ("compress.encoding",)}  # chats are encoded as in calibration and evaluation


@pytest.mark.parametrize("package", RULES)
def test_package_imports_only_what_it_may(package: str) -> None:
    """`compress.quant` itself is an empty package, so naming it on the way to quant.scheme loads no technique."""
    for name, targets in edges().items():
        if within(name, (package,)):
            extra = tuple(other for part, more in EXTRA.items() if within(name, (part,)) for other in more)
            allowed = (*RULES[package], *extra)
            strangers = {target for target in targets if not within(target, allowed)} - {"compress.quant"}
            assert not strangers, f"{name} imports {sorted(strangers)}; {package} may import {RULES[package]}"


def reach(name: str, graph: dict[str, set[str]]) -> set[str]:
    """What a module imports, directly or through others."""
    seen: set[str] = set()
    pending = [name]
    while pending:
        new = graph[pending.pop()] - seen
        seen |= new
        pending += new
    return seen


COMMANDS = ("compress.cli", "compress.commands")
FORBIDDEN = {
    "compress.runtime": (
        *(f"compress.{technique}" for technique in TECHNIQUES),
        "compress.evaluate",
        "compress.pipeline",
        "compress.stages",
        "compress.calibration",
        "compress.blockwise",
    ),
    **{
        f"compress.{technique}": (
            "compress.runtime",
            "compress.evaluate",
            "compress.pipeline",
            "compress.cli",
            "compress.commands",
        )
        for technique in TECHNIQUES
    },
    "compress.blockwise": ("compress.runtime", "compress.evaluate", "compress.quant", "compress.pipeline"),
    "compress.evaluate": ("compress.pipeline", "compress.stages", *COMMANDS),
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_never_reaches(package: str) -> None:
    """Not even through another module."""
    graph = edges()
    allowed = {"compress.quant", "compress.quant.scheme"} if package == "compress.runtime" else set()
    for name in graph:
        if within(name, (package,)):
            reached = {target for target in reach(name, graph) if within(target, FORBIDDEN[package])} - allowed
            assert not reached, f"{name} reaches {sorted(reached)}"


def test_nothing_is_imported_from_the_command_line() -> None:
    for name, targets in edges().items():
        assert name == "compress.__main__" or "compress.cli" not in targets, f"{name} imports compress.cli"
        if name != "compress.cli" and not within(name, ("compress.commands",)):
            found = {target for target in targets if within(target, ("compress.commands",))}
            assert not found, f"{name} imports {sorted(found)}"


def test_no_drawers() -> None:
    for name in sources():
        assert not DRAWERS & set(name.split(".")), f"{name}: call it by what it holds"


def loaded_by(statement: str) -> set[str]:
    """Top-level packages in sys.modules after a statement, in a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_command_line_loads_nothing_heavy() -> None:
    """Row 36: `import compress.cli` leaves torch and its like alone."""
    assert "torch" in loaded_by("import torch")
    heavy = loaded_by("import compress, compress.cli") & set(HEAVY)
    assert not heavy, f"import compress.cli loads {sorted(heavy)}"


def test_help_loads_nothing_heavy_and_is_quick() -> None:
    """Row 36: `compress --help`, and the help of every command, answer at once; the bound is loose."""
    statement = """
from click.testing import CliRunner
from compress.cli import cli
for arguments in [[], *([name] for name in cli.commands)]:
    shown = CliRunner().invoke(cli, [*arguments, "--help"])
    assert shown.exit_code == 0, shown.output"""
    start = time.monotonic()
    heavy = loaded_by(statement) & set(HEAVY)
    assert not heavy, f"--help loads {sorted(heavy)}"
    assert time.monotonic() - start < 5


def test_selection_needs_no_torch() -> None:
    """The checks of groups and ignore patterns can run before anything heavy is loaded."""
    assert not loaded_by("import compress.selection, compress.errors") & set(HEAVY)
