"""The rehearsal: two steps of the real run with dummy weights, through engine, capture, self-check, writer and reader.

What would fail after the load fails now, but for the weights themselves.
"""

import dataclasses
import shutil
import time

from eagle3 import extract, files
from eagle3.extract import Extraction
from eagle3.shards import ShardSet

STEPS = 2


def rehearse(extraction: Extraction) -> None:
    """Run the longest samples that fill two steps into a temporary folder inside the output folder, read them back,
    remove it. RuntimeError if what was read is not what was planned. The caller holds the output folder's lock."""
    small = _excerpt(extraction)
    print(f"rehearsal: {len(small.rows)} samples, {small.num_tokens:,} tokens, dummy weights", flush=True)
    start = time.monotonic()
    small.folder.mkdir()
    try:
        extract.extract(small)
        faults = _faults(small)
        written = sum(p.stat().st_size for p in small.folder.iterdir())
    finally:
        shutil.rmtree(small.folder)
    if faults:
        raise RuntimeError(f"rehearsal: {len(faults)} faults, the first: {faults[0]}")
    print(
        f"rehearsal passed in {time.monotonic() - start:.0f} s: {len(small.rows)} samples captured, checked, written "
        f"({written / 1e6:,.1f} MB) and read back; removed"
    )


def _excerpt(extraction: Extraction) -> Extraction:
    """The longest samples, enough to fill STEPS steps, as an extraction with dummy weights, in a folder of its own."""
    tokens, rows = 0, []
    for row in sorted(extraction.rows, key=lambda r: -len(r.input_ids)):
        if tokens >= STEPS * extraction.options.step_tokens:
            break
        tokens += len(row.input_ids)
        rows.append(row)
    folder = files.temporary_name(extraction.folder / "rehearsal")
    options = dataclasses.replace(
        extraction.options, output_dir=folder, part=None, ray_address=None, load_format="dummy"
    )
    return extract.plan(options, extraction.target, rows, extraction.metadata["prepared"])


def _faults(small: Extraction) -> list[str]:
    """What the reader finds wrong: damaged shards, or other ids, masks or shapes than planned."""
    states = ShardSet(small.folder)
    found = [fault for shard in states.shards for fault in shard.faults()]
    for row, sample in zip(small.rows, states, strict=True):
        shape = (len(row.input_ids), len(small.layer_ids), small.target.hidden_size)
        same = sample.id == row.id and sample.input_ids.tolist() == row.input_ids.tolist()
        same &= sample.loss_mask.int().tolist() == row.loss_mask.tolist()
        if not same or tuple(sample.hidden_states.shape) != shape:
            found.append(f"sample {row.id!r}: read back otherwise than it was written")
    return found
