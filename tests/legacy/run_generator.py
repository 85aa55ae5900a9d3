"""Run VllmHiddenStatesGenerator over given calls, as a user's script would.

    python run_generator.py JOB.json OUT.safetensors

JOB.json: {"model": ..., "layer_ids": [...], "calls": [[ids, ...], ...], "options": {...}}. OUT gets the tensors
"<call>/<sample>/<index of layer>" and "<call>/<sample>/input_ids". The last line printed is JSON: the errors of the
calls that failed, the requests that workers and scheduler still hold, and how a bare assertion in a worker arrives.
"""

import json
import sys

import torch
from safetensors.torch import save_file


def held_requests(worker: object) -> list[str]:
    return sorted(worker.model_runner.requests)


def bare_assertion(worker: object) -> None:
    assert worker is None


def main() -> None:
    from speculators.data_generation import VllmHiddenStatesGenerator

    with open(sys.argv[1]) as file:
        job = json.load(file)
    generator = VllmHiddenStatesGenerator(job["model"], layer_ids=job["layer_ids"], **job["options"])
    tensors, errors = {}, {}
    for call, batch in enumerate(job["calls"]):
        try:
            results = generator.generate(batch)
        except RuntimeError as error:
            errors[call] = str(error)
            continue
        for sample, result in enumerate(results):
            tensors[f"{call}/{sample}/input_ids"] = result["input_ids"]
            for index, states in enumerate(result["hidden_states"]):
                tensors[f"{call}/{sample}/{index}"] = states
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, sys.argv[2])
    facts = {
        "errors": errors,
        "workers_hold": generator.executor.collective_rpc(held_requests),
        "scheduler_holds": sorted(generator.scheduler.requests),
    }
    try:
        generator.executor.collective_rpc(bare_assertion, unique_reply_rank=0)
    except RuntimeError as error:
        facts["bare_assertion"] = str(error)
    print(json.dumps(facts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
