"""The distribution: what is in wheel and sdist, and that the wheel works with what it asks for and no more.

Both are built, and the wheel is installed into an environment of its own. Nothing is downloaded: the packages
that it depends on are those of this environment, and only those, linked there one by one.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    return folder


def depends_on(wanted: list[str]) -> dict[str, Distribution]:
    """By name, the distributions that these requirements need, directly or not."""
    found: dict[str, Distribution] = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name in found or not applies:
            continue
        found[requirement.name] = distribution(requirement.name)
        wanted += found[requirement.name].requires or []
    return found


def link(of: Distribution, folder: Path) -> None:
    """Makes a distribution's packages importable from a folder, and nothing else of its own folder."""
    for name in {file.parts[0] for file in of.files or () if file.parts[0] not in ("..", "__pycache__")}:
        there = Path(str(of.locate_file(name)))
        if there.exists() and not (folder / name).exists():
            (folder / name).symlink_to(there)


def test_the_wheel_works_with_what_it_asks_for(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    environment = tmp_path / "environment"
    venv.create(environment)
    python = environment / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    install = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install)
    [info] = packages.glob("ecemb-*.dist-info")
    for needed in depends_on(list(Distribution.at(info).requires or ())).values():
        link(needed, packages)
    assert "No broken requirements" in run(sys.executable, "-m", "pip", "--python", python, "check")
    code = "import ecemb, os; print(ecemb.__version__, os.path.dirname(ecemb.__file__))"
    version, place = run(python, "-I", "-W", "ignore", "-c", code).split()
    assert Path(place) == packages / "ecemb"
    for command in ([python, "-I", "-m", "ecemb"], [python, "-I", python.with_name("ecemb")]):
        assert run(*command, "--version") == f"ecemb {version}\n"
    assert version == yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert f"ecemb-{version}" in wheel.name


def test_what_is_in_them(built: Path) -> None:
    [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {str(path.relative_to(ROOT)) for path in ROOT.glob("ecemb/**/*.py")}
    assert sources | {"ecemb/py.typed"} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"ecemb"}
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    baselines = {str(path.relative_to(ROOT)) for path in ROOT.glob("baselines/**/*.py")}
    assert (
        sources | baselines | {"LICENSE", "Makefile", "README.md", "docs/index.md", "tests/conftest.py"}
        <= inside
    )
    assert not any(name.startswith((".ci", ".venv", "build")) for name in inside)


def test_a_package_that_is_not_there_is_noticed() -> None:
    with pytest.raises(PackageNotFoundError):
        depends_on(["ecemb-needs-no-such-thing"])
