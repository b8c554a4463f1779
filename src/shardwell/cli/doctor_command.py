"""`shardwell doctor`: reports this machine's hardware and software, problems, and their remedies."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwell.version import __version__

_OLDEST_TORCH = (2, 11)
_WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
_SMALL_SHM = 1 << 30
_DISK_BYTES = 256 << 20
_MARKS = {"broken": "[bold red]broken[/bold red]", "warning": "[yellow]warning[/yellow]", "note": "[cyan]note[/cyan]"}


@dataclass(frozen=True)
class Finding:
    """A problem that was found, and its remedy."""

    level: str  # "broken": training cannot work; "warning": it may be slow or fail later; "note": good to know
    found: str
    remedy: str


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    path: Annotated[
        Path | None,
        typer.Option("--disk", metavar="PATH", help="Measure reads and writes in this directory (256 MiB)."),
    ] = None,
) -> None:
    """Check this machine. Exit code 0 unless something that training needs is broken."""
    sections = {
        "versions": versions(),
        "devices": devices(),
        "backends": backends(),
        "bf16_on_cpu": bf16_on_cpu(),
        "kernels": kernels(),
        "disk": disk(path),
    }
    findings = check(sections)
    broken = any(finding.level == "broken" for finding in findings)
    if as_json:
        typer.echo(json.dumps({**sections, "findings": [asdict(f) for f in findings], "ok": not broken}, indent=2))
    else:
        _show(sections, findings)
    if broken:
        raise typer.Exit(1)


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that shardwell uses; None for those that are not installed."""
    import torch

    found: dict[str, str | None] = {"shardwell": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "pydantic", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    return found


def devices() -> dict[str, Any]:
    """Return the processor, its memory and the GPUs."""
    import torch

    from shardwell.memory.limits import all_host_bytes, num_cores

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            gpus.append({"name": properties.name, "memory": properties.total_memory})
    return {
        "cpu": _cpu_model(),
        "cores": num_cores(),
        "memory": int(all_host_bytes()),
        "gpus": gpus,
    }


def backends() -> dict[str, str]:
    """Return 'works', 'available' (built in, not tried), 'missing' or an error for each process-group backend."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return {"gloo": "missing", "nccl": "missing"}
    nccl = "missing"
    if dist.is_nccl_available():
        nccl = _try_backend("nccl", "cuda") if torch.cuda.is_available() else "available"
    return {"gloo": _try_backend("gloo", "cpu"), "nccl": nccl}


def _try_backend(name: str, device: str) -> str:
    """Start a process group of one rank in this process, and all-reduce over it."""
    import torch
    import torch.distributed as dist

    try:
        with tempfile.TemporaryDirectory(prefix="shardwell-") as folder:
            dist.init_process_group(name, init_method=f"file://{folder}/store", rank=0, world_size=1)
            try:
                value = torch.ones(3, device=device)
                dist.all_reduce(value)
                return "works" if value.tolist() == [1.0, 1.0, 1.0] else f"gives {value.tolist()} for a sum of ones"
            finally:
                dist.destroy_process_group()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def bf16_on_cpu() -> bool:
    """Tell whether a matrix product in bfloat16 works on the CPU, tried in its own process.

    Virtual machines may announce instructions (AMX) that they do not support.
    """
    product = "import torch; a = torch.ones(64, 64).bfloat16(); torch.nn.functional.linear(a, a)"
    return subprocess.run([sys.executable, "-c", product], capture_output=True).returncode == 0


def kernels() -> dict[str, Any]:
    """Return whether the optimizer kernels for host memory are compiled, and for which instruction set."""
    from shardwell import kernels

    return asdict(kernels.describe())


def disk(path: Path | None) -> dict[str, Any]:
    """Return the I/O engines that work; for a directory also their speed, which is measured by writing to it."""
    from shardwell.offload.disk_queue import AioSettings, choose, fastest, measure, unusable

    reasons = unusable()
    found: dict[str, Any] = {"unusable": reasons, "path": None if path is None else str(path)}
    if path is None:
        return found
    engines = [name for name in ("io_uring", "threads") if name not in reasons] or ["python"]
    if "SHARDWELL_IO" in os.environ:
        engines = [choose([path], AioSettings()).engine]
    speeds = measure([path], AioSettings(), _DISK_BYTES, engines)
    return {**found, "engine": fastest(speeds), "speeds": speeds}


def check(sections: dict[str, Any]) -> list[Finding]:
    """Return the problems of this machine: requirements of training that are not met."""
    findings = [*_check_torch(sections["versions"]), *_check_backends(sections), *_check_memory()]
    order = list(_MARKS)
    return sorted(findings, key=lambda finding: order.index(finding.level))


def _check_torch(found: dict[str, str | None]) -> list[Finding]:
    findings = []
    words = (found["torch"] or "0.0").split("+")[0].split(".")[:2]
    if tuple(int(word) for word in words if word.isdigit()) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        findings.append(Finding("broken", f"torch {found['torch']}", f"pip install 'torch>={oldest}'"))
    if found["triton"] is None:
        findings.append(Finding("note", "no triton", "not needed to train; torch.compile on a GPU would need it"))
    return findings


def _check_backends(sections: dict[str, Any]) -> list[Finding]:
    findings = []
    gloo, nccl = sections["backends"]["gloo"], sections["backends"]["nccl"]
    if gloo != "works":
        remedy = "CPU ranks need it: reinstall torch with distributed support, check the loopback interface"
        findings.append(Finding("broken", f"gloo: {gloo}", remedy))
    if not sections["devices"]["gpus"]:
        findings.append(Finding("note", "no CUDA device", "stages run on CPU ranks with gloo"))
    elif nccl != "works":
        remedy = "GPU ranks need it: install a CUDA build of torch, try NCCL_DEBUG=INFO"
        findings.append(Finding("broken", f"nccl: {nccl}", remedy))
    if not sections["bf16_on_cpu"]:
        remedy = f"for bf16 on CPU ranks: export {_WITHOUT_AMX}"
        findings.append(Finding("warning", "bfloat16 on this CPU crashes torch", remedy))
    if not sections["kernels"]["native"]:
        found = f"no compiled optimizer kernels: {sections['kernels']['reason']}"
        findings.append(Finding("note", found, "steps in host memory are the same, and slower"))
    return findings


def _check_memory() -> list[Finding]:
    from shardwell.memory.statistics import human

    findings = []
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < 1 << 30:
        remedy = "only InfiniBand needs more locked memory: ulimit -l unlimited"
        findings.append(Finding("note", f"memlock limit of {human(locked)}", remedy))
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < _SMALL_SHM:
        remedy = "loader workers and NCCL share memory there: docker run --shm-size=8g, or --ipc=host"
        findings.append(Finding("warning", f"{shared} holds only {human(size)}", remedy))
    return findings


def _cpu_model() -> str:
    """Return the processor's name from Linux, or from Python."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _disk_rows(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from shardwell.offload.disk_queue import told

    if found["path"] is None:
        reasons = found["unusable"]
        usable = [name for name in ("io_uring", "threads") if name not in reasons] or ["threads of Python"]
        why = "".join(f" ({name}: {reason})" for name, reason in list(reasons.items())[:1])
        yield "disk I/O", " or ".join(usable) + why + "; --disk PATH measures"
        return
    yield "disk I/O", f"{found['engine']}, in {found['path']}"
    for engine, speeds in found["speeds"].items():
        yield f"  {engine}", told(speeds)


def _show(sections: dict[str, Any], findings: list[Finding]) -> None:
    from shardwell.memory.statistics import human

    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in sections["versions"].items():
        table.add_row(name, value or "[dim]none[/dim]")
    machine = sections["devices"]
    table.add_row("cpu", escape(f"{machine['cpu']}, {machine['cores']} core(s), {human(machine['memory'])}"))
    for index, gpu in enumerate(machine["gpus"]):
        table.add_row(f"gpu {index}", escape(f"{gpu['name']}, {human(gpu['memory'])}"))
    for name, state in sections["backends"].items():
        table.add_row(name, "[green]works[/green]" if state == "works" else escape(state))
    kernels = sections["kernels"]
    table.add_row("kernels", f"compiled, {kernels['isa']}" if kernels["native"] else "torch operations")
    for name, text in _disk_rows(sections["disk"]):
        table.add_row(name, escape(text))
    console.print(table)
    for finding in findings:
        console.print(f"{_MARKS[finding.level]}: {escape(finding.found)}. {escape(finding.remedy)}", soft_wrap=True)
    if not any(finding.level == "broken" for finding in findings):
        console.print("[green]ready to train[/green]")
