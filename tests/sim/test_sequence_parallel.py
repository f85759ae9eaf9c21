"""Models of transformers with sequences split over ranks: losses and gradients are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onebit.comm import SimTransport, run_ranks
from onebit.zero import sequence_parallel
from onebit.zero.sequence import SequenceRanks, huggingface
from onebit.zero.sequence.pieces import Pieces
from onebit.zero.sparse_attention import replace_attention

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 40,
    "max_position_embeddings": 64, "attention_dropout": 0.0, "hidden_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
GROUPED = COMMON | {"num_key_value_heads": 2}
CAUSAL: dict[str, dict[str, Any]] = {
    "GPT2": COMMON | {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "Llama": GROUPED,
    "Mistral": GROUPED | {"sliding_window": None},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 6},
    "Olmo2": GROUPED,
    "Phi3": GROUPED,
    "GPTNeoX": COMMON,
    "Granite": GROUPED,
    "StableLm": GROUPED | {"hidden_size": 32},
    "Cohere": GROUPED,
    "Gemma": GROUPED | {"head_dim": 8},
    "Starcoder2": GROUPED | {"residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": None},
}
MASKED = {
    "Bert": COMMON | {"attention_probs_dropout_prob": 0.0},
    "Roberta": COMMON | {"attention_probs_dropout_prob": 0.0},
}


def build(name: str, keys: dict[str, Any], head: str = "ForCausalLM") -> nn.Module:
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**keys)
    made = "GPT2LMHeadModel" if name == "GPT2" else f"{name}{head}"
    return getattr(transformers, made)(config).train()


def batch(length: int, masked: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 97, (2, length), generator=generator)
    labels = ids.clone()
    labels[0, : length // 3] = -100  # so that pieces count differently
    return {"input_ids": ids, "labels": labels}


def results(model: nn.Module, given: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    output = model(**given)
    output.loss.backward()
    return output.loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def check(
    W: int,
    make: Callable[[], nn.Module],
    given: dict[str, Any],
    ulysses_degree: int = 1,
    sparsity: dict[str, Any] | None = None,
) -> None:
    """The ranks' mean loss and gradients are those of one process. transformers builds no models in threads."""
    whole, models = make(), [make() for _ in range(W)]
    if sparsity is not None:
        replace_attention(whole, sparsity)

    def rank(transport: SimTransport) -> Any:
        ranks = SequenceRanks.of(transport, ulysses_degree)
        model = sequence_parallel(models[transport.rank], ranks, sparsity=sparsity)
        return results(model, copy.deepcopy(given))

    loss, grads = results(whole, copy.deepcopy(given))
    found = run_ranks(W, rank)
    torch.testing.assert_close(torch.stack([its for its, _ in found]).mean(), loss, rtol=1e-5, atol=1e-5)
    for k, expected in enumerate(grads):
        torch.testing.assert_close(torch.stack([its[k] for _, its in found]).mean(0), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_decoder_trains_as_in_one_process(name: str) -> None:
    """With a length that divides nothing: positions, rotary angles, labels over the borders, mean over all tokens."""
    check(3, lambda: build(name, CAUSAL[name]), batch(23))


@pytest.mark.parametrize("name", MASKED)
def test_an_encoder_sees_all_pieces(name: str) -> None:
    check(
        3,
        lambda: build(name, MASKED[name], "ForMaskedLM"),
        batch(23) | {"token_type_ids": torch.ones(2, 23).long()} if name == "Bert" else batch(23),
    )


@pytest.mark.parametrize("W", [1, 2, 4, 5])
def test_any_number_of_ranks(W: int) -> None:
    check(W, lambda: build("Llama", CAUSAL["Llama"]), batch(32))


@pytest.mark.parametrize(
    ("name", "W", "U"),
    [*(("Llama", *each) for each in ((2, 2), (4, 2), (4, 4), (6, 2))), ("GPT2", 4, 2), ("Bert", 4, 2), ("Bert", 4, 4)],
)
def test_ranks_that_divide_heads(name: str, W: int, U: int) -> None:
    """Four heads, in Llama two of keys and values; packed documents, and padding of the encoder."""
    if name == "Bert":
        mask = torch.ones(2, 23).long()
        mask[0, :4] = mask[1, 19:] = 0
        given = batch(23) | {"attention_mask": mask}
        given["labels"] = given["labels"].masked_fill(mask == 0, -100)
        check(W, lambda: build(name, MASKED[name], "ForMaskedLM"), given, U)
    else:
        given = batch(23) | {"position_ids": PACKED}
        check(W, lambda: build(name, CAUSAL[name] | {"use_cache": False}), given, U)


def test_checkpointed_activations_are_computed_again_with_the_same_pieces() -> None:
    def make() -> nn.Module:
        model = build("Llama", CAUSAL["Llama"])
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    check(2, make, batch(16))


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_what_is_computed_again_belongs_to_its_own_pass(name: str) -> None:
    """A pass of another length, or of packed documents, comes between a forward pass and its backward pass."""
    between = [batch(30), batch(23) | {"position_ids": PACKED}]
    models = [build(name, CAUSAL[name]) for _ in range(2)]

    def rank(transport: SimTransport) -> list[list[Tensor]]:
        model, found = sequence_parallel(models[transport.rank], SequenceRanks.of(transport)), []
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for other in (None, *between):
            model.zero_grad()
            loss = model(**batch(23)).loss
            if other is not None:
                model(**other)
            loss.backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        return found

    for alone, *after in run_ranks(2, rank):
        assert all(torch.equal(x, y) for grads in after for x, y in zip(grads, alone, strict=True))


def test_padding_after_the_tokens_and_a_count_of_ones_own() -> None:
    given = batch(16) | {"attention_mask": torch.ones(2, 16).long()}
    given["attention_mask"][1, 12:] = 0
    given["labels"][1, 12:] = -100
    check(2, lambda: build("Llama", CAUSAL["Llama"]), given | {"num_items_in_batch": torch.tensor(11)})


def test_outputs_are_the_pieces() -> None:
    whole = build("Llama", CAUSAL["Llama"])(input_ids=batch(13)["input_ids"]).logits
    models = [build("Llama", CAUSAL["Llama"]) for _ in range(2)]

    def rank(transport: SimTransport) -> Tensor:
        return sequence_parallel(models[transport.rank], transport)(batch(13)["input_ids"]).logits.detach()

    torch.testing.assert_close(Pieces(13, 2).join(run_ranks(2, rank)), whole, rtol=0, atol=1e-5)


def refused(W: int, make: Callable[[], nn.Module], change: Callable[[int], dict[str, Any]], words: str) -> None:
    models = [make() for _ in range(W)]

    def rank(transport: SimTransport) -> None:
        model = sequence_parallel(models[transport.rank], transport)
        with pytest.raises(ValueError, match=f"rank {transport.rank}: .*{words}"):
            model(**batch(16) | change(transport.rank))

    run_ranks(W, rank)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rank: batch(16 + rank), r"the same whole batch; rank 0 has \(2, 16\), .*, rank 1 has \(2, 17\)"),
        (lambda rank: {"input_ids": batch(16)["input_ids"] + rank}, "the same whole batch"),
        (lambda rank: {"attention_mask": torch.tensor([[1, 0] + [1] * 14, [1] * 16])}, "padding between tokens"),
        (lambda rank: {"attention_mask": torch.ones(2, 1, 16, 16)}, r"got \[2, 1, 16, 16\]"),
        (lambda rank: {"attention_mask": torch.ones(2, 15)}, r"expected attention_mask \[2, 16\] .*got \[2, 15\]"),
        (lambda rank: {"labels": batch(16)["labels"] + rank}, "the same whole batch"),
        (lambda rank: {"position_ids": torch.arange(16)}, r"expected position_ids \[sequences, 16\], got \[16\]"),
        (lambda rank: {"use_cache": True}, "use_cache"),
        (lambda rank: {"cache_position": torch.arange(16)}, "cache_position is not known here"),
        (lambda rank: {"input_ids": batch(1)["input_ids"], "labels": None}, "1 tokens is too short for 2 ranks"),
        (lambda rank: {"input_ids": None}, "expected input_ids or inputs_embeds"),
    ],
)
def test_bad_batches_are_refused_on_all_ranks(change: Callable[[int], dict[str, Any]], words: str) -> None:
    refused(2, lambda: build("Llama", CAUSAL["Llama"]), change, words)


@pytest.mark.parametrize("cap", [None, 0.05, 50.0])
def test_capped_scores_and_a_window_in_every_second_layer(cap: float | None) -> None:
    keys = GROUPED | {"head_dim": 8, "attn_logit_softcapping": cap, "sliding_window": 7, "num_hidden_layers": 2}
    check(3, lambda: build("Gemma2", keys | {"_attn_implementation": "eager"}), batch(23))


@pytest.mark.parametrize("local", [2, 8, 46])
def test_windows_to_both_sides(local: int) -> None:
    """Of every second layer; and padding."""
    keys = {"vocab_size": 97, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 0}
    keys |= {"intermediate_size": 40, "local_attention": local, "global_attn_every_n_layers": 2}
    given = batch(23) | {"attention_mask": torch.ones(2, 23).long()}
    given["attention_mask"][1, 20:] = 0
    given["labels"][1, 20:] = -100
    check(3, lambda: build("ModernBert", keys, "ForMaskedLM"), given)


def test_what_ring_attention_lacks_is_refused_by_name() -> None:
    keys = GROUPED | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 8}
    refused(2, lambda: build("GptOss", keys), lambda rank: {}, "no s_aux")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("Llama", mode) for mode in ("bslongformer", "bigbird", "fixed", "variable")),
        ("GPT2", "bigbird"),
        ("Bert", "fixed"),
    ],
)
def test_block_layouts_are_those_of_one_process(name: str, mode: str) -> None:
    """Those of `replace_attention`, in float32."""
    keys, head = (MASKED[name], "ForMaskedLM") if name in MASKED else (CAUSAL[name], "ForCausalLM")
    check(3, lambda: build(name, keys, head), batch(23), sparsity={"mode": mode, "block": 4})


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_weights_are_dropped_in_training_alone(name: str) -> None:
    """Whatever is drawn: a checkpointed model draws the same again; in evaluation nothing is dropped."""
    masked = name == "Bert"
    keys = MASKED[name] | {"attention_probs_dropout_prob": 0.3} if masked else GROUPED | {"attention_dropout": 0.3}
    made = [build(name, keys, "ForMaskedLM" if masked else "ForCausalLM") for _ in range(3)]
    made[2].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plain, given = copy.deepcopy(made[0]).eval(), batch(16)
    for model in made:
        sequence_parallel(model, SimTransport())
    found = []
    for seed, model in ((3, made[0]), (3, made[2]), (4, made[1])):
        torch.manual_seed(seed)
        found.append(results(model, given))
    assert found[0][0] == found[1][0] != found[2][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))
    torch.testing.assert_close(made[0].eval()(**given).loss, plain(**given).loss)


WINDOWS: dict[str, dict[str, Any]] = {
    "Mistral": {},
    "Starcoder2": CAUSAL["Starcoder2"],
    "Phi3": {},
    "Qwen2": {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    "Qwen3": {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 6},
    "Olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize(
    ("name", "window"), [(name, 5) for name in WINDOWS] + [("Mistral", 1), ("Qwen2", 22), ("Qwen3", 23)]
)
def test_windows_of_some_layers_or_all(name: str, window: int) -> None:
    check(3, lambda: build(name, GROUPED | WINDOWS[name] | {"sliding_window": window}), batch(23))


def test_layers_with_windows_have_rotary_angles_of_their_own() -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "head_dim": 8}

    def make() -> nn.Module:
        torch.manual_seed(7)
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GROUPED, **types)).train()

    check(3, make, batch(23))


PACKED = torch.tensor([[*range(8), *range(1), *range(14)], [*range(23)]])


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "GPT2", "GPTNeoX"])
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    """Documents of 8, 1 and 14 tokens in one row, and a row of one; as transformers does, if neither a mask nor a cache
    is there."""
    given, keys = batch(23) | {"position_ids": PACKED}, CAUSAL[name] | {"use_cache": False}
    check(3, lambda: build(name, keys), given)
    check(2, lambda: build(name, keys), given | {"attention_mask": torch.ones(2, 23).long()})


def test_packed_documents_in_windows() -> None:
    keys = GROUPED | {"sliding_window": 4, "use_cache": False}
    check(3, lambda: build("Mistral", keys), batch(23) | {"position_ids": PACKED})


@pytest.mark.parametrize(
    ("name", "side"),
    [("Llama", "left"), ("Llama", "right"), ("Bert", "both"), ("Roberta", "left"), ("Roberta", "both")],
)
def test_padding_on_either_side(name: str, side: str) -> None:
    given = batch(23)
    mask = torch.ones(2, 23).long()
    if side != "right":
        mask[0, :9] = 0
    if side != "left":
        mask[1, 20:] = 0
    given = {key: x.masked_fill(mask == 0, 0 if key == "input_ids" else -100) for key, x in given.items()}
    is_masked = name in MASKED
    keys, head = (MASKED[name], "ForMaskedLM") if is_masked else (CAUSAL[name], "ForCausalLM")
    if not is_masked:
        given["labels"][0, :10] = -100  # the first token of a row is predicted from padding, which sees others
    check(3, lambda: build(name, keys, head), given | {"attention_mask": mask})


def test_a_model_can_be_copied_and_exported_and_is_split_once(tmp_path: Path) -> None:
    model = sequence_parallel(build("Llama", CAUSAL["Llama"]), SimTransport())
    copied, given = copy.deepcopy(model), batch(16)
    assert torch.equal(copied(**given).loss, model(**given).loss)
    with pytest.raises(ValueError, match="are split already"):
        sequence_parallel(model, SimTransport())
    model.save_pretrained(tmp_path)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(plain(**given).loss, model(**given).loss)


def test_gradients_of_gradients_are_refused() -> None:
    model = sequence_parallel(build("Llama", CAUSAL["Llama"]), SimTransport())
    (slope,) = torch.autograd.grad(model(**batch(8)).loss, [model.lm_head.weight], create_graph=True)
    weight = model.model.layers[0].self_attn.q_proj.weight
    (grad,) = torch.autograd.grad(model(**batch(8)).loss, [weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad.sum() + slope.sum()).backward()


def test_a_window_that_holds_the_sequence_is_none() -> None:
    check(2, lambda: build("Mistral", CAUSAL["Mistral"] | {"sliding_window": 16}), batch(16))


def test_models_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="Linear is no model of transformers, and has no method split_sequences"):
        sequence_parallel(nn.Linear(2, 2), SimTransport())
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="has an encoder and a decoder"):
        sequence_parallel(t5, SimTransport())
    small = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16, "expand": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    jamba = transformers.JambaForCausalLM(
        transformers.JambaConfig(**small, **heads, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False)
    )
    with pytest.raises(ValueError, match=r"(conv1d of|JambaForCausalLM has) .*cannot be split"):
        sequence_parallel(jamba, SimTransport())
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=97, hidden_size=8, state_size=4, num_hidden_layers=1)
    )
    with pytest.raises(ValueError, match="MambaForCausalLM"):
        sequence_parallel(mamba, SimTransport())
    classes = build("Llama", CAUSAL["Llama"] | {"num_labels": 3}, "ForSequenceClassification")
    with pytest.raises(ValueError, match="LlamaForSequenceClassification picks one token of a sequence"):
        sequence_parallel(classes, SimTransport())


def test_a_loss_in_place_of_that_of_transformers_is_not_ignored() -> None:
    model = build("Llama", CAUSAL["Llama"])
    model.loss_function = lambda logits, labels, vocab_size, **named: logits.square().mean()
    with pytest.raises(ValueError, match="not known how the loss of LlamaForCausalLM follows"):
        sequence_parallel(model, SimTransport())(**batch(8))


def test_a_window_that_only_the_mask_or_only_the_layer_has() -> None:
    """The mask's holds, as in one process; a layer's own might be meant or not."""

    class DeafForCausalLM(type(build("Mistral", CAUSAL["Mistral"]))):  # type: ignore[misc]
        def forward(self, *args: Any, **named: Any) -> Any:
            for layer in self.model.layers:
                layer.self_attn.config = copy.copy(layer.self_attn.config)
                layer.self_attn.config.sliding_window = self.theirs
            return super().forward(*args, **named)

    def make(of_mask: int | None, of_layer: int | None) -> nn.Module:
        model = build("Mistral", CAUSAL["Mistral"] | {"sliding_window": of_mask})
        model.__class__, model.theirs = DeafForCausalLM, of_layer
        return model

    check(2, lambda: make(8, None), batch(16))
    refused(2, lambda: make(None, 8), lambda rank: {}, "asks for a window of 8 tokens, which its mask does not have")


def test_masks_that_are_no_windows_are_refused() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    causal, both = (partial(huggingface._is_window, is_causal=is_causal) for is_causal in (True, False))
    for size in (1, 4, 7):
        before = masking.sliding_window_causal_mask_function(size)
        around = masking.sliding_window_bidirectional_mask_function(size)
        assert causal(before, size) and both(around, size + 1)
        assert not causal(before, size + 1) and not both(around, size)
        assert not causal(around, size) and not both(before, size + 1)
        assert not causal(masking.causal_mask_function, size)
    assert not causal(masking.chunked_causal_mask_function(4, torch.zeros(1).long()), 4)
    blocks = masking.or_masks(
        masking.sliding_window_causal_mask_function(4), masking.blockwise_overlay(torch.zeros(1, 4).long())
    )
    assert not causal(blocks, 4)
