"""Sparse attention in Hugging Face's models, through their own registry of attention functions.

Their attention modules call the function that `model.config._attn_implementation` names, with queries, keys and values
by heads. Ours is registered under `NAME`, together with a mask function that returns the padding mask instead of a
table of all pairs. Each module holds its sparse attention in its attribute `sparse_attention`. transformers is only
used if it has been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F

from .attention import SparseSelfAttention
from .config import SparsityConfig

NAME = "onebit_sparse"

# Classes of self-attention, and the attribute of the model's configuration with the number of heads.
ATTENTION = {
    "GPT2Attention": "num_attention_heads",
    "BertSelfAttention": "num_attention_heads",
    "LlamaAttention": "num_attention_heads",
}
_UNSUPPORTED = ("softcap", "sliding_window", "s_aux", "output_attentions")


def found(model: nn.Module, config: SparsityConfig, executor: str) -> Iterator[tuple[str, SparseSelfAttention]]:
    """The self-attention modules of a transformers model by name, each with the sparse attention to replace it."""
    for name, module in model.named_modules():
        of_them = type(module).__module__.startswith("transformers.")
        if not of_them or type(module).__name__ not in ATTENTION or getattr(module, "is_cross_attention", False):
            continue
        # The mask shows the whole sequence to a decoder whose configuration has is_causal: false.
        is_causal = bool(module.is_causal) and bool(getattr(module.config, "is_causal", True))
        heads = int(getattr(module.config, ATTENTION[type(module).__name__]))
        yield name, SparseSelfAttention(config.of_model(is_causal), heads, executor=executor)


def switch(model: nn.Module) -> None:
    """Register the function, and make the transformers models within `model` call it."""
    if "transformers" not in sys.modules:
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel) and any(hasattr(part, "sparse_attention") for part in module.modules()):
            ALL_ATTENTION_FUNCTIONS.register(NAME, attention_function)
            ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, padding_mask)
            module.set_attn_implementation(NAME)


def raise_limit(module: nn.Module, positions: int) -> None:
    """Raise the sequence limit in a transformers module's configuration and rotary angles."""
    config = getattr(module, "config", None)
    if type(module).__module__.startswith("transformers.") and hasattr(config, "max_position_embeddings"):
        cast(Any, config).max_position_embeddings = positions
    if isinstance(getattr(module, "max_seq_len_cached", None), int):
        cast(Any, module).max_seq_len_cached = positions


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """The registry's function: returns [B, S, H, D] and no weights. attention_mask comes from `padding_mask`."""
    asked = [name for name in _UNSUPPORTED if options.get(name)]
    if asked:
        raise ValueError(f"sparse attention has no {asked[0]}; remove it, or keep this model's own attention")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"expected attention_mask of shape [sequences, tokens], 1 for tokens and 0 for padding, got "
            f"{tuple(attention_mask.shape)}; a table of all pairs defeats a sparse layout"
        )
    sparse = getattr(module, "sparse_attention", None)
    if isinstance(sparse, SparseSelfAttention):
        sparse.dropout = dropout
        bias = cast(Tensor | None, options.get("position_bias"))
        mixed = sparse(query, key, value, padding=attention_mask, bias=bias, scale=scaling)
    elif getattr(module, "is_causal", False):
        raise ValueError(
            f"{type(module).__name__} is self-attention that replace_attention() does not know; it knows "
            f"{', '.join(ATTENTION)}"
        )
    else:  # cross-attention sees all of the other sequence except padding
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True
        )
    return mixed.transpose(1, 2).contiguous(), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., object] | None = None,
    attention_mask: Tensor | None = None,
    **options: object,
) -> Tensor | None:
    """The caller's padding mask [B, S], true or 1 for tokens.

    Raises:
        ValueError: The model hides more than padding and the future, or its cache has unfilled places.
    """
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function not in (None, causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "this model hides more than padding and the future (packed sequences, a sliding window, tokens seen both "
            "ways), which a sparse layout cannot express; pass an attention_mask of shape [sequences, tokens] with one "
            "sequence in each row, or keep this model's own attention"
        )
    if isinstance(q_offset, Tensor) or (q_offset and q_offset + q_length != kv_length):
        raise ValueError(
            "sparse attention needs a cache that grows with the sequence (DynamicCache); this one has unfilled places"
        )
    return None if attention_mask is None else attention_mask[:, -kv_length:]
