"""Compression in plain loops: what is cleaned is what was trained, in any order of techniques, and smaller."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compression_cases import GPT_TECHNIQUES, ConvNet, config, gpt, gpt_loss, technique, train, windows
from errors import refused
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from train.model import ModelSize, build_model

from onebit import zero
from onebit.zero.compression import (
    CompressionScheduler,
    Distillation,
    export_compressed,
    hidden_loss,
    import_compressed,
    init_compression,
    logits_loss,
    redundancy_clean,
    sizes,
)

SAME = {"rtol": 0, "atol": 1e-5}  # matrices of other sizes add up in another order


def after_training(techniques: dict, steps: int = 5) -> nn.Module:
    model = init_compression(gpt(), config(**techniques))
    train(model, gpt_loss, steps)
    return model.eval()


def said(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(windows(99)[:, :-1])


# ---------------------------------------------------------------- cleaning


@pytest.mark.parametrize("name", [*GPT_TECHNIQUES, "all"])
def test_cleaned_equals_before(name: str) -> None:
    chosen = GPT_TECHNIQUES if name == "all" else {name: GPT_TECHNIQUES[name]}
    model, fresh = after_training(chosen), gpt()
    before = said(model)
    assert redundancy_clean(model, config(**chosen)) is model
    torch.testing.assert_close(said(model), before, **SAME)
    assert not any(parametrize.is_parametrized(module) for module in model.modules())
    assert {type(a) for a in model.modules()} - {type(a) for a in fresh.modules()} <= {
        type(module) for n, module in model.named_modules() if n.endswith("activation_quantization")
    }
    expected = {n for n in fresh.state_dict()} | {
        f"blocks.{k}.mlp_in.activation_quantization.{end}"
        for k in range(2) for end in ("low", "high") if "activation_quantization" in chosen
    }  # fmt: skip
    assert set(model.state_dict()) == expected


@pytest.mark.parametrize("method", ["l1", "topk"])
@pytest.mark.parametrize("ranges", ["dynamic", "static"])
def test_dropped_inputs_have_no_part_in_ranges(method: str, ranges: str) -> None:
    """In float64: in float32 a sum in another order may move an activation to the next of its levels."""
    chosen = {name: copy.deepcopy(GPT_TECHNIQUES[name]) for name in ("row_pruning", "head_pruning")}
    for each in chosen.values():
        each["shared_parameters"]["method"] = method
    chosen["activation_quantization"] = technique(["blocks"], {"bits": 8}, range_calibration=ranges)
    model = after_training(chosen, steps=4).double()
    before = said(model)
    after = said(redundancy_clean(model))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


def test_pruned_modules_are_really_smaller() -> None:
    model = after_training({name: GPT_TECHNIQUES[name] for name in ("row_pruning", "head_pruning")})
    before = sizes(gpt())
    redundancy_clean(model)
    block = model.blocks[1]
    shapes = [tuple(m.weight.shape) for m in (block.qkv, block.attention_out, block.mlp_in, block.mlp_out)]
    assert shapes == [(24, 16), (16, 8), (32, 16), (16, 32)]
    assert (block.qkv.out_features, block.mlp_out.in_features) == (24, 32)
    after = sizes(model)
    assert after.parameters == before.parameters - 2 * (24 * 16 + 16 * 8 + 2 * 32 * 16)
    assert after.memory_bytes == 4 * after.parameters
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() for p in model.parameters())  # no view of what was


def test_any_order_of_techniques_gives_the_same_model() -> None:
    reordered = {name: GPT_TECHNIQUES[name] for name in reversed(GPT_TECHNIQUES)}
    assert list(reordered) != list(GPT_TECHNIQUES)
    one, other = after_training(GPT_TECHNIQUES), after_training(reordered)
    assert list(one.state_dict()) == list(other.state_dict())
    for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(said(redundancy_clean(one)), said(redundancy_clean(other)))


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["symmetric", "asymmetric"])
def test_weights_hold_as_many_values_as_their_bits_allow(bits: int, kind: str) -> None:
    chosen = technique(["blocks"], {"start_bits": bits, "target_bits": bits}, quantization_type=kind)
    model = after_training({"weight_quantization": chosen}, steps=1)
    assert len(model.blocks[0].qkv.weight.unique()) <= (3 if bits == 2 else 2**bits)
    redundancy_clean(model)
    assert 2 <= len(model.blocks[0].qkv.weight.unique()) <= (3 if bits == 2 else 2**bits)


def test_what_was_never_switched_on_leaves_no_trace() -> None:
    late = copy.deepcopy(GPT_TECHNIQUES)
    for each in late.values():
        each["shared_parameters"]["schedule_offset"] = 100
    model, plain = after_training(late, steps=3), gpt()
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-2)
    for k in range(3):
        gpt_loss(plain, k).backward()
        optimizer.step()
        optimizer.zero_grad()
    redundancy_clean(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert torch.equal(said(model), said(plain.eval()))


def test_channels_with_a_norm_between() -> None:
    """Dropped channels are not zero behind the norm: the next module's inputs are masked, not only these outputs."""
    torch.manual_seed(0)
    model = ConvNet()
    chosen = config(channel_pruning=technique(["^first"], {"dense_ratio": 0.5}, [["^norm", "^second"]], method="l1"))
    with pytest.raises(ValueError, match=r"finds 1 .first., related_modules 'norm.second' finds 2"):
        init_compression(model, config(channel_pruning=technique(["^first"], {"dense_ratio": 0.5}, [["norm|second"]])))
    init_compression(model, chosen)
    x = torch.randn(6, 3, 6, 6)
    train(model, lambda m, k: nn.functional.cross_entropy(m(x), torch.arange(6) % 5), 4)
    before = model.eval()(x).detach()
    redundancy_clean(model)
    torch.testing.assert_close(model(x), before, **SAME)
    assert (model.first.out_channels, model.norm.num_features, model.second.in_channels) == (4, 4, 4)
    assert model.second.weight.shape == (4, 4, 3, 3) and model.norm.running_mean.shape == (4,)


# ---------------------------------------------------------------- masks and schedules


def test_an_l1_mask_is_fixed_when_it_is_switched_on() -> None:
    chosen = technique(["mlp_in"], {"dense_ratio": 0.25}, schedule_offset=2, method="l1")
    model = init_compression(gpt(), config(sparse_pruning=chosen))
    seen = []
    scheduler = CompressionScheduler(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for k in range(4):
        seen.append(model.blocks[0].mlp_in.weight != 0)
        gpt_loss(model, k).backward()
        optimizer.step()
        if k == 1:
            trained = model.blocks[0].mlp_in.parametrizations.weight.original.detach().abs()
        optimizer.zero_grad()
        scheduler.step()
    assert seen[0].all() and seen[1].all() and int(seen[2].sum()) == 16 * 64 // 4
    assert float(trained[seen[2]].min()) >= float(trained[~seen[2]].max())
    assert torch.equal(seen[3], seen[2])


def test_a_learned_mask_begins_as_l1_and_moves_with_its_scores() -> None:
    chosen = technique(["mlp_in"], {"dense_ratio": 0.5}, method="topk")
    model, fixed = gpt(), gpt()
    init_compression(model, config(sparse_pruning=chosen))
    init_compression(fixed, config(sparse_pruning=chosen | {"shared_parameters": {"enabled": True, "method": "l1"}}))
    pruned = model.blocks[0].mlp_in
    assert torch.equal(pruned.weight, fixed.blocks[0].mlp_in.weight)
    gpt_loss(model, 0).backward()
    scores, weight = pruned.parametrizations.weight[0].scores, pruned.parametrizations.weight.original
    assert scores.grad is not None and weight.grad is not None
    dropped = pruned.weight == 0
    assert not weight.grad[dropped].any() and scores.grad[dropped].any()
    with torch.no_grad():
        scores[dropped] = 100.0
    assert torch.equal(pruned.weight == 0, ~dropped)


def test_the_straight_through_gradient_of_scores_by_hand() -> None:
    """d loss / d mask of a unit, as autograd computes it of a mask that is a plain tensor."""
    head = technique(["attention_out"], {"dense_ratio": 0.5}, num_heads=4, method="topk")
    model = init_compression(gpt(), config(head_pruning=head))
    gpt_loss(model, 0).backward()
    found = model.blocks[0].attention_out.parametrizations.weight[0]
    twin, mask = gpt(), found.kept.clone().requires_grad_()
    for k, block in enumerate(twin.blocks):
        weight, kept = (
            block.attention_out.weight,
            mask if k == 0 else model.blocks[k].attention_out.parametrizations.weight[0].kept,
        )
        del block.attention_out.weight
        block.attention_out.weight = weight * kept.repeat_interleave(4)[None]
    gpt_loss(twin, 0).backward()
    torch.testing.assert_close(found.scores.grad, mask.grad, rtol=1e-4, atol=1e-7)


def test_a_density_that_falls_slowly() -> None:
    chosen = technique(["mlp_in"], {"dense_ratio": 0.25}, schedule_offset=1, schedule_offset_end=5)
    model = init_compression(gpt(), config(sparse_pruning=chosen))
    kept = []
    train(model, lambda m, k: (kept.append(int((m.blocks[0].mlp_in.weight != 0).sum())), gpt_loss(m, k))[1], 7)
    assert kept[0] == kept[1] == 1024 and kept[5] == kept[6] == 256
    assert kept[1] > kept[2] > kept[3] > kept[4] >= kept[5]


def test_the_scheduler_says_what_it_switches_on(caplog: pytest.LogCaptureFixture) -> None:
    model = init_compression(gpt(), config(**GPT_TECHNIQUES))
    with caplog.at_level(logging.INFO, logger="onebit"):
        train(model, gpt_loss, 3)
    lines = [record.getMessage() for record in caplog.records]
    assert "step 1: weights in 8 bits" in lines and "step 3: weights in 7 bits" in lines
    assert "step 1: row pruning (l1) keeps 50.0%" in lines and "step 2: activations in 8 bits" in lines


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_run_resumes_in_mid_schedule_to_the_bit(at: int) -> None:
    chosen = copy.deepcopy(GPT_TECHNIQUES)
    chosen["weight_quantization"]["shared_parameters"] |= {
        "rounding": "stochastic", "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.3}
    }  # fmt: skip

    def run(model: nn.Module, optimizer: Any, scheduler: CompressionScheduler, steps: range) -> None:
        for k in steps:
            gpt_loss(model, k).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    def start() -> tuple[nn.Module, Any, CompressionScheduler]:
        model = init_compression(gpt(), config(**chosen))
        return model, torch.optim.AdamW(model.parameters(), 1e-2), CompressionScheduler(model)

    whole, half, other = start(), start(), start()
    run(*whole, range(6))
    run(*half, range(at))
    states = [copy.deepcopy(part.state_dict()) for part in half]
    for part, state in zip(other, states, strict=True):
        part.load_state_dict(state)
    assert other[2].training_steps == at
    run(*other, range(at, 6))
    for a, b in zip(whole[0].state_dict().values(), other[0].state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(said(redundancy_clean(whole[0])), said(redundancy_clean(other[0])))


def test_a_scheduler_of_another_step_is_refused() -> None:
    model = init_compression(gpt(), config(**GPT_TECHNIQUES))
    with pytest.raises(ValueError, match="scheduler's step is 7, the model's is 0; load the model's state"):
        CompressionScheduler(model).load_state_dict({"compression_step": 7})


def test_a_copy_is_a_model_of_its_own() -> None:
    model = after_training(GPT_TECHNIQUES, steps=2)
    other = copy.deepcopy(model)
    train(other, gpt_loss, 2)
    assert CompressionScheduler(model).training_steps == 2 and CompressionScheduler(other).training_steps == 4
    before = said(other.eval())
    torch.testing.assert_close(said(redundancy_clean(other)), before, **SAME)
    assert CompressionScheduler(model).training_steps == 2
    train(model, gpt_loss, 2)
    assert torch.equal(said(model), before)


# ---------------------------------------------------------------- activations


def test_a_static_range_is_that_of_training() -> None:
    static = technique(["mlp_in"], {"bits": 8}, range_calibration="static", quantization_type="asymmetric")
    model = init_compression(gpt(), config(activation_quantization=static))
    refused(RuntimeError, "has seen no training batch", said, model.eval())
    train(model.train(), gpt_loss, 3)
    low = model.blocks[0].mlp_in.activation_quantization.low.clone()
    said(model.eval())
    assert torch.isfinite(low) and torch.equal(low, model.blocks[0].mlp_in.activation_quantization.low)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_static_range_counts_a_batch_once_if_activations_are_computed_again(reentrant: bool) -> None:
    static = config(activation_quantization=technique(["2"], {"bits": 4}, range_calibration="static"))

    def trained(recompute: bool) -> nn.Module:
        torch.manual_seed(0)
        model = init_compression(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), static)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        CompressionScheduler(model, says=False).attach(optimizer)
        for k in range(1, 5):
            x = (k * torch.randn(8, 6, generator=torch.Generator().manual_seed(k))).requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
            assert isinstance(y, Tensor)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    plain, again = trained(False).state_dict(), trained(True).state_dict()
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("pixels", [4, 6])
def test_channels_that_pruning_drops_are_those_of_a_single_image_too(pixels: int) -> None:
    both = config(
        channel_pruning=technique(["^0$"], {"dense_ratio": 0.5}, [["^1$"]]),
        activation_quantization=technique(["^1$"], {"bits": 16}),
    )
    torch.manual_seed(0)
    model = init_compression(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)), both)
    images = torch.randn(2, 3, pixels, pixels)
    torch.testing.assert_close(model(images[0]), model(images)[0])


def test_what_goes_in_has_as_many_values_as_its_bits_allow() -> None:
    model = init_compression(gpt(), config(activation_quantization=technique(["mlp_in"], {"bits": 4})))
    seen: list[Tensor] = []
    model.blocks[0].mlp_in.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    said(model)
    assert all(len(token.unique()) <= 15 for token in seen[0].flatten(0, 1))
    assert any(len(token.unique()) > 8 for token in seen[0].flatten(0, 1))


@pytest.mark.parametrize("shape", [(2, 3, 5, 1), (2, 3, 4, 6), (3, 4, 6)], ids=str)
def test_a_convolution_has_a_dynamic_range_for_each_image(shape: tuple[int, ...], tmp_path: Path) -> None:
    dynamic = config(activation_quantization=technique(["0"], {"bits": 4}, range_calibration="dynamic"))
    model = init_compression(nn.Sequential(nn.Conv2d(3, 2, 1)), dynamic)
    CompressionScheduler(model, says=False).step()
    redundancy_clean(model)
    export_compressed(model, tmp_path / "small.safetensors")
    again = import_compressed(nn.Sequential(nn.Conv2d(3, 2, 1)), tmp_path / "small.safetensors")
    x, seen = torch.randn(shape, generator=torch.Generator().manual_seed(0)), list[Tensor]()
    for each in (model, again):
        each[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        each(x)
    scale = x.double().abs().amax((-3, -2, -1), keepdim=True) / 7
    expected = ((x / scale).round() * scale).float()
    for quantized in seen:
        torch.testing.assert_close(quantized, expected)


# ---------------------------------------------------------------- files


def test_a_file_holds_codes_and_gives_the_same_bits(tmp_path: Path) -> None:
    model = redundancy_clean(after_training(GPT_TECHNIQUES))
    written = export_compressed(model, tmp_path / "small.safetensors")
    back = import_compressed(gpt(seed=5), tmp_path / "small.safetensors").eval()
    assert torch.equal(said(back), said(model))
    assert list(back.state_dict()) == list(model.state_dict())
    assert written == (tmp_path / "small.safetensors").stat().st_size
    assert sizes(back) == sizes(model) and sizes(model).packed_bytes < written
    assert export_compressed(back, tmp_path / "again.safetensors") == written


def bits_on_disk(chosen: dict) -> float:
    """Of a weight of the blocks, scales included."""
    rest = sum(p.numel() for name, p in gpt().named_parameters() if "blocks" not in name or p.dim() < 2)
    model = redundancy_clean(after_training(chosen, steps=1))
    return 8 * (sizes(model).packed_bytes - 4 * rest) / (sum(p.numel() for p in gpt().parameters()) - rest)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_a_weight_takes_its_bits(bits: int) -> None:
    chosen = technique(["blocks"], {"start_bits": bits, "target_bits": bits})
    assert (
        bits <= bits_on_disk({"weight_quantization": chosen}) <= bits + 0.09
    )  # a scale for each matrix of 256 to 1024


def test_zeros_take_a_bit_each() -> None:
    half = technique(["blocks"], {"dense_ratio": 0.5})
    assert bits_on_disk({"sparse_pruning": half}) == pytest.approx(0.5 * 32 + 1, abs=0.01)
    binary = {"weight_quantization": technique(["blocks"], {"start_bits": 1, "target_bits": 1})}
    assert bits_on_disk(binary | {"sparse_pruning": half}) == pytest.approx(0.5 + 1, abs=0.09)
    eight = {"weight_quantization": technique(["blocks"], {"start_bits": 8, "target_bits": 8})}
    assert bits_on_disk(eight | {"sparse_pruning": half}) <= 0.5 * 8 + 1.09


def test_what_was_not_cleaned_or_was_changed_is_not_written(tmp_path: Path) -> None:
    model = after_training({"weight_quantization": GPT_TECHNIQUES["weight_quantization"]})
    with pytest.raises(ValueError, match="not permanent yet: call redundancy_clean"):
        export_compressed(model, tmp_path / "file.safetensors")
    redundancy_clean(model)
    with torch.no_grad():
        model.blocks[0].qkv.weight[0, 0] += 0.001
    with pytest.raises(ValueError, match=r"blocks.0.qkv.weight has changed since it was cleaned"):
        export_compressed(model, tmp_path / "file.safetensors")
    assert not list(tmp_path.iterdir())


def test_parts_that_were_compressed_apart_are_written_as_codes(tmp_path: Path) -> None:
    """Two models in one, and a third that never was compressed; names count from the whole."""
    chosen = ("sparse_pruning", "row_pruning")
    parts = [redundancy_clean(after_training({name: GPT_TECHNIQUES[name]})) for name in chosen]
    whole, plain = nn.ModuleList([*parts, gpt()]), nn.ModuleList([gpt(), gpt(), gpt()])
    apart = sum(export_compressed(part, tmp_path / f"{k}.safetensors") for k, part in enumerate(whole))
    assert export_compressed(whole, tmp_path / "whole.safetensors") < 1.05 * apart
    back = import_compressed(plain, tmp_path / "whole.safetensors")
    for one, other in zip(whole, back, strict=True):
        assert torch.equal(said(other), said(one))


def test_a_damaged_file_or_one_of_another_model_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "small.safetensors"
    export_compressed(redundancy_clean(after_training(GPT_TECHNIQUES)), file)
    other = build_model(ModelSize(layers=3, width=16, heads=4, context=8), 0)
    before = copy.deepcopy(other.state_dict())
    refused(ValueError, r"is of another model: the file has no blocks.2", import_compressed, other, file)
    wider = build_model(ModelSize(layers=2, width=32, heads=4, context=8), 0)
    with pytest.raises(ValueError, match=r"bytes.weight has shape \(256, 16\) there and \(256, 32\) here"):
        import_compressed(wider, file)
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    refused(ValueError, "is damaged", import_compressed, other, file)
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    zero.compression.sizes(other)
    refused(ValueError, "cannot be read", import_compressed, other, tmp_path / "none.safetensors")


# ---------------------------------------------------------------- teachers


REDUCTION = {
    "enabled": True, "keep_number_layer": 2, "module_name_prefix": "blocks", "teacher_layer": [1, 3],
    "other_module_name": ["bytes", "positions", "norm"],
}  # fmt: skip


def teacher() -> nn.Module:
    return build_model(ModelSize(layers=4, width=16, heads=4, context=8), 7)


def test_layers_come_from_the_teacher() -> None:
    student, its = gpt(), teacher()
    init_compression(student, config(layer_reduction=REDUCTION), its)
    for own, other in ((0, 1), (1, 3)):
        for name, x in its.blocks[other].state_dict().items():
            assert torch.equal(student.blocks[own].state_dict()[name], x)
    assert torch.equal(student.bytes.weight, its.bytes.weight) and student.bytes.weight is not its.bytes.weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_layer": [1, 4]}, "teacher_layer names layer 4, the teacher's blocks has 4"),
        (
            {"teacher_layer": [1], "keep_number_layer": 1},
            "names 1 layers, the student's blocks has 2; build the student",
        ),
        ({"keep_number_layer": 3}, "keep_number_layer is 3 and teacher_layer names 2"),
        ({"module_name_prefix": "layers"}, "the student has no module 'layers'; it has bytes, positions"),
        ({"module_name_prefix": "norm"}, "norm of the student is a LayerNorm, no list of layers"),
        ({"other_module_name": ["head"]}, "the student has no module 'head'"),
    ],
)
def test_a_wrong_layer_reduction_changes_nothing(change: dict, message: str) -> None:
    student = gpt()
    before = copy.deepcopy(student.state_dict())
    refused(ValueError, message, init_compression, student, config(layer_reduction=REDUCTION | change), teacher())
    assert all(torch.equal(x, before[name]) for name, x in student.state_dict().items())


def test_a_teacher_of_other_widths_changes_nothing() -> None:
    student, wide = gpt(), build_model(ModelSize(layers=4, width=32, heads=4, context=8), 0)
    before = copy.deepcopy(student.state_dict())
    with pytest.raises(ValueError, match=r"blocks.0.* has shape \(16,\), .* \(32,\): a teacher of the same widths"):
        init_compression(student, config(layer_reduction=REDUCTION), wide)
    with pytest.raises(ValueError, match="layer_reduction copies layers of a teacher: pass"):
        init_compression(student, config(layer_reduction=REDUCTION))
    assert list(student.state_dict()) == list(before)
    assert all(torch.equal(x, before[name]) for name, x in student.state_dict().items())


def test_the_loss_of_logits_is_that_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    own, its = torch.randn(2, 3, 5, generator=generator), torch.randn(2, 3, 5, generator=generator)
    p, q = (torch.softmax(x.double() / 2.5, -1) for x in (its, own))
    expected = 2.5**2 * (p * (p / q).log()).sum(-1).mean()
    torch.testing.assert_close(logits_loss(own, its, 2.5).double(), expected, rtol=1e-5, atol=0)
    assert float(logits_loss(its, its, 3.0)) == pytest.approx(0, abs=1e-6)
    refused(ValueError, "expected a temperature above 0, got 0", logits_loss, own, its, 0)
    refused(ValueError, r"student's logits have shape \(2, 3, 5\), the teacher's \(2, 5\)", logits_loss, own, its[:, 0])
    refused(ValueError, "layers of the same width are needed", hidden_loss, own, its[..., :4])


def test_distillation_pulls_a_student_to_its_teacher() -> None:
    """The whole loss by hand, and what is left of it after training by it alone."""
    student, its = gpt(), teacher()
    with Distillation(student, its, temperature=2.0, layer_map={0: 1, 1: 3}, layers="blocks") as distillation:
        x = windows(0)[:, :-1]
        taught = distillation.teach(x)
        loss = distillation.loss(student(x), taught)
        states: dict[str, Tensor] = {}
        handles = [
            model.blocks[k].register_forward_hook(lambda m, a, out, name=f"{whose}{k}": states.update({name: out}))
            for whose, model, k in (("s", student, 0), ("s", student, 1), ("t", its, 1), ("t", its, 3))
        ]
        expected = logits_loss(student(x), its(x), 2.0)
        expected = expected + (hidden_loss(states["s0"], states["t1"]) + hidden_loss(states["s1"], states["t3"])) / 2
        torch.testing.assert_close(loss, expected)
        for handle in handles:
            handle.remove()
        optimizer = torch.optim.AdamW(student.parameters(), 1e-2)
        for _ in range(15):
            taught = distillation.teach(x)
            now = distillation.loss(student(x), taught)
            now.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert float(now.detach()) < 0.5 * float(loss.detach())
        refused(RuntimeError, "a hidden state is missing: call teach", distillation.loss, taught, taught)
    assert not any(module._forward_hooks for module in [*student.modules(), *its.modules()])
    with pytest.raises(ValueError, match="layer_map names layer 2 of the student, whose 'blocks' is 2 layers"):
        Distillation(student, its, layer_map={2: 0}, layers="blocks")


# ---------------------------------------------------------------- weights that are shared


def test_a_shared_weight_stays_one() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(10, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["words"].weight
    eight = {"start_bits": 8, "target_bits": 8}
    with pytest.raises(ValueError, match="words, head share one weight: quantize all of them the same way"):
        init_compression(model, config(weight_quantization=technique(["words"], eight)))
    with pytest.raises(ValueError, match="share one weight: it can be quantized, but not pruned"):
        init_compression(model, config(sparse_pruning=technique(["head"], {"dense_ratio": 0.5})))
    init_compression(model, config(weight_quantization=technique(["words", "head"], eight)))
    assert len(list(model.parameters())) == 1
    before = model["head"].weight.detach().clone()
    redundancy_clean(model)
    assert model["head"].weight is model["words"].weight and torch.equal(model["head"].weight, before)


# ---------------------------------------------------------------- what is wrong


def wrong(name: str, change: dict, **shared: Any) -> dict:
    """One of the GPT's techniques with another group, or other shared parameters."""
    chosen = copy.deepcopy(GPT_TECHNIQUES[name])
    chosen["different_groups"]["all"] |= change
    chosen["shared_parameters"] |= shared
    return {name: chosen}


TWO = copy.deepcopy(GPT_TECHNIQUES["sparse_pruning"])
TWO["different_groups"]["other"] = {"params": {"dense_ratio": 0.3}, "modules": ["blocks.1"]}


@pytest.mark.parametrize(
    ("techniques", "message"),
    [
        (wrong("sparse_pruning", {"modules": ["atention"]}), "'atention' finds no module; there are bytes"),
        (wrong("sparse_pruning", {"modules": ["norm$"]}), "finds .* alone .LayerNorm.: no Linear"),
        ({"sparse_pruning": TWO}, "blocks.1.qkv is in the groups 'all' and 'other'; a module is in one group"),
        (wrong("sparse_pruning", {"modules": []}), "modules: expected patterns, got none"),
        (wrong("sparse_pruning", {"modules": ["(qkv"]}), "'.qkv' is no regular expression"),
        (wrong("sparse_pruning", {"params": {"dense_ratio": 0}}), "dense_ratio: expected a number above 0"),
        (wrong("sparse_pruning", {"params": {"dens_ratio": 0.5}}), 'unknown key "dens_ratio"; did you mean'),
        (wrong("sparse_pruning", {"related_modules": [["mlp_in"]]}), "sparse_pruning keeps all shapes"),
        (wrong("sparse_pruning", {}, method="snip_momentum"), 'method: expected one of "l1", "topk", got'),
        (wrong("sparse_pruning", {}, schedule_offset_end=1), "schedule_offset_end 1 is before schedule_offset 2"),
        (wrong("head_pruning", {}, num_heads=3), "attention_out: 3 heads do not divide its 16 inputs"),
        (wrong("head_pruning", {}, num_heads=None), 'write "num_heads" into shared_parameters'),
        (wrong("head_pruning", {"params": {"dense_ratio": 0.5}}), 'may lie in two ways; write "qkv_layout"'),
        (wrong("head_pruning", {"related_modules": [["mlp_in"]]}), "related module blocks.0.mlp_in has 64 outputs"),
        (wrong("row_pruning", {"related_modules": [["qkv"]]}), "has 64 outputs, and its related module blocks.0.qkv"),
        (wrong("row_pruning", {"related_modules": [["blocks.0.mlp_out"]]}), "finds 2 .* finds 1 .*each must have"),
        (wrong("row_pruning", {"related_modules": ["mlp_out", "qkv"]}), "patterns for each of the 1 in modules"),
        (wrong("row_pruning", {"modules": ["bytes"], "related_modules": None}), "bytes is an Embedding, whose rows"),
        (wrong("weight_quantization", {}, quantize_groups=5), "quantize_groups 5: a weight of .* 5 equal groups"),
        (wrong("weight_quantization", {"params": {"start_bits": 4, "target_bits": 8}}), "target_bits 8 is above start"),
        (wrong("weight_quantization", {"params": {"start_bits": 4}}), 'target_bits is missing'),
        (wrong("activation_quantization", {"modules": ["bytes"]}), "bytes is an Embedding, which reads whole numbers"),
        ({"sparse_pruning": {"shared_parameters": {"enabled": True}}}, "is enabled and has no different_groups"),
        ({"sparse_prunning": {}}, 'unknown key "sparse_prunning"; did you mean "sparse_pruning"'),
        ({"channel_pruning": technique(["mlp_in"], {"dense_ratio": 0.5})}, "is a Linear; channels are a convolution's"),
        (
            {"row_pruning": technique(["qkv"], {"dense_ratio": 0.5}), "head_pruning": GPT_TECHNIQUES["head_pruning"]},
            "the outputs of blocks.0.qkv are pruned twice: by row_pruning",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_wrong_is_named_before_anything_is_changed(techniques: dict, message: str) -> None:
    model = gpt()
    before = copy.deepcopy(model.state_dict())
    both = {"activation_quantization": GPT_TECHNIQUES["activation_quantization"]} | techniques
    refused(ValueError, message, init_compression, model, config(**both))
    assert list(model.state_dict()) == list(before) and not any(m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    init_compression(model, config(**GPT_TECHNIQUES))


def test_calls_that_cannot_be_meant() -> None:
    model = gpt()
    refused(ValueError, "the model has no techniques: call init_compression", redundancy_clean, model)
    refused(ValueError, r"the model has no techniques: call onebit.zero.init_compression", CompressionScheduler, model)
    with pytest.raises(ValueError, match=r'config has no block "compression_training": write \{"compression_tr'):
        init_compression(model, GPT_TECHNIQUES)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got int"):
        init_compression(3, config(**GPT_TECHNIQUES))  # type: ignore[type-var]
    init_compression(model, config(**GPT_TECHNIQUES))
    refused(ValueError, "the model has techniques already", init_compression, model, config(**GPT_TECHNIQUES))
    with pytest.raises(ValueError, match="not the one that init_compression was given"):
        redundancy_clean(model, config(row_pruning=GPT_TECHNIQUES["row_pruning"]))
    normed = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="0 has parametrizations already"):
        init_compression(normed, config(sparse_pruning=technique(["*"], {"dense_ratio": 0.5})))


def test_the_configuration_may_be_a_file_or_a_config(tmp_path: Path) -> None:
    written = {"train_micro_batch_size_per_gpu": 1} | config(**GPT_TECHNIQUES)
    (tmp_path / "ds.json").write_text(json.dumps(written))
    read = zero.read_config(tmp_path / "ds.json", world_size=1)
    assert zero.read_config(read.to_dict(), world_size=1) == read
    for given in (tmp_path / "ds.json", str(tmp_path / "ds.json"), read):
        model = init_compression(gpt(), given)
        redundancy_clean(model, written)
    with pytest.raises(ValueError, match=r"ds.json: compression_training.row_pruning.*: unknown key"):
        written["compression_training"]["row_pruning"]["shared_parameters"]["xyzzy"] = 1
        (tmp_path / "ds.json").write_text(json.dumps(written))
        zero.read_config(tmp_path / "ds.json", world_size=1)


def test_keys_that_ask_for_what_is_done_anyway_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    usual = {"quantizer_kernel": False, "quantize_verbose": False, "quantize_weight_in_forward": True}
    mixed = {"rounding": "nearest", "fp16_mixed_quantize": {"enabled": False, "quantize_change_ratio": 0.1}}
    chosen = technique(["blocks"], {"start_bits": 8, "target_bits": 8, "quantization_period": 50}, **usual, **mixed)
    init_compression(gpt(), config(weight_quantization=chosen))
    assert caplog.records == []
    chosen["shared_parameters"]["quantize_weight_in_forward"] = False
    init_compression(gpt(), config(weight_quantization=chosen))
    assert "weights are quantized in the forward pass" in caplog.text


def test_an_optimizer_that_was_made_too_early_is_refused() -> None:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    init_compression(model, config(**GPT_TECHNIQUES))
    with pytest.raises(ValueError, match=r"does not train blocks.0.qkv.*scores.* make it after init_compression"):
        CompressionScheduler(model).attach(optimizer)
    CompressionScheduler(model).attach(torch.optim.AdamW(model.parameters()))


def test_deepspeeds_module_takes_its_arguments() -> None:
    import onebit.zero as deepspeed
    from onebit.zero.compression import compress

    assert deepspeed.compression.compress is compress
    model = compress.init_compression(gpt(), deepspeed_config=config(**GPT_TECHNIQUES), teacher_model=None, mpu=None)
    compress.redundancy_clean(model=model, deepspeed_config=config(**GPT_TECHNIQUES))
    with pytest.raises(ValueError, match="mpu: layers that tensor-parallel ranks divide"):
        compress.init_compression(gpt(), config(**GPT_TECHNIQUES), mpu=object())
