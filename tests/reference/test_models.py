"""Properties every reference model must have, on tiny random checkpoints of all families."""

import pytest
import torch

from sglang_trunc.reference.tiny import FAMILIES, build_tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return build_tiny(request.param)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 512, (96,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_causal(model, ids):
    changed = ids.clone()
    changed[60] = (changed[60] + 1) % 512
    before, after = model(ids), model(changed)
    assert torch.equal(before[:60], after[:60])
    assert (before[60:] != after[60:]).any(-1).all()
    torch.testing.assert_close(model(ids[:60]), before[:60], atol=2e-4, rtol=0)


@torch.no_grad()
def test_all_depths_equals_forward_at_each_depth(model, ids):
    every = model.all_depths(ids)
    assert every.shape == (model.full_depth, len(ids), model.vocab_size)
    for depth in range(1, model.full_depth + 1):
        assert torch.equal(every[depth - 1], model(ids, depth=depth))
    assert torch.equal(every[-1], model(ids))


@torch.no_grad()
def test_depths_and_states_matter(model, ids):
    agreement = (model.all_depths(ids).argmax(-1) == model(ids).argmax(-1)).float().mean(-1)
    assert 0.1 < agreement[0] < 0.6  # some drafts fail, some do not
    assert agreement[-1] == 1
    _, state = model.begin(ids)
    moved = model(ids, depth=1, state=state[0] + 1.0)
    assert (moved != model(ids, depth=1)).any()
    assert torch.equal(model(ids, state=state[0]), model(ids))


@torch.no_grad()
def test_batch_and_last_only(model, ids):
    pair = torch.stack((ids, ids.flip(0)))
    torch.testing.assert_close(model(pair)[0], model(ids), atol=2e-4, rtol=0)
    assert model.all_depths(pair).shape == (model.full_depth, 2, len(ids), model.vocab_size)
    torch.testing.assert_close(model(ids, last_only=True), model(ids)[-1:], atol=2e-4, rtol=0)


@torch.no_grad()
def test_half_precision_stays_close(model, ids):
    logits = model(ids)
    model.bfloat16()
    half = model(ids).float()
    model.float()
    assert (half.argmax(-1) == logits.argmax(-1)).float().mean() > 0.7


def test_differentiable(model, ids):
    loss = model.all_depths(ids[:8], depth=2).float().square().mean()
    loss.backward()
    unused = {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    missing = {name for name, p in model.named_parameters() if p.grad is None}
    assert missing <= unused
    model.zero_grad()


def test_refusals(model):
    with pytest.raises(ValueError, match="depth"):
        model(torch.tensor([1, 2]), depth=0)
    with pytest.raises(ValueError, match="ids"):
        model(torch.tensor(3))
    with pytest.raises(ValueError, match="family"):
        build_tiny("gpt")
