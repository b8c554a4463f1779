"""The ways in to DeepSpeed's names, their order against clients, and the processes that inherit them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.as_deepspeed import run_python

WAY_IN = ("-m", "shardwell.compat.deepspeed")
TOO_LATE = {
    "accelerate": "import accelerate",
    "transformers": "import transformers.integrations.deepspeed",
    "trl": "import trl.trainer.utils",
    "lightning": "from lightning.pytorch.strategies import DeepSpeedStrategy\nimport lightning.fabric.strategies.deepspeed "
    "as d\nbool(d._DEEPSPEED_AVAILABLE)",
}


@pytest.mark.parametrize("client", ["accelerate", "transformers", "lightning"])
def test_after_a_client_it_refuses_with_the_right_order(client: str, tmp_path: Path) -> None:
    done = run_python("-c", f"{TOO_LATE[client]}\nimport shardwell.compat.deepspeed", cwd=tmp_path)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "comes too late" in last
    assert client in last
    assert "import shardwell.compat.deepspeed` at the top" in last


def test_before_a_client_it_is_found_by_it(tmp_path: Path) -> None:
    script = (
        "import shardwell.compat.deepspeed\n"
        "from accelerate.utils import DummyOptim, DeepSpeedEngineWrapper, is_deepspeed_available\n"
        "from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_available as second\n"
        "from accelerate.utils.deepspeed import HfDeepSpeedConfig as Base\n"
        "from lightning.fabric.strategies.deepspeed import _DEEPSPEED_AVAILABLE, _DEEPSPEED_GREATER_EQUAL_0_16 as new\n"
        "print(is_deepspeed_available(), second(), issubclass(HfDeepSpeedConfig, Base), bool(_DEEPSPEED_AVAILABLE), "
        "bool(new))"
    )
    done = run_python("-c", script, cwd=tmp_path)
    assert done.stdout.split() == ["True"] * 5, done.stderr


def test_lightning_may_come_before_as_long_as_it_has_not_looked(tmp_path: Path) -> None:
    done = run_python("-c", "import lightning.fabric\nimport shardwell.compat.deepspeed\nimport deepspeed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_real_deepspeed_is_named_and_not_used(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.16.0'")
    metadata = tmp_path / "deepspeed-0.16.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.0\n")
    words = "import shardwell.compat.deepspeed, deepspeed, importlib.metadata as m; print(deepspeed.__version__, m.version('deepspeed'))"
    done = run_python("-c", words, cwd=tmp_path)
    assert done.stdout.count("shardwell") == 2
    [line] = [line for line in done.stderr.splitlines() if "0.16.0" in line]
    assert "means shardwell" in line
    assert "is not used" in line
    late = run_python("-c", "import deepspeed, shardwell.compat.deepspeed", cwd=tmp_path)
    assert "DeepSpeed 0.16.0 itself is imported already" in late.stderr.splitlines()[-1]


def test_a_script_and_a_module_are_run_as_main_with_their_arguments(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("here = 1")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside, deepspeed\nif __name__ == '__main__':\n    print(sys.argv[1:], deepspeed.__version__)")
    for way in ([script], ["-m", "script"]):
        done = run_python(*WAY_IN, *way, "--flag", "-m", cwd=tmp_path)
        assert done.stdout.startswith("['--flag', '-m'] 0.19.8+shardwell."), done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [(["nothing.py"], "there is no script 'nothing.py'"), (["-m"], "needs the name of a module"), (["--what"], "is no script")],
)
def test_what_cannot_be_run_is_one_line(args: list[str], words: str, tmp_path: Path) -> None:
    done = run_python(*WAY_IN, *args, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_children_inherit_it_and_the_users_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.users_own = 'ran'")
    script = tmp_path / "script.py"
    look = "import deepspeed, importlib.metadata as m; print(m.version('deepspeed'), users_own)"
    script.write_text(
        "import subprocess, sys, multiprocessing\n"
        "def child():\n    import deepspeed\n    print(deepspeed.__version__, users_own, flush=True)\n"
        "if __name__ == '__main__':\n"
        f"    subprocess.run([sys.executable, '-c', {look!r}], check=True)\n"
        "    one = multiprocessing.get_context('spawn').Process(target=child)\n    one.start()\n    one.join()\n"
    )
    done = run_python(*WAY_IN, script, cwd=tmp_path, PYTHONPATH=_with(tmp_path / "site"))
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    assert all(line.startswith("0.19.8+shardwell.") and line.endswith(" ran") for line in lines)


def test_children_of_an_import_do_not_inherit(tmp_path: Path) -> None:
    look = "import importlib.util as u; print(u.find_spec('deepspeed'))"
    words = f"import subprocess, sys, shardwell.compat.deepspeed\nsubprocess.run([sys.executable, '-c', {look!r}])"
    assert run_python("-c", words, cwd=tmp_path).stdout.strip() == "None"


def _with(folder: Path) -> str:
    from tests.support.command import environment

    return f"{folder}:{environment()['PYTHONPATH']}"
