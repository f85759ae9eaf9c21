"""1-bit Muon for whatever has parameters: the matrices among them are taken for hidden ones."""

from __future__ import annotations

from collections.abc import Iterable

import onebit


def muon_of(params: Iterable, **options: object) -> onebit.OnebitMuon:
    """Of parameters, or of groups, which may have a list of masks. Each group becomes two."""
    given = list(params)
    groups = given if isinstance(given[0], dict) else [{"params": given}]
    split = []
    for group in groups:
        members, masks = list(group["params"]), group.get("exp_avg_mask")
        for is_matrix in (True, False):
            chosen = [k for k, p in enumerate(members) if (p.dim() == 2) == is_matrix]
            mask = {"exp_avg_mask": [masks[k] for k in chosen]} if isinstance(masks, list) else {}
            if chosen:
                split.append(group | {"params": [members[k] for k in chosen], "use_muon": is_matrix} | mask)
    return onebit.OnebitMuon(split, **options)
