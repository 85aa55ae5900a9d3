"""Independent views that captured states are compared with, and an exported draft as a module."""

from pathlib import Path

import torch
import transformers

from eagle3.draft import Draft, DraftConfig
from eagle3.initial import InitialDraft
from eagle3.shards import ShardSet
from eagle3.target import EMBEDDING, Target
from eagle3.vocab import DraftVocab

ROUTER_MARGIN = 5e-6  # of expert scores: closer ones may be ordered either way by float32 rounding


def load_target(path: Path) -> torch.nn.Module:
    """The target in Transformers, float32."""
    kind = transformers.AutoConfig.from_pretrained(path).model_type
    kimi = "kimi" in kind
    loader = transformers.Kimi_K25ForConditionalGeneration if kimi else transformers.AutoModelForCausalLM
    return loader.from_pretrained(path, dtype=torch.float32).eval()


def worst_error(path: Path, states: ShardSet) -> float:
    """The largest relative error of a captured row against Transformers' output of that decoder layer.

    Rows from the first one on whose expert choice is a tie within rounding are left out: either choice is right. At
    most a tenth of the rows may go that way.
    """
    model = load_target(path)
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    seen: dict[int, torch.Tensor] = {}
    margins: list[torch.Tensor] = []
    for k in states.shared["layer_ids"]:
        text.layers[k].register_forward_hook(lambda _m, _i, out, k=k: seen.update({k: _tensor(out)[0]}))
    for layer in text.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda gate, inputs, _out: margins.append(_margin(gate, inputs[0])))
    worst, kept, rows = 0.0, 0, 0
    for sample in states:
        margins.clear()
        with torch.no_grad():
            model(input_ids=sample.input_ids[None])
        sure = _sure_rows(margins, len(sample.input_ids))
        rows, kept = rows + len(sample.input_ids), kept + sure
        for j, k in enumerate(states.shared["layer_ids"]):
            error = (sample.hidden_states[:sure, j] - seen[k][:sure]).norm(dim=-1) / seen[k][:sure].norm(dim=-1)
            worst = max(worst, error.max().item()) if sure else worst
    assert kept >= 0.9 * rows, f"only {kept} of {rows} rows could be compared"
    return worst


def _tensor(output: object) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _margin(gate: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """How far the last chosen expert's score is from the first not chosen, for each row."""
    scores = (hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T).sigmoid() + gate.e_score_correction_bias
    ranked = scores.sort(-1, descending=True).values
    return ranked[:, 1] - ranked[:, 2]  # two experts a token


def _sure_rows(margins: list[torch.Tensor], length: int) -> int:
    """How many rows come before the first doubtful choice of experts."""
    if not margins:
        return length
    doubtful = (torch.stack(margins).amin(0) < ROUTER_MARGIN).nonzero()
    return int(doubtful[0]) if len(doubtful) else length


def load_draft(folder: Path, target_path: Path, vocab: DraftVocab, layer_ids: list[int]) -> Draft:
    """An exported draft as our own module, the target's embedding in it."""
    target = Target.open(target_path)
    stored = InitialDraft.open(folder, layer_ids, target.num_layers)
    config = DraftConfig.for_target(target, vocab, **stored.flags)
    head = torch.zeros(vocab.size, target.hidden_size)
    draft = Draft.create(config, target.load(EMBEDDING).float(), head)
    with torch.no_grad():
        stored.load_into(draft, vocab)
    return draft
