"""Shards: the safetensors files that hold captured states, their writer and their reader.

On disk, in this order, with all samples of a shard one after another:
    offsets        int64 [samples + 1]           first row of each sample
    scale          float32 [tokens, layers]      fp8 storage only: state = stored value x scale
    input_ids      int32 [tokens]
    hidden_states  [tokens, layers, hidden]      float32, bfloat16 or float8_e4m3fn
    loss_mask      uint8 [tokens]                1: the target itself would generate this token

    python -m eagle3.shards verify DIR    # lists what is wrong; exit code 1 if anything is
    python -m eagle3.shards show DIR      # what is there

The header's metadata holds the shard's index, the sample ids, the checksums (xxh3 of each sample's tensors, and of the
header itself) and what the whole set shares: format, layer ids, layer convention, target fingerprint, versions. A file
under its final name is always whole: it is written under a temporary name at known positions, flushed, and renamed.
"""

from __future__ import annotations  # torch is imported where it is used, so that `--help` is quick

import argparse
import itertools
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from eagle3 import cli, files, vocab

if TYPE_CHECKING:
    import torch

FORMAT = "eagle3-hidden-states/2"
METADATA = "metadata.json"
VERIFY_THREADS = 8  # a disk gives its full rate to several readers only
OWN = ("index", "sample_ids", "checksums", "checksum_tokens")  # of one shard; the rest is the whole set's
HEADER = "checksum_header"
SCRIPT = "02_extract_hidden_states.py"
REDO = f"{SCRIPT} with the same flags redoes the shard"
FP8 = "float8_e4m3fn"
DTYPES = {"offsets": np.int64, "input_ids": np.int32, "loss_mask": np.uint8}
DTYPE_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", FP8: "F8_E4M3"}


@dataclass(frozen=True)
class ShardContent:
    """The samples of a shard, known before its first state is captured.

    `offsets` int64 [samples + 1], `input_ids` int32 [tokens], `loss_mask` uint8 [tokens].
    """

    index: int
    sample_ids: list[str]
    offsets: np.ndarray
    input_ids: np.ndarray
    loss_mask: np.ndarray

    @property
    def name(self) -> str:
        return shard_name(self.index)

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    def message(self) -> dict[str, Any]:
        """With arrays as bytes, for an RPC; `ShardContent.receive` reads it."""
        return {k: np.asarray(v, DTYPES[k]).tobytes() if k in DTYPES else v for k, v in vars(self).items()}

    @classmethod
    def receive(cls, message: dict[str, Any]) -> ShardContent:
        return cls(**{k: np.frombuffer(v, DTYPES[k]) if k in DTYPES else v for k, v in message.items()})


@dataclass(frozen=True)
class ShardFormat:
    """What all shards of a set have in common; `shared` is the part of the header that says so."""

    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    shared: dict[str, Any]

    @property
    def has_scale(self) -> bool:
        return dtype_name(self.dtype) == FP8


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which metadata and settings know a dtype: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def shard_name(index: int) -> str:
    return f"shard-{index:05}.safetensors"


def part_name(number: int, total: int) -> str:
    """The name of one part of a set that is extracted in parts."""
    return f"part-{number:05}-of-{total:05}"


def parse_part(text: str) -> tuple[int, int]:
    """The number of a part and how many there are, from I/N. ValueError unless 1 <= I <= N."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"expected I/N, such as 1/4 to 4/4, found {text}")
    return int(index), int(count)


def bytes_per_token(num_layers: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes that one token takes on disk: states, its scales with fp8, id and mask."""
    scale = 4 if dtype_name(dtype) == FP8 else 0
    return num_layers * (hidden_size * dtype.itemsize + scale) + 4 + 1


def quantise_fp8(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States [tokens, layers, hidden] as float8_e4m3fn and their scales float32 [tokens, layers].

    A scale is not finite where one of its values is not.
    """
    import torch

    largest, tiny = torch.finfo(torch.float8_e4m3fn).max, torch.finfo(torch.float32).tiny
    magnitude = torch.maximum(states.amax(-1), -states.amin(-1))  # reads twice, writes nothing
    scale = (magnitude.float() / largest).clamp_min(tiny)
    stored = torch.empty_like(states, dtype=torch.float8_e4m3fn)
    return torch.div(states, scale[..., None], out=stored), scale  # in float32, without a copy in float32


class ShardWriter:
    """Writes one shard; rows may arrive in any order of samples, each sample's rows in order from 0.

    A sample that starts again at row 0 (a preempted request) replaces what it had. Not thread-safe per sample: one
    sample's rows must come from one thread at a time.
    """

    def __init__(self, folder: Path, content: ShardContent, form: ShardFormat) -> None:
        self.content, self.form = content, form
        self.path = folder / content.name
        self._temporary = files.temporary_name(self.path)
        tensors = _layout(content, form)
        header = _header(content, form, [])
        self._data_start = 8 + (len(header) + _checksum_room(content, form) + 7) // 8 * 8
        self._starts = {name: self._data_start + start for name, (_, _, start, _) in tensors.items()}
        self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._rows = [0] * len(content.sample_ids)
        self._digests = [_digests(form.has_scale) for _ in content.sample_ids]
        self._lock, self._claimed = threading.Lock(), False
        try:
            for name in ("offsets", "input_ids", "loss_mask"):
                self._write(np.ascontiguousarray(getattr(content, name)), self._starts[name])
        except OSError:
            self.abandon()
            raise

    def write(self, sample: int, row: int, states: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Write `states` [n, layers, hidden] (CPU, contiguous) as rows row..row+n of a sample; its scales with fp8."""
        length = int(self.content.offsets[sample + 1] - self.content.offsets[sample])
        if row == 0:
            self._rows[sample], self._digests[sample] = 0, _digests(self.form.has_scale)
        if row != self._rows[sample] or row + len(states) > length:
            raise RuntimeError(
                f"{self.path.name}, sample {self.content.sample_ids[sample]!r}: expected rows from "
                f"{self._rows[sample]} up to {length}, captured {row} to {row + len(states)}"
            )
        at = int(self.content.offsets[sample]) + row
        self._write_rows("hidden_states", at, states, sample)
        if self.form.has_scale:
            assert scale is not None
            self._write_rows("scale", at, scale, sample)
        self._rows[sample] += len(states)

    @property
    def complete(self) -> bool:
        return self._rows == np.diff(self.content.offsets).tolist()

    def claim_finish(self) -> bool:
        """True exactly once, for the thread whose rows completed the shard: that thread calls `finish`."""
        with self._lock:
            claimed, self._claimed = self.complete and not self._claimed, self._claimed or self.complete
            return claimed

    def finish(self) -> Path:
        """Write the header, flush to disk, give the shard its final name."""
        if not self.complete:
            raise RuntimeError(f"{self.path.name}: not every sample has all its rows; nothing was published")
        header = _header(self.content, self.form, [_checksum(d) for d in self._digests])
        room = self._data_start - 8
        assert len(header) <= room, (len(header), room)
        self._write(room.to_bytes(8, "little") + header.ljust(room), 0)
        os.fsync(self._file)
        os.close(self._file)
        files.publish(self._temporary, self.path)
        return self.path

    def abandon(self) -> None:
        """Remove the temporary file of an unfinished shard."""
        if self._temporary.exists():
            os.close(self._file)
            self._temporary.unlink()

    def _write_rows(self, name: str, at: int, rows: torch.Tensor, sample: int) -> None:
        data = _bytes_of(rows)
        position = self._starts[name] + at * (data.nbytes // len(rows))
        hashing = threading.Thread(target=self._digests[sample][name].update, args=(data,))
        hashing.start()  # beside the write: no later step hides the time that the last one's rows take
        self._write(data, position)
        hashing.join()
        # Linux begins to write them out; left alone, the disk would idle for seconds and then have it all at once
        os.posix_fadvise(self._file, position, data.nbytes, os.POSIX_FADV_DONTNEED)

    def _write(self, data: np.ndarray | bytes, position: int) -> None:
        view = memoryview(data).cast("B")
        while view:
            try:
                written = os.pwrite(self._file, view, position)
            except OSError as error:
                raise OSError(error.errno, f"{os.strerror(error.errno)} while writing", str(self.path)) from None
            view, position = view[written:], position + written


def _layout(content: ShardContent, form: ShardFormat) -> dict[str, tuple[str, list[int], int, int]]:
    """name -> (safetensors dtype, shape, start byte, end byte), widest elements first so that all stay aligned."""
    tokens, states = content.num_tokens, [content.num_tokens, form.num_layers, form.hidden_size]
    shapes = {"offsets": ("I64", 8, [len(content.offsets)])}
    if form.has_scale:
        shapes["scale"] = ("F32", 4, states[:2])
    shapes["input_ids"] = ("I32", 4, [tokens])
    shapes["hidden_states"] = (DTYPE_CODES[dtype_name(form.dtype)], form.dtype.itemsize, states)
    shapes["loss_mask"] = ("U8", 1, [tokens])
    layout, start = {}, 0
    for name, (code, width, shape) in shapes.items():
        end = start + width * int(np.prod(shape, dtype=np.int64))
        layout[name] = (code, shape, start, end)
        start = end
    return layout


def _checksum_room(content: ShardContent, form: ShardFormat) -> int:
    """Bytes that the header grows by once the checksums are known: their digits, escaped quotes, a comma, a space."""
    return (16 * (1 + form.has_scale) + 8) * len(content.sample_ids)


def _header(content: ShardContent, form: ShardFormat, digests: list[str]) -> bytes:
    tokens = _tokens_checksum(content.offsets, content.input_ids, content.loss_mask)
    own = dict(zip(OWN, (content.index, content.sample_ids, digests, tokens), strict=True))
    metadata = {k: json.dumps(v) for k, v in ({"format": FORMAT} | form.shared | own).items()}
    layout = _layout(content, form)
    metadata[HEADER] = _header_checksum(metadata, {name: entry[:2] for name, entry in layout.items()})
    entries = {n: {"dtype": c, "shape": s, "data_offsets": [a, b]} for n, (c, s, a, b) in layout.items()}
    return json.dumps({"__metadata__": metadata} | entries).encode()


def _header_checksum(metadata: dict[str, str], tensors: dict[str, tuple[str, list[int]]]) -> str:
    """xxh3 of a header's metadata but for this checksum, and of each tensor's dtype and shape.

    Where the tensors lie, their own checksums tell.
    """
    said = [{k: v for k, v in metadata.items() if k != HEADER}, tensors]
    return xxhash.xxh3_64_hexdigest(json.dumps(said, sort_keys=True).encode())


def _digests(has_scale: bool) -> dict[str, xxhash.xxh3_64]:
    """A running checksum of each of a sample's tensors."""
    return {name: xxhash.xxh3_64() for name in ("hidden_states", *(["scale"] if has_scale else []))}


def _checksum(digests: dict[str, xxhash.xxh3_64]) -> str:
    return "".join(digest.hexdigest() for digest in digests.values())


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory, uint8 [bytes]."""
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def _tokens_checksum(*arrays: np.ndarray) -> str:
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


@dataclass(frozen=True)
class Sample:
    """One sample on the CPU: `input_ids` int64 [n], `loss_mask` bool [n], `hidden_states` [n, layers, hidden]."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor


class Shard:
    """A shard opened for reading: header and tokens at once, states mapped and read on demand."""

    def __init__(self, path: Path) -> None:
        """ValueError, naming the file, if it is not a whole shard of this format."""
        self.path = path
        try:
            self._file = safe_open(path, "pt")
            self.metadata = self._checked_metadata()
            self.offsets = self._file.get_tensor("offsets").numpy()
            self.input_ids = self._file.get_tensor("input_ids").numpy()
            self.loss_mask = self._file.get_tensor("loss_mask").numpy()
            self._states = self._file.get_slice("hidden_states")
        except (SafetensorError, ValueError, OSError) as error:
            raise ValueError(f"{path}: not a whole shard: {error}") from None
        self.sample_ids: list[str] = self.metadata["sample_ids"]
        self._unverified = set(range(len(self.sample_ids)))

    def _checked_metadata(self) -> dict[str, Any]:
        raw = self._file.metadata() or {}
        if raw.get("format") != json.dumps(FORMAT):
            raise ValueError(f"expected format {FORMAT!r}, found {raw.get('format')}")
        slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        tensors = {name: (found.get_dtype(), found.get_shape()) for name, found in slices.items()}
        if raw.get(HEADER) != _header_checksum(raw, tensors):
            raise ValueError("its header does not match its checksum")
        return {key: json.loads(value) for key, value in raw.items() if key != HEADER}

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def shared(self) -> dict[str, Any]:
        """The metadata that all shards of a set have in common."""
        return {k: v for k, v in self.metadata.items() if k not in OWN}

    @cached_property
    def _scale(self) -> Any:
        return self._file.get_slice("scale") if "scale" in self._file.keys() else None  # noqa: SIM118

    def rows(self, sample: int) -> slice:
        """The rows of a sample in the shard's tensors."""
        return slice(int(self.offsets[sample]), int(self.offsets[sample + 1]))

    def stored(self, sample: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A sample's states as stored [n, layers, hidden], and their scales [n, layers] with fp8."""
        rows = self.rows(sample)
        return self._states[rows], self._scale[rows] if self._scale is not None else None

    def verified(self, sample: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`stored`, held against its checksum the first time. ValueError naming shard and sample if it is damaged."""
        tensors = self.stored(sample)
        if sample in self._unverified:
            if self._checksum_of(tensors) != self.metadata["checksums"][sample]:
                raise ValueError(f"{self._fault(sample)}; {REDO}")
            self._unverified.discard(sample)
        return tensors

    def check_tokens(self) -> None:
        """ValueError naming the shard if its ids, masks or offsets are damaged."""
        if fault := self._token_fault():
            raise ValueError(f"{fault}; {REDO}")

    def sample(self, index: int, layers: slice = slice(None)) -> Sample:
        """One sample; fp8 states are returned as bfloat16."""
        import torch

        states, scale = self.stored(index)
        if scale is not None:
            states = (states.float() * scale[..., None]).to(torch.bfloat16)
        rows = self.rows(index)
        return Sample(
            id=self.sample_ids[index],
            input_ids=torch.from_numpy(self.input_ids[rows].astype(np.int64)),
            loss_mask=torch.from_numpy(self.loss_mask[rows].astype(bool)),
            hidden_states=states[:, layers],
        )

    def faults(self) -> list[str]:
        """What is wrong with the stored bytes, one line a fault; empty when every checksum holds."""
        named = shard_name(self.metadata["index"])
        misnamed = None if self.path.name == named else f"{self.path}: is {named} by its header"
        found = [misnamed, self._token_fault()] + [
            None if self._checksum_of(self.stored(index)) == expected else self._fault(index)
            for index, expected in enumerate(self.metadata["checksums"])
        ]
        return [fault for fault in found if fault]

    def _fault(self, sample: int) -> str:
        return f"{self.path}: sample {self.sample_ids[sample]!r} does not match its checksum"

    def _token_fault(self) -> str | None:
        if _tokens_checksum(self.offsets, self.input_ids, self.loss_mask) == self.metadata["checksum_tokens"]:
            return None
        return f"{self.path}: ids, mask or offsets do not match their checksum"

    def _checksum_of(self, tensors: tuple[torch.Tensor, torch.Tensor | None]) -> str:
        digests = _digests(self._scale is not None)
        for digest, tensor in zip(digests.values(), tensors, strict=False):
            digest.update(_bytes_of(tensor))
        return _checksum(digests)


class ShardSet:
    """All shards of a folder, or of several, as one sequence of samples, in shard order."""

    def __init__(self, *folders: Path) -> None:
        """ValueError if a folder has none, one is not whole, or they do not belong together."""
        self.shards: list[Shard] = []
        for folder in folders:
            paths = shard_paths(folder)
            if not paths:
                raise ValueError(f"{folder}: no shards there (02_extract_hidden_states.py writes them)")
            try:
                self.shards += map(Shard, paths)
            except ValueError as error:
                raise ValueError(f"{error}; {REDO}") from None
        self.shared = self.shards[0].shared
        for shard in self.shards[1:]:
            if difference := files.first_difference(self.shared, shard.shared):
                raise ValueError(f"{shard.path} does not belong with {self.shards[0].path.name}: {difference}")
        self._firsts = np.cumsum([0] + [len(s) for s in self.shards])
        ids = self.sample_ids
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            where = " and ".join(map(str, folders))
            raise ValueError(f"{where}: sample {twice!r} is in the shards more than once")

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        shard, inner = self.locate(index)
        return shard.sample(inner)

    def locate(self, index: int) -> tuple[Shard, int]:
        """The shard that holds a sample, and the sample's place in it."""
        at = int(np.searchsorted(self._firsts, index, side="right")) - 1
        return self.shards[at], index - int(self._firsts[at])

    @property
    def sample_ids(self) -> list[str]:
        return [i for shard in self.shards for i in shard.sample_ids]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [samples]."""
        return np.concatenate([np.diff(s.offsets) for s in self.shards])


def copy_samples(data: ShardSet, samples: Sequence[int], folder: Path) -> None:
    """Write these samples (ascending) into `folder` as they are stored, a shard for each shard that holds some.

    ValueError if one is damaged: a copy would give it a checksum that holds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = itertools.groupby(map(data.locate, samples), key=lambda found: found[0].path)
    for index, (_, found) in enumerate(groups):
        located = list(found)
        shard, indices = located[0][0], [inner for _, inner in located]
        rows = [shard.rows(i) for i in indices]
        content = ShardContent(
            index=index,
            sample_ids=[shard.sample_ids[i] for i in indices],
            offsets=np.cumsum([0] + [r.stop - r.start for r in rows]),
            input_ids=np.concatenate([shard.input_ids[r] for r in rows]),
            loss_mask=np.concatenate([shard.loss_mask[r] for r in rows]),
        )
        _, layers, hidden = shard.stored(0)[0].shape
        writer = ShardWriter(folder, content, ShardFormat(layers, hidden, shard.stored(0)[0].dtype, shard.shared))
        for place, i in enumerate(indices):
            writer.write(place, 0, *(None if t is None else t.contiguous() for t in shard.verified(i)))
        writer.finish()


def shard_paths(folder: Path) -> list[Path]:
    """The shards of a folder under their final names, in order."""
    return sorted(folder.glob("shard-*.safetensors"))


def plan_shards(lengths: Sequence[int], token_bytes: int, shard_bytes: int) -> list[range]:
    """Consecutive samples for each shard: as many as fit `shard_bytes`, at least one. Depends on nothing else."""
    plan, first, size = [], 0, 0
    for index, length in enumerate(lengths):
        if index > first and size + length * token_bytes > shard_bytes:
            plan.append(range(first, index))
            first, size = index, 0
        size += length * token_bytes
    return [*plan, range(first, len(lengths))] if len(lengths) else []


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with a folder of shards, one line a fault: shards that are absent, not whole, damaged
    or of another set, samples that are there twice or not at all, temporary files. Reads every byte."""
    paths = shard_paths(folder)
    if not paths:
        return [f"{folder}: no shards there"]
    with ThreadPoolExecutor(VERIFY_THREADS) as pool:
        verified = list(pool.map(_opened_and_verified, paths))
    opened = [shard for shard, _ in verified if shard is not None]
    faults = [fault for _, found in verified for fault in found]
    faults += [
        f"{shard.path}: does not belong with {opened[0].path.name}: {difference}"
        for shard in opened
        if (difference := files.first_difference(opened[0].shared, shard.shared))
    ]
    counts = Counter(i for shard in opened for i in shard.sample_ids)
    faults += [f"{folder}: sample {i!r} is there {count} times" for i, count in counts.items() if count > 1]
    faults += [f"{path}: of a run that was killed, or is running" for path in files.leftovers(folder)]
    return faults + _faults_of_the_whole(folder, paths, opened, len(counts))


def _opened_and_verified(path: Path) -> tuple[Shard | None, list[str]]:
    try:
        shard = Shard(path)
    except ValueError as error:
        return None, [str(error)]
    return shard, shard.faults()


def read_metadata(folder: Path) -> dict[str, Any]:
    """What metadata.json says of the whole set. ValueError if it is of another format, or lacks an entry."""
    path = folder / METADATA
    metadata = files.read_json(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT!r}, found {metadata.get('format')!r}")
    expected = dict.fromkeys(("shared", "settings", "prepared"), dict)
    expected |= dict.fromkeys(("num_samples", "num_tokens", "num_shards"), int)
    files.check_entries(path, metadata, expected, SCRIPT)
    files.check_entries(path, {"settings": {}} | metadata["prepared"], {"settings": dict}, SCRIPT)
    try:
        parse_part(str(metadata["settings"].get("part") or "1/1"))
    except ValueError as error:
        raise ValueError(f"{path}: has a part that is none: {error}") from None
    return metadata


def load_vocab(folder: Path, metadata: dict[str, Any]) -> vocab.DraftVocab:
    """The draft vocabulary beside the shards. ValueError if it is damaged, or not the one of the prepared data."""
    found, expected = vocab.DraftVocab.load(folder), metadata["prepared"].get("draft_vocab_sha256")
    if expected and files.sha256_file(folder / vocab.FILE) != expected:
        raise ValueError(
            f"{folder / vocab.FILE}: is not the one of the prepared data; 02_extract_hidden_states.py with the same "
            "flags copies it again"
        )
    return found


def _faults_of_the_whole(folder: Path, paths: list[Path], opened: list[Shard], num_samples: int) -> list[str]:
    """What metadata.json promises and the shards do not hold; a draft vocabulary that stage 3 would not take."""
    if absent := [folder / name for name in (METADATA, vocab.FILE) if not (folder / name).is_file()]:
        return [f"{path}: missing" for path in absent]
    try:
        metadata = read_metadata(folder)
    except ValueError as error:
        return [str(error)]
    names, expected = {p.name for p in paths}, [shard_name(i) for i in range(metadata["num_shards"])]
    faults = [f"{folder / name}: missing" for name in expected if name not in names]
    faults += [f"{folder / name}: not of this set" for name in sorted(names - set(expected))]
    shared = {"format": FORMAT} | metadata["shared"]
    if opened and (difference := files.first_difference(shared, opened[0].shared)):
        faults.append(f"{opened[0].path}: does not belong with {METADATA}: {difference}")
    found = {"num_samples": num_samples, "num_tokens": sum(len(shard.input_ids) for shard in opened)}
    faults += [
        f"{folder}: expected {metadata[key]:,} {key.removeprefix('num_')}, found {number:,}"
        for key, number in found.items()
        if metadata[key] != number
    ]
    try:
        load_vocab(folder, metadata)
    except ValueError as error:
        faults.append(str(error))
    return faults


def summary(folder: Path) -> str:
    """What a folder of shards holds, a line each. ValueError if it is no set."""
    states = ShardSet(folder)
    shared, tokens = states.shared, int(states.lengths.sum())
    size = sum(shard.path.stat().st_size for shard in states.shards)
    supervised = sum(int(shard.loss_mask.sum()) for shard in states.shards)
    lines = {
        "shards": f"{len(states.shards):,}, {size / 1e9:,.3f} GB",
        "samples": f"{len(states):,}, of {states.lengths.min():,} to {states.lengths.max():,} tokens",
        "tokens": f"{tokens:,}, {supervised:,} of them supervised, {size / tokens:,.0f} bytes each",
        **{key: json.dumps(shared[key], ensure_ascii=False) for key in sorted(shared) if key != "target"},
        **{f"target {key}": value for key, value in shared.get("target", {}).items()},
    }
    if (folder / METADATA).is_file():
        metadata = read_metadata(folder)
        lines |= {"whole set": f"{metadata['num_shards']:,} shards, {metadata['num_samples']:,} samples"}
        lines |= {key: str(value) for key, value in metadata["settings"].items() if value is not None}
    width = max(map(len, lines))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in lines.items())


def parser() -> cli.Tool:
    p = cli.Tool("python -m eagle3.shards", "Look at a folder of hidden states.")
    p.add_argument("action", choices=["verify", "show"], help="verify: read every byte; show: what is there")
    p.add_argument("folder", type=Path, metavar="DIR", help="written by 02_extract_hidden_states.py")
    return p


def check(args: argparse.Namespace) -> argparse.Namespace:
    """ValueError if there is no such folder."""
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder}: no such folder")
    return args


def work(args: argparse.Namespace) -> None:
    """Print what is asked for; exit code 1 if anything is wrong with the folder."""
    if args.action == "show":
        print(summary(args.folder))
        return
    if faults := verify(args.folder):
        print(*faults, sep="\n")
        sys.exit(cli.FAILED)
    print(f"{args.folder}: sound, {len(ShardSet(args.folder)):,} samples, every checksum holds")


if __name__ == "__main__":
    cli.run(parser(), check, work)
