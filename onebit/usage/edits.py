"""What users change in param_groups and state themselves, as torch lets them: found by identities, and named.

Buckets hold parameters and flat state by themselves. A parameter that replaces another in a group, or a moment in
`optimizer.state`, would never be looked at. Nothing here waits for a device, or sends anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_

import torch
from torch import Tensor

from .contract import Group, State

_GROUPS = (
    "parameters are added by add_param_group, on all ranks before the same step; if they are replaced or taken away, "
    "construct another optimizer, on all ranks"
)
_STATE = (
    "the optimizer keeps it flat, in buckets: write into its tensors in place, on all ranks, or give load_state_dict a "
    "whole state; to begin anew construct another optimizer"
)


def edit_of_groups(groups: Sequence[Group], built: Sequence[Sequence[Tensor]]) -> str:
    """How the parameters of these groups differ from those they were built of, and the remedy; "" where they do not."""
    if len(groups) != len(built):
        return f"param_groups has {len(groups)} groups, the optimizer was given {len(built)}: {_GROUPS}"
    for g, (group, params) in enumerate(zip(groups, built, strict=True)):
        now = group["params"]
        if len(now) != len(params):
            return f"group {g} has {len(now)} parameters, the optimizer was given {len(params)}: {_GROUPS}"
        if not all(map(is_, now, params)):
            k = next(k for k, p in enumerate(params) if now[k] is not p)
            return f"parameter {k} of group {g} is another than the optimizer was given: {_GROUPS}"
    return ""


def edit_of_options(groups: Sequence[Group], before: Sequence[Group], check: Callable[[str, Group], None]) -> str:
    """Why groups that stand in place of those before cannot be taken up; "" where they can. check: of one's options."""
    for g, (group, old) in enumerate(zip(groups, before, strict=True)):
        if group is old:
            continue
        if missing := [key for key in old if key not in group]:
            return f"group {g} was replaced by one without {missing[0]!r}: give it all options that it had"
        try:
            check(f"group {g}", group)
        except (TypeError, ValueError) as error:
            return str(error)
    return ""


def edit_of_state(state: Mapping[Tensor, State], shown: Iterable[Iterable[tuple[Tensor, State]]]) -> tuple[bool, str]:
    """Whether state has other tensors than were shown in it; and if these hold other values, which, and the remedy.

    shown: by bucket. Copies of the same values are no edit: frameworks make them when they move a state to a device.
    """
    has_others = False
    for p, entry in chain.from_iterable(shown):
        now = state.get(p, {})
        if all(map(is_, map(now.get, entry), entry.values())):
            continue
        has_others = True
        for key, was in entry.items():
            x = now.get(key)
            if not (isinstance(x, Tensor) and x.shape == was.shape and torch.equal(x.to(was.device, was.dtype), was)):
                what = "is not there any more" if x is None else "was replaced"
                return True, f"{key} of a parameter of shape {tuple(p.shape)} in optimizer.state {what}: {_STATE}"
    return has_others, ""
