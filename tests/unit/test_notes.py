"""What ranks conclude from each other's notes, and from who has come: pure functions, as tables."""

from __future__ import annotations

import time

import pytest

from onebit.comm import PeerError, SimTransport, messages, run_ranks
from onebit.comm.transports.notes import Note, Operation, conclude

OURS = Operation("all_to_all", 7, 4096)
OTHER = Operation("all_gather", 7, 4096)


def waiting(*misses: int, operation: Operation = OURS, transport: str = "world", gave_up: bool = False) -> Note:
    before = tuple(Operation("all_to_all", number, 64) for number in range(3, operation.number))
    return Note(transport, operation, (*before, operation), misses, gave_up)


def test_a_note_travels() -> None:
    for note in (waiting(1, 2, gave_up=True), Note("world", OURS, (OURS,), ended="ValueError: ←")):
        assert Note.decode(note.encode()) == note


@pytest.mark.parametrize(
    ("notes", "ranks", "said"),
    [
        pytest.param({}, (1, 2), "Missing: ranks 1, 2; look at their logs", id="nobody has a note"),
        pytest.param({1: waiting(2)}, (2,), "Missing: rank 2; look at its log", id="1 waits for 2"),
        pytest.param({1: waiting(2), 2: waiting(3)}, (3,), "Missing: rank 3;", id="1 waits for 2, 2 for 3"),
        pytest.param({1: waiting(2), 2: waiting(3), 3: waiting(1)}, (1, 2), "in the same operation", id="a circle"),
        pytest.param(
            {1: waiting(0, 2), 2: waiting(0, 1, operation=OTHER)},
            (2,),
            "launched different operations: rank 2 all_gather (operation 7, 4096 bytes)",
            id="2 launched something else",
        ),
        pytest.param(
            {1: waiting(2), 2: waiting(4, operation=Operation("all_to_all", 9, 8), transport="inter_node")},
            (4,),
            "Missing: rank 4;",
            id="2 waits elsewhere, for 4",
        ),
        pytest.param(
            {1: waiting(2), 2: waiting(0, operation=Operation("all_to_all", 9, 8), transport="inter_node")},
            (2,),
            "Waiting elsewhere: rank 2 all_to_all (operation 9, 8 bytes)",
            id="2 waits elsewhere, for me",
        ),
        pytest.param(
            {1: waiting(3, operation=Operation("all_to_all", 6, 64)), 2: waiting(1), 3: waiting(1)},
            (1,),
            "Waiting elsewhere: rank 1 all_to_all (operation 6, 64 bytes)",
            id="1 is behind",
        ),
        pytest.param(
            {1: waiting(0, gave_up=True), 2: waiting(1)},
            (1, 2),
            "This rank came too late: rank 1 had given up waiting for it",
            id="I am late",
        ),
        pytest.param(
            {1: waiting(2), 2: Note("world", OURS, (OURS,), ended="ValueError: no data")},
            (2,),
            "Ended: rank 2 by ValueError: no data",
            id="2 ended on an error",
        ),
    ],
)
def test_conclusions_lead_to_the_root(notes: dict[int, Note], ranks: tuple[int, ...], said: str) -> None:
    """Rank 0 misses 1 and 2."""
    concluded = conclude(0, waiting(1, 2), notes)
    assert concluded.ranks == ranks and said in concluded.text


def test_a_call_of_all_that_some_make_is_named_to_all() -> None:
    """Rank 0 saves, 1 trains, and 2 has ended; or rank 0 trains while 1 saves."""
    saving = OURS._replace(call="engine.save_checkpoint()")
    concluded = conclude(0, waiting(1, 2, operation=saving), {1: waiting(0, operation=OTHER)})
    assert "Every rank must call engine.save_checkpoint(): rank 0 did, rank 1 did not" in concluded.text
    assert "Missing: rank 2 (not in engine.save_checkpoint(), or ended)" in concluded.text and not concluded.is_silence
    concluded = conclude(0, waiting(1), {1: waiting(0, operation=saving)})
    assert "Every rank must call engine.save_checkpoint(): rank 1 did, rank 0 did not" in concluded.text


def test_who_waits_for_a_call_of_all_says_so_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "QUIET_S", 0.1)

    def call(transport: SimTransport, late_s: float) -> int:
        time.sleep(late_s * transport.rank)
        with messages.call_of_all(transport, "engine.eval()"):
            messages.gather_bytes(transport, b"1")
            return transport.sent_bytes

    assert run_ranks(2, lambda transport: call(transport, 0.0)) == [2, 2] and not caplog.records
    assert run_ranks(2, lambda transport: call(transport, 0.5)) == [2, 2]
    (record,) = caplog.records
    assert "rank 0 has waited 0.1 s in engine.eval()" in record.getMessage()


def test_two_calls_of_all_never_get_each_others_bytes() -> None:
    def call(transport: SimTransport) -> None:
        with messages.call_of_all(transport, ("engine.eval()", "engine.save_checkpoint()")[transport.rank]):
            raise AssertionError

    with pytest.raises(PeerError, match=r"engine\.save_checkpoint\(\)"):
        run_ranks(2, call)


def test_who_launched_my_operation_is_not_out_of_step_for_waiting_in_a_later_one() -> None:
    later = Operation("all_gather", 9, 8)
    ahead = Note("world", later, (OURS, Operation("all_gather", 8, 8), later), (3,))
    assert conclude(0, waiting(1), {1: ahead}).ranks == (3,)


def test_operations_differ_in_their_tags() -> None:
    """By name, number and bytes; below any bound."""
    operations = [
        Operation(name, n, size) for name in ("all_to_all", "all_gather") for n in range(99) for size in (0, 1, 64)
    ]
    assert len({operation.tag(1 << 30) for operation in operations}) == len(operations)
    assert all(operation.tag(32765) < 32765 for operation in operations)
