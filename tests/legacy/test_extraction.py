"""02_extract_hidden_states.py on vLLM 0.16, whose DeepseekV2 has no EAGLE-3 interface: the patched-forward route."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import targets
import torch

from eagle3 import prepared, shards, vocab
from eagle3.target import Target

ROOT = Path(__file__).parents[2]
LENGTHS = [40, 7, 300, 3, 64, 11, 2000, 90, 5, 33]
COMMAND = """\
--batch-size 4 --max-seq-len 2048 --tp-size {tp} --gpu-memory-utilization 0.80 --layer-ids 2 30 58 60"""


def prepare(target: Path, folder: Path) -> list[prepared.Row]:
    """What 01 leaves for 02: rows, metadata with the target's fingerprint, draft vocabulary."""
    folder.mkdir()
    draw = random.Random(0)
    rows = []
    with open(folder / prepared.DATA, "w") as file:
        for number, length in enumerate(LENGTHS):
            ids = np.array([draw.randrange(3, targets.VOCAB_SIZE) for _ in range(length)], np.int32)
            rows.append(prepared.Row(f"sample-{number}", ids, np.ones(length, np.uint8)))
            prepared.write_row(file, rows[-1])
    vocab.DraftVocab(targets.VOCAB_SIZE).save(folder)
    prepared.write_metadata(folder, {"target": Target.open(target).fingerprint})
    return rows


@pytest.mark.parametrize("tp", [1, 2])
def test_02_extracts_the_states_of_a_kimi_through_the_patched_forward(models, reference, tmp_path, tp):
    """The promised flags (tensor parallelism aside) on a tiny Kimi-K2.5: every sample's states are Transformers'."""
    rows = prepare(models / "kimi", tmp_path / "prepared")
    command = [sys.executable, "02_extract_hidden_states.py", "--model-path", models / "kimi"]
    command += ["--prepared-data", tmp_path / "prepared" / prepared.DATA, "--output-dir", tmp_path / "states"]
    process = subprocess.run(
        [*map(str, command), *COMMAND.format(tp=tp).split()],
        cwd=ROOT,
        env=os.environ | {"VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout[-5000:]
    assert "capture route: patched DeepseekV2Model.forward" in process.stdout
    found = {}
    for path in shards.shard_paths(tmp_path / "states"):
        shard = shards.Shard(path)
        found |= {sample_id: shard.sample(i).hidden_states for i, sample_id in enumerate(shard.sample_ids)}
    assert found.keys() == {row.id for row in rows}
    for row in rows:
        expected = torch.stack(reference("kimi").states(row.input_ids.tolist()), dim=1)
        assert found[row.id].shape == expected.shape
        error = (found[row.id].float() - expected).norm() / expected.norm()
        assert error < 1e-4, (row.id, error)
