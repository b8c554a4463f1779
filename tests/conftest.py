from __future__ import annotations

import gc
import os
import sys

# Some virtual machines announce AMX and then refuse its instructions, which kills any bf16 matrix product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# Torch asks a name server for the name of both ends of each connection to a store, and everyone who uses the store
# waits: five seconds where an answer is lost. No test needs names that are not in the machine's own table.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or torch warns that there is no name

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import leaks, preloaded
from tests.support.fast import fast_cases, long_files_first, together
from tests.support.ranks import Ranks

sys.dont_write_bytecode = False  # a run starts hundreds of processes: sources are compiled once
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
gc.disable()  # until tests run: what is imported stays, and would be looked at again and again
torch.set_num_threads(1)
leaks.watch()
if not torch.cuda.is_available():  # where tests may use it, each process asks the driver itself
    preloaded.install()


@pytest.fixture(autouse=True)
def nothing_is_dropped() -> Iterator[None]:
    """Work that nobody waited for, and memory that was not given back, fail the test (in ranks, their job)."""
    leaks.said()
    yield
    assert not (words := leaks.said()), "\n".join(words)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "give every engine in ranks a mesh of (REPLICAS, ranks / REPLICAS); with 1, nothing may change"
    parser.addoption("--mesh", type=int, metavar="REPLICAS", help=words)
    parser.addoption(
        "--fast", action="store_true", help="leave out what is slow, and all cases but one of tests in ranks"
    )


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Ranks]:
    pool = Ranks(pytestconfig.getoption("--mesh"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def preloaded_processes() -> Iterator[None]:
    """What tests of the module start without an environment of their own comes with torch loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(preloaded.VARIABLE, "1")
        yield


@pytest.fixture(scope="session")
def nccl_ranks() -> Iterator[Ranks]:
    """Ranks on NCCL that share one GPU."""
    pool = Ranks(backend="nccl")
    yield pool
    pool.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        chosen = fast_cases(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    items[:] = long_files_first(items)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, let one worker have all files of libraries that take long to import.

    Files begin in the order of the items: xdist's own order would begin those with a single long test last.
    """
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return together(super()._split_scope(nodeid))

    return Files(config, log)


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()
