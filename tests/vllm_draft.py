"""Builds the draft model that vLLM would serve, without an engine, and loads an export into it.

    python tests/vllm_draft.py TARGET DRAFT

Prints one JSON line: the parameters and their shapes, those that the export left out, what vLLM read of the flags.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def main() -> None:
    target, draft = sys.argv[1:]
    speculative = {"model": draft, "method": "eagle3", "num_speculative_tokens": 3}
    config = EngineArgs(model=target, speculative_config=speculative, max_model_len=128).create_engine_config()
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as store:
        init_distributed_environment(1, 0, f"file://{store.name}", 0, "gloo")
        initialize_model_parallel(1)
        with torch.device("meta"):
            model = Eagle3LlamaForCausalLM(vllm_config=config)
        loaded: set[str] = set()
        AutoWeightsLoader.load_weights = recording(loaded)
        model.load_weights((k, v.to("meta")) for k, v in load_file(f"{draft}/model.safetensors").items())
    served = config.speculative_config.draft_model_config.hf_config
    print(
        json.dumps(
            {
                "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
                "missing": sorted({n for n, _ in model.named_parameters()} - loaded),
                "layers": served.eagle_aux_hidden_state_layer_ids,
                "flags": {k: getattr(served, k) for k in FLAGS},
            }
        )
    )


def recording(loaded: set[str]) -> Callable:
    """AutoWeightsLoader.load_weights, noting in `loaded` what it has loaded: vLLM's draft model does not say."""
    load_weights = AutoWeightsLoader.load_weights

    def load(*args: object, **kwargs: object) -> set[str]:
        found = load_weights(*args, **kwargs)
        loaded.update(found)
        return found

    return load


if __name__ == "__main__":
    main()
