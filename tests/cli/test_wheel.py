"""The wheel that `.ci/wheel` builds runs in a clean environment without a compiler, installed by pip and by uv."""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.command import ROOT
from tests.support.patience import HANG

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # a compiler works, on a machine that may be busy
    pytest.mark.skipif(
        importlib.util.find_spec("scikit_build_core") is None or shutil.which("c++") is None,
        reason="needs scikit-build-core and a C++ compiler to build the wheel",
    ),
]
SCRIPT = """
import torch, shardwell
model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU()) for _ in range(2)])
config = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}, "steps_per_print": 2}
engine, *_ = shardwell.initialize(model=model, config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 16)).square().mean())
    engine.step()
print("ran", shardwell.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    quickly = "--config-settings=cmake.define.SHARDWELL_OPTIMIZATION=-O0"  # the same files, in a quarter of the time
    command = ["bash", str(ROOT / ".ci" / "wheel"), str(folder), "--no-build-isolation", quickly]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    assert "manylinux" in found.name or "no manylinux tag: " in done.stderr
    return found


def clean_environment(folder: Path) -> tuple[Path, dict[str, str]]:
    """A new virtual environment in which torch and the other requirements can be imported, but not this shardwell.

    Installing torch anew would take an index and minutes. Folders in a .pth file are not searched for .pth files, which
    is how an editable shardwell would come along.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=HANG)
    (packages,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("-packages") and Path(path).is_dir()]
    (packages / "requirements.pth").write_text("\n".join(dict.fromkeys([*others, *site.getsitepackages()])))
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return folder / "bin", {**variables, "PATH": str(folder / "bin"), "SHARDWELL_DEVICE": "cpu", "NO_COLOR": "1"}


def test_the_wheel_has_the_library_and_all_files_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert any(name.startswith("shardwell/kernels/") and name.endswith(".so") for name in names)
    source = ROOT / "src"
    wanted = {str(path.relative_to(source)) for path in (source / "shardwell").rglob("*.py")}
    assert wanted | {"shardwell/py.typed", "shardwell/train/harbour.txt"} <= names


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_installed_wheel_works(wheel: Path, tmp_path: Path, installer: str) -> None:
    programs, environment = clean_environment(tmp_path / "clean")
    python = str(programs / "python")
    if installer == "uv":
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if uv is None:
            pytest.skip("uv is not installed")
        install = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python, str(wheel)]
    else:
        pip = [sys.executable, "-m", "pip", "--python", python]
        install = [*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)]
    subprocess.run(install, env=environment, check=True, timeout=HANG)
    assert shutil.which("c++", path=environment["PATH"]) is None
    (tmp_path / "train.py").write_text(SCRIPT)
    shardwell = str(programs / "shardwell")

    def run(*words: str) -> str:
        done = subprocess.run(
            [shardwell, *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=HANG
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    if installer == "uv":  # which installs the same files
        (packages,) = (tmp_path / "clean").glob("lib/python*/site-packages")
        files = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("shardwell/")]
        assert all((packages / name).exists() for name in files)
        assert "compiled, " in run("doctor")
        return
    printed = run("run", "-n", "2", "train.py")
    assert printed.count(f"ran {tmp_path / 'clean'}") == 2
    assert "step 2  loss" in printed
