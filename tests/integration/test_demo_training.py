"""The demo's training by itself: it learns, it repeats, and its faults are faults of the computation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from gradiometer.demo.data import DemoError, Text, encode, standard_library_text
from gradiometer.demo.faults import Fault, make_fault
from gradiometer.demo.training import StepResult, Training, TrainingConfig, learning_rate


@pytest.fixture(scope="module")
def text() -> Text:
    return standard_library_text(300_000)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def train(
    text: Text, steps: int, fault: Fault | None = None, seed: int = 0
) -> tuple[Training, list[StepResult]]:
    training = Training(TrainingConfig(steps=steps, seed=seed), text, fault)
    return training, list(training.steps())


def gradients_at(training: Training, steps: int) -> dict[str, Tensor]:
    """Scaled gradients just before the optimizer takes step number `steps`."""
    kept: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for name, parameter in training.model.named_parameters():
            if parameter.grad is not None:
                kept[name] = parameter.grad.clone()

    clip = torch.nn.utils.clip_grad_norm_

    def clip_and_keep(*args: object, **options: object) -> Tensor:
        keep()
        return clip(*args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip_and_keep)
        for result in training.steps():
            if result.step == steps:
                break
    return kept


def test_it_learns(text: Text) -> None:
    _, results = train(text, 30)
    assert float(results[0].loss) == pytest.approx(math.log(len(text.vocabulary)), rel=0.05)
    assert float(results[-1].loss) < 0.75 * float(results[0].loss)


def test_the_same_seed_gives_the_same_training(text: Text) -> None:
    losses = [[float(result.loss) for result in train(text, 3, seed=seed)[1]] for seed in (5, 5, 6)]
    assert losses[0] == losses[1] != losses[2]


def test_the_learning_rate_warms_up_and_falls() -> None:
    config = TrainingConfig(steps=100, warmup_steps=10, peak_lr=1.0, final_lr_fraction=0.1)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_characters_that_are_rare_become_unknown() -> None:
    found = encode("aab" + "".join(chr(300 + n) for n in range(200)))
    assert found.vocabulary[:3] == ("\0", "a", "b")
    assert len(found.vocabulary) == 96
    assert found.characters_N[:3].tolist() == [1, 1, 2]
    assert found.characters_N[-1] == 0


def test_a_python_without_sources_is_told_about(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DemoError, match="standard library"):
        standard_library_text()


def test_nan_starts_in_one_attention_and_spares_the_weights(text: Text) -> None:
    training = Training(TrainingConfig(steps=1), text, make_fault("nan", 1))
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    finite: dict[str, bool] = {}

    def note(name: str, output: Tensor) -> None:
        finite.setdefault(name, bool(torch.isfinite(output).all()))

    for name, module in training.model.named_modules():
        module.register_forward_hook(lambda _module, _inputs, output, name=name: note(name, output))
    (result,) = training.steps()
    assert math.isnan(float(result.loss))
    assert finite["blocks.1"]
    assert finite["blocks.2.attention.qkv"]
    assert not finite["blocks.2.attention.project"]
    after = training.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_spike_is_one_batch(text: Text) -> None:
    _, results = train(text, 26, make_fault("spike", 25))
    norms = [float(result.norm) for result in results]
    assert norms[24] > 10 * norms[23]
    assert norms[25] < 3 * norms[23]


def test_the_scaler_cannot_save_an_overflowing_backward(text: Text) -> None:
    training = Training(TrainingConfig(steps=20), text, make_fault("scaler", 2))
    bad = {name for name, grad in gradients_at(training, 20).items() if not torch.isfinite(grad).all()}
    assert training.scaler.get_scale() < 1
    assert "blocks.2.mlp.down.weight" in bad
    assert not any(name.startswith(("blocks.3", "norm", "head")) for name in bad)


def test_a_dead_relu_has_gradients_of_exactly_zero(text: Text) -> None:
    training = Training(TrainingConfig(steps=5), text, make_fault("dead-layer", 2))
    zero = {name for name, grad in gradients_at(training, 5).items() if not grad.any()}
    assert {"blocks.2.mlp.up.weight", "blocks.2.mlp.up.bias"} <= zero
    assert all(name.startswith("blocks.2.") for name in zero)


@pytest.mark.parametrize("kind", ["nan", "spike", "scaler", "dead-layer"])
def test_a_fault_changes_nothing_before_its_step(kind: str, text: Text) -> None:
    healthy = [float(result.loss) for result in train(text, 4)[1]]
    broken = [float(result.loss) for result in train(text, 4, make_fault(kind, 4))[1]]
    assert broken[:3] == healthy[:3]
