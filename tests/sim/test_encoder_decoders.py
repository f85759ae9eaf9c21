"""Encoder-decoders in inference: the tokens of transformers' own generate. Models are small and untrained."""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import Any

import pytest
import torch
from family import same
from torch import Tensor

from onebit.comm import SimTransport
from onebit.comm.transports.simulated import run_ranks
from onebit.zero import InferenceEngine, init_inference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="pip install onebit[transformers]"),
]

IDS = {"vocab_size": 64, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
SPEECH = {
    "is_multilingual": True,
    "lang_to_id": {"<|en|>": 60, "<|de|>": 61},
    "task_to_id": {"transcribe": 58, "translate": 59},
    "no_timestamps_token_id": 57,
}


@functools.cache
def model_of(kind: str) -> Any:
    import transformers

    torch.manual_seed(3)
    layers = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "init_std": 0.3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    if kind == "bart":
        config = transformers.BartConfig(max_position_embeddings=40, forced_bos_token_id=5, **layers, **heads, **IDS)
        return transformers.BartForConditionalGeneration(config).eval()
    if kind == "whisper":
        sizes = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
        suppressed = {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7]}
        config = transformers.WhisperConfig(bos_token_id=0, **sizes, **suppressed, **layers, **heads, **IDS)
        model = transformers.WhisperForConditionalGeneration(config).eval()
        vars(model.generation_config).update(SPEECH)
        return model
    kinds = {"gated t5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, "t5": {}}
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**kinds[kind], **sizes, **IDS)).eval()
    if kind == "gated t5":  # so that tokens depend on what was encoded
        with torch.no_grad():
            for p in model.decoder.block.parameters():
                p.mul_(2)
    return model


OF_TEXT = ("t5", "gated t5", "bart")
KINDS = (*OF_TEXT, "whisper")


def inputs_of(kind: str, rows: int = 3, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if kind == "whisper":
        return torch.randn(rows, 8, 24, generator=generator)
    return torch.randint(3, 64, (rows, length), generator=generator)


def theirs(kind: str, inputs: Tensor, **options: Any) -> Tensor:
    """transformers' tokens. Whisper's leave the prompt out, unless it may call its decoding only once."""
    torch.manual_seed(7)
    once = {"force_unique_generate_call": True} if kind == "whisper" else {}
    found = model_of(kind).generate(inputs, max_new_tokens=options.pop("max_new_tokens", 12), **options, **once)
    assert isinstance(found, Tensor)
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9},
]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str) -> None:
    """Greedy, by processors and drawn; batches and a single row; and one new token."""
    engine, inputs = init_inference(model_of(kind)), inputs_of(kind)
    for options in OPTIONS:
        draws = {"do_sample": True} if "top_k" in options and kind != "whisper" else {}
        ours = engine.generate(inputs, max_new_tokens=12, seed=7, **options, **draws)
        assert isinstance(ours, Tensor) and ours.dtype == torch.int64
        assert torch.equal(ours, theirs(kind, inputs, **options, **draws)), options
    for rows, most in ((1, 12), (3, 1)):
        named = {model_of(kind).main_input_name: inputs[:rows]}  # as a tokenizer or a processor names it
        few = engine.generate(**named, max_new_tokens=most)
        assert torch.equal(few, theirs(kind, inputs[:rows], max_new_tokens=most))


@pytest.mark.parametrize("kind", OF_TEXT)
def test_rows_end_alone(kind: str) -> None:
    engine, inputs = init_inference(model_of(kind)), inputs_of(kind)
    free = theirs(kind, inputs)
    end = int(free[0, 5])
    ours = engine.generate(inputs, max_new_tokens=12, eos_token_id=end)
    assert torch.equal(ours, theirs(kind, inputs, eos_token_id=end))
    steps = list(engine.stream(inputs[:1], max_new_tokens=12, eos_token_id=end))
    assert [step[0] for step in steps] == free[0, 1 : 2 + free[0, 1:].tolist().index(end)].tolist()


@pytest.mark.parametrize("kind", OF_TEXT)
def test_padding_of_inputs_is_not_read(kind: str) -> None:
    """On both sides, as transformers reads it with the same mask; and a list of inputs is each alone."""
    engine, inputs = init_inference(model_of(kind)), inputs_of(kind)
    mask = torch.ones_like(inputs)
    mask[1, 4:] = mask[2, :3] = 0
    padded = engine.generate(inputs, attention_mask=mask, max_new_tokens=12)
    assert torch.equal(padded, theirs(kind, inputs, attention_mask=mask))
    assert not torch.equal(padded, theirs(kind, inputs))
    rows = [inputs[0], inputs[1, :1], inputs[2, :5]]
    alone = [theirs(kind, row[None])[0] for row in rows]
    assert same(engine.generate(rows, max_new_tokens=12), alone)


def test_whispers_prompt_is_of_its_language_and_task() -> None:
    engine, inputs = init_inference(model_of("whisper")), inputs_of("whisper")
    for options in ({"language": "de", "task": "translate"}, {"language": ["en", "de", "en"]}, {"task": "transcribe"}):
        ours = engine.generate(inputs, max_new_tokens=6, **options)  # type: ignore[arg-type]
        assert torch.equal(ours, theirs("whisper", inputs, max_new_tokens=6, **options))
    assert ours[:, :4].tolist() != [[1] * 4] * 3 and ours.shape == (3, 10)


@torch.no_grad()
def logits_of(model: Any, inputs: Tensor, tokens: Tensor, **named: object) -> Tensor:
    found = model(inputs, decoder_input_ids=tokens, **named).logits
    assert isinstance(found, Tensor)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_steps_over_the_cache_are_one_pass(kind: str) -> None:
    """The encoder, and the keys and values of what it made, are computed once."""
    engine, inputs, tokens = init_inference(model_of(kind)), inputs_of(kind), inputs_of("t5", 3, 8)
    calls: list[str] = []
    for name, module in engine.module.named_modules():
        if name.endswith(("encoder_attn.k_proj", "EncDecAttention.v", "encoder")):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    steps = [engine.step(tokens[:, :3], 0, inputs)] + [engine.step(tokens[:, k : k + 1], k) for k in range(3, 8)]
    assert len(calls) == len(set(calls)) == 3  # the encoder, and one layer's product in each of two
    whole = logits_of(model_of(kind), inputs, tokens)[:, 2:]
    torch.testing.assert_close(torch.stack(steps, 1), whole, rtol=0, atol=1e-4)
    before = engine.cache_bytes
    engine.step(tokens[:1, :3], 0, inputs[:1])
    assert 0 < engine.cache_bytes < before


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_give_the_tokens_of_one(kind: str) -> None:
    inputs, tokens = inputs_of(kind), inputs_of("t5", 3, 6)
    model, alone = model_of(kind), theirs(kind, inputs)
    whole, held = logits_of(model, inputs, tokens), init_inference(model).held_bytes

    def serve(transport: SimTransport) -> tuple[Tensor, Tensor, int]:
        engine = init_inference(model, mp_size=2, transport=transport)
        answers = engine.generate(inputs, max_new_tokens=12)
        assert isinstance(answers, Tensor)
        return answers, logits_of(engine, inputs, tokens), engine.held_bytes

    for answers, logits, bytes_of_rank in run_ranks(2, serve):
        assert torch.equal(answers, alone) and bytes_of_rank < 0.7 * held
        torch.testing.assert_close(logits, whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["t5", "whisper"])
def test_a_plan_that_cuts_wrongly_is_found_out(kind: str) -> None:
    """Of Whisper, whose inputs are features, in the first call of generate."""
    model, policy = model_of(kind), {"DenseReluDense.wi" if kind == "t5" else "fc1": "colwise"}

    def serve(transport: SimTransport) -> None:
        engine = init_inference(model, mp_size=2, injection_policy=policy, transport=transport)
        engine.generate(inputs_of(kind), max_new_tokens=2)

    with pytest.raises(ValueError, match="split over 2 ranks the model gives"):
        run_ranks(2, serve)


@pytest.mark.parametrize(
    ("kind", "dtype", "near"),
    [
        *(("t5", *of) for of in (("bf16", 0.06), ("int8", 0.08), ("int4", 0.6))),
        ("bart", "int8", 0.08),
        ("whisper", "bf16", 0.06),
        ("whisper", "int4", 0.6),
    ],
)
def test_few_bits_are_near(kind: str, dtype: str, near: float) -> None:
    """Of random layers with 32 inputs: in 4 bits each adds a tenth of its outputs as noise."""
    engine = init_inference(small := copy.deepcopy(model_of(kind)), dtype=dtype)
    inputs, tokens = inputs_of(kind), inputs_of("t5", 3, 6)
    whole = logits_of(small, inputs, tokens)
    given = inputs.bfloat16() if (dtype, kind) == ("bf16", "whisper") else inputs
    off = logits_of(engine, given, tokens).float() - whole
    assert float(off.norm() / whole.norm()) < near
    answers = engine.generate(inputs, max_new_tokens=4)
    assert isinstance(answers, Tensor) and len(answers) == 3
    steps = engine.step(tokens[:, :5], 0, inputs), engine.step(tokens[:, 5:], 5)
    assert float((steps[1].float() - whole[:, -1]).norm() / whole[:, -1].norm()) < near


@pytest.mark.thorough
def test_a_compiled_step_decodes_the_same() -> None:
    """By inductor; `test_a_compiled_step_has_few_forms` has the answers of a step as torch traces it."""
    model = copy.deepcopy(model_of("t5"))
    model.decoder.block = model.decoder.block[:1]
    plain, compiled = init_inference(model), init_inference(model, kernel_inject=True)
    inputs = inputs_of("t5")
    ours = compiled.generate(inputs, max_new_tokens=5)
    assert torch.equal(ours, plain.generate(inputs, max_new_tokens=5))  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is refused


def refused(engine: InferenceEngine, said: str, *args: object, **options: object) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        engine.generate(*args, **{"max_new_tokens": 3, **options})  # type: ignore[arg-type]


def test_what_cannot_be_answered_is_refused_by_name() -> None:
    engine, inputs = init_inference(model_of("t5"), max_out_tokens=8), inputs_of("t5")
    refused(engine, "inputs of at least one token each", [[3, 4], []])
    refused(engine, r"at least one row and token, got shape \(2, 0\)", inputs[:2, :0])
    refused(engine, "one that is seen in every row", inputs, attention_mask=torch.zeros_like(inputs))
    refused(engine, "of the shape of the prompts", [[3]], attention_mask=inputs)
    refused(engine, "tokens from 0 to 63, got 3 to 64", [[3], [64]])
    refused(engine, "do not fit into the cache of 8", inputs, max_new_tokens=8)
    refused(engine, "max_new_tokens of at least 1, got 0", inputs, max_new_tokens=0)
    refused(engine, "beam_search", inputs, num_beams=2)
    refused(engine, "takes no language", inputs, language="en")
    refused(engine, "temperature has no effect without do_sample", inputs, temperature=0.5)
    for slot, given in ((0, None), (1, inputs)):
        with pytest.raises(ValueError, match="need it with slot 0 and only there"):
            engine.step(inputs[:, :1], slot, given)


def test_what_whisper_does_besides_is_refused_by_name() -> None:
    engine, inputs = init_inference(copy.deepcopy(model_of("whisper"))), inputs_of("whisper")
    refused(engine, "takes no return_timestamps", inputs, return_timestamps=True)
    refused(engine, "long-form generation", torch.cat([inputs[:1]] * 2, 2))
    refused(engine, "draws if a temperature is given", inputs, do_sample=True)
    engine.module.generation_config.no_speech_threshold = 0.5  # type: ignore[union-attr]
    refused(engine, "no_speech_threshold=0.5", inputs)


def test_heads_that_ranks_do_not_divide() -> None:
    model = model_of("t5")
    with pytest.raises(ValueError, match="heads is 4, which 3 ranks do not divide"):
        run_ranks(3, lambda t: init_inference(model, mp_size=3, transport=t))


def test_a_decoder_encodes_nothing() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=9)
    engine = init_inference(transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="is for encoder-decoders"):
        engine.step(torch.ones(1, 2, dtype=torch.int64), 0, [[1]])
