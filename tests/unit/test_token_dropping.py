"""Layers that drop tokens: the arithmetic against a loop by hand, masks, angles, checkpoints of activations, errors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from errors import refused
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onebit.zero.data_efficiency import Root, TokenDropping, current_positions, disarm, drop_tokens
from onebit.zero.data_efficiency.token_dropping import arm, stack_of

B, S, D = 3, 8, 6


def keep(tokens: int) -> Root:
    """So many, always."""
    return Root(tokens, tokens, 1)


class Layer(nn.Module):
    """Causal attention with rotary angles that come in, a padding mask, and an MLP with dropout."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.qkv, self.mlp, self.dropout = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Dropout(dropout)

    def forward(
        self, x: Tensor, attention_mask: Tensor | None = None, position_embeddings: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=2)
        if position_embeddings is not None:
            q, k = q + position_embeddings, k + position_embeddings
        T = x.shape[1]
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if attention_mask is not None:
            seen = seen & attention_mask[:, None, :].bool()
        scores = (q @ k.transpose(1, 2) / D**0.5).masked_fill(~seen, -1e9)
        return x + self.dropout(self.mlp(scores.softmax(-1) @ v).tanh())


class Stack(nn.Module):
    def __init__(self, layers: int = 4, dropout: float = 0.0, kind: Callable[..., nn.Module] = Layer):
        super().__init__()
        self.layers = nn.ModuleList(kind(dropout) for _ in range(layers))
        self.recompute: bool | None = None  # or use_reentrant

    def forward(self, x: Tensor, **named: object) -> Tensor:
        for layer in self.layers:
            if self.recompute is None or not self.training:
                x = layer(x, **named)
            else:
                x = checkpoint(layer, x, *named.values(), use_reentrant=self.recompute)
        return x


def stack(**options: object) -> Stack:
    torch.manual_seed(4)
    return Stack(**options)  # type: ignore[arg-type]


def inputs(length: int = S) -> Tensor:
    return torch.randn(B, length, D, generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


# ---------------------------------------------------------------- arithmetic


def test_keeping_all_is_the_plain_layer_to_the_bit() -> None:
    plain = stack(dropout=0.3)
    dropping = copy.deepcopy(plain)
    drop_tokens(dropping, "layers.*", keep(S))
    for model in (plain, dropping):
        torch.manual_seed(7)
        model(inputs()).square().sum().backward()
    torch.manual_seed(7)
    first = plain(inputs())
    torch.manual_seed(7)
    assert torch.equal(first, dropping(inputs()))
    for a, b in zip(gradients(plain), gradients(dropping), strict=True):
        assert torch.equal(a, b)


def test_a_layer_runs_on_what_it_keeps_and_the_rest_passes_by() -> None:
    """Against a loop over samples, with the plain layer and the positions as they were."""
    model, plain = stack(), stack()
    drop_tokens(model, ["layers.1"], keep(5))
    kept: list[Tensor] = []
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: kept.append(current_positions()))  # type: ignore[arg-type]
    angles = torch.randn(1, S, D, generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(S) < torch.tensor([8, 6, 7])[:, None]).long()
    x = inputs().requires_grad_()
    out = model.layers[1](x, attention_mask=mask, position_embeddings=angles)
    (positions,) = kept
    assert positions.shape == (B, 5) and len({tuple(row) for row in positions.tolist()}) > 1
    for b in range(B):
        rows = positions[b].tolist()
        assert rows == sorted(set(rows)) and set(rows) <= set(range(int(mask[b].sum()))), "real tokens come first"
        few = plain.layers[1](x[b : b + 1, rows], mask[b : b + 1, rows], angles[:, rows])
        expected = x[b].detach().clone()
        expected[rows] = few[0]
        torch.testing.assert_close(out[b], expected, rtol=1e-6, atol=1e-6)
    (out - x).square().sum().backward()
    assert x.grad is not None
    is_kept = torch.zeros(B, S, dtype=torch.bool).scatter(1, positions, torch.ones_like(positions).bool())
    assert not x.grad[~is_kept].any(), "gradients reach kept tokens only"
    assert x.grad[is_kept].any(dim=1).float().mean() > 0.9


def test_gradients_of_parameters_are_those_of_the_kept_tokens() -> None:
    model, plain = stack(), stack()
    drop_tokens(model, ["layers.1"], keep(3))
    kept: list[Tensor] = []
    model.layers[1].mlp.register_forward_pre_hook(lambda *_: kept.append(current_positions()))  # type: ignore[arg-type]
    model.layers[1](inputs()).square().sum().backward()
    index = kept[0][:, :, None].expand(-1, -1, D)
    plain.layers[1](inputs().gather(1, index)).square().sum().backward()
    for p, q in zip(model.layers[1].parameters(), plain.layers[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-7)


def test_in_evaluation_all_tokens_are_kept() -> None:
    model, plain = stack().eval(), stack().eval()
    drop_tokens(model, "layers.*", keep(2))
    assert torch.equal(model(inputs()), plain(inputs()))
    assert not torch.equal(model.train()(inputs()), plain(inputs()))
    disarm(model.layers[1]._token_dropping[0])  # type: ignore[index]
    assert torch.equal(model(inputs()), plain(inputs())) and type(model.layers[1]) is Layer


def test_the_first_and_the_last_layer_keep_all_and_names_stay() -> None:
    model = stack()
    names = list(model.state_dict())
    dropping = drop_tokens(model, "layers.*", keep(2))
    assert list(dropping.layers) == ["layers.1", "layers.2"] and list(model.state_dict()) == names
    assert isinstance(model.layers[1], Layer) and dropping.layer_tokens(S, 4) == 2 * S + 2 * 2


# ---------------------------------------------------------------- which positions


def positions_of(model: Stack, dropping: TokenDropping, steps: int, calls: int = 2, **named: object) -> list[list[int]]:
    """Of all layers, in all calls of so many steps."""
    found: list[list[int]] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *_: found.append(current_positions().flatten().tolist()))  # type: ignore[union-attr]
        for layer in dropping.layers.values()
    ]
    for _ in range(steps):
        for _ in range(calls):
            model(inputs(), **named)
        dropping.advance()
    for hook in hooks:
        hook.remove()
    return found


def test_positions_are_a_function_of_seed_step_layer_rank_and_call() -> None:
    def run(step: int = 0, **options: int) -> list[list[int]]:
        model = stack()
        dropping = drop_tokens(model, "layers.*", keep(4), **options)  # type: ignore[arg-type]
        dropping.advance(step)
        torch.manual_seed(step + sum(options.values()))  # torch's generator has no say in them
        return positions_of(model, dropping, 2)

    first = run()
    assert first == run() and len({tuple(row) for row in first}) == len(first) == 8
    assert run(step=1)[:4] == first[4:], "a resumed run goes on with the same positions"
    for options in ({"seed": 2}, {"data_rank": 1}):
        assert not {tuple(row) for row in run(**options)} & {tuple(row) for row in first}


def test_the_schedule_rises_with_steps() -> None:
    model = stack()
    dropping = drop_tokens(model, "layers.*", Root(2, 8, 6, 2))
    kept = []
    for _ in range(7):
        kept.append(dropping.kept)
        dropping.advance()
    assert kept == [2, 4, 4, 6, 6, 8, 8]
    again = TokenDropping(Root(2, 8, 6, 2))
    again.load_state_dict({"seed": 5, "step": 3})
    assert again.kept == 6 and again.state_dict() == {"seed": 5, "step": 3}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_activation_checkpoints_compute_the_same_tokens_again(reentrant: bool, dropout: float) -> None:
    """Two forward passes before their backward passes, which come in reverse order."""
    found = []
    for recompute in (None, reentrant):
        model = stack(dropout=dropout)
        model.recompute = recompute
        drop_tokens(model, "layers.*", keep(4))
        torch.manual_seed(11)
        losses = [model(inputs().requires_grad_() * (k + 1)).square().sum() for k in range(2)]
        sum(losses, torch.zeros(())).backward()  # type: ignore[union-attr]
        found.append(gradients(model))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_that_forgets_random_numbers_is_refused() -> None:
    model = stack()
    drop_tokens(model, "layers.*", keep(4))
    out = checkpoint(model.layers[1], inputs().requires_grad_(), use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(
        RuntimeError, match=r"layers\.1 is computed again with other random numbers.*preserve_rng_state=True"
    ):
        out.sum().backward()


# ---------------------------------------------------------------- what comes in


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("form", ["sequence first", "batch first"])
def test_torchs_own_layers(form: str, is_causal: bool) -> None:
    """An encoder and a decoder of torch's: [S, S] masks, key padding masks, sequences first."""
    sequence_dim, first = (1, True) if form == "batch first" else (0, False)
    torch.manual_seed(1)
    plain = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(D, 2, 12, 0.0, batch_first=first), 3, enable_nested_tensor=False
    )
    model = copy.deepcopy(plain)
    drop_tokens(model, "layers.*", keep(5), sequence_dim=sequence_dim)
    kept: list[Tensor] = []
    model.layers[1].norm1.register_forward_pre_hook(lambda *_: kept.append(current_positions()))  # type: ignore[arg-type]
    causal = nn.Transformer.generate_square_subsequent_mask(S) if is_causal else None
    padding = torch.arange(S) >= torch.tensor([8, 6, 7])[:, None]
    x = inputs() if first else inputs().transpose(0, 1)
    y = plain.layers[0](x, causal, padding)
    out = model.layers[1](y, causal, padding)
    (positions,) = kept
    for b in range(B):
        rows = positions[b].tolist()
        of_sample = y[b : b + 1] if first else y[:, b : b + 1]
        mask = None if causal is None else causal[: len(rows), : len(rows)]
        few = plain.layers[1](of_sample.index_select(sequence_dim, positions[b]), mask, padding[b : b + 1, rows])
        expected = of_sample.index_copy(sequence_dim, positions[b], few)
        torch.testing.assert_close(out[b : b + 1] if first else out[:, b : b + 1], expected, rtol=1e-5, atol=1e-5)
        assert not padding[b, rows].any()


class Taking(nn.Module):
    """Keeps what it is called with."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.given: dict[str, object] = {}

    def forward(self, x: Tensor, attention_mask: object = None, **named: object) -> tuple[Tensor, str]:
        self.given = {"x": x, "attention_mask": attention_mask, **named}
        return x * self.w, "extra"


def given_to(kept: int = 5, **named: object) -> tuple[dict[str, object], Tensor]:
    model = stack(kind=Taking)
    drop_tokens(model, ["layers.1"], keep(kept))
    layer = model.layers[1]
    out = layer(inputs(), **named)
    assert out[1] == "extra" and torch.equal(out[0], inputs())
    x = layer.given["x"]
    assert isinstance(x, Tensor)
    return layer.given, (inputs()[:, None] == x[:, :, None]).all(-1).float().argmax(-1)


@pytest.mark.parametrize("hides", [-torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4, False])
@pytest.mark.parametrize("shape", [(B, S), (B, 1, S), (B, S, S), (B, 1, 1, S), (B, 1, S, S)], ids=str)
def test_real_tokens_are_kept_before_padding_with_every_form_of_a_mask(hides: float, shape: tuple[int, ...]) -> None:
    is_token = torch.arange(S) < torch.tensor([S, 6, 5])[:, None]
    mask = is_token.view(B, *[1] * (len(shape) - 2), S).expand(shape)
    if hides is not False:
        mask = torch.where(mask, 0.0, hides)
    _, positions = given_to(attention_mask=mask)
    for b, real in enumerate((S, 6, 5)):
        assert (positions[b] < real).all()


def test_what_runs_along_the_sequence_is_gathered_with_it() -> None:
    full = torch.randn(B, 2, S, S)
    full[:, :, :, 6:] = -torch.inf
    table = torch.randn(1, S, 4)
    given, positions = given_to(
        attention_mask=full,
        position_ids=torch.arange(S)[None],
        position_embeddings=(table, 2 * table),
        cache_position=torch.arange(S),
        rotary_offsets=torch.arange(S),
        head_mask=None,
        encoder_hidden_states=torch.zeros(B, S, D),
        encoder_attention_mask=torch.zeros(B, 1, 1, S),
        use_cache=False,
    )
    for b in range(B):
        rows = positions[b]
        assert (rows < 6).all(), "what is padding for all is kept last"
        assert torch.equal(given["attention_mask"][b], full[b][:, rows][:, :, rows])  # type: ignore[index]
        assert torch.equal(given["position_ids"][b], rows)  # type: ignore[index]
        assert torch.equal(given["rotary_offsets"][b], rows)  # type: ignore[index]
        for of, factor in zip(given["position_embeddings"], (1, 2), strict=True):  # type: ignore[call-overload]
            assert torch.equal(of[b], factor * table[0, rows])
    assert given["encoder_hidden_states"].shape == (B, S, D)  # type: ignore[attr-defined]
    assert given["encoder_attention_mask"].shape == (B, 1, 1, S) and given["use_cache"] is False  # type: ignore[attr-defined]
    assert given["cache_position"].shape == (S,) and given["head_mask"] is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("shape", [(B, S), (B, 1, 1, S), (1, 1, S, S), (B, 1, S, S), (B, S, S), (1, 1, 1, S)])
def test_masks_of_all_shapes(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) < 0.9
    given, positions = given_to(4, attention_mask=mask)
    got = given["attention_mask"]
    assert isinstance(got, Tensor)
    for b in range(B):
        of = mask[min(b, len(mask) - 1)]
        if of.dim() == 1:
            expected = of[positions[b]]
        else:
            expected = of[..., positions[b]]
            expected = expected[..., positions[b], :] if of.shape[-2] == S else expected
        assert torch.equal(got[b], expected)


def test_arguments_that_cannot_be_gathered_are_named() -> None:
    for named, message in (
        (
            {"attention_mask": torch.ones(7, 1, S, S)},
            r"layers\.1: attention_mask of shape \(7, 1, 8, 8\) is no mask of 3",
        ),
        ({"attention_mask": torch.randn(S, S)}, r"attention_mask of shape \(8, 8\) becomes a different mask"),
        ({"rotary_table": torch.randn(S, 4)}, r"rotary_table of shape \(8, 4\) runs along the sequence of 8 tokens"),
        ({"bias": torch.randn(5, S, 4)}, r"layers\.1: cannot tell how bias of shape \(5, 8, 4\) runs"),
    ):
        refused(ValueError, message, given_to, **named)
    with pytest.raises(ValueError, match=r"layers\.1 is called with a tensor of shape \(3, 8\)"):
        model = stack(kind=Taking)
        drop_tokens(model, ["layers.1"], keep(3))
        model.layers[1](torch.ones(B, S))


def test_slices_of_a_sequence_keep_as_many_each() -> None:
    """Two tensor ranks, of which each holds half of the sequence, keep what one rank keeps that counts by halves."""

    def run(x: Tensor, parts: int, part: int) -> tuple[Tensor, Tensor]:
        model = stack(kind=Taking)
        dropping = TokenDropping(keep(5), parts=parts, part=part)
        arm(dropping, model, ["layers.1"])
        ids = torch.arange(S)[None].expand(B, S)
        model.layers[1](x, position_ids=ids)
        return model.layers[1].given["x"], model.layers[1].given["position_ids"]  # type: ignore[return-value, index]

    x = inputs()
    halves = [run(x[:, 4 * part : 4 * part + 4], 2, part) for part in range(2)]
    assert torch.equal(halves[0][1], halves[1][1]), "both know all positions"
    positions = halves[0][1]
    assert positions.shape == (B, 4) and (positions[:, :2] < 4).all() and (positions[:, 2:] >= 4).all()
    whole = torch.cat([half for half, _ in halves], dim=1)
    assert torch.equal(whole, x.gather(1, positions[:, :, None].expand(-1, -1, D)))


# ---------------------------------------------------------------- errors


class Shrinking(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[:, ::2]


def test_layers_that_disagree_in_length_are_refused_in_the_first_pass() -> None:
    model = stack(kind=Layer)
    model.layers[1] = nn.Sequential(Layer())
    drop_tokens(model, ["layers.0", "layers.2"], keep(3))
    model.layers[0](inputs(8))
    with pytest.raises(
        ValueError, match=r"layers disagree in the length of a sequence: layers\.0 has 8 tokens, layers\.2 6"
    ):
        model.layers[2](inputs(6))
    model = stack(kind=Shrinking)
    drop_tokens(model, "layers.*", keep(3))
    refused(ValueError, r"layers\.1 makes \(3, 2, 6\) of hidden states \(3, 3, 6\)", model, inputs())


def test_names_that_match_nothing_are_refused() -> None:
    model = stack()
    with pytest.raises(
        ValueError, match=r"'blocks\.\*' matches no layer; the model has layers, layers\.\*, layers\.\*\.qkv"
    ):
        drop_tokens(model, "blocks.*", keep(3))
    refused(ValueError, r"the model has no layer 'layers\.7'", drop_tokens, model, ["layers.7"], keep(3))
    with pytest.raises(ValueError, match=r"the first and the last layer keep all tokens"):
        drop_tokens(stack(layers=2), "layers.*", keep(3))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp is within layers\.1"):
        drop_tokens(model, ["layers.1", "layers.1.mlp"], keep(3))
    drop_tokens(model, "layers.*", keep(3))
    refused(ValueError, r"layers\.1 drops tokens already", drop_tokens, model, "layers.*", keep(3))
    refused(ValueError, "sequence_dim is 1", TokenDropping, keep(3), sequence_dim=2)


def test_the_only_list_of_so_many_layers_is_found() -> None:
    assert stack_of(stack(), 4) == [f"layers.{k}" for k in range(4)]
    two = nn.ModuleDict({"a": stack(), "b": stack()})
    refused(ValueError, r"found 2 of them: a\.layers \(Layer\), b\.layers \(Layer\).*layer_name", stack_of, two, 4)
    refused(ValueError, r"total_layer_num is 5: .* found none", stack_of, stack(), 5)


# ---------------------------------------------------------------- Hugging Face's models


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_models_of_hugging_face(kind: str, attention: str) -> None:
    """One dropping layer of a padded batch against the model without the dropped tokens, sample by sample."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 40, "attn_implementation": attention}
    torch.manual_seed(2)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_head=2, n_layer=3, n_positions=16, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **small
        )
        model, pattern = transformers.GPT2Model(config), "h.*"
    elif kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=24, **small
        )
        model, pattern = transformers.LlamaModel(config), "layers.*"
    else:
        config = transformers.BertConfig(
            hidden_size=16, num_attention_heads=2, num_hidden_layers=3, intermediate_size=24,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **small,
        )  # fmt: skip
        model, pattern = transformers.BertModel(config, add_pooling_layer=False), "encoder.layer.*"
    model.train()
    plain = copy.deepcopy(model)
    dropping = drop_tokens(model, pattern, keep(4))
    (name,) = dropping.layers
    calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
    kept: list[Tensor] = []
    inner = plain.get_submodule(name)
    inner.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    first_linear = next(m for m in model.get_submodule(name).modules() if isinstance(m, nn.LayerNorm | nn.Linear))
    if kind == "llama":
        first_linear = model.get_submodule(name).self_attn.q_proj
    first_linear.register_forward_pre_hook(lambda *_: kept.append(current_positions()))  # type: ignore[arg-type]
    outputs: list[Tensor] = []
    model.get_submodule(name).register_forward_hook(
        lambda _, args, out: outputs.append(out if isinstance(out, Tensor) else out[0])
    )
    ids = torch.randint(1, 40, (B, S), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(S) < torch.tensor([8, 5, 7])[:, None]).long()
    plain(input_ids=ids, attention_mask=mask, use_cache=False)
    model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state.sum().backward()
    (positions,), (out,) = kept, outputs
    x = calls[0][0][0] if calls[0][0] else calls[0][1]["hidden_states"]
    assert isinstance(x, Tensor)
    for b in range(B):
        rows = positions[b]
        assert (rows < int(mask[b].sum())).all()
        few = _alone(plain, kind, name, x[b, rows][None], rows)
        expected = x[b].index_copy(0, rows, few[0])
        torch.testing.assert_close(out[b], expected, rtol=1e-5, atol=1e-5)


def _alone(plain: nn.Module, kind: str, name: str, x: Tensor, rows: Tensor) -> Tensor:
    """The plain layer on these tokens at these positions, with a mask of its own."""
    layer, n = plain.get_submodule(name), len(rows)
    seen = torch.ones(n, n, dtype=torch.bool).tril() if kind != "bert" else torch.ones(n, n, dtype=torch.bool)
    mask = torch.zeros(1, 1, n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
    named: dict[str, object] = {"attention_mask": mask}
    if kind == "llama":
        named["position_embeddings"] = plain.rotary_emb(x, position_ids=rows[None])
    out = layer(x, **named)
    return out if isinstance(out, Tensor) else out[0]


@pytest.mark.slow
def test_gradient_checkpoints_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers")
    found = []
    for recompute in (False, True):
        torch.manual_seed(2)
        config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=4, n_positions=16, vocab_size=40)  # with dropout
        model = transformers.GPT2LMHeadModel(config).train()
        drop_tokens(model, "transformer.h.*", keep(4))
        if recompute:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        ids = torch.randint(0, 40, (B, S))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(gradients(model))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
