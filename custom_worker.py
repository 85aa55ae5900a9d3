"""The vLLM worker that captures decoder-layer outputs while the target prefills. Named to vLLM by `worker_cls`.

Every tensor-parallel rank runs it, since all take part in the self-check's logits; rank 0 alone has the rows copied to
its host and written to shards, by threads of its own process, so no tensor crosses an RPC. The driver
(eagle3/extract.py) says through `additional_config` what to capture, through `open_shards` what each shard will
hold, and through a request's `extra_args` which sample it is.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput

from eagle3 import capture, selfcheck
from eagle3.layers import vllm_aux_ids
from eagle3.sink import ShardSink

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

CHECKED_TOGETHER = 32  # samples: their logits read the whole output head, as many or as few as they are


class HiddenStatesWorker(PlatformWorker):
    """The platform's own worker, plus capture, self-check and shard writing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        capture.check_engine(self.vllm_config)
        self.plan = capture.CapturePlan(**self.vllm_config.additional_config[capture.CONFIG_KEY])
        self.tracker = capture.RequestTracker()
        self.tally = selfcheck.Tally()
        self.sink: ShardSink | None = None  # rank 0's
        self.ended: list[capture.Ended] = []  # not checked yet
        self.check: tuple[capture.Ended, torch.Tensor | None] | None = None  # with its logits, to be judged
        self.witness: selfcheck.LayerWitness | None = None
        self.witnessed = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self.check_stream = torch.cuda.Stream() if self.model_runner.device.type == "cuda" else None
        self.route = capture.open_route(self.model_runner, self.aux_ids(self.plan.layer_ids))
        if self.rank == 0:
            print(f"capture route: {self.route.name}", flush=True)
            form = self.plan.shard_format(self.vllm_config.model_config.get_hidden_size())
            max_rows = self.vllm_config.scheduler_config.max_num_batched_tokens
            self.sink = ShardSink(Path(self.plan.output_dir), form, self.model_runner.device, max_rows)

    @staticmethod
    def aux_ids(layer_ids: list[int]) -> list[int]:
        """The auxiliary ids asked of vLLM; a test overrides this to capture a wrong layer on purpose."""
        return vllm_aux_ids(layer_ids)

    @torch.inference_mode()
    def execute_model(self, scheduler_output: "SchedulerOutput") -> Any:
        rows = self.tracker.schedule(scheduler_output)
        if not self.witnessed and self.tracker.any_sample(rows):
            compiled = not self.vllm_config.model_config.enforce_eager
            self.witness = selfcheck.LayerWitness(self.route.decoder, self.plan.layer_ids, compiled=compiled)
        output = super().execute_model(scheduler_output)
        self._settle()  # what the steps before left to do, while the device is at work on this one
        state = self.model_runner.execute_model_state
        if state is not None:
            batch = getattr(state, "input_batch", None) or self.model_runner.input_batch
            spans = self.tracker.spans(batch.req_ids, scheduler_output.num_scheduled_tokens, rows)
            if spans:
                self._capture(spans, state)
        return output

    def _capture(self, spans: list[capture.Span], state: Any) -> None:
        """Take this step's rows: check the layers at the start, keep rank 0's rows, note what the check needs."""
        rows = spans[-1].stop
        layers = [aux[:rows] for aux in self.route.layers(state)]
        if len(layers) != len(self.plan.layer_ids):
            raise RuntimeError(
                f"the target returned {len(layers)} layers, expected {len(self.plan.layer_ids)} ({self.plan.layer_ids})"
            )
        if self.witness is not None:
            self.tally.faults += self.witness.faults(layers)
            self.witness.remove()
            self.witness, self.witnessed = None, True
        if self.sink is not None and not self.tally.faults:
            # on the engine's stream: a later step may overwrite the layers' buffers
            self.sink.stage(torch.stack(layers, dim=1), spans)
        ended = [s for s in spans if s.ends]
        if ended:
            last_rows = self._on_device([s.stop - 1 for s in ended])
            recomputed = self.route.decoder.norm(layers[-1][last_rows])
            requests = [s.request for s in ended]
            self.ended.append(capture.Ended(requests, recomputed, state.hidden_states[last_rows]))

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        """As an index on the device, without waiting for what the device is at work on."""
        device = self.model_runner.device
        return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if isinstance(output, AsyncModelRunnerOutput):  # of the V2 model runner, whatever the scheduling
            output = output.get_output()
        if self.ended and not self.ended[-1].tokens:
            self.ended[-1].found(output.req_ids, output.sampled_token_ids)
        if sum(len(part.requests) for part in self.ended) >= CHECKED_TOGETHER:
            self._prepare_check()
        return output

    @torch.inference_mode()
    def _prepare_check(self) -> None:
        """Ask for the logits of all that has ended. Every rank does so at once, since each has a part of them."""
        ended, self.ended = capture.Ended.joined(self.ended), []
        self.check = ended, self.model_runner.model.compute_logits(ended.recomputed)
        if self.check_stream is not None:
            self.check_stream.wait_stream(torch.cuda.current_stream())

    def _settle(self) -> None:
        """Send the states of the step before to the host, and judge the check whose logits are asked for.

        Once the next step is launched: the copy is long, and the tokens of its own step would have to wait for it.
        """
        if self.sink is None:
            self.check = None
            return
        self.sink.send()
        if self.check is not None:
            (ended, logits), self.check = self.check, None
            with torch.cuda.stream(self.check_stream):  # of its own: the engine's is busy. Nothing on a CPU (None)
                names = [request.sample_id for request in ended.requests]
                selfcheck.compare(self.tally, names, ended.recomputed, ended.final_rows, logits, ended.tokens)
            if not self.tally.faults:
                self.sink.checked(ended.requests)

    # Called by the driver through collective_rpc.

    def open_shards(self, contents: list[dict[str, Any]]) -> None:
        """Create the temporary files of the shards that the next requests belong to."""
        if self.sink is not None:
            self.sink.open(contents)

    def capture_status(self) -> dict[str, Any] | None:
        """What rank 0 has done: see ShardSink.status; the self-check's line and faults besides. None on other ranks."""
        if self.sink is None:
            return None
        status = self.sink.status()
        return status | {"check": self.tally.line(), "faults": self.tally.faults + status["faults"]}

    def close_capture(self) -> None:
        """Check what is left, wait for the writers, then remove the temporary files of unfinished shards."""
        self._settle()
        if self.ended:
            self._prepare_check()
            self._settle()
        if self.sink is not None:
            self.sink.close()
