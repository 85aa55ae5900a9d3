"""The self-check passes what is right and names what is wrong, and the request tracker knows whose rows are whose."""

from types import SimpleNamespace

import pytest
import torch

from eagle3 import capture, selfcheck

HIDDEN = torch.tensor([[1.0, 2.0, 4.0], [3.0, -2.0, 1.0]])
LOGITS = torch.tensor([[0.0, 4.0, 1.0], [8.0, 2.0, 1.0]])


def judged(**changes) -> selfcheck.Tally:
    arguments = {"names": ["a", "b"], "recomputed": HIDDEN, "final_rows": HIDDEN, "logits": LOGITS, "sampled": [1, 0]}
    tally = selfcheck.Tally()
    selfcheck.compare(tally, **(arguments | changes))
    return tally


def test_right_states_pass():
    """Same rows, and the sampled tokens have the largest logits: no fault, two exact samples."""
    tally = judged()
    assert (tally.samples, tally.exact, tally.faults) == (2, 2, [])


def test_another_layers_rows_are_named():
    """Rows that differ by more than the dtype's tolerance are a fault of their sample; a NaN is one too."""
    off = HIDDEN.clone()
    off[1, 0] += 0.01
    assert "sample 'b': the last captured layer" in judged(recomputed=off).faults[0]
    off[1, 0] = float("nan")
    assert "sample 'b'" in judged(recomputed=off).faults[0]


def test_a_tie_in_bf16_is_allowed_and_a_gap_is_not():
    """At 4.0 an ulp of bf16 is 2^-5: two of them below the largest pass as not exact, three are a fault."""
    logits = LOGITS.to(torch.bfloat16)
    rows = HIDDEN.to(torch.bfloat16)
    logits[0, 2] = 4.0 - 2 * 2.0**-5
    tally = judged(recomputed=rows, final_rows=rows, logits=logits, sampled=[2, 0])
    assert (tally.exact, tally.worst_gap_ulps, tally.faults) == (1, 2.0, [])
    logits[0, 2] = 4.0 - 3 * 2.0**-5
    assert "3.0 ulp below" in judged(recomputed=rows, final_rows=rows, logits=logits, sampled=[2, 0]).faults[0]


def test_less_than_99_percent_exact_is_a_fault_once_it_rests_on_100_samples():
    """Two ties in 100 samples stop the run, two in 99 do not yet."""
    tally = selfcheck.Tally(samples=97, exact=97)
    near = LOGITS.clone()
    near[:, :] = torch.tensor([4.0, 4.0 - 2.0**-21, 0.0])
    selfcheck.compare(tally, ["a", "b"], HIDDEN, HIDDEN, near, [1, 1])
    assert tally.faults == []
    selfcheck.compare(tally, ["c"], HIDDEN[:1], HIDDEN[:1], LOGITS[:1], [1])
    assert tally.faults == ["the sampled token has the largest logit in only 98 of 100 samples (at least 99% expected)"]


class Layer(torch.nn.Module):
    def __init__(self, step):
        super().__init__()
        self.step = step

    def forward(self, hidden, residual):
        return hidden + self.step, residual * 2


class Decoder(torch.nn.Module):
    """Four layers; called, it is `compiled` unless `do_not_compile`, as vLLM's support_torch_compile makes a model."""

    def __init__(self, compiled=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(i) for i in range(4))
        self.do_not_compile = False
        self.compiled = compiled

    def forward(self, hidden):
        hidden, residual, captured = hidden.add_(0), torch.ones_like(hidden), []
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
            captured.append(hidden + residual)
        return hidden, captured[1:3]

    def __call__(self, hidden):
        return self.forward(hidden) if self.do_not_compile else self.compiled(hidden)


def test_witness_sees_each_layer_itself():
    """Outputs of layers 1 and 2 are hidden + residual after them; a neighbour's output and a lost layer are named."""
    decoder = Decoder()
    witness = selfcheck.LayerWitness(decoder, [1, 2], compiled=False)
    hidden, residual, outputs = torch.zeros(2, 3), torch.ones(2, 3), []
    for layer in decoder.layers:
        hidden, residual = layer(hidden, residual)
        outputs.append(hidden + residual)
    assert witness.faults([outputs[1], outputs[2]]) == []
    assert witness.faults([outputs[1], outputs[3]]) == [
        "layer 2: what was captured is not what decoder layer 2 put out"
    ]
    assert witness.faults([outputs[1]]) == ["the target returned 1 layers, 2 were asked for"]


def test_a_compiled_target_is_witnessed_eagerly_and_compared():
    """The first step gives the eager states, which the hooks saw; a compiled layer 2 that is 10% off is named, and the
    steps after it are compiled again."""
    plain = Decoder()
    compiled = Decoder(lambda hidden: (hidden, [(s := plain.forward(hidden)[1])[0], s[1] * 1.1]))
    witness = selfcheck.LayerWitness(compiled, [1, 2], compiled=True)
    _, states = compiled(torch.zeros(5, 3))
    assert [s[0, 0].item() for s in states] == [1 + 4, 3 + 8]
    assert witness.faults(states) == [
        "layer 2: the compiled target gives states that differ from the eager one's by 1.0e-01 in half of the rows "
        "(allowed 1e-03); run without --compile"
    ]
    witness.remove()
    assert compiled(torch.zeros(5, 3))[1][1][0, 0].item() == pytest.approx(11 * 1.1)


def test_a_row_that_a_router_sent_elsewhere_is_no_wrong_layer():
    """Two rows of five differ altogether: the median of the relative differences is that of the other three, 0.5."""
    expected = torch.ones(5, 4)
    found = expected * torch.tensor([1.5, 1.5, 1.5, 9, 9])[:, None]
    assert selfcheck.relative_difference(expected, found) == pytest.approx(0.5)


def test_a_warm_up_belongs_to_nobody():
    """A request that names no sample takes rows of the step but is captured by none."""
    tracker = capture.RequestTracker()
    output = scheduled(new=[("x", 5)], counts={"w": 4, "x": 5})
    warm_up = SimpleNamespace(extra_args=None)
    output.scheduled_new_reqs.append(
        SimpleNamespace(req_id="w", sampling_params=warm_up, prompt_token_ids=[1] * 4, num_computed_tokens=0)
    )
    assert spans(tracker, ["w", "x"], output) == [("s0", 0, 4, 9, True)]


def scheduled(new=(), cached=(), finished=(), counts=None):
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=r,
                sampling_params=SimpleNamespace(extra_args={capture.SAMPLE_KEY: [0, i, f"s{i}"]}),
                prompt_token_ids=list(range(length)),
                num_computed_tokens=0,
            )
            for i, (r, length) in enumerate(new)
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[r for r, _ in cached], num_computed_tokens=[n for _, n in cached]
        ),
        num_scheduled_tokens=counts or {},
    )


def spans(tracker, order, output):
    rows = tracker.schedule(output)
    found = tracker.spans(order, output.num_scheduled_tokens, rows)
    return [(s.request.sample_id, s.row, s.start, s.stop, s.ends) for s in found]


def test_rows_go_to_their_sample_by_position():
    """Two prompts of 5 and 7 tokens, the second in two chunks, the batch reordered; then a preempted one from row 0."""
    tracker = capture.RequestTracker()
    first = scheduled(new=[("x", 5), ("y", 7)], counts={"x": 5, "y": 3})
    assert spans(tracker, ["y", "x"], first) == [("s1", 0, 0, 3, False), ("s0", 0, 3, 8, True)]
    second = scheduled(cached=[("y", 3)], finished=["x"], counts={"y": 4})
    assert spans(tracker, ["y"], second) == [("s1", 3, 0, 4, True)]
    again = scheduled(cached=[("y", 0)], counts={"y": 7})
    assert spans(tracker, ["y"], again) == [("s1", 0, 0, 7, True)]
