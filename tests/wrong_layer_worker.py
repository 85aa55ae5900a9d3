"""A worker that captures one layer off on purpose: what the self-check is there to stop."""

from custom_worker import HiddenStatesWorker
from eagle3.layers import vllm_aux_ids


class OffByOneWorker(HiddenStatesWorker):
    """Asks vLLM for its own ids as if they were ours: each layer's input instead of its output."""

    @staticmethod
    def aux_ids(layer_ids: list[int]) -> list[int]:
        return [i - 1 for i in vllm_aux_ids(layer_ids)]


class WrongLastLayerWorker(HiddenStatesWorker):
    """Only the last layer is wrong, and no hook looks at the layers themselves."""

    @staticmethod
    def aux_ids(layer_ids: list[int]) -> list[int]:
        *first, last = vllm_aux_ids(layer_ids)
        return [*first, last - 1]

    def load_model(self, *args: object, **kwargs: object) -> None:
        super().load_model(*args, **kwargs)
        self.witnessed = True


class ThreeLayersWorker(HiddenStatesWorker):
    """Asks for one layer less, as a vLLM does that drops the last."""

    @staticmethod
    def aux_ids(layer_ids: list[int]) -> list[int]:
        return vllm_aux_ids(layer_ids)[:-1]

    def load_model(self, *args: object, **kwargs: object) -> None:
        super().load_model(*args, **kwargs)
        self.witnessed = True
