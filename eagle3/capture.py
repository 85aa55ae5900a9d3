"""What the worker needs to know of vLLM: which rows of a step belong to which sample, and how layers are asked for.

Rows of a step stand in the order of the input batch's request ids; a request's rows start at its number of already
computed tokens, so chunked prefill and preemption (which starts again at 0) are handled by position.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from eagle3 import patched_forward
from eagle3.shards import ShardFormat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

CONFIG_KEY = "eagle3_capture"  # in vLLM's additional_config: the fields of CapturePlan
SAMPLE_KEY = "eagle3_sample"  # in a request's SamplingParams.extra_args: [shard, sample in shard, sample id]


@dataclass(frozen=True)
class CapturePlan:
    """What the driver tells the workers at start. `shared` is the metadata of the shards (see eagle3/shards.py)."""

    output_dir: str
    shared: dict[str, Any]

    @property
    def layer_ids(self) -> list[int]:
        return self.shared["layer_ids"]

    def shard_format(self, hidden_size: int) -> ShardFormat:
        """What every shard of this run looks like."""
        dtype = getattr(torch, self.shared["storage_dtype"])
        return ShardFormat(len(self.layer_ids), hidden_size, dtype, self.shared)


@dataclass(frozen=True)
class Request:
    """One request: which sample of which shard it is, and how many tokens its prompt has."""

    request_id: str
    shard: int
    sample: int
    sample_id: str
    length: int


@dataclass(frozen=True)
class Span:
    """Rows `start`..`stop` of a step are rows from `row` on of `request`'s sample."""

    request: Request
    row: int
    start: int
    stop: int

    @property
    def ends(self) -> bool:
        """Whether the prompt's last token is among these rows."""
        return self.row + self.stop - self.start == self.request.length


class RequestTracker:
    """Follows the scheduler's messages, since a request's identity is sent only once.

    A request that names no sample (a warm-up) is let pass: its rows are counted and belong to nobody.
    """

    def __init__(self) -> None:
        self._requests: dict[str, Request | None] = {}

    def schedule(self, output: "SchedulerOutput") -> dict[str, int]:
        """Note new and finished requests; returns the first row of each scheduled one."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        rows = {}
        for new in output.scheduled_new_reqs:
            identity = (new.sampling_params.extra_args or {}).get(SAMPLE_KEY)
            length = len(new.prompt_token_ids)
            self._requests[new.req_id] = Request(new.req_id, *identity, length) if identity else None
            rows[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        return rows | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))

    def any_sample(self, request_ids: Iterable[str]) -> bool:
        """Whether one of these requests is a sample's."""
        return any(self._requests[request_id] for request_id in request_ids)

    def spans(
        self, batch_order: Sequence[str], num_scheduled: Mapping[str, int], rows: Mapping[str, int]
    ) -> list[Span]:
        """The rows of a step, request by request in the order of the input batch."""
        spans, start = [], 0
        for request_id in batch_order:
            if count := num_scheduled.get(request_id, 0):
                if (request := self._requests[request_id]) is not None:
                    spans.append(Span(request, rows[request_id], start, start + count))
                start += count
        return spans


@dataclass
class Ended:
    """Samples whose prompt ended in a step, for the self-check (see selfcheck.compare); `tokens` once sampled."""

    requests: list[Request]
    recomputed: torch.Tensor
    final_rows: torch.Tensor
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def joined(cls, parts: Sequence["Ended"]) -> "Ended":
        """Those of several steps as one."""
        return cls(
            [request for part in parts for request in part.requests],
            torch.cat([part.recomputed for part in parts]),
            torch.cat([part.final_rows for part in parts]),
            [token for part in parts for token in part.tokens],
        )

    def found(self, request_ids: Sequence[str], sampled: Sequence[Sequence[int]]) -> None:
        """Note each sample's token, of what the whole step sampled."""
        of = dict(zip(request_ids, sampled, strict=True))
        self.tokens = [int(of[request.request_id][0]) for request in self.requests]


@dataclass(frozen=True)
class Route:
    """How captured layers are reached: `decoder` has `.layers` and the final `.norm`."""

    name: str
    decoder: Any

    def layers(self, state: Any) -> list[torch.Tensor]:
        """The captured layers of the step just run, each [rows or more, hidden]."""
        return list(state.aux_hidden_states or [])


def open_route(runner: Any, aux_ids: list[int]) -> Route:
    """Ask the loaded target for its auxiliary layers, before anything is compiled. ValueError if it cannot."""
    model = runner.get_model()
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    decoder = language_model.model
    if hasattr(model, "set_aux_hidden_state_layers"):
        model.set_aux_hidden_state_layers(tuple(aux_ids))
        name = "set_aux_hidden_state_layers"
    elif not (misfits := patched_forward.misfits(decoder)):
        patched_forward.patch(decoder, aux_ids)
        name = f"patched {type(decoder).__name__}.forward"
    else:
        raise ValueError(
            f"{type(model).__name__} in this vLLM has no set_aux_hidden_state_layers, and its forward can't be "
            f"patched: {'; '.join(misfits)}. Use a newer vLLM"
        )
    runner.use_aux_hidden_state_outputs = True
    return Route(name, decoder)


def check_engine(config: "VllmConfig") -> None:
    """ValueError if the engine is set up so that some rows would not pass through this worker, or not when expected."""
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise ValueError(
            f"pipeline parallelism ({parallel.pipeline_parallel_size} stages): a stage sees only its own layers, so "
            "the states of earlier stages would be lost; use tensor parallelism"
        )
    if config.cache_config.enable_prefix_caching:
        raise ValueError("prefix caching is on: tokens found in the cache are not computed, and would have no states")
    if config.scheduler_config.async_scheduling:
        raise ValueError("asynchronous scheduling is on: the self-check needs each step's tokens within the step")


def storage_dtype(setting: str, engine_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the shards: the engine's own, or float8_e4m3fn."""
    return torch.float8_e4m3fn if setting == "fp8" else engine_dtype
