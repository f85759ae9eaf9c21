"""Checkpoints under names that the user chooses: DIR/TAG/step_00000123; DIR/latest may name TAG.

A tag is a separate folder of checkpoints, with one checkpoint; `files.py` writes it like any other. Checkpoints without
a tag are in DIR itself. All ranks call all functions except `pointing`.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from ...checkpoint.files import CheckpointError, CheckpointFiles, is_name, open_regular
from ...comm import Transport
from ...comm.messages import gather_texts

log = logging.getLogger(__name__)


def checked(tag: str | int | None, transport: Transport) -> str | None:
    """The tag as a folder's name. Raises CheckpointError, on all ranks, if tags differ or are not plain names."""
    given = [json.loads(text) for text in gather_texts(transport, json.dumps(None if tag is None else str(tag)))]
    if len(set(given)) > 1:
        raise CheckpointError(f"rank {transport.rank}: the ranks give a checkpoint different tags: {given}; give one")
    name: str | None = given[0]
    if name is None:
        return None
    if name in ("", ".", "..", "latest") or name.startswith(".") or Path(name).name != name or is_name(name):
        raise CheckpointError(
            f"the tag {name!r} is no name for a checkpoint: expected one folder's name, and neither `latest`, nor a "
            "hidden one, nor one like step_00000123, the name of checkpoints without a tag"
        )
    return name


def pointing(folder: Path, tag: str) -> Callable[[], None]:
    """A function that makes folder/latest name the tag; for one rank to call."""
    return lambda: CheckpointFiles(folder, secrets.token_hex(8)).point_at(tag)


def find(folder: Path, tag: str | int | None, transport: Transport) -> tuple[Path | None, str | None]:
    """The place of the checkpoint to load: (its folder, its name there or None for the latest); (None, None): none.

    Raises CheckpointError, on all ranks, if the tag is given, or named by folder/latest, and does not exist.
    """
    if tag is not None and is_name(str(tag)):
        return folder, str(tag)
    name = checked(tag, transport)
    if name is None:
        here = json.dumps([_latest(folder), os.path.lexists(folder / "latest")])
        every = [json.loads(text) for text in gather_texts(transport, here)]
        rows = [latest for latest, _ in every]
        name = rows[0]
        if name is None or is_name(name) or any(row != name for row in rows):
            if name is None and (tags := _tags(folder)) and not CheckpointFiles(folder, "").names():
                if every[0][1]:  # `latest` exists, and which tag it named is lost
                    raise CheckpointError(
                        f"{folder / 'latest'} names no checkpoint that exists; {folder} holds {', '.join(tags)}: "
                        "name one of them by tag="
                    )
                if transport.rank == 0:
                    log.warning(
                        "%s has no `latest`, so nothing is loaded; it holds %s: name one by tag=",
                        folder,
                        ", ".join(tags),
                    )
                return None, None
            return folder, None  # `latest` names a step, or is of no use
    if any(text == "absent" for text in gather_texts(transport, "there" if _is_tag(folder / name) else "absent")):
        known = _tags(folder) + CheckpointFiles(folder, "").names()
        raise CheckpointError(
            f"{folder} holds no checkpoint {name!r}; it holds {', '.join(known) or 'none'}: name one of them by tag="
        )
    return folder / name, None


def _latest(folder: Path) -> str | None:
    """The name in folder/latest if it can be a tag; `files.py` reports damage."""
    try:
        with open_regular(folder / "latest") as file:
            name = file.readall().decode().strip()
    except (OSError, ValueError):
        return None
    return name if is_name(name) or (Path(name).name == name and _is_tag(folder / name)) else None


def _is_tag(path: Path) -> bool:
    return path.is_dir() and bool(CheckpointFiles(path, "").names())


def _tags(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if not is_name(path.name) and _is_tag(path))
