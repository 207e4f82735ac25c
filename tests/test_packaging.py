"""What is installed is what is here: the links to kernels and runtime survive a wheel and a source archive."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


def requirements(section: str) -> list[Requirement]:
    """What a list of pyproject.toml asks for; a regular expression, as Python 3.10 cannot read TOML."""
    body = re.search(rf"^{section} = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert body, section
    return [Requirement(line) for line in re.findall(r'^ *"([^"]+)"', body[1], re.MULTILINE)]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python_files() -> set[str]:
    """Every module as the package names it, such as compress/kernels/norm.py."""
    own = {path.relative_to(ROOT) for path in (ROOT / "compress").rglob("*.py")}
    linked = {
        Path("compress") / path.relative_to(ROOT)
        for name in ("kernels", "runtime")
        for path in (ROOT / name).rglob("*.py")
    }
    return {path.as_posix() for path in own | linked}


def data_files() -> set[str]:
    """What the package reads beside its modules: templates, C sources, recorded figures."""
    own = {path.relative_to(ROOT) for path in (ROOT / "compress").rglob("*.html")}
    linked = {
        Path("compress") / path.relative_to(ROOT)
        for pattern in ("*.c", "*.h", "*.json")
        for path in (ROOT / "kernels").rglob(pattern)
    }
    assert len(linked) > 10
    return {path.as_posix() for path in own | linked}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree without what git ignores; links stay links."""
    copy = tmp_path_factory.mktemp("packaging") / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", "out", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    assert (copy / "compress" / "kernels").is_symlink()
    return copy


@pytest.mark.slow
def test_wheel_holds_every_module_and_imports(source: Path, tmp_path: Path) -> None:
    wheelhouse, target = tmp_path / "wheels", tmp_path / "target"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", wheelhouse, ".", cwd=source)
    (wheel,) = wheelhouse.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    assert {name for name in packed if name.endswith(".py")} == python_files()
    assert any(name.endswith("licenses/LICENSE") for name in packed)
    assert data_files() <= packed
    run(*pip, "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=tmp_path)
    told = run(
        sys.executable, "-c",
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import compress, compress.kernels.norm, compress.runtime, compress.selection\n"
        "print(compress.__file__, compress.kernels.norm.__file__, compress.runtime.__file__)",
        cwd=tmp_path,
    )  # fmt: skip
    assert all(path.startswith(str(target)) for path in told.split())


@pytest.mark.slow
def test_source_archive_builds_the_same_wheel(source: Path, tmp_path: Path) -> None:
    """In an archive the links are plain folders; a wheel built from it holds the same modules."""
    build = "import setuptools.build_meta as b; print(b.build_{}({!r}))"
    run(sys.executable, "-c", build.format("sdist", str(tmp_path)), cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", build.format("wheel", str(tmp_path)), cwd=unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed_wheel:
        names = set(packed_wheel.namelist())
    assert {name for name in names if name.endswith(".py")} == python_files()
    assert data_files() <= names


def pins() -> dict[str, Version]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pairs = [line.split("==") for line in lines if line]
    assert all(len(pair) == 2 for pair in pairs), "constraints.txt holds exact pins only"
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    pinned = pins()
    for requirement in requirements("dependencies") + requirements("dev"):
        name = canonicalize_name(requirement.name)
        if name != "setuptools":
            assert name in pinned, f"constraints.txt does not pin {name}"
            assert pinned[name] in requirement.specifier, f"constraints.txt pins {name} outside {requirement.specifier}"


def test_torch_is_pinned_to_one_release_without_a_local_part() -> None:
    """`torch==2.13.0` takes a CPU wheel where one is at hand, and the index's otherwise; `+cpu` would fail there."""
    assert str(pins()["torch"]) == "2.13.0"


def test_base_install_stays_small() -> None:
    """Harnesses and servers are extras."""
    base = {canonicalize_name(requirement.name) for requirement in requirements("dependencies")}
    assert "torch" in base
    assert not base & {"datasets", "lm-eval", "fastapi", "accelerate", "triton", "compressed-tensors", "vllm"}


def test_ci_script_can_run() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    run("bash", "-n", script, cwd=ROOT)
    assert re.search(r"^set -euo pipefail$", script.read_text(), re.MULTILINE)


@pytest.mark.parametrize("target", ["demo", "test", "check"])
def test_make_targets_install_what_they_need_first(target: str) -> None:
    """A dry run of make on a tree without an environment: venv, then pip with the constraints, then the work."""
    shown = run("make", "--dry-run", "--always-make", target, "VENV=/nonexistent/.venv", cwd=ROOT)
    venv, install = shown.index("-m venv"), shown.index("-c constraints.txt")
    work = {"demo": "compress run recipes/", "test": "-m pytest", "check": "ruff check"}[target]
    assert venv < install < shown.index(work)
    assert ("[dev]" in shown) == (target != "demo")
