"""The table of DeepSpeed's names: every row is an object or a refusal in words, and the modules follow from it."""

from __future__ import annotations

from pathlib import Path

from tests.support.as_deepspeed import MARK, results, run_python

LOOK = f"""
import json
import shardwell.compat.deepspeed
from shardwell.compat.deepspeed_api import names
from shardwell.compat.deepspeed_api.refusal import UnsupportedNameError
from shardwell.compat.deepspeed_api.rows import Absent, Refused

broken, refused, found = [], 0, 0
for module, name, row in names.rows():
    if name == "*":  # refused as a whole: any name of it can be imported
        module, name = f"{{module}}.anything", "Thing"
    exec(f"import {{module}}")
    try:
        value = getattr(__import__("sys").modules[module], name)
    except AttributeError as error:
        if not isinstance(row, Absent) or row.reason not in str(error):
            broken.append([module, name, str(error)])
        continue
    if not isinstance(row, Refused):
        found += 1
        continue
    refused += 1
    assert not isinstance(object(), value)
    for use in (lambda: value(1), lambda: type("Child", (value,), {{}})(1)):
        try:
            use()
            broken.append([module, name, "could be used"])
        except UnsupportedNameError as error:
            if row.reason not in str(error) or name not in str(error):
                broken.append([module, name, str(error)])
    if hasattr(value, "attribute"):
        broken.append([module, name, "has attributes"])
print({MARK!r} + json.dumps([broken, found, refused]))
"""

IMPORTS = f"""
import importlib.metadata, importlib.util, json, sys
import shardwell.compat.deepspeed
import deepspeed
import deepspeed.zero
from deepspeed.runtime import zero
from deepspeed import comm as dist, DeepSpeedEngine, checkpointing
from deepspeed.utils import *
from deepspeed.ops.adam import DeepSpeedCPUAdam

seen = {{
    "version": deepspeed.__version__,
    "metadata": [importlib.metadata.version("deepspeed"), importlib.metadata.metadata("deepspeed")["Name"]],
    "spec": importlib.util.find_spec("deepspeed") is not None,
    "nothing": importlib.util.find_spec("deepspeed.no_such_module") is None,
    "one zero": deepspeed.zero is zero and sys.modules["deepspeed.zero"] is zero,
    "dist": deepspeed.dist is dist,
    "star": callable(safe_get_full_grad) and RepeatingLoader.__name__ == "RepeatingLoader",
    "engine": DeepSpeedEngine is deepspeed.runtime.engine.DeepSpeedEngine,
    "dir": {{"zero", "initialize", "ops"}} <= set(dir(deepspeed)),
    "files": [one for one in importlib.metadata.distributions() if one.metadata["Name"] == "deepspeed"] == [],
}}
try:
    deepspeed.no_such_name
except AttributeError as error:
    seen["unknown"] = str(error)
try:
    import deepspeed.no_such_module
except ModuleNotFoundError as error:
    seen["unknown module"] = str(error)
print({MARK!r} + json.dumps(seen))
"""


def test_every_row_is_an_object_or_refuses_in_words(tmp_path: Path) -> None:
    done = run_python("-c", LOOK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [(broken, found, refused)] = results(done.stdout)
    assert broken == []
    assert found > 300
    assert refused > 60


def test_modules_behave_as_installed_ones_do(tmp_path: Path) -> None:
    done = run_python("-c", IMPORTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [seen] = results(done.stdout)
    assert seen["version"].startswith("0.19.8+shardwell.")
    assert seen["metadata"] == [seen["version"], "deepspeed"]
    assert "no_such_name" in seen["unknown"]
    assert "no_such_module" in seen["unknown module"]
    others = {"version", "metadata", "unknown", "unknown module"}
    assert [name for name, value in seen.items() if name not in others and value is not True] == []
