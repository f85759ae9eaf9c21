"""Half the data for the same loss: curriculum sampling, shorter sequences, random layerwise token dropping.

Works from the JSON of `onebit.zero` and as plain classes without an engine. Start at docs/data-efficiency.md, then
`sampler.py` and `token_dropping.py`.
"""

from .loader import CurriculumLoader
from .measuring import count_vocabulary, measure, read_metric
from .metrics import EffectiveLength, Length, UserMetric, VocabularyRarity
from .pacing import Discrete, Root
from .sampler import CurriculumMetric, CurriculumSampler, Drawn, TokenSampler
from .sequence import reshape, truncate
from .token_dropping import TokenDropping, current_positions, disarm, drop_tokens
from .token_rates import TokenLR

__all__ = [
    "CurriculumLoader", "CurriculumMetric", "CurriculumSampler", "Discrete", "Drawn", "EffectiveLength", "Length",
    "Root", "TokenDropping", "TokenLR", "TokenSampler", "UserMetric", "VocabularyRarity", "count_vocabulary",
    "current_positions", "disarm", "drop_tokens", "measure", "read_metric", "reshape", "truncate",
]  # fmt: skip
