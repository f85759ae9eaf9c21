"""Finds objects that users have replaced in param_groups and state, as torch lets them, by identity, and names them.

Buckets refer to parameters and flat state directly. A parameter that replaces another in a group, or a moment in
`optimizer.state`, would never be read. Nothing here waits for a device, or sends anything, except that `edit_of_state`
compares the values of replaced tensors.
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
    """A message on how the parameters of groups differ from those at construction, with the remedy; "" if they do not.

    Args:
        groups: The param groups now.
        built: For each group, the parameters at construction.
    """
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
    """A message on why new group dicts cannot replace the old ones; "" if they can.

    Args:
        groups: The param groups now.
        before: The param groups before.
        check: Raises TypeError or ValueError if the options of a group, whose name comes first, are bad.
    """
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
    """Find tensors in optimizer.state that have been replaced.

    Copies of the same values are no edit: frameworks make them when they move a state to a device.

    Args:
        state: optimizer.state.
        shown: For each bucket, (parameter, state) pairs as they were shown there.

    Returns:
        Whether any tensor was replaced; and if one has other values, a message with the remedy, else "".
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
