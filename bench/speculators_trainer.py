"""speculators 0.9.0's own trainer on this project's hidden states: `python -m speculators.train`, also on a CPU.

    python bench/speculators_trainer.py FLAGS OF speculators.train

`convert` writes the states in the layout that it reads, and `flags` says what goes with them. Nothing of the trainer is
changed but where it cannot run: its fused loss stays out of the compiled graph (torch 2.11 fails to compile it), and
without a GPU the device is the CPU.

Its counting: layer ids are vLLM's, whose id k is the stream before layer k, so ours plus one; the last of the stored
layers is the target's last one before the final norm, which its model applies itself. Its loader shifts: row t holds
f_t, x_{t+1}, g_{t+1} and the mask of x_{t+1}, at position t + 1.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from safetensors.torch import save_file

from eagle3 import layers
from eagle3.batches import split
from eagle3.states import HiddenStates


def convert(states: HiddenStates, eval_fraction: float, folder: Path) -> None:
    """Write every sample, the held-out ones last: speculators cuts its validation split off the end.

    ValueError if none is held out, which speculators does not know.
    """
    from datasets import Dataset

    order = [sample for half in _halves(states, eval_fraction) for sample in half]
    (folder / "hidden_states").mkdir(parents=True)
    rows: dict[str, list] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for place, index in enumerate(order):
        sample = states.data[index]
        tensors = {"hidden_states": sample.hidden_states.contiguous(), "token_ids": sample.input_ids}
        save_file(tensors, folder / "hidden_states" / f"hs_{place}.safetensors")
        rows["input_ids"].append(sample.input_ids.numpy())
        rows["loss_mask"].append(sample.loss_mask.numpy().astype(np.int64))
        rows["seq_len"].append(len(sample.input_ids))
    dataset = Dataset.from_dict(rows)
    dataset.set_format(type="torch")
    dataset.save_to_disk(folder)
    if states.vocab.ids is not None:
        np.save(folder / f"d2t-{states.vocab.size}.npy", states.vocab.d2t)
        np.save(folder / f"t2d-{states.vocab.size}.npy", states.vocab.t2d)


def _halves(states: HiddenStates, eval_fraction: float) -> tuple[list[int], list[int]]:
    train, held_out = split(states.data.sample_ids, eval_fraction)
    if not held_out:
        raise ValueError("--eval-fraction 0: speculators always holds samples out")
    return train, held_out


def flags(states: HiddenStates, eval_fraction: float, budget: int, steps: int, seed: int) -> dict[str, object]:
    """What `speculators.train` is told beside the paths, so that both sides see the same samples, tokens and steps.

    `budget`: tokens of a step. Its loop ends with an epoch, so the epochs must be no more than the steps fill.
    """
    train, held_out = _halves(states, eval_fraction)
    found: dict[str, object] = {
        "train-data-ratio": (len(train) + 0.5) / (len(train) + len(held_out)),  # it rounds down
        "full-attention-indices": 0,  # no sample and no answer here is as long as its window of 2,048 tokens
        "target-layer-ids": layers.draft_aux_ids(states.layer_ids),
        "total-seq-len": budget,
        "epochs": epochs(states.data.lengths[train], budget, steps, seed),
        "max-steps": steps,
        "seed": seed,
        "on-missing": "raise",
        "num-workers": 2,
    }
    if states.vocab.ids is not None:
        found["draft-vocab-size"] = states.vocab.size
    if not torch.cuda.is_available():
        found |= {"num-workers": 0, "hidden-states-dtype": "float32", "loss-implementation": "eager"}
        found["draft-attn-impl"] = "sdpa"
    return found


def epochs(lengths: Sequence[int], budget: int, steps: int, seed: int) -> int:
    """How many epochs of speculators' own packing `steps` batches begin."""
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    sampler = MultipackDistributedBatchSamplerV2(budget, lengths, num_replicas=1, rank=0, seed=seed)
    epoch, done = 0, 0
    while done < steps:
        sampler.set_epoch(epoch)
        done += len(sampler)
        epoch += 1
    return epoch


def main() -> None:
    import speculators.models.eagle3.metrics as metrics
    import speculators.train.trainer as trainer
    from speculators.train.cli import main as train
    from speculators.train.config import TrainConfig

    metrics.compound_loss = torch.compiler.disable(metrics.compound_loss)
    if not torch.cuda.is_available():
        trainer.get_local_rank = lambda: torch.device("cpu")
        torch.accelerator.synchronize = lambda: None
    train(TrainConfig.resolve(sys.argv[1:]))


if __name__ == "__main__":
    main()
