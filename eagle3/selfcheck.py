"""Proof that the captured states are the target's own, made in the worker for every sample while it runs.

For each sample whose prompt ends in a step, on its last row:
- norm(h_last) equals the final hidden row that the model itself made its logits from, within the dtype's tolerance;
- the token that the target sampled greedily has, in lm_head(norm(h_last)), a logit within two ulps of the largest
  (ties happen in bf16), and is exactly the largest in at least 99% of the samples.
For every row: all values are finite. At the start, in eager mode, each captured layer equals what a hook on that very
decoder layer saw.
"""

from dataclasses import dataclass, field

import torch

NORM_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative to the row's largest value
TIE_ULPS = 2
MIN_EXACT = 0.99
EXACT_SAMPLES = 100  # the exact share is judged once it rests on this many samples: one tie in four is no fault


@dataclass
class Tally:
    """What the check has seen so far."""

    samples: int = 0
    exact: int = 0
    worst_norm_error: float = 0.0
    worst_gap_ulps: float = 0.0
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        """One line for the log."""
        return (
            f"self-check: {self.samples:,} samples, sampled token = largest logit in {self.exact:,}, "
            f"worst gap {self.worst_gap_ulps:.1f} ulp, worst final-norm error {self.worst_norm_error:.1e}"
        )


def compare(
    tally: Tally,
    names: list[str],
    recomputed: torch.Tensor,
    final_rows: torch.Tensor,
    logits: torch.Tensor | None,
    sampled: list[int],
) -> None:
    """Judge the samples `names` that ended in this step and add them to the tally.

    recomputed: norm(h_last) [n, H]; final_rows: the model's own [n, H]; logits: lm_head(recomputed) [n, V], None on a
    rank that has none; sampled: the target's greedy tokens.
    """
    tolerance = NORM_TOLERANCE[final_rows.dtype]
    largest = final_rows.float().abs().amax(-1)
    errors = ((recomputed.float() - final_rows.float()).abs().amax(-1) / largest).tolist()
    gaps = [0.0] * len(names) if logits is None else _gaps_in_ulps(logits, sampled)
    for name, error, gap in zip(names, errors, gaps, strict=True):
        tally.samples += 1
        tally.exact += gap == 0
        tally.worst_norm_error = max(tally.worst_norm_error, error)
        tally.worst_gap_ulps = max(tally.worst_gap_ulps, gap)
        if not error <= tolerance:  # a NaN fails too
            tally.faults.append(
                f"sample {name!r}: the last captured layer, normed, differs from the target's final hidden row by "
                f"{error:.1e} of its largest value (allowed {tolerance:.0e}): it is not the last layer's output"
            )
        elif not gap <= TIE_ULPS:
            tally.faults.append(
                f"sample {name!r}: the token that the target sampled is {gap:.1f} ulp below the largest logit of the "
                f"captured last layer (allowed {TIE_ULPS})"
            )
    if tally.samples >= EXACT_SAMPLES and tally.exact < MIN_EXACT * tally.samples:
        tally.faults.append(
            f"the sampled token has the largest logit in only {tally.exact} of {tally.samples} samples "
            f"(at least {MIN_EXACT:.0%} expected)"
        )


def _gaps_in_ulps(logits: torch.Tensor, sampled: list[int]) -> list[float]:
    """How far each sampled token's logit lies below the largest, in ulps of the largest."""
    largest = logits.amax(-1)
    own = logits.gather(-1, torch.tensor(sampled, device=logits.device)[:, None])[:, 0]
    exponent = torch.floor(torch.log2(largest.float().abs().clamp_min(torch.finfo(torch.float32).tiny)))
    ulp = torch.exp2(exponent) * torch.finfo(logits.dtype).eps
    return ((largest.float() - own.float()) / ulp).tolist()


class LayerWitness:
    """Hooks on the decoder layers themselves: an independent view of what each layer put out in the last step.

    Works in eager mode only: a compiled graph does not call the hooks.
    """

    def __init__(self, layers: torch.nn.ModuleList, layer_ids: list[int]) -> None:
        self._layer_ids = layer_ids
        self._seen: dict[int, torch.Tensor] = {}
        self._handles = [layers[i].register_forward_hook(self._hook(i)) for i in layer_ids]

    def _hook(self, layer_id: int):  # noqa: ANN202
        def hook(_module: torch.nn.Module, _inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            hidden, residual = output
            self._seen[layer_id] = hidden + residual

        return hook

    def faults(self, captured: list[torch.Tensor]) -> list[str]:
        """Compare with the captured states, one tensor [rows, H] a layer; one line for each that differs."""
        if len(captured) != len(self._layer_ids):
            return [f"the target returned {len(captured)} layers, {len(self._layer_ids)} were asked for"]
        return [
            f"layer {i}: what was captured is not what decoder layer {i} put out"
            for i, states in zip(self._layer_ids, captured, strict=True)
            if i not in self._seen or not torch.equal(self._seen[i][: len(states)], states)
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._seen.clear()
