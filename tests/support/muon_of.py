"""1-bit Muon for whatever has parameters: the matrices among them are taken for hidden ones."""

from __future__ import annotations

from collections.abc import Iterable

import onebit
from onebit.arithmetic.muon import with_use_muon


def muon_of(params: Iterable, **options: object) -> onebit.OnebitMuon:
    """Of parameters, or of groups, which may have a list of masks. Each group becomes two."""
    given = list(params)
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    matrices = {p for group in groups for p in group["params"] if p.dim() == 2}
    return onebit.OnebitMuon(with_use_muon(given, matrices), **options)
