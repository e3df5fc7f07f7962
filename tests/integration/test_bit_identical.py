"""A loop with the agent ends with the same bits in its weights as without, and skips the same steps."""

from __future__ import annotations

import copy
import hashlib

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_before_watch

import gradiometer as gm

STEPS = 12
BAD_STEP = 5

OPTIMIZERS = {
    "adamw-for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


class Net(nn.Module):
    """Draws random numbers (dropout), holds an in-place module, a buffer, half-used and tied parameters."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(32, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, tokens):
        return self.head(self.norm(self.body(self.embedding(tokens))))


def clip_none(_scaler, _optimizer, _model):
    pass


def clip_after_unscale(scaler, optimizer, model):
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clip_before_unscale(_scaler, _optimizer, model):
    imported_before_watch(model.parameters(), 0.5)


def train(optimizer_name, *, scaled, accumulation, clip, watch=None):
    """Train from a fixed seed; returns a digest of weights, optimizer state and RNG, and the skipped steps."""
    torch.manual_seed(7)
    model = Net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) if scaled else None
    if watch is not None:
        watch(model, optimizer, scaler)
    scales = []
    for step in range(STEPS):
        for _ in range(accumulation):
            tokens = torch.randint(0, 11, (16,))
            loss = nn.functional.cross_entropy(model(tokens), tokens) / accumulation
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaled and step == BAD_STEP:
            model.body[0].weight.grad[0, 0] = float("inf")
        clip(scaler, optimizer, model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        optimizer.zero_grad()
    return digest(model, optimizer), scales


def digest(model, optimizer):
    sha = hashlib.sha256()
    tensors = list(model.state_dict().values())
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in [*tensors, torch.get_rng_state()]:
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize(
    "clip", [clip_none, clip_after_unscale, clip_before_unscale], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_weights_are_bit_identical(optimizer_name, scaled, accumulation, clip, spool):
    options = {"scaled": scaled, "accumulation": accumulation, "clip": clip}
    bare = train(optimizer_name, **options)
    with gm.init(mode="offline") as run:
        watched = train(optimizer_name, **options, watch=lambda *what: run.watch(*what, forward=True))
        assert run.step == STEPS
        assert run.dropped == {}
        assert run.failures == {}
    assert watched == bare
    if scaled:
        assert sum(later < earlier for earlier, later in zip(bare[1], bare[1][1:], strict=False)) == 1, (
            "nothing was skipped"
        )
    assert train(optimizer_name, **options) == bare, "the loop itself is not repeatable"


def test_after_finish_everything_is_as_before(spool):
    clip_cell = nn.utils.clip_grad._get_total_norm.__closure__[0]
    original = clip_cell.cell_contents
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, scaler)
        assert clip_cell.cell_contents is not original
        assert "step" in vars(scaler)
    assert clip_cell.cell_contents is original
    assert "step" not in vars(scaler)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not any(module._forward_hooks for module in model.modules())


def test_a_watched_model_and_scaler_can_be_copied_and_pickled(spool):
    import pickle

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    with gm.init(mode="offline") as run:
        run.watch(model, optimizer, scaler)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(torch.zeros(4, dtype=torch.long)).sum().backward()
        assert pickle.loads(pickle.dumps(optimizer.state_dict()))
        for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            assert other.step.__func__ is torch.amp.GradScaler.step
            assert other.step.__self__ is other
    assert run.failures == {}
