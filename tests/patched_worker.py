"""The capturing worker with route 2 forced on it: the forward is patched although vLLM has its own interface."""

from typing import Any
from unittest import mock

from custom_worker import HiddenStatesWorker
from eagle3 import capture, patched_forward


def patched_route(runner: Any, aux_ids: list[int]) -> capture.Route:
    """As capture.open_route in a vLLM without set_aux_hidden_state_layers."""
    decoder = runner.get_model().get_language_model().model
    assert patched_forward.misfits(decoder) == []
    patched_forward.patch(decoder, aux_ids)
    runner.use_aux_hidden_state_outputs = True
    return capture.Route(f"patched {type(decoder).__name__}.forward", decoder)


class PatchedRoute(HiddenStatesWorker):
    def load_model(self, *args: object, **kwargs: object) -> None:
        with mock.patch.object(capture, "open_route", patched_route):
            super().load_model(*args, **kwargs)
