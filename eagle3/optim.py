"""Optimizers and the learning rate: AdamW, or Muon for the matrices and AdamW for the rest."""

import math
from collections.abc import Sequence

import torch

OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.95)
MOMENTUM = 0.9  # Muon's; with its usual 0.95 a draft learns less in a few hundred steps (docs/training.md)
HEAD = "lm_head.weight"


def learning_rate(step: int, num_steps: int, num_warmup: int, peak: float) -> float:
    """The rate of step `step` (0-based): linear warm-up to `peak` over `num_warmup` steps, then a cosine to 0.

    The first step already learns (peak / num_warmup) and the last one still does.
    """
    if step < num_warmup:
        return peak * (step + 1) / num_warmup
    done = (step - num_warmup) / max(num_steps - num_warmup, 1)
    return peak * (1 + math.cos(math.pi * done)) / 2


class Optimizer:
    """The optimizers of one draft, stepped together; their state as tensors under the parameters' names.

    Norm weights are never decayed. Muon's update is scaled to the size of AdamW's, so one rate serves both.
    """

    def __init__(self, draft: torch.nn.Module, kind: str, weight_decay: float) -> None:
        assert kind in OPTIMIZERS, kind
        parameters = {name: p for name, p in draft.named_parameters() if p.requires_grad}
        muon = {n: p for n, p in parameters.items() if kind == "muon" and p.ndim == 2 and n != HEAD}
        adamw = {n: p for n, p in parameters.items() if n not in muon}
        groups = [
            {"params": [p for p in adamw.values() if p.ndim == 2], "weight_decay": weight_decay},
            {"params": [p for p in adamw.values() if p.ndim != 2], "weight_decay": 0.0},
        ]
        self.parameters = parameters
        self.parts: list[torch.optim.Optimizer] = [torch.optim.AdamW(groups, betas=BETAS, fused=True)]
        if muon:
            rate = "match_rms_adamw"
            matrices = list(muon.values())
            self.parts += [torch.optim.Muon(matrices, momentum=MOMENTUM, weight_decay=weight_decay, adjust_lr_fn=rate)]

    def step(self, lr: float) -> None:
        """One update of every parameter at rate `lr`."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, torch.Tensor]:
        """`<parameter>.<key>` -> tensor: moments, momentum, step counts."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for part in self.parts
            for key, value in part.state.get(parameter, {}).items()
        }

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state()` gave."""
        for part in self.parts:
            held = part.state_dict()
            held["state"] = {i: _of(state, self._name(p)) for i, p in enumerate(_parameters(part))}
            part.load_state_dict(held)

    def _name(self, parameter: torch.nn.Parameter) -> str:
        return next(name for name, own in self.parameters.items() if own is parameter)


def _parameters(part: torch.optim.Optimizer) -> Sequence[torch.nn.Parameter]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


def _of(state: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
