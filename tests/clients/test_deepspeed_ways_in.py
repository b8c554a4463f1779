"""The ways in to DeepSpeed's names, their order against clients, and the processes that inherit them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.as_deepspeed import run_python

WAY_IN = ("-m", "shardwell.compat.deepspeed")
TOO_LATE = {
    "accelerate": "import accelerate",
    "transformers": "import transformers.integrations.deepspeed",
    "lightning": "import lightning.fabric.strategies.deepspeed as d\nbool(d._DEEPSPEED_AVAILABLE)",
}


@pytest.mark.slow
@pytest.mark.parametrize("client", ["accelerate", "transformers", "lightning"])
def test_after_a_client_it_refuses_with_the_right_order(client: str, tmp_path: Path) -> None:
    done = run_python("-c", f"{TOO_LATE[client]}\nimport shardwell.compat.deepspeed", cwd=tmp_path)
    assert done.returncode != 0
    last = done.stderr.splitlines()[-1]
    assert "comes too late" in last
    assert client in last
    assert "import shardwell.compat.deepspeed` at the top" in last


@pytest.mark.slow
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


@pytest.mark.slow
def test_lightning_may_come_before_as_long_as_it_has_not_looked(tmp_path: Path) -> None:
    done = run_python(
        "-c", "import lightning.fabric\nimport shardwell.compat.deepspeed\nimport deepspeed", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr


def test_a_real_deepspeed_is_named_and_not_used(tmp_path: Path) -> None:
    package = tmp_path / "deepspeed"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.16.0'")
    metadata = tmp_path / "deepspeed-0.16.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.16.0\n")
    words = (
        "import shardwell.compat.deepspeed, deepspeed, importlib.metadata as m\n"
        "print(deepspeed.__version__, m.version('deepspeed'))"
    )
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
    script.write_text(
        "import sys, beside, deepspeed\nif __name__ == '__main__':\n    print(sys.argv[1:], deepspeed.__version__)"
    )
    for way in ([script], ["-m", "script"]):
        done = run_python(*WAY_IN, *way, "--flag", "-m", cwd=tmp_path)
        assert done.stdout.startswith("['--flag', '-m'] 0.19.8+shardwell."), done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing.py"], "there is no script 'nothing.py'"),
        (["-m"], "needs the name of a module"),
        (["--what"], "is no script"),
    ],
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


def test_programs_find_the_command_of_the_launcher(tmp_path: Path) -> None:
    """`accelerate launch` starts it by its name for several machines."""
    command = ["deepspeed", "--no_local_rank", "--launcher", "pdsh", "train.py"]
    script = tmp_path / "script.py"
    script.write_text(f"import subprocess, sys\nsys.exit(subprocess.run({command!r}).returncode)")
    done = run_python(*WAY_IN, script, cwd=tmp_path)
    assert done.returncode == 2
    assert "run `shardwell run` once on each node" in done.stderr
    assert "Traceback" not in done.stderr


def test_children_of_an_import_do_not_inherit(tmp_path: Path) -> None:
    look = "import importlib.util as u; print(u.find_spec('deepspeed'))"
    words = f"import subprocess, sys, shardwell.compat.deepspeed\nsubprocess.run([sys.executable, '-c', {look!r}])"
    assert run_python("-c", words, cwd=tmp_path).stdout.strip() == "None"


@pytest.mark.slow
def test_accelerate_launch_gets_two_ranks_of_gloo_on_a_cpu(tmp_path: Path) -> None:
    """Without a backend each rank would take itself for the only one, and train on all data."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))\n"
        "data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(128.0).view(16, 8)), 2)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "model, optimizer, data = accelerator.prepare(model, optimizer, data)\n"
        "seen = 0\n"
        "for (x,) in data:\n"
        "    seen += len(x)\n"
        "    accelerator.backward(model(x).square().mean())\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "weights = accelerator.get_state_dict(model)\n"
        "kind = str(accelerator.distributed_type)\n"
        "accelerator.print(type(model).__name__, accelerator.num_processes, kind, seen, len(weights), "
        "torch.distributed.get_backend(), model.zero_optimization_stage(), model.global_steps)\n"
        "accelerator.end_training()\n"
    )
    launch = ("-m", "accelerate.commands.launch", "--use_deepspeed", "--zero_stage", "3", "--num_processes", "2")
    more = ("--zero3_save_16bit_model", "true", "--mixed_precision", "no", "--main_process_port", "0")
    done = run_python(*WAY_IN, *launch, *more, script, cwd=tmp_path, libraries=True)
    assert "DeepSpeedEngine 2 DistributedType.DEEPSPEED 8 4 gloo 3 4" in done.stdout, done.stderr[-4000:]


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (["--num_gpus", "4"], ["-n", "4", "--pass-local-rank"]),
        (["--num_gpus=2", "--no_local_rank", "--module"], ["-n", "2", "-m"]),
        (
            ["--num_nodes", "2", "--num_gpus", "8", "--master_addr", "one", "--master_port", "3"],
            ["-n", "8", "--nnodes", "2", "--master-addr", "one", "--master-port", "3", "--pass-local-rank"],
        ),
        (["--hostfile", "hosts"], ["-n", "4", "--nnodes", "2", "--master-addr", "one", "--master-port", "29500"]),
        (["--hostfile", "hosts", "--include", "two:1,3"], ["-n", "2", "--pass-local-rank"]),
        (["--hostfile", "hosts", "--include", "one:0@two:1,3", "--node_rank", "1"], ["-n", "2", "--nnodes", "2"]),
        (["--hostfile", "hosts", "--exclude", "two:1", "--no_ssh", "--node_rank=1"], ["-n", "3", "--nnodes", "2"]),
    ],
)
def test_the_launchers_options_become_those_of_run(options: list[str], command: list[str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two nodes\none slots=4\n\ntwo slots=4\n")
    words = (
        "from shardwell.compat.deepspeed_api import launcher\nimport sys\n"
        "print(launcher.command_of(launcher._parser().parse_args(sys.argv[1:])))"
    )
    done = run_python("-c", words, *options, "script.py", "--deepspeed", "--deepspeed_config", "f.json", cwd=tmp_path)
    found = ast.literal_eval(done.stdout)
    assert found[:2] == ["run", "--as-deepspeed"]
    assert found[2 : 2 + len(command)] == command
    assert found[-4:] == ["script.py", "--deepspeed", "--deepspeed_config", "f.json"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--launcher", "pdsh"], "run `shardwell run` once on each node"),
        (["--autotuning", "run"], "no autotuner"),
        (["--bind_cores_to_rank"], "numactl"),
        (["--num_nodes", "2"], "--master_addr"),
        (["--hostfile", "none"], "no such file"),
        (["--include", "localhost:0", "--num_gpus", "2"], "keep one kind"),
        (["--hostfile", "hosts", "--node_rank", "2"], "the hostfile has 2 host(s)"),
    ],
)
def test_options_without_a_counterpart_are_refused_with_the_way_out(
    options: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("one slots=4\ntwo slots=4\n")
    done = run_python(*WAY_IN, "--launch", *options, "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def _with(folder: Path) -> str:
    from tests.support.command import environment

    return f"{folder}:{environment()['PYTHONPATH']}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("deepspeed.checkpoint.ds_to_universal", "--input_folder"),
        ("deepspeed.utils.zero_to_fp32", "--exclude_frozen_parameters"),
        ("deepspeed.launcher.runner", "--num_gpus"),
    ],
)
def test_modules_of_deepspeed_that_are_programs_run(tmp_path: Path, module: str, words: str) -> None:
    done = run_python(*WAY_IN, "-m", module, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout.replace("_ ", "_")


def test_a_module_of_deepspeed_that_is_no_program_says_so(tmp_path: Path) -> None:
    done = run_python(*WAY_IN, "-m", "deepspeed.utils.groups", cwd=tmp_path)
    assert done.returncode != 0
    assert "cannot be directly executed" in done.stderr
