"""A process that is forked with torch loaded is, to the test that starts it, the one that Python itself would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import preloaded
from tests.support.command import arguments, environment
from tests.support.patience import HANG

# What each prints must not depend on how it was started.
PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.orig_argv[1:], sys.path[0], __name__, sys.executable)",
    "place": "import os; print(os.getcwd(), os.environ['MARK'], os.getenv('GONE'))",
    "parent": "import os; print(os.getppid(), os.getpgid(0) == os.getpgid(os.getppid()), os.getsid(0))",
    "files": "import os; print(sorted(os.listdir('/proc/self/fd')))",
    "signals": "import signal as s; print([s.getsignal(n) for n in (s.SIGINT, s.SIGTERM, s.SIGPIPE, s.SIGCHLD)])",
    "streams": "import sys; print([(s.encoding, s.errors, s.mode) for s in (sys.stdin, sys.stdout, sys.stderr)])",
    "input": "import sys; print(sys.stdin.read())",
    "bytes": "import sys; sys.stdout.buffer.write(b'\\x00 bytes'); print('and text')",
    "exception": "def f():\n    raise ValueError('wrong')\nf()",
    "exception at exit": "import atexit, sys; atexit.register(lambda: print(repr(sys.last_value))); raise KeyError(1)",
    "no program": "def",
    "exit code": "import sys; sys.exit(7)",
    "exit with words": "import sys; sys.exit('no')",
    "abort": "import os; os.abort()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "threads": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "at exit": "import atexit; atexit.register(print, 'bye'); print('said')",
    "last words": "class A:\n    def __del__(self): print('gone')\na = A()",
    "temporary": "import tempfile; print(tempfile.gettempdir())",
    "warnings": "import sys, warnings; warnings.warn('so'); print(sys.warnoptions)",
    "threads of torch": "import torch; print(torch.get_num_threads(), torch.is_grad_enabled())",
}


def run(*args: str, is_preloaded: bool, cwd: Path, **more: Any) -> tuple[int, str, str]:
    env = {**environment(fresh=not is_preloaded), "MARK": "here", "TMPDIR": str(cwd), "OMP_NUM_THREADS": "1"}
    env.pop("GONE", None)
    command = [sys.executable, *args]
    done = subprocess.run(
        command, env={**env, **more}, cwd=cwd, capture_output=True, text=True, timeout=HANG, input="in"
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_text_sees_and_leaves_what_it_does_in_python_itself(name: str, tmp_path: Path) -> None:
    expected = run("-c", PROGRAMS[name], "an argument", is_preloaded=False, cwd=tmp_path)
    code, out, words = run("-c", PROGRAMS[name], "an argument", is_preloaded=True, cwd=tmp_path)
    assert (code, out) == expected[:2]
    if name != "interrupted":  # its traceback has frames of the server
        assert words == expected[2]


def test_a_script_and_a_module_are_run_as_python_runs_them(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint(__name__, __file__, sys.argv, sys.path[0], sys.modules['__main__'].__dict__ is globals())"
    )
    for args in ([str(script), "one"], ["script.py", "one"], ["-m", "script", "one"]):
        assert run(*args, is_preloaded=True, cwd=tmp_path) == run(*args, is_preloaded=False, cwd=tmp_path)


def test_ranks_of_torchrun_are_forked_too(tmp_path: Path) -> None:
    """It starts them with `-u`, and Lightning with a variable of torch's that is read when it is asked for."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv, sys.stdout.write_through, 'torch' in sys.modules)")
    variables = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    found = run("-u", str(script), "one", is_preloaded=True, cwd=tmp_path, **variables)
    assert found == (0, f"{[str(script), 'one']} True True\n", "")


def test_filters_of_warnings_are_those_of_the_environment(tmp_path: Path) -> None:
    """Benchmarks set them, and their ranks would import torch anew."""
    look = "import sys, warnings; warnings.warn('so'); print(sys.warnoptions, 'torch' in sys.modules)"
    for filters in ("ignore", "error::UserWarning,ignore"):
        expected = run("-c", look, is_preloaded=False, cwd=tmp_path, PYTHONWARNINGS=filters)
        code, out, words = run("-c", look, is_preloaded=True, cwd=tmp_path, PYTHONWARNINGS=filters)
        assert (code, out.replace("True", "False"), words) == expected
    assert "True" in run("-c", look, is_preloaded=True, cwd=tmp_path, PYTHONWARNINGS="ignore")[1]


def test_torch_is_there_before_the_program_and_only_where_it_was_asked_for(tmp_path: Path) -> None:
    look = "import sys; print('torch' in sys.modules)"
    assert run("-c", look, is_preloaded=True, cwd=tmp_path)[1] == "True\n"
    assert run("-c", look, is_preloaded=False, cwd=tmp_path)[1] == "False\n"
    assert run("-c", look, is_preloaded=True, cwd=tmp_path, PYTHONHASHSEED="3")[1] == "False\n"  # read by Python itself
    (tmp_path / "sitecustomize.py").touch()
    assert run("-c", look, is_preloaded=True, cwd=tmp_path, PYTHONPATH=str(tmp_path))[1] == "False\n"


def test_processes_draw_different_numbers_and_have_two_seeds_of_hashes(tmp_path: Path) -> None:
    words = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item(), hash('a'))"
    found = [run("-c", words, is_preloaded=True, cwd=tmp_path)[1].split() for _ in range(4)]
    numbers, (own, other, *_) = [{draw[kind] for draw in found} for kind in range(3)], [draw[3] for draw in found]
    assert [len(kind) for kind in numbers] == [4] * 3
    assert own != other


def test_a_process_is_signalled_and_waited_for_as_any_child(tmp_path: Path) -> None:
    words = "import time\nprint('begun', flush=True)\ntime.sleep(60)"
    command = [sys.executable, "-c", words]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, start_new_session=True) as one:
        assert os.getpgid(one.pid) == one.pid
        assert one.stdout is not None
        assert one.stdout.readline() == b"begun\n"
        assert one.poll() is None
        os.killpg(one.pid, signal.SIGTERM)
        assert one.wait(timeout=HANG) == -signal.SIGTERM


def test_ranks_of_a_launcher_are_its_children_and_have_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, os\nprint('torch' in sys.modules, os.getppid() == int(sys.argv[1]) or os.getppid())")
    command = arguments("run", "-n", "2", script)
    with subprocess.Popen([*command, "0"], env=environment(), stdout=subprocess.PIPE, text=True) as launcher:
        out, _ = launcher.communicate(timeout=HANG)
    assert out.splitlines() == [f"True {launcher.pid}"] * 2


def test_a_command_whose_server_was_killed_starts_python_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(preloaded.Server):
        def fork(self, request: dict[str, Any], files: list[int]) -> int:
            raise EOFError

    killed = [Killed(one._connection, one.early) for one in preloaded._servers["1"]]
    monkeypatch.setattr(preloaded, "_servers", {"1": killed})
    monkeypatch.setattr(preloaded, "_can_start_servers", False)
    assert run("-c", "import sys; print('torch' in sys.modules)", is_preloaded=True, cwd=tmp_path)[1] == "False\n"
