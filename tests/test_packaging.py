"""The wheel holds the whole package, and finds its configs without the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from actorlearner.config import config_dir

ROOT = Path(__file__).resolve().parents[1]


def files_under(directory: Path) -> set[str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)) for path in files if "__pycache__" not in path.parts}


def build(source: Path, target: str, into: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    result = subprocess.run(
        command, cwd=source, capture_output=True, text=True, timeout=50, check=False
    )
    assert result.returncode == 0, result.stderr
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the source distribution, so that both are known to be complete."""
    directory = tmp_path_factory.mktemp("packaging")
    with tarfile.open(build(ROOT, "sdist", directory / "sdist")) as archive:
        archive.extractall(directory / "source", filter="data")
    (source,) = (directory / "source").iterdir()
    with zipfile.ZipFile(build(source, "wheel", directory / "wheel")) as archive:
        archive.extractall(directory / "unpacked")
    return directory / "unpacked"


def test_the_wheel_holds_the_package_and_its_configs(unpacked_wheel: Path) -> None:
    package = files_under(ROOT / "actorlearner")
    configs = {str(Path("configs") / name) for name in files_under(ROOT / "configs")}
    assert "py.typed" in package
    assert any(name.endswith(".yaml") for name in configs)
    assert files_under(unpacked_wheel / "actorlearner") == package | configs


def test_the_wheel_holds_nothing_else(unpacked_wheel: Path) -> None:
    names = {path.name.partition("-")[0] for path in unpacked_wheel.iterdir()}
    assert names == {"actorlearner"}
    (metadata,) = unpacked_wheel.glob("actorlearner-*.dist-info")
    assert (metadata / "licenses" / "LICENSE").is_file()


def test_config_dir_of_a_wheel_is_inside_the_package(unpacked_wheel: Path, tmp_path: Path) -> None:
    # PYTHONPATH stands before what an editable install adds, so the wheel's modules are taken.
    result = subprocess.run(
        [sys.executable, "-c", "from actorlearner.config import config_dir; print(config_dir())"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked_wheel)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = Path(result.stdout.strip())
    assert found == unpacked_wheel / "actorlearner" / "configs"
    assert files_under(found)


def test_config_dir_of_a_checkout_is_at_its_top_level() -> None:
    assert config_dir() == ROOT / "configs"
    assert config_dir().is_dir()
