#!/usr/bin/env python3
"""Make speculators 0.3.0's (and 0.4.0's) VllmHiddenStatesGenerator work on vLLM 0.16, or say why it can't.

    python fix_custom_worker.py            # --check: what is installed, what would break, what is repaired already
    python fix_custom_worker.py --diff     # the change as a unified diff; writes nothing
    python fix_custom_worker.py --apply    # repair the two files in place, a backup beside each
    python fix_custom_worker.py --revert   # put back the bytes that were there before

`--site DIR` names another environment: its site-packages, its root (a venv), or the speculators folder itself.
Python's standard library only, one file: copy it to the machine and run it with the Python that has speculators.
Neither speculators nor vLLM is imported; both are read as text.

Exit codes: 0 nothing to do or done; 1 the patch is needed (--check, --diff); 2 can't, and the text says why.

Sections: 1 the repairs; 2 source -> source; 3 files; 4 what is installed; 5 the contract with vLLM; 6 command line.
docs/speculators-0.3.0.md tells the same as symptoms, causes and repairs.
"""

import argparse
import ast
import contextlib
import difflib
import fcntl
import glob
import hashlib
import importlib.util
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REVISION = 1
MARKER = f"# Repaired for vLLM 0.16 by fix_custom_worker.py, revision {REVISION} (--revert undoes it)."
MARKER_PATTERN = re.compile(r"^# Repaired for vLLM .* by fix_custom_worker\.py, revision (\d+) ", re.MULTILINE)

WORKER = "custom_worker.py"
GENERATOR = "vllm_hidden_states_generator.py"

# sha256 of the files as the wheels of speculators carry them.
SHIPPED_SHA256 = {
    ("0.3.0", WORKER): "e9a95cf6422fa3e3efb3edb658e4898ba23ee141619f58d7096ea7fbde8af548",
    ("0.3.0", GENERATOR): "514f3f585afa335b558f98c1954a1dc5b804003cd7b08aeeac7c4cd333cd5106",
    ("0.4.0", WORKER): "6bc791477d99cc885e9344f47f7a6bcd1f0b1377a453ebb11d368999aa08df1e",
    ("0.4.0", GENERATOR): "a4c48d8c93526d8a8eef4cba220be209798b71d3b54ee5b347d13e360a2e312e",
}


# ---------------------------------------------------------------------------------------------------------------
# 1. The repairs
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Repair:
    """One place of one file: the text as shipped, by version of speculators, and the text that replaces it."""

    name: str
    file: str
    why: str
    shipped: dict[str, str]  # version of speculators -> text, found exactly once in that version's file
    repaired: str


def both(text: str) -> dict[str, str]:
    """The same text in 0.3.0 and in 0.4.0."""
    return {"0.3.0": text, "0.4.0": text}


REPAIRS = (
    # ---- custom_worker.py: runs in every worker process ----
    Repair(
        name="worker imports",
        file=WORKER,
        why="what the repairs below need; supports_eagle3 goes (see 'model gate')",
        shipped={
            "0.3.0": '''\
"""Custom worker extension for hidden states capture."""

import logging
import types
from itertools import islice

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.sequence import IntermediateTensors
''',
            "0.4.0": '''\
"""Custom worker extension for hidden states capture."""

import logging
import types
from collections import defaultdict
from itertools import islice

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.sequence import IntermediateTensors
''',
        },
        repaired=f'''\
"""Custom worker extension for hidden states capture."""
{MARKER}

import inspect
import logging
import traceback
import types
from itertools import islice

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.sequence import IntermediateTensors
''',
    ),
    Repair(
        name="helpers of the worker",
        file=WORKER,
        why="layers called as vLLM's own forward calls them, llama_4_scaling included; the first batch is proven "
        "against vLLM's own forward; a worker's exception arrives with its traceback instead of an empty text",
        shipped=both("""\
__all__ = ["HiddenStatesWorkerExtension"]

logger = logging.getLogger(__name__)
"""),
        repaired='''\
__all__ = ["HiddenStatesWorkerExtension"]

DEEPSEEK_LAYER = ["positions", "hidden_states", "residual", "llama_4_scaling"]

logger = logging.getLogger(__name__)


def _llama_4_scaling(config, positions):
    """1 + beta * ln(1 + floor(position / original_max_position_embeddings)), [tokens, 1, 1].

    What DeepseekV2Model.forward computes once for all its layers; None where the config
    has no llama_4_scaling.
    """
    scaling = getattr(config, "llama_4_scaling", None)
    if scaling is None:
        return None
    periods = torch.floor(positions / scaling["original_max_position_embeddings"])
    return (1 + scaling["beta"] * torch.log(1 + periods))[..., None, None]


def _call_layer(config, layer, positions, hidden_states, residual, scaling):
    """Call one decoder layer as vLLM's own forward does.

    The DeepseekV2 family (DeepSeek-V3, Kimi-K2; its config names a scoring_func) by position,
    the scaling last; any other by name, with the scaling only if its signature has one.
    """
    accepted = list(inspect.signature(layer.forward).parameters)
    if hasattr(config, "scoring_func") and accepted == DEEPSEEK_LAYER:
        return layer(positions, hidden_states, residual, scaling)
    extra = {"llama_4_scaling": scaling} if "llama_4_scaling" in accepted else {}
    return layer(
        positions=positions, hidden_states=hidden_states, residual=residual, **extra
    )


def _proving_forward(
    self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs
):
    """Run the first batch through vLLM's own forward too, and go on only if they agree.

    A model whose forward does more than embed, layers and norm (Gemma scales its
    embeddings) would give wrong states without an error. The warm-up run has no requests
    and no attention, so it proves nothing and is let through.
    """
    if self._extension._num_scheduled_tokens is None:  # noqa: SLF001
        return _patched_forward(
            self, input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
        )
    # layers write into their input, so each run gets its own
    embeds = inputs_embeds if inputs_embeds is None else inputs_embeds.clone()
    expected = type(self).forward(
        self, input_ids, positions, intermediate_tensors, embeds, **kwargs
    )
    found = _patched_forward(
        self, input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs
    )
    tolerance = 1e-4 if expected.dtype == torch.float32 else 5e-2
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    if not error <= tolerance:
        raise RuntimeError(
            f"the capturing forward and {type(self).__name__}.forward of vLLM disagree: "
            f"relative error {error:.2e}, allowed {tolerance:.0e}. The captured states "
            f"would be wrong: this model can't be extracted with this worker."
        )
    logger.info(f"Capturing forward proven on the first batch: error {error:.1e}")
    self.forward = types.MethodType(_patched_forward, self)
    return found


def _report_tracebacks():
    """Send a worker's exception as its traceback: vLLM sends str(exception) alone."""
    from vllm.v1.executor.multiproc_executor import WorkerProc  # noqa: PLC0415

    send = WorkerProc.enqueue_output

    def enqueue_output(self, output):
        if isinstance(output, Exception):
            vars(output).pop("__notes__", None)  # vLLM adds the traceback as a note too
            output = RuntimeError("".join(traceback.format_exception(output)))
        send(self, output)

    WorkerProc.enqueue_output = enqueue_output
''',
    ),
    Repair(
        name="forward arguments",
        file=WORKER,
        why="newer models hand forward further keywords",
        shipped={
            "0.3.0": """\
def _patched_forward(
    self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None
):
"""
        },
        repaired="""\
def _patched_forward(
    self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **_kwargs
):
""",
    ),
    Repair(
        name="embed method",
        file=WORKER,
        why="error 8, in the warm-up run: 'DeepseekV2Model' object has no attribute 'get_input_embeddings'",
        shipped={"0.3.0": "            else self.get_input_embeddings(input_ids)\n"},
        repaired="            else self.embed_input_ids(input_ids)\n",
    ),
    Repair(
        name="scaling of the forward",
        file=WORKER,
        why="raises nothing: llama_4_scaling was left out, wrong states for a model that has it",
        shipped=both("""\
    aux_hidden_states = []
    extension = self._extension  # noqa: SLF001
"""),
        repaired="""\
    aux_hidden_states = []
    config = getattr(self, "config", None)
    scaling = _llama_4_scaling(config, positions)
    extension = self._extension  # noqa: SLF001
""",
    ),
    Repair(
        name="layer call",
        file=WORKER,
        why="the other half of 'scaling of the forward'; a layer whose parameters have other names fails by name",
        shipped=both("""\
        hidden_states, residual = layer(
            hidden_states=hidden_states, positions=positions, residual=residual
        )
"""),
        repaired="""\
        hidden_states, residual = _call_layer(
            config, layer, positions, hidden_states, residual, scaling
        )
""",
    ),
    Repair(
        name="capture by request",
        file=WORKER,
        why="raises nothing: rows were cut by prompt order and length, so that a chunked prefill (more tokens than "
        "max_num_batched_tokens), a reordered batch or a preemption gave wrong or short states",
        shipped={
            "0.3.0": """\
        if self._captured_states is None:  # type: ignore[has-type]
            self._captured_states = [[h] for h in aux_hidden_states]
        else:
            for i, h in enumerate(aux_hidden_states):
                self._captured_states[i].append(h)
""",
            "0.4.0": """\
        if self._captured_states is None:  # type: ignore[has-type]
            self._captured_states = [[h] for h in aux_hidden_states]
        else:
            for i, h in enumerate(aux_hidden_states):
                self._captured_states[i].append(h)

        metadata = getattr(self, "_current_request_metadata", None)
        if metadata is not None:
            # Sort by vLLM's actual batch position (vLLM reorders requests internally)
            input_batch = self.model_runner.input_batch  # type: ignore[attr-defined]
            sorted_metadata = sorted(
                metadata.items(),
                key=lambda item: input_batch.req_id_to_index.get(item[0], float("inf")),
            )
            self._request_metadata.append(sorted_metadata)  # type: ignore[has-type]
""",
        },
        repaired='''\
        """Share the rows of one forward among its requests, in the order of the batch.

        aux_hidden_states: one [tokens, hidden] per captured layer, lowest layer first.
        Kept as request id -> chunks of its prompt, each a tensor per layer.
        """
        if self._num_scheduled_tokens is None:  # the warm-up run: no requests
            return
        if self._captured_states is None:
            self._captured_states = {}
        batch = self.model_runner.input_batch  # type: ignore[attr-defined]
        first = 0
        for index, req_id in enumerate(batch.req_ids):
            last = first + self._num_scheduled_tokens[req_id]
            start = int(batch.num_computed_tokens_cpu[index])
            if start == 0:  # a new request, or one that starts again after a preemption
                self._captured_states[req_id] = []
            chunks = self._captured_states[req_id]
            rows = sum(len(chunk[0]) for chunk in chunks)
            if rows != start:
                raise RuntimeError(
                    f"request {req_id}: {rows} rows captured so far, but vLLM goes on "
                    f"at position {start}"
                )
            chunks.append([h[first:last] for h in aux_hidden_states])
            first = last
''',
    ),
    Repair(
        name="layer order",
        file=WORKER,
        why="raises nothing: layer_ids given in another order than ascending came back ascending",
        shipped=both("""\
        self._layer_ids = frozenset(layer_ids)  # Convert once for O(1) lookup
"""),
        repaired="""\
        _report_tracebacks()
        self._layer_ids = frozenset(layer_ids)
        ascending = sorted(self._layer_ids)
        self._layer_order = [ascending.index(layer_id) for layer_id in layer_ids]
        self._num_scheduled_tokens = None  # request id -> rows, while a batch runs
""",
    ),
    Repair(
        name="model gate",
        file=WORKER,
        why="error 3: 'Model ... does not support hidden state extraction' (DeepSeek, Kimi); "
        "error 4: the Kimi wrapper has no attribute 'model'",
        shipped={
            "0.3.0": """\
        if not supports_eagle3(model):
            raise ValueError(
                f"Model {type(model).__name__} does not support hidden state extraction"
            )

        base_model = model.model  # type: ignore[attr-defined]
"""
        },
        repaired="""\
        if hasattr(model, "get_language_model"):  # a wrapper: Kimi-K2.5
            model = model.get_language_model()
        base_model = model.model  # type: ignore[attr-defined]
""",
    ),
    Repair(
        name="forward binding",
        file=WORKER,
        why="the first batch goes through 'helpers of the worker'; the worker learns how many rows each request has",
        shipped=both("""\
        base_model._extension = self  # noqa: SLF001
        base_model.forward = types.MethodType(_patched_forward, base_model)
"""),
        repaired="""\
        base_model._extension = self  # noqa: SLF001
        base_model.forward = types.MethodType(_proving_forward, base_model)
        execute_model = self.model_runner.execute_model  # type: ignore[attr-defined]

        def counting_execute_model(scheduler_output, *args, **kwargs):
            self._num_scheduled_tokens = scheduler_output.num_scheduled_tokens
            try:
                return execute_model(scheduler_output, *args, **kwargs)
            finally:
                self._num_scheduled_tokens = None

        self.model_runner.execute_model = counting_execute_model  # type: ignore[attr-defined]
""",
    ),
    Repair(
        name="captured states",
        file=WORKER,
        why="the other half of 'capture by request': request id -> one tensor per layer, in the order of layer_ids",
        shipped={
            "0.3.0": '''\
        """Get the captured hidden states

        Returns:
            List of tensors, one per target layer, or None if no states captured
        """
        if self._captured_states is None:
            return None
        # Concatenate lists of tensors into single tensors
        result = [
            torch.cat(layer_tensors, dim=0) for layer_tensors in self._captured_states
        ]
        # Clear intermediate storage after concatenating
        self._captured_states = None  # type: ignore[assignment]
        return result
''',
            "0.4.0": '''\
        """Get the captured hidden states organized by request ID.

        Returns:
            Dict mapping request_id to list of tensors (one per layer),
            or None if no states captured.

        Track which tokens belong to which request across chunked prefill iterations.
        """
        if self._captured_states is None:
            return None

        # Concatenate captured states from all scheduler iterations
        concatenated_layers = [
            torch.cat(layer_tensors, dim=0) for layer_tensors in self._captured_states
        ]

        # Slice and group by request
        request_chunks: defaultdict[str, list[list[torch.Tensor]]] = defaultdict(
            lambda: [[] for _ in range(len(concatenated_layers))]
        )
        current_idx = 0

        for metadata in self._request_metadata:  # type: ignore[has-type]
            for req_id, num_tok in metadata:
                for layer_idx, layer_tensor in enumerate(concatenated_layers):
                    chunk = layer_tensor[current_idx : current_idx + num_tok].clone()
                    request_chunks[req_id][layer_idx].append(chunk)
                current_idx += num_tok

        # Concatenate chunks for each request
        result: dict[str, list[torch.Tensor]] = {
            req_id: [torch.cat(chunks, dim=0) for chunks in layer_chunks]
            for req_id, layer_chunks in request_chunks.items()
        }

        # Clear intermediate storage
        self._captured_states = None  # type: ignore[assignment]
        self._request_metadata = []  # type: ignore[assignment]
        return result
''',
        },
        repaired='''\
        """Request id -> one [tokens, hidden] per layer, in the order of layer_ids, on the CPU.

        None if nothing was captured.
        """
        if self._captured_states is None:
            return None
        result = {}
        for req_id, chunks in self._captured_states.items():
            layers = [torch.cat(parts).cpu() for parts in zip(*chunks, strict=True)]
            result[req_id] = [layers[index] for index in self._layer_order]
        self._captured_states = None
        return result
''',
    ),
    # ---- vllm_hidden_states_generator.py: runs in the user's process ----
    Repair(
        name="marker",
        file=GENERATOR,
        why="says that the file is repaired, and by which revision",
        shipped=both(
            '"""Extract hidden states from intermediate layers during prefill using vLLM."""\n\nimport torch\n'
        ),
        repaired=f'''\
"""Extract hidden states from intermediate layers during prefill using vLLM."""
{MARKER}

import torch
''',
    ),
    Repair(
        name="dtype argument",
        file=GENERATOR,
        why="see 'checkpoint's dtype'",
        shipped={
            "0.3.0": """\
        tensor_parallel_size: int = 1,
    ):
"""
        },
        repaired="""\
        tensor_parallel_size: int = 1,
        dtype: str | None = None,
    ):
""",
    ),
    Repair(
        name="dtype argument",
        file=GENERATOR,
        why="see 'checkpoint's dtype'",
        shipped={
            "0.4.0": """\
        max_num_batched_tokens: int | None = None,
    ):
"""
        },
        repaired="""\
        max_num_batched_tokens: int | None = None,
        dtype: str | None = None,
    ):
""",
    ),
    Repair(
        name="tokenizer's remote code",
        file=GENERATOR,
        why="error 1, Kimi: ValueError 'repository contains custom code' (EOFError without a terminal)",
        shipped=both("""\
        self.tokenizer = AutoTokenizer.from_pretrained(model_path)
"""),
        repaired="""\
        self.tokenizer = AutoTokenizer.from_pretrained(
            model_path, trust_remote_code=True
        )
""",
    ),
    Repair(
        name="checkpoint's dtype",
        file=GENERATOR,
        why="raises nothing: dtype='auto' computes a float32 checkpoint in bfloat16",
        shipped=both("""\
        log.info(f"Model has {num_layers} layers")

        if layer_ids is None:
"""),
        repaired="""\
        log.info(f"Model has {num_layers} layers")

        # vLLM's "auto" would compute a float32 checkpoint in bfloat16 without a word
        text_config = getattr(config, "text_config", config)
        stored = getattr(text_config, "dtype", None) or getattr(config, "dtype", None)
        self.dtype = dtype or ("float32" if str(stored).endswith("float32") else "auto")
        log.info(f"Computing in {self.dtype} (the checkpoint says {stored})")

        if layer_ids is None:
""",
    ),
    Repair(
        name="KV cache memory",
        file=GENERATOR,
        why="error 5, on CPU: 'Found no NVIDIA driver'",
        shipped={
            "0.3.0": """\
        free_memory, _ = torch.cuda.mem_get_info()
        cache_memory = int(free_memory * gpu_memory_utilization * CACHE_MEMORY_FRACTION)
""",
        },
        repaired="""\
        # set where vLLM runs on CPU (VLLM_CPU_KVCACHE_SPACE), None elsewhere
        cache_memory = self.vllm_config.cache_config.cpu_kvcache_space_bytes
        if cache_memory is None:
            free_memory, _ = torch.cuda.mem_get_info()
            cache_memory = int(
                free_memory * gpu_memory_utilization * CACHE_MEMORY_FRACTION
            )
""",
    ),
    Repair(
        name="KV cache memory",
        file=GENERATOR,
        why="on CPU it took 0 bytes for the KV cache, and Scheduler fails with a bare AssertionError",
        shipped={
            "0.4.0": """\
        free_memory, _ = mem_get_info()
        cache_memory = int(free_memory * gpu_memory_utilization * CACHE_MEMORY_FRACTION)
""",
        },
        repaired="""\
        # set where vLLM runs on CPU (VLLM_CPU_KVCACHE_SPACE), None elsewhere
        cache_memory = self.vllm_config.cache_config.cpu_kvcache_space_bytes
        if cache_memory is None:
            free_memory, _ = mem_get_info()
            cache_memory = int(
                free_memory * gpu_memory_utilization * CACHE_MEMORY_FRACTION
            )
""",
    ),
    Repair(
        name="KV cache config",
        file=GENERATOR,
        why="error 6: get_kv_cache_config_from_groups() got an unexpected keyword argument 'kv_cache_specs'",
        shipped={
            "0.3.0": """\
            kv_cache_groups=kv_cache_groups,
            kv_cache_specs=kv_cache_spec,
            available_memory=cache_memory,
"""
        },
        repaired="""\
            kv_cache_groups=kv_cache_groups,
            available_memory=cache_memory,
""",
    ),
    Repair(
        name="scheduler's block size",
        file=GENERATOR,
        why="error 7: Scheduler.__init__() missing 1 required positional argument: 'block_size'; taken from the "
        "config, since MLA on CUDA forces 64 or 128 there",
        shipped={
            "0.3.0": """\
            structured_output_manager=structured_output_manager,
        )
""",
            "0.4.0": """\
            structured_output_manager=structured_output_manager,
            block_size=VLLM_BLOCK_SIZE,
        )
""",
        },
        repaired="""\
            structured_output_manager=structured_output_manager,
            block_size=self.vllm_config.cache_config.block_size,
        )
""",
    ),
    Repair(
        name="prefix caching off",
        file=GENERATOR,
        why="error 9: a bare AssertionError in vLLM's block_pool.py (len(request.block_hashes) >= ...); and a cached "
        "prefix would not be computed, so not captured",
        shipped={
            "0.3.0": """\
            gpu_memory_utilization=gpu_memory_utilization,
        )

        # For prefill-only workloads, use conservative scheduler limits
"""
        },
        repaired="""\
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=False,
        )

        # For prefill-only workloads, use conservative scheduler limits
""",
    ),
    Repair(
        name="model config",
        file=GENERATOR,
        why="dtype as above; and text only: no vision weights (Kimi wrapper)",
        shipped=both("""\
                dtype="auto",
                max_model_len=max_model_len,
                enforce_eager=True,
"""),
        repaired="""\
                dtype=self.dtype,
                max_model_len=max_model_len,
                enforce_eager=True,
                limit_mm_per_prompt=dict.fromkeys(
                    ("image", "video", "audio", "vision_chunk"), 0
                ),
""",
    ),
    Repair(
        name="scheduler config",
        file=GENERATOR,
        why="error 2: ValidationError 'is_encoder_decoder: Field required'; async scheduling off: it schedules "
        "decode steps whose rows nobody asked for",
        shipped={
            "0.3.0": """\
                max_num_batched_tokens=max_num_batched_tokens,
            ),
            device_config=DeviceConfig(),
""",
            "0.4.0": """\
                max_num_batched_tokens=max_num_batched_tokens,
                is_encoder_decoder=False,
            ),
            device_config=DeviceConfig(),
""",
        },
        repaired="""\
                max_num_batched_tokens=max_num_batched_tokens,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            device_config=DeviceConfig(),
""",
    ),
    Repair(
        name="samples and lengths",
        file=GENERATOR,
        why="raises nothing: samples longer than max_model_len - 1 were cut without a word; an empty one, or requests "
        "left by a call that failed, break the next call",
        shipped=both("""\
        input_ids_list = [ids[:max_len] for ids in input_ids_list]
"""),
        repaired="""\
        whole = input_ids_list
        empty = [i for i, ids in enumerate(whole) if len(ids) == 0]
        if empty:
            raise ValueError(f"token_ids[{empty[0]}] has no tokens")
        num_cut = sum(len(ids) > max_len for ids in whole)
        if num_cut:
            log.warning(
                f"{num_cut} of {len(whole)} samples are longer than max_model_len - 1 = "
                f"{max_len} tokens and are cut there"
            )
        input_ids_list = [ids[:max_len] for ids in whole]
        # left by a call that failed
        self.scheduler.finish_requests(
            list(self.scheduler.requests), RequestStatus.FINISHED_ABORTED
        )
""",
    ),
    Repair(
        name="prefill loop and results",
        file=GENERATOR,
        why="error 10: 'Boolean value of Tensor with more than one value is ambiguous' (unique_reply_rank's result "
        "is that rank's own already); error 11, the second generate(): 'State error: sample_tokens() must be "
        "called'; raises nothing: requests finished before their prompt was, held by the workers afterwards, rows "
        "cut by length; in 0.4.0 sorted() on request ids as text (req_0_10 before req_0_2) mixed the samples of "
        "batches of 11 or more, and a full KV cache ended the loop early",
        shipped={
            "0.3.0": """\
        # Increment to ensure unique request IDs across calls
        # (prevents KV cache corruption with delayed block freeing)
        self._request_counter += 1
        self.executor.collective_rpc("_reset_capture")

        schedule_iterations = 0
        while (
            scheduler_output := self.scheduler.schedule()
        ).total_num_scheduled_tokens > 0:
            schedule_iterations += 1
            log.debug(
                f"Scheduler iteration {schedule_iterations} - tokens: "
                f"{scheduler_output.total_num_scheduled_tokens}"
            )

            self.executor.execute_model(scheduler_output)

            for req_id in scheduler_output.num_scheduled_tokens:
                self.scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORTED)

        # Get captured states from driver worker
        captured_states_list = self.executor.collective_rpc(
            "_get_captured_states",
            unique_reply_rank=0,
        )
        aux_hidden_states = captured_states_list[0]

        if not aux_hidden_states:
            raise RuntimeError("Failed to capture hidden states from worker")

        log.debug(f"Successfully captured {len(aux_hidden_states)} layers")

        seq_lens = [len(ids) for ids in input_ids_list]
        results = []
        offset = 0
        for i, seq_len in enumerate(seq_lens):
            layer_states = [
                h[offset : offset + seq_len].clone().cpu() for h in aux_hidden_states
            ]

            input_ids_tensor = torch.as_tensor(input_ids_list[i], dtype=torch.long)

            results.append(
                {
                    "input_ids": input_ids_tensor,
                    "hidden_states": layer_states,
                    "loss_mask": None,
                }
            )
            offset += seq_len
""",
            "0.4.0": """\
        # Increment to ensure unique request IDs across calls
        # (prevents KV cache corruption with delayed block freeing)
        self._request_counter += 1
        self.executor.collective_rpc("_reset_capture")

        # Track progress for each request to distinguish prefill from decode
        request_num_computed = dict.fromkeys(request_id_to_idx, 0)
        schedule_iterations = 0
        all_prefill_complete = False

        while (
            scheduler_output := self.scheduler.schedule()
        ).total_num_scheduled_tokens > 0 and not all_prefill_complete:
            schedule_iterations += 1

            # Calculate prefill tokens for each request (ignore decode tokens)
            prefill_metadata = {}
            for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
                num_already_computed = request_num_computed[req_id]
                num_prompt = request_id_to_prompt_len[req_id]
                num_prefill = max(0, min(num_tokens, num_prompt - num_already_computed))

                if num_prefill > 0:
                    prefill_metadata[req_id] = num_prefill

                request_num_computed[req_id] += num_tokens

            all_prefill_complete = all(
                request_num_computed[req_id] >= request_id_to_prompt_len[req_id]
                for req_id in request_id_to_idx
            )

            if prefill_metadata:
                self.executor.collective_rpc(
                    "_set_request_metadata", args=(prefill_metadata,)
                )

            model_output = self.executor.execute_model(scheduler_output)
            self.executor.sample_tokens(model_output)

        # Abort all requests (prefill complete, don't need decode)
        self.scheduler.finish_requests(
            list(request_id_to_idx.keys()), RequestStatus.FINISHED_ABORTED
        )

        # Get captured states organized by request ID
        request_states_dict = self.executor.collective_rpc(
            "_get_captured_states",
            unique_reply_rank=0,
        )

        if not request_states_dict:
            raise RuntimeError("Failed to capture hidden states from worker")

        log.debug(f"Captured states for {len(request_states_dict)} requests")

        # Map results back to original input order
        results = []
        for req_id in sorted(request_id_to_idx.keys()):
            i = request_id_to_idx[req_id]

            if req_id not in request_states_dict:
                raise RuntimeError(
                    f"Request {req_id} not found in captured states. "
                    f"Available: {list(request_states_dict.keys())}"
                )

            layer_states = [h.clone().cpu() for h in request_states_dict[req_id]]
            input_ids_tensor = torch.as_tensor(input_ids_list[i], dtype=torch.long)

            results.append(
                {
                    "input_ids": input_ids_tensor,
                    "hidden_states": layer_states,
                    "loss_mask": None,
                }
            )
""",
        },
        repaired="""\
        request_ids = [
            f"req_{self._request_counter}_{i}" for i in range(len(input_ids_list))
        ]
        # Increment to ensure unique request IDs across calls
        # (prevents KV cache corruption with delayed block freeing)
        self._request_counter += 1
        self.executor.collective_rpc("_reset_capture")

        while (
            scheduler_output := self.scheduler.schedule()
        ).total_num_scheduled_tokens > 0:
            self._run(scheduler_output)
        # the last output schedules nothing, but tells the workers which requests to drop
        self.executor.execute_model(scheduler_output)

        captured = self.executor.collective_rpc(
            "_get_captured_states",
            unique_reply_rank=0,
        )
        results = []
        for i, (req_id, ids) in enumerate(
            zip(request_ids, input_ids_list, strict=True)
        ):
            results.append(
                {
                    "input_ids": torch.as_tensor(ids, dtype=torch.long),
                    "hidden_states": self._checked_states(i, req_id, ids, captured),
                    "loss_mask": None,
                }
            )
""",
    ),
    Repair(
        name="helpers of the generator",
        file=GENERATOR,
        why="one step of the loop, and the check that each sample has a row for each token",
        shipped=both("""\
        return results

    def __del__(self):
"""),
        repaired='''\
        return results

    def _run(self, scheduler_output):
        """One forward; then drop the requests whose whole prompt is computed.

        A chunked prefill goes on in the next forward. max_tokens is 1, so what is sampled
        is never used, but vLLM wants it sampled before the next forward.
        """
        if self.executor.execute_model(scheduler_output) is None:
            self.executor.sample_tokens(None)
        requests = self.scheduler.requests
        done = [
            req_id
            for req_id in scheduler_output.num_scheduled_tokens
            if requests[req_id].num_computed_tokens >= requests[req_id].num_prompt_tokens
        ]
        self.scheduler.finish_requests(done, RequestStatus.FINISHED_ABORTED)

    def _checked_states(self, i, req_id, ids, captured):
        """The states of sample i, one [tokens, hidden] per layer, a row for each token."""
        states = (captured or {}).get(req_id, [])
        rows = [len(layer) for layer in states]
        if rows != [len(ids)] * len(self.layer_ids):
            cache = self.vllm_config.cache_config
            raise RuntimeError(
                f"token_ids[{i}] has {len(ids)} tokens, but the rows captured for its "
                f"{len(self.layer_ids)} layers are {rows or 'none'}. A sample longer than "
                f"the KV cache ({cache.num_gpu_blocks} blocks of {cache.block_size} "
                f"tokens) can't be computed: free memory on the device or shorten it"
            )
        return states

    def __del__(self):
''',
    ),
)


# ---------------------------------------------------------------------------------------------------------------
# 2. Source -> source
# ---------------------------------------------------------------------------------------------------------------


class CannotRepair(Exception):
    """Something that the user has to know and decide; nothing was written."""


def repairs_of(file: str, version: str) -> list[Repair]:
    return [repair for repair in REPAIRS if repair.file == file and version in repair.shipped]


def place_state(source: str, repair: Repair, version: str) -> str:
    """'ours', 'original' or 'foreign'. No place's shipped text is part of what the repairs put in."""
    if source.count(repair.repaired) == 1:
        return "ours"
    return "original" if source.count(repair.shipped[version]) == 1 else "foreign"


def repair_source(source: str, file: str, version: str) -> str:
    """The source with every place repaired; places that are repaired already stay as they are.

    Raises CannotRepair, naming file, line, expected and found, if a place is neither as shipped nor as repaired, or
    if the result is no Python.
    """
    states = [(repair, place_state(source, repair, version)) for repair in repairs_of(file, version)]
    foreign = [describe_foreign(source, repair, version) for repair, state in states if state == "foreign"]
    if foreign:
        raise CannotRepair("\n".join(foreign))
    for repair, state in states:
        if state == "original":
            source = source.replace(repair.shipped[version], repair.repaired)
    try:
        ast.parse(source)
    except SyntaxError as error:
        raise CannotRepair(f"{file}, line {error.lineno}: not Python once repaired ({error.msg})") from error
    return source


def undo_source(source: str, file: str, version: str) -> str:
    """The source with every repaired place as shipped; what somebody else changed elsewhere stays."""
    for repair in repairs_of(file, version):
        if place_state(source, repair, version) == "ours":
            source = source.replace(repair.repaired, repair.shipped[version])
    return source


def nearest_line(source: str, text: str) -> int:
    """The line (from 1) at which `source` looks most like `text`."""
    lines, wanted = source.splitlines(), text.splitlines()
    windows = range(max(1, len(lines) - len(wanted) + 1))
    shared = [len(set(wanted) & set(lines[start : start + len(wanted)])) for start in windows]
    return max(windows, key=shared.__getitem__) + 1


def line_of(source: str, repair: Repair, version: str) -> int:
    """The line (from 1) of a place, whatever its state."""
    for text in (repair.repaired, repair.shipped[version]):
        if source.count(text) == 1:
            return source[: source.index(text)].count("\n") + 1
    return nearest_line(source, repair.shipped[version])


def describe_foreign(source: str, repair: Repair, version: str) -> str:
    """What was expected at a place that somebody else changed, and what stands there, as a diff."""
    shipped = repair.shipped[version]
    where = f"{repair.file}, line {line_of(source, repair, version)}, '{repair.name}'"
    if source.count(shipped) > 1:
        return f"{where}: the text to replace is there {source.count(shipped)} times, expected once:\n" + shipped
    start = nearest_line(source, shipped) - 1
    found = source.splitlines()[start : start + len(shipped.splitlines())]
    diff = difflib.ndiff(shipped.splitlines(), found)
    return f"{where}: changed by someone else (- expected, + found):\n" + "\n".join(
        "    " + line.rstrip() for line in diff if not line.startswith("?")
    )


# ---------------------------------------------------------------------------------------------------------------
# 3. Files
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceFile:
    """One of the two files as found: its text with \\n line ends, and what that text is."""

    path: Path
    source: str
    newline: str
    version: str  # of speculators: the one whose places it has

    @property
    def revision(self) -> int | None:
        """The revision that repaired this file, or None."""
        match = MARKER_PATTERN.search(self.source)
        return int(match.group(1)) if match else None

    @property
    def states(self) -> list[tuple[Repair, str]]:
        """(repair, state) of each place."""
        repairs = repairs_of(self.path.name, self.version)
        return [(repair, place_state(self.source, repair, self.version)) for repair in repairs]

    @property
    def edited_elsewhere(self) -> bool:
        """Whether it differs from the shipped file outside our places."""
        shipped = undo_source(self.source, self.path.name, self.version)
        return sha256(shipped) != SHIPPED_SHA256[self.version, self.path.name]

    @property
    def state(self) -> str:
        found = {state for _, state in self.states}
        if self.revision not in (None, REVISION):
            return f"repaired by another revision ({self.revision}; this file is revision {REVISION})"
        if "foreign" in found:
            return "changed by someone else"
        text = {
            frozenset(["original"]): f"original ({self.version})",
            frozenset(["ours"]): f"repaired, revision {REVISION}",
        }.get(frozenset(found), f"half repaired ({self.version})")
        return text + (", with edits elsewhere that stay" if self.edited_elsewhere else "")

    @property
    def backup(self) -> Path:
        return backup_path(self.path)

    def encode(self, source: str) -> bytes:
        return source.replace("\n", self.newline).encode()


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def backup_path(path: Path) -> Path:
    return path.with_name(path.name + ".before-repair")


def decode(path: Path) -> tuple[str, str]:
    """The text of a file with \\n line ends, and the line end that it has."""
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise CannotRepair(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CannotRepair(f"{path}: not UTF-8 at byte {error.start}") from error
    newline = "\r\n" if "\r\n" in text else "\n"
    plain = text.replace("\r\n", "\n")
    if plain.replace("\n", newline) != text:
        raise CannotRepair(f"{path}: some lines end with CRLF and some with LF; expected one kind")
    return plain, newline


def read_source(path: Path) -> SourceFile:
    """Read one of the two files and tell of which version of speculators it is: the one with most known places."""
    source, newline = decode(path)
    versions = sorted({version for version, _ in SHIPPED_SHA256})

    def share_known(version: str) -> float:
        repairs = repairs_of(path.name, version)
        return sum(place_state(source, repair, version) != "foreign" for repair in repairs) / len(repairs)

    version = max(versions, key=share_known)
    if share_known(version) == 0 and not MARKER_PATTERN.search(source):
        raise CannotRepair(f"{path}: none of the places to repair is in it; expected {' or '.join(versions)}'s file")
    return SourceFile(path, source, newline, version)


def stale_bytecode(path: Path) -> list[Path]:
    """Compiled files that Python would run although they are not compiled from this source.

    Python compares time and size, unless they were compiled with `--invalidation-mode unchecked-hash` (some images
    are): then it runs them whatever the source says.
    """
    unchecked = 0b01
    stale = []
    for compiled in cached_bytecode(path):
        header = compiled.read_bytes()[:16]
        flags = int.from_bytes(header[4:8], "little")
        if flags == unchecked and header[8:16] != importlib.util.source_hash(path.read_bytes()):
            stale.append(compiled)
    return stale


def cached_bytecode(path: Path) -> list[Path]:
    folder = Path(importlib.util.cache_from_source(str(path))).parent
    return sorted(folder.glob(f"{glob.escape(path.stem)}.*.pyc"))


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Let one process at a time change the folder. Where locks don't exist (some network disks) go on without:
    writes are atomic and every process writes the same bytes."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CannotRepair(f"{folder}: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def stage(path: Path, data: bytes, like: Path) -> Path:
    """Write data beside `path` under a temporary name, flushed, with the mode of `like`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(like, temporary)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def replace_all(contents: dict[Path, bytes]) -> None:
    """Give each path (existing or not) its bytes: all of them, or none.

    By renaming, never by writing into a file: installers share files between environments by hard links.
    """
    before, staged, replaced = {}, {}, []
    try:
        before = {path: path.read_bytes() for path in contents if path.exists()}
        for path, data in contents.items():
            staged[path] = stage(path, data, like=path if path.exists() else path.with_suffix(""))
        for path, temporary in staged.items():
            os.replace(temporary, path)
            replaced.append(path)
    except OSError as error:
        for path in replaced:
            if path in before:
                os.replace(stage(path, before[path], like=path), path)
            else:
                path.unlink()
        raise CannotRepair(
            f"can't write {error.filename2 or error.filename}: {error.strerror}. Nothing was changed. Run as the owner "
            f"of {next(iter(contents)).parent} (you are uid {os.getuid()}), or use an environment of your own"
        ) from error
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def drop_bytecode(paths: list[Path]) -> None:
    for compiled in [compiled for path in paths for compiled in cached_bytecode(path)]:
        try:
            compiled.unlink(missing_ok=True)
        except OSError as error:
            raise CannotRepair(f"{compiled}: delete it, Python may run it instead ({error.strerror})") from error


def without_older_revision(file: SourceFile) -> SourceFile:
    """A file that another revision repaired, as it was before: from its backup. Any other file as it is."""
    if file.revision in (None, REVISION):
        return file
    if not file.backup.exists():
        raise CannotRepair(
            f"{file.path}: {file.state}, and {file.backup.name} is gone. "
            f"Reinstall: pip install --force-reinstall --no-deps speculators=={file.version}"
        )
    source, newline = decode(file.backup)
    for (version, name), digest in SHIPPED_SHA256.items():
        if name == file.path.name and digest == sha256(source):
            return SourceFile(file.path, source, newline, version)
    raise CannotRepair(f"{file.backup}: not the file that a known version of speculators ships")


def apply_repairs(files: list[SourceFile]) -> list[Path]:
    """Repair all files or none; returns the paths written. A file that is repaired already is not touched."""
    contents = {}
    for found in files:
        file = without_older_revision(found)
        repaired = repair_source(file.source, file.path.name, file.version)
        if repaired != found.source:
            shipped = undo_source(file.source, file.path.name, file.version)
            contents[file.backup] = file.encode(shipped)
            contents[file.path] = file.encode(repaired)
    if contents:
        replace_all(contents)
    drop_bytecode([path for file in files for path in [file.path] if path in contents or stale_bytecode(path)])
    return [file.path for file in files if file.path in contents]


def revert_repairs(files: list[SourceFile]) -> list[Path]:
    """Put back what was there before; returns the paths written. Edits made elsewhere since then stay."""
    contents = {}
    for found in files:
        file = without_older_revision(found)
        if file is found and "foreign" in {state for _, state in file.states} and file.revision:
            foreign = next(repair for repair, state in file.states if state == "foreign")
            raise CannotRepair(
                describe_foreign(file.source, foreign, file.version)
                + f"\nEdited after it was repaired. The file as it was before: {file.backup}; copy it back yourself."
            )
        shipped = undo_source(file.source, file.path.name, file.version)
        if shipped != found.source:
            contents[file.path] = file.encode(shipped)
    if contents:
        replace_all(contents)
        drop_bytecode(list(contents))
    for path in contents:
        backup_path(path).unlink(missing_ok=True)
    return list(contents)


# ---------------------------------------------------------------------------------------------------------------
# 4. What is installed
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Installed:
    """The package folders of one environment."""

    speculators: Path
    vllm: Path | None
    shadowed: tuple[Path, ...] = ()  # other speculators on sys.path, which Python does not reach

    @property
    def folder(self) -> Path:
        return self.speculators / "data_generation"


def installed_version(package: Path | None) -> str:
    """The version in the dist-info folder beside a package; '?' if it has none."""
    if package is None:
        return "not found"
    names = (package.name, f"{package.name}_cpu")  # vLLM's CPU build goes by another name
    for metadata in [path for name in names for path in package.parent.glob(f"{name}-*.dist-info/METADATA")]:
        match = re.search(r"^Version: (\S+)", metadata.read_text(), re.MULTILINE)
        if match:
            return match.group(1)
    return "?"


def find_in_python() -> Installed:
    """What the running Python would import, found without importing it."""
    specs = {name: importlib.util.find_spec(name) for name in ("speculators", "vllm")}
    folders = {
        name: Path(next(iter(spec.submodule_search_locations)))
        for name, spec in specs.items()
        if spec and spec.submodule_search_locations
    }
    if "speculators" not in folders:
        raise CannotRepair(
            f"no speculators in {sys.executable}. Run with the Python that has it, or name its folder with --site"
        )
    found = [Path(entry, "speculators") for entry in dict.fromkeys(sys.path)]
    shadowed = [f for f in found if (f / "data_generation").is_dir() and not f.samefile(folders["speculators"])]
    return Installed(folders["speculators"], folders.get("vllm"), tuple(shadowed))


def find_in_site(site: Path) -> Installed:
    """The packages under DIR: a site-packages folder, the root of an environment, or speculators itself."""
    if not site.is_dir():
        raise CannotRepair(f"--site {site}: no such folder")
    if (site / "data_generation").is_dir():
        candidates = [site.parent]
    else:
        folders = [site, *sorted(site.glob("lib*/python3*/site-packages"))]
        candidates = list({f.resolve(): f for f in folders if (f / "speculators").is_dir()}.values())
    if not candidates:
        raise CannotRepair(f"--site {site}: no speculators there, nor in its lib/python3*/site-packages")
    if len(candidates) > 1:
        raise CannotRepair(f"--site {site} has speculators more than once; name one: {', '.join(map(str, candidates))}")
    vllm = candidates[0] / "vllm"
    return Installed(candidates[0] / "speculators", vllm if vllm.is_dir() else None)


def read_files(installed: Installed) -> list[SourceFile]:
    """Both files, or why there is nothing to repair."""
    paths = [installed.folder / name for name in (WORKER, GENERATOR)]
    missing = [path for path in paths if not path.exists()]
    version = installed_version(installed.speculators)
    if len(missing) == 2:
        raise CannotRepair(
            f"speculators {version} in {installed.speculators} has no VllmHiddenStatesGenerator: 0.3.0 and 0.4.0 have "
            f"it, 0.5.0 dropped it.\n{ADVICE}"
        )
    if missing:
        raise CannotRepair(
            f"{missing[0]} is missing (interrupted install?). Reinstall: pip install --force-reinstall --no-deps "
            f"speculators=={version}"
        )
    files = [read_source(path) for path in paths]
    if files[0].version != files[1].version:
        found = ", ".join(f"{file.path.name} of {file.version}" for file in files)
        raise CannotRepair(f"{installed.folder} mixes two versions of speculators: {found}. Reinstall one of them")
    return files


ADVICE = """\
What to do instead:
  - 02_extract_hidden_states.py of this project: its worker captures the states through vLLM's own interface and
    checks every batch; it needs no speculators.
  - speculators 0.9 with the vLLM that it names: its own data generation, made for that vLLM.
  - or keep the scripts and install the pair that the patch is for: vllm==0.16.0 with speculators==0.3.0. (With
    vllm==0.11.0, for which speculators 0.3.0 was made, leave its files as shipped; they keep the faults that raise
    nothing, see docs/speculators-0.3.0.md.)"""


# ---------------------------------------------------------------------------------------------------------------
# 5. The contract: what speculators calls, what vLLM offers
# ---------------------------------------------------------------------------------------------------------------

# Callee as it stands in speculators' two files -> where vLLM defines it.
CALLEES = {
    "ModelConfig": ("config/model.py", "ModelConfig"),
    "CacheConfig": ("config/cache.py", "CacheConfig"),
    "ParallelConfig": ("config/parallel.py", "ParallelConfig"),
    "SchedulerConfig": ("config/scheduler.py", "SchedulerConfig"),
    "VllmConfig": ("config/vllm.py", "VllmConfig"),
    "SamplingParams": ("sampling_params.py", "SamplingParams"),
    "Request": ("v1/request.py", "Request"),
    "Scheduler": ("v1/core/sched/scheduler.py", "Scheduler"),
    "self.scheduler.add_request": ("v1/core/sched/scheduler.py", "Scheduler.add_request"),
    "self.scheduler.schedule": ("v1/core/sched/scheduler.py", "Scheduler.schedule"),
    "self.scheduler.finish_requests": ("v1/core/sched/scheduler.py", "Scheduler.finish_requests"),
    "StructuredOutputManager": ("v1/structured_output/__init__.py", "StructuredOutputManager"),
    "MultiprocExecutor": ("v1/executor/multiproc_executor.py", "MultiprocExecutor"),
    "self.executor.collective_rpc": ("v1/executor/multiproc_executor.py", "MultiprocExecutor.collective_rpc"),
    "self.executor.execute_model": ("v1/executor/multiproc_executor.py", "MultiprocExecutor.execute_model"),
    "self.executor.sample_tokens": ("v1/executor/multiproc_executor.py", "MultiprocExecutor.sample_tokens"),
    "self.executor.initialize_from_config": ("v1/executor/abstract.py", "Executor.initialize_from_config"),
    "unify_hybrid_kv_cache_specs": ("v1/core/kv_cache_utils.py", "unify_hybrid_kv_cache_specs"),
    "_get_kv_cache_groups_uniform_spec": ("v1/core/kv_cache_utils.py", "_get_kv_cache_groups_uniform_spec"),
    "get_kv_cache_config_from_groups": ("v1/core/kv_cache_utils.py", "get_kv_cache_config_from_groups"),
    "get_request_block_hasher": ("v1/core/kv_cache_utils.py", "get_request_block_hasher"),
    "init_none_hash": ("v1/core/kv_cache_utils.py", "init_none_hash"),
}

DEEPSEEK = "model_executor/models/deepseek_v2.py"
LLAMA = "model_executor/models/llama.py"
FORWARD = "forward(input_ids, positions, intermediate_tensors, inputs_embeds)"
# Calls that the text of speculators does not show: what vLLM calls, or what is called on a model's own classes.
# An argument given by position must have that name too.
MODEL_CALLS = (
    (FORWARD, DEEPSEEK, "DeepseekV2Model.forward"),
    ("embed_input_ids(input_ids)", DEEPSEEK, "DeepseekV2Model.embed_input_ids"),
    ("layer(positions, hidden_states, residual, llama_4_scaling)", DEEPSEEK, "DeepseekV2DecoderLayer.forward"),
    (FORWARD, LLAMA, "LlamaModel.forward"),
    ("embed_input_ids(input_ids)", LLAMA, "LlamaModel.embed_input_ids"),
    (
        "layer(positions=positions, hidden_states=hidden_states, residual=residual)",
        LLAMA,
        "LlamaDecoderLayer.forward",
    ),
    ("send(output)", "v1/executor/multiproc_executor.py", "WorkerProc.enqueue_output"),
    ("model_runner.execute_model(scheduler_output)", "v1/worker/gpu_model_runner.py", "GPUModelRunner.execute_model"),
    ("model_runner.sample_tokens(grammar_output)", "v1/worker/gpu_model_runner.py", "GPUModelRunner.sample_tokens"),
)
# Attributes that the repaired code reads.
ATTRIBUTES = (
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner", ("input_batch", "model")),
    ("v1/worker/gpu_input_batch.py", "InputBatch", ("req_ids", "num_computed_tokens_cpu")),
    ("v1/core/sched/output.py", "SchedulerOutput", ("num_scheduled_tokens", "total_num_scheduled_tokens")),
    ("v1/core/sched/scheduler.py", "Scheduler", ("requests",)),
    ("v1/request.py", "Request", ("num_computed_tokens", "num_prompt_tokens")),
    ("config/cache.py", "CacheConfig", ("cpu_kvcache_space_bytes", "num_gpu_blocks", "block_size")),
)


@dataclass(frozen=True)
class Parameter:
    name: str
    required: bool
    positional: bool = True


@dataclass(frozen=True)
class Row:
    """One line of the table. `problem` is None where the call fits."""

    calls: str
    offers: str
    problem: str | None
    repaired_by_apply: bool = False

    @property
    def verdict(self) -> str:
        if self.problem is None:
            return "fits"
        return f"{'repaired by --apply' if self.repaired_by_apply else 'BREAKS'}: {self.problem}"


class Vllm:
    """vLLM's sources, parsed on demand."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._trees = {}

    def tree(self, path: str) -> ast.Module | None:
        """The parsed module, or None if vLLM has no such file."""
        if path not in self._trees:
            file = self.folder / path
            self._trees[path] = ast.parse(file.read_bytes()) if file.is_file() else None
        return self._trees[path]

    def definition(self, path: str, qualname: str) -> ast.ClassDef | ast.FunctionDef | None:
        """The class or function of that name; None if there is none."""
        node = self.tree(path)
        for name in qualname.split("."):
            body = getattr(node, "body", [])
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            node = next((n for n in reversed(body) if isinstance(n, kinds) and n.name == name), None)
        return node

    def parameters(self, path: str, qualname: str) -> list[Parameter] | None:
        """The parameters of a function, or of a class's constructor; None if there is no such name."""
        node = self.definition(path, qualname)
        if isinstance(node, ast.ClassDef):
            init = self.definition(path, f"{qualname}.__init__")
            return field_parameters(node) if init is None else function_parameters(init)[1:]
        if node is None:
            return None
        return function_parameters(node)[1:] if "." in qualname else function_parameters(node)

    def binds(self, module: str, name: str) -> bool:
        """Whether `from module import name` finds something."""
        path = module.replace("vllm", "", 1).lstrip(".").replace(".", "/")
        package = f"{path}/__init__.py".lstrip("/")
        tree = self.tree(f"{path}.py") or self.tree(package)
        submodule = self.folder / path / f"{name}.py"
        if tree is None or submodule.exists():
            return tree is not None
        stars = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                stars.append(f"{module}.{node.module}" if node.level else node.module)
            elif name in bound_names(node):
                return True
        return any(self.binds(star, name) for star in stars)


def bound_names(node: ast.AST) -> set[str]:
    """The names that one statement binds."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return {node.name}
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name for alias in node.names}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def function_parameters(node: ast.FunctionDef) -> list[Parameter]:
    args = node.args
    positional = [*args.posonlyargs, *args.args]
    num_required = len(positional) - len(args.defaults)
    named = [Parameter(arg.arg, i < num_required) for i, arg in enumerate(positional)]
    named += [
        Parameter(arg.arg, default is None, positional=False)
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return named + ([Parameter("**", False)] if args.kwarg else [])


def field_parameters(node: ast.ClassDef) -> list[Parameter]:
    """The constructor parameters of a dataclass (pydantic's and msgspec's included): its annotated fields."""
    fields = []
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or "ClassVar" in ast.unparse(item.annotation):
            continue
        options = {}
        if isinstance(item.value, ast.Call) and ast.unparse(item.value.func) in ("Field", "field"):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in item.value.keywords}
            required = not options.keys() & {"default", "default_factory"} and not item.value.args
        else:
            required = item.value is None
        if options.get("init") != "False":
            fields.append(Parameter(item.target.id, required))
    return fields


def call_problem(call: ast.Call, parameters: list[Parameter] | None, check_names: bool = False) -> str | None:
    """Why a call does not fit the parameters, or None. Positional arguments are names if `check_names`."""
    if parameters is None:
        return "vLLM has no such name"
    names = [p.name for p in parameters]
    if len(call.args) > len([p for p in parameters if p.positional and p.name != "**"]):
        return f"takes {len(names)} arguments, is given {len(call.args)} by position"
    given = names[: len(call.args)]
    if check_names and [ast.unparse(arg) for arg in call.args] != given:
        return f"its parameters are {', '.join(given)}, in this order"
    keywords = [keyword.arg for keyword in call.keywords]
    unknown = [k for k in keywords if k not in names and k is not None and "**" not in names]
    if unknown:
        return f"unexpected {', '.join(unknown)}"
    missing = [p.name for p in parameters if p.required and p.name not in [*given, *keywords]]
    return f"missing {', '.join(missing)}" if missing and None not in keywords else None


def shown_call(name: str, call: ast.Call) -> str:
    name = name.removeprefix("self.")
    arguments = [ast.unparse(arg) for arg in call.args] + [str(keyword.arg or "**") for keyword in call.keywords]
    return f"{name}({', '.join(arguments)})"


def shown_offer(qualname: str, call: ast.Call, parameters: list[Parameter] | None) -> str:
    """The signature as far as the call touches it: its arguments and what vLLM requires."""
    if parameters is None:
        return "-"
    used = {keyword.arg for keyword in call.keywords}
    shown = [p.name for i, p in enumerate(parameters) if i < len(call.args) or p.name in used or p.required]
    more = len(parameters) - len(shown)
    return f"{qualname}({', '.join(shown + ([f'{more} more'] if more else []))})"


def calls_of(sources: list[str]) -> dict[str, dict[str, ast.Call]]:
    """Callee of CALLEES -> its different calls in the sources, as {shown text: call}."""
    found = {}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CALLEES:
            name = ast.unparse(node.func)
            found.setdefault(name, {})[shown_call(name, node)] = node
    return found


def imports_of(sources: list[str]) -> dict[str, list[str]]:
    """vllm module -> names that the sources import from it."""
    found = {}
    for node in (node for source in sources for node in ast.walk(ast.parse(source))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            found.setdefault(node.module, []).extend(alias.name for alias in node.names)
    return found


def source_rows(vllm: Vllm, sources: list[str]) -> list[Row]:
    """The imports and the calls that stand in speculators' text."""
    rows = []
    for module, names in imports_of(sources).items():
        absent = [name for name in names if not vllm.binds(module, name)]
        offers = ", ".join(name for name in names if name not in absent) or "-"
        rows.append(Row(f"import {module}: {', '.join(names)}", offers, f"no {', '.join(absent)}" if absent else None))
    for name, calls in calls_of(sources).items():
        path, qualname = CALLEES[name]
        parameters = vllm.parameters(path, qualname)
        for call in calls.values():
            offer = shown_offer(qualname, call, parameters)
            rows.append(Row(shown_call(name, call), offer, call_problem(call, parameters)))
    return rows


def model_rows(vllm: Vllm) -> list[Row]:
    """The calls and attributes that speculators' text does not show."""
    rows = []
    for text, path, qualname in MODEL_CALLS:
        call = ast.parse(text, mode="eval").body
        parameters = vllm.parameters(path, qualname)
        problem = call_problem(call, parameters, check_names=True)
        rows.append(Row(f"{qualname.split('.')[0]}: {text}", shown_offer(qualname, call, parameters), problem))
    for path, name, attributes in ATTRIBUTES:
        node = vllm.definition(path, name)
        text = ast.unparse(node) if node else ""
        absent = [a for a in attributes if not re.search(rf"(self\.{a}(:| =)|^    (def )?{a}[:(])", text, re.MULTILINE)]
        offers = ", ".join(a for a in attributes if a not in absent) or "-"
        rows.append(Row(f"{name}: {', '.join(attributes)}", offers, f"no {', '.join(absent)}" if absent else None))
    return rows


def contract(vllm_folder: Path, files: list[SourceFile]) -> list[Row]:
    """The rows of the table: what breaks now and is repaired by --apply, then all that the repaired files need."""
    vllm = Vllm(vllm_folder)
    now = [file.source for file in files]
    then = [repair_source(file.source, file.path.name, file.version) for file in map(without_older_revision, files)]
    needed = source_rows(vllm, then)
    left = {row.calls for row in needed}
    gone = [row for row in source_rows(vllm, now) if row.problem and row.calls not in left]
    gone = [Row(row.calls, row.offers, row.problem, repaired_by_apply=True) for row in gone]
    return gone + needed + model_rows(vllm)


def table(rows: list[Row]) -> str:
    widths = (46, 46, 34)
    heads = ("what speculators calls", "what vLLM offers", "verdict")
    lines = []
    for cells in [heads, ["-" * w for w in widths], *((r.calls, r.offers, r.verdict) for r in rows)]:
        wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
        for parts in itertools.zip_longest(*wrapped, fillvalue=""):
            padded = [part.ljust(width) for part, width in zip(parts, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# 6. Command line
# ---------------------------------------------------------------------------------------------------------------

FINE, NEEDS_PATCH, CANNOT = 0, 1, 2


def report(installed: Installed, files: list[SourceFile], rows: list[Row]) -> str:
    """What --check prints, without its last line."""
    lines = [
        f"speculators {installed_version(installed.speculators):<12} {installed.folder}",
        f"vLLM        {installed_version(installed.vllm):<12} {installed.vllm or ''}".rstrip(),
    ]
    lines += [f"not used: {path} (Python finds the one above first)" for path in installed.shadowed]
    for file in files:
        lines += ["", f"{file.path.name}: {file.state}"]
        lines += [f"  stale bytecode, which Python runs instead: {path}" for path in stale_bytecode(file.path)]
        for repair, state in file.states:
            line = line_of(file.source, repair, file.version)
            text = f"  line {line:<4} {state:<9} {repair.name}: {repair.why}"
            lines += textwrap.wrap(text, 118, subsequent_indent=" " * 22)
    reason = "the places above can't be repaired" if installed.vllm else "it is not in this environment"
    lines += ["", table(rows) if rows else f"The contract with vLLM was not checked: {reason}."]
    return "\n".join(lines)


def refuse_what_breaks(installed: Installed, rows: list[Row]) -> None:
    broken = [row for row in rows if row.problem and not row.repaired_by_apply]
    if broken:
        raise CannotRepair(
            f"vLLM {installed_version(installed.vllm)} does not offer what speculators needs even once repaired "
            f"({len(broken)} of {len(rows)} rows break):\n"
            + "\n".join(f"  {row.calls}: {row.problem}" for row in broken)
            + "\n"
            + ADVICE
        )


def changes(files: list[SourceFile]) -> str:
    """What --apply would change, as a unified diff."""
    parts = []
    for file in files:
        base = without_older_revision(file)
        repaired = repair_source(base.source, file.path.name, file.version)
        names = (f"a/{file.path.name}", f"b/{file.path.name}")
        parts += difflib.unified_diff(file.source.splitlines(True), repaired.splitlines(True), *names)
    return "".join(parts)


def needs_patch(files: list[SourceFile]) -> bool:
    return any(file.state.split(",")[0] != "repaired" or stale_bytecode(file.path) for file in files)


def check(installed: Installed, files: list[SourceFile]) -> int:
    rows, problem = [], None
    try:
        rows = contract(installed.vllm, files) if installed.vllm else []
        changes(files)
        refuse_what_breaks(installed, rows)
    except CannotRepair as error:
        problem = error
    print(report(installed, files, rows), end="\n\n")
    if problem:
        raise problem
    if needs_patch(files):
        print("Needs the patch: python fix_custom_worker.py --apply (the same --site)")
        return NEEDS_PATCH
    print("Fine: both files are repaired.")
    return FINE


def show_diff(installed: Installed, files: list[SourceFile]) -> int:
    text = changes(files)
    print(text, end="")
    if installed.vllm:
        refuse_what_breaks(installed, contract(installed.vllm, files))
    return NEEDS_PATCH if text else FINE


def apply(installed: Installed, files: list[SourceFile]) -> int:
    if installed.vllm:
        refuse_what_breaks(installed, contract(installed.vllm, files))
    else:
        print("vLLM is not in this environment: the contract is not checked.")
    written = apply_repairs(files)
    for path in written:
        print(f"repaired {path} (before: {backup_path(path).name})")
    if not written:
        print(f"Nothing to do: both files in {installed.folder} are repaired already.")
    return FINE


def revert(installed: Installed, files: list[SourceFile]) -> int:
    written = revert_repairs(files)
    for path in written:
        print(f"as before: {path}")
    if not written:
        print(f"Nothing to revert: no place in {installed.folder} is repaired.")
    return FINE


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\nSections")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"fix_custom_worker.py revision {REVISION}")
    action = parser.add_argument_group("what to do (one of these)").add_mutually_exclusive_group()
    for name, function, text in (
        ("check", check, "say what is installed, what breaks and what is repaired (the default)"),
        ("apply", apply, "repair both files, or none"),
        ("revert", revert, "put back the bytes from before"),
        ("diff", show_diff, "print the change as a unified diff"),
    ):
        action.add_argument(f"--{name}", dest="action", action="store_const", const=function, help=text)
    where = parser.add_argument_group("where")
    where.add_argument("--site", type=Path, metavar="DIR", help="another environment (default: the running Python's)")
    parser.set_defaults(action=check)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    try:
        installed = find_in_site(args.site) if args.site else find_in_python()
        with exclusive(installed.folder if installed.folder.is_dir() else installed.speculators):
            return args.action(installed, read_files(installed))
    except CannotRepair as error:
        print(f"fix_custom_worker.py: {error}", file=sys.stderr)
        return CANNOT


if __name__ == "__main__":
    sys.exit(main())
