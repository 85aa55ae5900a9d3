"""The arithmetic of a step, counted by hand, and the share of a GPU's that it is."""

import pytest
import torch
from reference_draft import small_config

from eagle3.flops import device_peak, peak_flops, training_flops
from eagle3.metrics import Window, flat
from eagle3.ttt import supervised_depth


def test_the_operations_of_four_tokens_by_hand():
    """Mask 0111, two steps: row 0 counts twice, row 1 once. H 8, FFN 4, one head of 2, 5 draft tokens.

    fc and embedding half: 4 tokens x 8 x (24 + 6) = 960. Layer: first keys and values 4 x 8 x 4, first queries
    2 x 8 x 2, later q, k, v 1 x 8 x 6, out and MLP 3 x 8 x (2 + 12): 544. Keys seen: 1 + 2 by row 0, 2 by row 1:
    2 x 2 x 5 = 20.
    Head 3 x 8 x 5 = 120, teacher 2 x 8 x 5 = 80. In all 4 x 960 + 6 x (544 + 20) + 4 x 120 + 2 x 80.
    """
    config = small_config(
        hidden_size=8, intermediate_size=4, num_heads=1, num_kv_heads=1, head_dim=2, draft_vocab_size=5
    )
    depth = supervised_depth(torch.tensor([False, True, True, True]), [0, 4], 2)
    assert depth.tolist() == [2, 1, 0, 0]
    assert training_flops(config, depth, [0, 4], train_head=False) == 7864
    assert training_flops(config, depth, [0, 4], train_head=True) == 7864 + 2 * 120


def test_samples_packed_together_need_what_they_need_apart():
    """No row sees another sample's keys."""
    config = small_config()
    mask = torch.rand(30, generator=torch.Generator().manual_seed(0)) > 0.3
    apart = [training_flops(config, supervised_depth(mask[a:b], [0, b - a], 3), [0, b - a], False)
             for a, b in ((0, 11), (11, 30))]  # fmt: skip
    assert training_flops(config, supervised_depth(mask, [0, 11, 30], 3), [0, 11, 30], False) == sum(apart)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA B200", 2250),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GB200", None),
    ],
)
def test_the_peak_goes_by_the_name_that_the_driver_gives(name, tflops):
    """A name that only contains a known one is another GPU."""
    assert peak_flops(name) == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_mfu_is_a_rank_s_share_of_its_peak_and_absent_where_none_is_known(monkeypatch):
    """6e12 operations of two ranks in two seconds are 1.5 TFLOP/s each: half of a peak of 3."""
    monkeypatch.setattr("eagle3.metrics.time.perf_counter", iter([0.0, 2.0, 2.0, 4.0, 4.0]).__next__)
    window = Window(1, torch.device("cpu"))
    window.flops, window.norms = 6e12, [1.0]
    rates = window.rates(2, 3e12)
    assert (rates["tflops"], rates["mfu"]) == (1.5, 0.5)
    assert device_peak(torch.device("cpu")) is None
    rates = window.rates(2, None)
    assert rates["mfu"] is None and "train/mfu" not in flat("train", {"step": 1, **rates})
