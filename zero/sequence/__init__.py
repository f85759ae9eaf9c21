"""Context parallelism: a sequence is split over ranks, and attention reaches over all of them.

    onebit.zero.sequence_parallel(model, transport)    # a model of transformers, in place
    model(input_ids=ids, labels=ids).loss.backward()   # on all ranks with the whole batch; each computes its piece

`ranks.py` has the ranks on one level or two, `pieces.py` cuts a sequence, `sight.py` says what its tokens see,
`ring.py` is the attention, `local.py` one tile of it, `models.py` splits the sequences of models, with `huggingface.py`
for those of transformers.
See docs/long-sequences.md.
"""

from .models import SplitsSequences, sequence_parallel
from .pieces import Pieces
from .ranks import SequenceRanks
from .ring import ring_attention

__all__ = ["Pieces", "SequenceRanks", "SplitsSequences", "ring_attention", "sequence_parallel"]
