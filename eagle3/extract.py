"""The extraction stage: prepared samples through vLLM's prefill into shards.

The plan fixes which samples each shard holds before anything runs, so the set of finished shards is all the state
there is: a run that was killed goes on with the shards that are missing.
"""

import itertools
import math
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eagle3 import capture, engine, files, layers, prepared, shards, transfer, vocab
from eagle3.target import Target, check_same_target
from eagle3.watch import STATUS, Watch

if TYPE_CHECKING:
    from vllm import LLM

    Start = Callable[["Extraction"], LLM]
    Drive = Callable[["Extraction", list[int], Watch, Start], None]

SHARD_BYTES = 1 << 30
STEPS_AHEAD = 6  # engine steps' worth of tokens kept queued: each call to the worker takes one, two may come in a row
MAX_NUM_SEQS = 256  # short samples share a step up to this many
SHARDS_AT_HAND = 8  # filled side by side: the kernel lets one thread at a time write to a file
STATUS_EVERY_S = 1.0
WORKER = "custom_worker.HiddenStatesWorker"
DISK_MARGIN = 1.02  # file system overhead
NAMED_IN_FLIGHT = 20


@dataclass(frozen=True, kw_only=True)
class Options:
    """The flags of 02. `layer_ids` None means the EAGLE preset; `storage_dtype` is "auto" or "fp8"; `part` (i, n)
    means every n-th sample from the i-th on (from 1), in a folder of its own under `output_dir`."""

    model_path: Path
    prepared_data: Path
    output_dir: Path
    batch_size: int
    max_seq_len: int
    tp_size: int = 1
    gpu_memory_utilization: float = 0.9
    layer_ids: list[int] | None = None
    storage_dtype: str = "auto"
    part: tuple[int, int] | None = None
    ray_address: str | None = None
    compile: bool = False
    shard_bytes: int = SHARD_BYTES
    worker: str = WORKER
    load_format: str = "auto"  # of vLLM; "dummy" for random weights

    @property
    def step_tokens(self) -> int:
        """Tokens that one engine step takes at most."""
        return self.batch_size * self.max_seq_len

    @property
    def folder(self) -> Path:
        """Where the shards go."""
        return self.output_dir / shards.part_name(*self.part) if self.part else self.output_dir

    @property
    def queued_tokens(self) -> int:
        return STEPS_AHEAD * self.step_tokens


@dataclass(frozen=True)
class Extraction:
    """A checked plan. `metadata` is what metadata.json will say; `plan` the samples of each shard."""

    options: Options
    target: Target
    rows: list[prepared.Row]
    metadata: dict[str, Any]
    plan: list[range]

    @property
    def folder(self) -> Path:
        return self.options.folder

    @property
    def layer_ids(self) -> list[int]:
        return self.metadata["shared"]["layer_ids"]

    @property
    def dtype(self) -> torch.dtype:
        """How states are stored."""
        return getattr(torch, self.metadata["shared"]["storage_dtype"])

    @property
    def num_tokens(self) -> int:
        return self.metadata["num_tokens"]

    @property
    def token_bytes(self) -> int:
        """Bytes on disk of one token."""
        return shards.bytes_per_token(len(self.layer_ids), self.target.hidden_size, self.dtype)

    @property
    def ring_bytes(self) -> int:
        """Host memory of the copies on their way to the disk: all of it, whatever the size of the data."""
        return transfer.SLOTS * self.options.step_tokens * self.token_bytes

    def tokens_of(self, indices: list[int]) -> int:
        return sum(len(self.rows[i].input_ids) for index in indices for i in self.plan[index])

    def samples_of(self, indices: list[int]) -> int:
        return sum(len(self.plan[index]) for index in indices)

    def path(self, index: int) -> Path:
        return self.folder / shards.shard_name(index)

    def unpublished(self, indices: list[int]) -> list[int]:
        """Those of the shards `indices` that have no file under their final name."""
        return [i for i in indices if not self.path(i).exists()]

    def content(self, index: int) -> shards.ShardContent:
        """What shard `index` will hold."""
        rows = [self.rows[i] for i in self.plan[index]]
        return shards.ShardContent(
            index=index,
            sample_ids=[r.id for r in rows],
            offsets=np.cumsum([0] + [len(r.input_ids) for r in rows]),
            input_ids=np.concatenate([r.input_ids for r in rows]),
            loss_mask=np.concatenate([r.loss_mask for r in rows]),
        )


def plan_extraction(options: Options) -> Extraction:
    """Check the flags against the target and the data, and plan the shards. ValueError names what does not fit."""
    target = open_target(options)
    return plan(options, target, *read_data(options, target))


def open_target(options: Options) -> Target:
    """The target, which the flags fit; ValueError names the flag that does not."""
    target = Target.open(options.model_path)
    target.check_weights()
    if options.layer_ids:
        layers.check_layer_ids(options.layer_ids, target.num_layers)
    _check_flags(options, target)
    return target


def read_data(options: Options, target: Target) -> tuple[list[prepared.Row], dict[str, Any]]:
    """The samples of the prepared data (of the part asked for) and its metadata; ValueError if the target does not
    fit them."""
    data = prepared.read_metadata(options.prepared_data)
    check_same_target(data["target"], target.fingerprint, str(options.prepared_data))
    folder = options.prepared_data.parent
    remedy = "run 01_prepare_data.py again with --overwrite"
    vocab.DraftVocab.load(folder).check_target(folder, target.vocab_size, remedy)  # goes with the states, for stage 3
    rows = list(prepared.read_rows(options.prepared_data))
    _check_rows(rows, options, target.vocab_size)
    if options.part:
        index, count = options.part
        rows = rows[index - 1 :: count]  # every n-th, so that all parts are alike whatever the order of the data
        if not rows:
            raise ValueError(f"--part {index}/{count}: holds no samples, the data has fewer than {count}")
    return rows, data


def plan(options: Options, target: Target, rows: list[prepared.Row], data: dict[str, Any]) -> Extraction:
    """Lay the samples out in shards. `data`: the metadata of the prepared data."""
    layer_ids = options.layer_ids or layers.eagle_layer_ids(target.num_layers)
    engine_dtype = engine.dtype_for(target)
    dtype = capture.storage_dtype(options.storage_dtype, engine_dtype)
    token_bytes = shards.bytes_per_token(len(layer_ids), target.hidden_size, dtype)
    lengths = [len(r.input_ids) for r in rows]
    planned = shards.plan_shards(lengths, token_bytes, options.shard_bytes)
    metadata = {
        "format": shards.FORMAT,
        "shared": {
            "layer_ids": layer_ids,
            "layer_convention": layers.CONVENTION,
            "storage_dtype": shards.dtype_name(dtype),
            "engine_dtype": shards.dtype_name(engine_dtype),
            "target": target.fingerprint,
            "versions": engine.versions(),
        },
        "settings": {
            "data_sha256": data["data_sha256"],
            "max_seq_len": options.max_seq_len,
            "shard_bytes": options.shard_bytes,
            "part": "{}/{}".format(*options.part) if options.part else None,
            "compile": options.compile,
        },
        "num_samples": len(rows),
        "num_tokens": sum(lengths),
        "num_shards": len(planned),
        "prepared": data,
    }
    return Extraction(options, target, rows, metadata, planned)


def _check_flags(options: Options, target: Target) -> None:
    if options.folder.resolve() == options.prepared_data.parent.resolve():
        raise ValueError(f"--output-dir {options.folder}: holds the prepared data itself; choose another folder")
    if target.num_heads % options.tp_size:
        raise ValueError(
            f"--tp-size {options.tp_size}: does not divide the target's {target.num_heads} attention heads"
        )
    if options.max_seq_len + 1 > target.max_positions:
        raise ValueError(
            f"--max-seq-len {options.max_seq_len}: the target has {target.max_positions} positions and one is needed "
            f"for the token that the self-check samples, so at most {target.max_positions - 1}"
        )


def _check_rows(rows: list[prepared.Row], options: Options, vocab_size: int) -> None:
    if not rows:
        raise ValueError(f"--prepared-data {options.prepared_data}: holds no samples")
    longest = max(rows, key=lambda r: len(r.input_ids))
    if len(longest.input_ids) > options.max_seq_len:
        count = sum(len(r.input_ids) > options.max_seq_len for r in rows)
        raise ValueError(
            f"--max-seq-len {options.max_seq_len}: {count} of {len(rows)} samples are longer, the longest "
            f"({longest.id}) has {len(longest.input_ids)} tokens; raise it, or prepare the data with this length"
        )
    if bad := next((r for r in rows if r.input_ids.max() >= vocab_size), None):
        raise ValueError(
            f"--prepared-data {options.prepared_data}: sample {bad.id!r} has a token id outside 0 to {vocab_size - 1}"
        )
    if len({r.id for r in rows}) != len(rows):
        raise ValueError(f"--prepared-data {options.prepared_data}: two samples share an id")


def check_folder(extraction: Extraction) -> None:
    """ValueError if the output folder holds a set made with other settings."""
    path = extraction.folder / shards.METADATA
    there = shards.shard_paths(extraction.folder)
    if path.is_file():
        # what else stage 1 said of the data changes no state: the settings have the data's hash
        known = {"prepared": extraction.metadata["prepared"]}
        if difference := files.first_difference(files.read_json(path) | known, extraction.metadata):
            raise ValueError(
                f"--output-dir {extraction.folder} holds a set made with other settings: {difference} "
                "(choose another folder, or --overwrite to delete it)"
            )
    elif there:
        raise ValueError(f"--output-dir {extraction.folder} has shards but no {shards.METADATA} (or use --overwrite)")
    planned = {shards.shard_name(index) for index in range(len(extraction.plan))}
    if foreign := [p for p in there if p.name not in planned or p.is_dir()]:
        raise ValueError(f"{foreign[0]}: is no shard of this set; move it elsewhere, then give the same command")


def clear(folder: Path) -> None:
    """Delete what an extraction has written into a folder. ValueError, with nothing deleted, if it cannot have."""
    if folders := [p for p in shards.shard_paths(folder) if p.is_dir()]:
        raise ValueError(f"{folders[0]}: is a folder, not a shard; move it elsewhere, then give the same command")
    for path in [*shards.shard_paths(folder), *(folder / name for name in (shards.METADATA, vocab.FILE, STATUS))]:
        path.unlink(missing_ok=True)


def missing_shards(extraction: Extraction) -> list[int]:
    """The shards still to be made. A file that is there but not whole or not as planned is deleted and named."""
    indices = range(len(extraction.plan))
    there = sorted(set(indices) - set(extraction.unpublished(list(indices))))
    start = time.monotonic()
    with ThreadPoolExecutor(shards.VERIFY_THREADS) as pool:
        faults = dict(zip(there, pool.map(lambda i: _shard_faults(extraction, i), there), strict=True))
    if there:
        print(f"verified {len(there)} shards of an earlier run in {time.monotonic() - start:.1f} s", flush=True)
    for index, found in faults.items():
        if found:
            print(f"redoing {extraction.path(index).name}: {found[0]}", flush=True)
            extraction.path(index).unlink()
    return [i for i in indices if faults.get(i) != []]


def _shard_faults(extraction: Extraction, index: int) -> list[str]:
    planned = extraction.content(index)
    try:
        shard = shards.Shard(extraction.path(index))
        shared = {"format": shards.FORMAT} | extraction.metadata["shared"]
        if difference := files.first_difference(shared, shard.shared):
            return [f"{shard.path}: is of another set: {difference}"]
        names = ("offsets", "input_ids", "loss_mask")
        same = all(np.array_equal(getattr(shard, name), getattr(planned, name)) for name in names)
        if shard.sample_ids != planned.sample_ids or not same:
            return [f"{shard.path}: holds other samples than planned"]
        return shard.faults()
    except ValueError as error:
        return [str(error)]


def check_disk(extraction: Extraction, missing: list[int], reclaimed: int = 0) -> str:
    """What the missing shards need and what is free, `reclaimed` bytes of old files included.

    ValueError if the need is larger.
    """
    need = int(extraction.tokens_of(missing) * extraction.token_bytes * DISK_MARGIN)
    free = shutil.disk_usage(files.existing(extraction.folder)).free + reclaimed
    tokens = extraction.tokens_of(missing)
    if need > free:
        raise ValueError(f"--output-dir {extraction.folder}: needs {need:,} bytes, the disk has {free:,} free")
    return (
        f"need {need / 1e9:,.2f} GB ({tokens:,} tokens x {extraction.token_bytes:,} bytes), free {free / 1e9:,.2f} GB"
    )


def start_engine(extraction: Extraction, **changes: Any) -> "LLM":
    """Load the target with the capturing worker, set up for prefill alone; `changes` win over these arguments."""
    options = extraction.options
    capture_plan = {
        "output_dir": str(extraction.folder.resolve()),
        "shared": extraction.metadata["shared"],
    }
    arguments = {
        "dtype": extraction.metadata["shared"]["engine_dtype"],
        "load_format": options.load_format,
        "enforce_eager": not options.compile,
        "compilation_config": {"cudagraph_mode": "NONE"},  # graphs are for decoding: a prefill step is larger
        "enable_prefix_caching": False,
        "async_scheduling": False,
        "max_num_seqs": min(MAX_NUM_SEQS, options.step_tokens),
        "max_num_batched_tokens": options.step_tokens,
        "worker_cls": options.worker,
        "additional_config": {capture.CONFIG_KEY: capture_plan},
    }
    if options.ray_address and options.tp_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # ranks are processes of the actor, not actors of their own
    return engine.start(
        options.model_path,
        tp_size=options.tp_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_len=options.max_seq_len + 1,
        **arguments | changes,
    )


def one_engine(extraction: Extraction, missing: list[int], watch: Watch, start: "Start") -> None:
    """Make the shards `missing` with one engine of this process."""
    llm = start(extraction)
    try:
        Run(extraction, llm, watch).over(missing)
    finally:
        engine.stop(llm)


class CaptureFault(RuntimeError):
    """What the worker found wrong with the states, or could not write."""


class Run:
    """One pass of the engine over missing shards: opens shards, queues their samples, watches the worker."""

    def __init__(self, extraction: Extraction, llm: "LLM", watch: Watch) -> None:
        self.extraction, self.llm, self.watch = extraction, llm, watch
        self.stopping = False
        self.last_status = 0.0
        self.in_flight: dict[str, str] = {}  # request id -> sample id

    def over(self, missing: list[int]) -> None:
        """Make the shards `missing`.

        CaptureFault if the worker finds a fault, RuntimeError if the engine dies or a shard did not come about,
        InterruptedError after SIGTERM.
        """
        self.watch.start()
        with on_sigterm(self._stop):
            try:
                self._drive(missing)
            except (CaptureFault, KeyboardInterrupt):
                raise
            except Exception as error:
                if self.stopping:  # as when a scheduler sends SIGTERM to every process of the run
                    traceback.print_exc()
                    raise InterruptedError(
                        f"stopped on request, and its engine with it; {self._in_flight()}; the same command goes on"
                    ) from error
                raise RuntimeError(f"the engine stopped; {self._in_flight()}; its traceback is above") from error
        conclude(self.extraction, missing, stopping=self.stopping)

    def _drive(self, missing: list[int]) -> None:
        for output in engine.stream(self.llm, self._requests(missing), self.extraction.options.queued_tokens):
            del self.in_flight[output.request_id]
            self.watch.sample_done(len(output.prompt_token_ids))
            if time.monotonic() - self.last_status >= STATUS_EVERY_S:  # the first time after the first step
                self._ask_worker()
        engine.call_workers(self.llm, "close_capture")
        self._ask_worker()

    def _stop(self) -> None:
        print("stopping: finishing the shards at hand", flush=True)
        self.stopping = True
        self.watch.stopping()

    def _requests(self, missing: list[int]) -> Iterator[engine.Request]:
        """The samples of the missing shards, of up to SHARDS_AT_HAND shards in turn."""
        groups = max(math.ceil(len(missing) / SHARDS_AT_HAND), 1)
        for group in np.array_split(missing, groups):  # of like sizes: the last step has files enough to write to, too
            if self.stopping:
                return
            contents = [self.extraction.content(int(index)) for index in group]
            # in one call: each is answered between two steps only, and a step's worth of the queue is gone by then
            engine.call_workers(self.llm, "open_shards", [content.message() for content in contents])
            for turn in itertools.zip_longest(*map(self._requests_of, contents)):
                yield from filter(None, turn)

    def _requests_of(self, content: shards.ShardContent) -> Iterator[engine.Request]:
        """The samples of a shard, which the worker has opened."""
        from vllm import SamplingParams

        for sample, sample_id in enumerate(content.sample_ids):
            ids = content.input_ids[content.offsets[sample] : content.offsets[sample + 1]].tolist()
            identity = {capture.SAMPLE_KEY: [content.index, sample, sample_id]}
            params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, extra_args=identity)
            request_id = f"{content.index}-{sample}"
            self.in_flight[request_id] = sample_id
            yield engine.Request(request_id, ids, params)

    def _ask_worker(self) -> None:
        status = next(s for s in engine.call_workers(self.llm, "capture_status") if s is not None)
        self.watch.worker_says(status["rows"], status["check"])
        if status["faults"]:
            engine.call_workers(self.llm, "close_capture")
            raise CaptureFault(f"extraction stopped, finished shards are kept: {status['faults'][0]}")
        self.last_status = time.monotonic()

    def _in_flight(self) -> str:
        names = list(self.in_flight.values())
        more = f" and {len(names) - NAMED_IN_FLIGHT} more" if len(names) > NAMED_IN_FLIGHT else ""
        return f"{len(names)} samples were in flight: {', '.join(names[:NAMED_IN_FLIGHT])}{more}"


def conclude(extraction: Extraction, missing: list[int], *, stopping: bool) -> None:
    """InterruptedError if a run that was told to stop left shards to do, RuntimeError if another did."""
    left = extraction.unpublished(missing)
    if left and stopping:
        raise InterruptedError(f"stopped on request: {len(left)} shards to do; the same command goes on from here")
    if left:
        raise RuntimeError(f"{len(left)} shards did not come about, the first is {shards.shard_name(left[0])}")


@contextmanager
def on_sigterm(action: Any) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        action()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def extract(
    extraction: Extraction,
    *,
    overwrite: bool = False,
    drive: "Drive" = one_engine,
    start: "Start" = start_engine,
) -> None:
    """Make every missing shard; `overwrite` deletes what was there. The caller holds the folder's lock.

    `drive` makes shards with engines that `start` gives: one engine here, or cluster.many_engines.
    """
    if overwrite:
        clear(extraction.folder)
    check_folder(extraction)
    missing = missing_shards(extraction)
    done = len(extraction.plan) - len(missing)
    print(f"shards: {done} finished before, {len(missing)} to do ({extraction.tokens_of(missing):,} tokens)")
    print(f"disk: {check_disk(extraction, missing)}", flush=True)
    files.write_json(extraction.folder / shards.METADATA, extraction.metadata)
    with files.atomic(extraction.folder / vocab.FILE) as temporary:
        shutil.copyfile(extraction.options.prepared_data.with_name(vocab.FILE), temporary)
    with Watch(extraction, missing) as watch, on_sigterm(_stop_while_loading):
        if missing:
            drive(extraction, missing, watch, start)


def _stop_while_loading() -> None:
    raise InterruptedError("stopped on request while the target was loading; the same command starts again")
