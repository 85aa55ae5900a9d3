"""A worker whose device runs out of memory in its third step."""

from typing import Any

import torch

from custom_worker import HiddenStatesWorker


class OutOfMemoryWorker(HiddenStatesWorker):
    """Raises what torch raises."""

    steps = 0

    def execute_model(self, scheduler_output: Any) -> Any:
        self.steps += scheduler_output.total_num_scheduled_tokens > 0
        if self.steps == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().execute_model(scheduler_output)
