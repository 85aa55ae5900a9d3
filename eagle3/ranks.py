"""The processes of one training: one a GPU under torchrun, or a single one.

The draft is replicated and its gradients are summed over ranks. It is small beside the target (Kimi-K2.5's: 0.8
billion trained weights, 13 GB with masters, moments and gradients), and every step of the training-time test uses every
weight, so no gradient is final before the end of the backward pass: there is nothing to overlap, and sharding the
weights would only gather them again.
"""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from eagle3 import cli


@dataclass(frozen=True)
class Ranks:
    """This process's place among `world` processes, and its device."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def join(cls) -> "Ranks":
        """Join the processes that torchrun started, or be alone; a GPU each where there are GPUs."""
        local = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "RANK" not in os.environ:
            return cls(0, 1, device)
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print once, not once a rank."""
        if self.first:
            print(text, flush=True)

    def sum(self, *tensors: torch.Tensor) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.world > 1:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

    @contextmanager
    def refusing_together(self) -> Iterator[None]:
        """What any rank refuses in the block (ValueError, OSError) ends all of them with cli.REFUSED, and is said once.

        The first rank raises it as a ValueError, the others leave silently.
        """
        refusal = None
        try:
            yield
        except (ValueError, OSError) as error:
            refusal = cli.describe(error)
        refusals: list[str | None] = [refusal]
        if self.world > 1:
            refusals *= self.world
            dist.all_gather_object(refusals, refusal)
        if any(refusals):
            self.leave()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others once one has left: let all leave
            if not self.first:
                sys.exit(cli.REFUSED)
            raise ValueError("; ".join(dict.fromkeys(filter(None, refusals))))

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.world > 1:
            dist.destroy_process_group()


def gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """The gradients, zeros where a rank had nothing to learn from: every rank joins every sum."""
    found = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(parameter.grad)
    return found
