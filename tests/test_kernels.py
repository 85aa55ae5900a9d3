"""The Triton kernels compute what the plain torch beside them does: on a GPU, or under Triton's interpreter.

The interpreter must be chosen before triton is imported, so without a GPU the tests run in a process of their own.
"""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from reference_draft import small_batch, small_config, small_draft

from eagle3 import ops
from eagle3.ttt import training_loss

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
here = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="run by test_under_the_interpreter")
CASES = {
    "grouped heads": ({}, ["0" * 9 + "1" * 40, "0110111101", "00111111"], "kl", {}),
    "all heads, trained head": (
        {"num_kv_heads": 4, "norm_before_residual": False},
        ["0011111", "011011"],
        "lk",
        {"train_head": True},
    ),
    "norm_output, head_dim 24, normed before fc": (
        {"norm_output": True, "head_dim": 24, "fc_norm": False, "norm_before_fc": True},
        ["0011111", "0111"],
        "ce",
        {},
    ),
}


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the tests below run here")
def test_under_the_interpreter():
    """All tests of this file, in a process with TRITON_INTERPRET=1."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "4 passed" in done.stdout


def gradients(monkeypatch, use_kernels, overrides, masks, loss, flags):
    monkeypatch.setattr(ops, "has_kernels", lambda tensor: use_kernels)
    config = small_config(**overrides)
    draft, teacher = small_draft(config, torch.float32, **flags)
    draft._compute_dtype = torch.float32
    draft, teacher, batch = draft.to(DEVICE), teacher.to(DEVICE), small_batch(config, masks, torch.float32).to(DEVICE)
    found = training_loss(draft, teacher, batch, torch.tensor([0.3, 0.2, 0.1], device=DEVICE), loss=loss)
    found.loss.backward()
    return found, {n: p.grad for n, p in draft.named_parameters() if p.requires_grad}


@here
@pytest.mark.parametrize(("overrides", "masks", "loss", "flags"), CASES.values(), ids=CASES.keys())
def test_kernels_equal_plain_torch(monkeypatch, overrides, masks, loss, flags):
    """Loss sums, argmax counts and every gradient, to fp32 rounding; blocks of rows that span samples included."""
    found, kernel_grads = gradients(monkeypatch, True, overrides, masks, loss, flags)
    expected, grads = gradients(monkeypatch, False, overrides, masks, loss, flags)
    torch.testing.assert_close(found.loss_sums, expected.loss_sums, rtol=1e-5, atol=1e-5)
    assert found.correct.tolist() == expected.correct.tolist()
    assert found.accepted.tolist() == expected.accepted.tolist()
    for name, grad in grads.items():
        torch.testing.assert_close(kernel_grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@here
def test_a_step_leaves_no_garbage(monkeypatch):
    """Gradient buffers die with the step, without the garbage collector: a cycle would keep a step's memory alive."""
    alive = weakref.WeakSet()
    original = ops.GradBuffer.__init__
    monkeypatch.setattr(ops.GradBuffer, "__init__", lambda self, *a: (original(self, *a), alive.add(self))[0])
    gc.collect()
    gc.disable()
    try:
        gradients(monkeypatch, True, {}, ["00111"], "kl", {})
        assert len(alive) == 0
    finally:
        gc.enable()
