"""Inference of architectures in which `study.py inference-models` found an error: each test keeps one mended."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install onebit[transformers]")

from study.model_cases import SERVED

from onebit.comm import Transport, run_ranks
from onebit.zero import init_inference, initialize

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["OLMo", "NanoChat"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_model_without_parameters_besides_matrices_is_packed(name: str, compute: torch.dtype, dtype: str) -> None:
    """Norms without weights: transformers reads a model's dtype and device from its first parameter."""
    model: Any = SERVED[name].build(0.2).to(compute)
    engine = init_inference(model, dtype=dtype)
    assert (engine.module.dtype, engine.module.device) == (compute, model.device)
    logits = engine(torch.tensor([[5, 6, 7]])).logits
    assert logits.dtype == compute and len(engine.generate([[5, 6, 7]], max_new_tokens=4)[0]) == 7


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_layer_that_the_model_casts_stays_packed(dtype: str) -> None:
    """Switch casts its routers to float32 in every pass."""
    model = SERVED["Switch"].build(0.2).bfloat16()
    inputs, starts = torch.arange(5, 10)[None], torch.tensor([[1, 8, 9]])
    expected = init_inference(copy.deepcopy(model).float(), dtype=dtype)(inputs, decoder_input_ids=starts).logits
    engine = init_inference(model, dtype=dtype)
    logits = engine(inputs, decoder_input_ids=starts).logits
    assert float((logits - expected).norm() / expected.norm()) < 0.05
    assert torch.equal(engine(inputs, decoder_input_ids=starts).logits, logits)  # casts lose nothing


def test_a_decoder_that_makes_positions_of_tokens_is_looked_at_without_padding() -> None:
    """M2M-100 and NLLB count no padding as a position, and the tokens of the look contained it."""
    model: Any = SERVED["M2M-100"].build(0.2).eval()
    assert model.config.pad_token_id in (0, 1)
    inputs = torch.arange(5, 12)[None]
    expected = model.generate(inputs, max_new_tokens=8, do_sample=False)
    assert torch.equal(init_inference(model).generate(inputs, max_new_tokens=8), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["M2M-100", "XGLM", "GPT-J"])
def test_tables_of_positions_are_added_in_the_dtype_of_embeddings(name: str) -> None:
    """They are in no checkpoint, as the angles of rotations, which stay in float32."""
    model: Any = SERVED[name].build(0.2).eval()
    engine = init_inference(model, dtype="bf16")
    tokens = torch.arange(5, 10)[None]
    named = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        expected, logits = (each(tokens, **named).logits for each in (model, engine))
    assert logits.dtype == torch.bfloat16 and float((logits - expected).norm() / expected.norm()) < 0.05
    assert engine.generate(tokens, max_new_tokens=4).shape[1] > 4  # type: ignore[union-attr]
    dtypes = {buffer.dtype for key, buffer in engine.module.named_buffers() if buffer.is_floating_point()}
    assert dtypes == {torch.float32 if name == "GPT-J" else torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["GPT", "XGLM", "M2M-100", "GPT-J", "Llama"])
def test_buffers_that_meet_activations_have_their_dtype(name: str, dtype: torch.dtype) -> None:
    """Trained as `model.to(dtype)` computes; GPT in an engine that serves, too. Frequencies stay in float32."""
    model = SERVED[name]
    batch, key = model.batch(), {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    expected = model.build().to(dtype)(**batch).loss  # type: ignore[operator]
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine, *_ = initialize(
        model=model.build(),
        config={"train_micro_batch_size_per_gpu": 1, "optimizer": adamw, key: {"enabled": True, "loss_scale": 1.0}},
    )
    try:
        loss = engine(**batch).loss
        torch.testing.assert_close(loss.float(), expected.float(), rtol=0.02, atol=0)
        engine.backward(loss)
        engine.step()
    finally:
        engine.close()
    frequencies = [x for key, x in engine.module.named_buffers() if "inv_freq" in key]
    assert all(x.dtype == torch.float32 for x in frequencies) and (name != "Llama" or frequencies)
    if name == "GPT":
        with torch.no_grad():
            served = init_inference(model.build(), dtype=key)(batch["input_ids"]).logits
            assert served.dtype == dtype
            torch.testing.assert_close(served, model.build().eval().to(dtype)(batch["input_ids"]).logits)  # type: ignore[operator]


def test_a_decoder_that_takes_no_mask_of_slots_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match=r"ProphetNetForConditionalGeneration in torch.float32 does not decode over a cache"
    ):
        init_inference(SERVED["ProphetNet"].build())


@pytest.mark.parametrize(
    "name",
    ["mBART", "PLBART", "M2M-100", "Marian", "Pegasus", "Blenderbot", "XGLM", "BioGPT", "mT5", "UMT5"],
)
def test_relatives_of_bart_and_t5_are_divided_by_their_plans(name: str) -> None:
    model: Any = SERVED[name].build(0.2).eval()
    model.generation_config.forced_eos_token_id = None
    inputs = torch.arange(5, 12)[None]
    expected = model.generate(inputs, max_new_tokens=8, do_sample=False)
    held = init_inference(model).held_bytes

    def serve(transport: Transport) -> tuple[object, int]:
        engine = init_inference(model, mp_size=2, transport=transport)
        return engine.generate(inputs, max_new_tokens=8), engine.held_bytes

    for tokens, bytes_of_rank in run_ranks(2, serve):
        assert torch.equal(tokens, expected) and bytes_of_rank < 0.8 * held  # type: ignore[arg-type]


def test_a_temperature_that_is_too_small_is_an_error_as_in_transformers() -> None:
    """The smallest normal one in float32 takes the likeliest token; a subnormal one divides by what is no number."""
    model: Any = SERVED["Llama"].build(0.2).eval()
    engine, prompt = init_inference(model), torch.arange(5, 10)[None]
    likeliest = model.generate(prompt, max_new_tokens=4, do_sample=False)
    for generate in (model.generate, engine.generate):
        assert torch.equal(generate(prompt, max_new_tokens=4, do_sample=True, temperature=2**-126), likeliest)
        for temperature in (1e-39, 1e-310, 5e-324):
            with pytest.raises((RuntimeError, ValueError), match=r"probability tensor|temperature that is too small"):
                generate(prompt, max_new_tokens=4, do_sample=True, temperature=temperature)
