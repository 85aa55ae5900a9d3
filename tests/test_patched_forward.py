"""Capture route 2 on a decoder of three layers; the real thing runs on vLLM 0.16 in tests/legacy."""

import math
from types import SimpleNamespace

import pytest
import torch

from eagle3 import capture, patched_forward

SCALING = {"original_max_position_embeddings": 4, "beta": 0.5}


class Layer(torch.nn.Module):
    """Adds its number (1, 2, 3) times the scaling (1 without one) to the residual stream."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, positions, hidden_states, residual, llama_4_scaling=None):
        residual = hidden_states if residual is None else hidden_states + residual
        scale = 1 if llama_4_scaling is None else llama_4_scaling[:, 0]
        return torch.full_like(residual, self.number) * scale, residual


class Decoder(torch.nn.Module):
    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(scoring_func="sigmoid", **config)
        self.layers = torch.nn.ModuleList(Layer(number) for number in (1, 2, 3))

    def embed_input_ids(self, input_ids):
        return input_ids[:, None].float()

    def norm(self, hidden_states, residual):
        return -(hidden_states + residual), None

    def forward(self, input_ids, positions, intermediate_tensors, inputs_embeds=None):
        raise AssertionError("replaced")


def test_states_are_the_inputs_of_the_layers_asked_for():
    """Token t has t before layer 0, t+1 before layer 1, t+3 before layer 2, t+6 after the last; norm comes after."""
    decoder = Decoder()
    assert patched_forward.misfits(decoder) == []
    patched_forward.patch(decoder, [1, 3])
    ids = torch.tensor([10, 20])
    hidden, captured = decoder(ids, torch.tensor([0, 1]), None)
    assert [layer[:, 0].tolist() for layer in captured] == [[11, 21], [16, 26]]
    assert hidden[:, 0].tolist() == [-16, -26]
    embedded, _ = decoder(None, torch.tensor([0, 1]), None, torch.tensor([[10.0], [20.0]]))
    assert torch.equal(embedded, hidden)


def test_llama_4_scaling_reaches_every_layer():
    """Positions 3 and 4 with original 4 and beta 0.5: scale 1 and 1 + 0.5 ln 2, so 6 is added, or 6 times that."""
    decoder = Decoder(llama_4_scaling=SCALING)
    patched_forward.patch(decoder, [3])
    _, captured = decoder(torch.tensor([0, 0]), torch.tensor([3, 4]), None)
    assert captured[0][:, 0].tolist() == pytest.approx([6, 6 * (1 + 0.5 * math.log(2))])


def test_another_decoder_is_refused_by_its_signatures():
    """Other parameters, or another family: each reason is named, and open_route refuses with them."""

    class Reordered(Layer):
        def forward(self, hidden_states, positions, residual):
            raise AssertionError

    decoder = Decoder()
    decoder.layers[0] = Reordered(1)
    del decoder.config.scoring_func
    reasons = patched_forward.misfits(decoder)
    assert "not of the DeepseekV2 family" in reasons[0]
    assert "its layer takes (hidden_states, positions, residual), expected (positions, hidden_states" in reasons[1]
    runner = SimpleNamespace(get_model=lambda: SimpleNamespace(model=decoder))
    with pytest.raises(ValueError, match="can't be patched: Decoder is not of the DeepseekV2 family"):
        capture.open_route(runner, [1, 3])


def test_a_decoder_without_vllms_interface_takes_the_patched_route():
    """The route says which it is, and the runner is told to expect auxiliary states."""
    runner = SimpleNamespace(get_model=lambda: SimpleNamespace(model=Decoder()))
    route = capture.open_route(runner, [1, 3])
    assert route.name == "patched Decoder.forward" and runner.use_aux_hidden_state_outputs
