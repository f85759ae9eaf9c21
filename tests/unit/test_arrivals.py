"""Who has come to a rendezvous: what a list comes to for each process on it, however late it looks."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from onebit.comm.transports.arrivals import Arrival, End, Start, comes, contradiction, ends, from_where, read, sees


def arrivals(*ranks: int, size: int = 3, host: str = "a") -> list[Arrival]:
    return [Arrival(rank, size, host, 100 + 10 * len(host) + k) for k, rank in enumerate(ranks)]


@pytest.mark.parametrize(
    ("came", "said"),
    [
        (arrivals(), ""),
        (arrivals(0, 2, 1), ""),
        (arrivals(0, 1) * 2, ""),
        (
            arrivals(0, 1, 1),
            "process 111 on a and process 112 on a are both rank 1; start each process with its own RANK",
        ),
        (arrivals(0) + arrivals(0, host="bb"), "process 110 on a and process 120 on bb are both rank 0"),
        (
            arrivals(0) + arrivals(1, 2, size=4, host="bb"),
            "WORLD_SIZE differs: 3 for rank 0 on a (process 110), 4 for rank 1 2 on bb (process 120 121); start all",
        ),
    ],
)
def test_contradictions_name_processes_and_hosts(came: list[Arrival], said: str) -> None:
    assert contradiction(came)[: len(said)] == said and bool(contradiction(came)) == bool(said)


def test_where_ranks_come_from_is_told_host_by_host() -> None:
    came = arrivals(0, 2) + arrivals(1, host="bb")
    assert from_where(came) == "0 2 on a (process 110 111), 1 on bb (process 120)"


def lists(seed: int, count: int = 200) -> Iterator[list[tuple[str, str]]]:
    """Lists of 24 lines: who comes, who says that he sees all, who ends it, some of them in view of older lines.

    Each line with the token of the process that comes with it, "" for lines of another kind.
    """
    draw = random.Random(seed)
    for _ in range(count):
        said: list[tuple[str, str]] = []
        size, came = draw.randint(1, 3), 0
        for pid in range(24):
            me = Arrival(draw.randrange(size), size if draw.random() < 0.97 else size + 1, "a", pid)
            seen = Start(0, max(0, came - (draw.random() < 0.2)))
            kind = draw.random()
            if kind < 0.45:
                said.append((str(pid), comes(str(pid), me)))
                came += 1
            elif kind < 0.92:
                said.append(("", sees(me, seen)))
            else:
                said.append(("", ends(End(draw.choice(("", "both")), 1.0), seen)))
        yield said


def is_decided(start: Start) -> bool:
    return start.has_met or start.end is not None


@pytest.mark.slow
@pytest.mark.parametrize("keeps_old_lines", [False, True])
def test_a_later_look_decides_as_an_earlier_one(keeps_old_lines: bool) -> None:
    decided = 0
    for said in lists(0, 70):
        for token in filter(None, (token for token, _ in said)):
            first = None
            for k in range(len(said) + 1):
                start = read("".join(line for _, line in said[:k]), token, keeps_old_lines=keeps_old_lines)
                came = token in {name for name, _ in said[:k]}
                if first is not None:
                    assert start == first
                elif came and is_decided(start):
                    first, decided = start, decided + 1
    assert decided > 140


@pytest.mark.parametrize("keeps_old_lines", [False, True])
def test_all_who_came_in_one_start_decide_alike(keeps_old_lines: bool) -> None:
    """Who met, met those whom these say they met."""
    met = ended = 0
    for said in lists(1):
        text = "".join(line for _, line in said)
        tokens = [token for token, _ in said if token]
        found = {int(token): read(text, token, keeps_old_lines=keeps_old_lines) for token in tokens}
        for start in found.values():
            inside = [found[each.pid] for each in start.here.values()]
            if start.has_met:
                assert {(each.has_met, each.lines) for each in inside} == {(True, start.lines)}
                assert set(start.here) == set(range(start.world_size))
                met += 1
            if start.end is not None:
                assert all(each.end == start.end for each in inside)
                ended += 1
    assert met > 40 and ended > 40
