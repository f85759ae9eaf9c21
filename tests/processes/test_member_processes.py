"""Members as processes over Gloo: killed, stopped and come back, with the rendezvous there and away."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ranks
import torch

from onebit import membership
from onebit.comm import PeerError
from onebit.membership import network
from onebit.membership.published import Onlooker

SCRIPT = Path(__file__).with_name("member_ranks.py")


@dataclass
class Run:
    """A rendezvous and its members, which write into files of this folder."""

    folder: Path
    port: int = 0
    members: dict[str, Any] = field(default_factory=dict)
    last_steps: int = 50
    """Of a second, in which all read when to end."""

    def serve(self) -> None:
        """The rendezvous; at the port of the one before it."""
        said = self.folder / "rendezvous.txt"
        self.rendezvous = ranks.start("rendezvous", "--port", str(self.port), output=said)
        while "\n" not in said.read_text():
            assert self.rendezvous.poll() is None, said.read_text()
            time.sleep(0.02)
        self.port = int(said.read_text().rpartition(":")[2])

    def start(self, name: str, founders: int, kind: str = "adam") -> None:
        words = (str(SCRIPT), f"127.0.0.1:{self.port}", name, str(founders), str(self.folder / "end"), "0.02", kind)
        self.members[name] = ranks.start(*words, output=self.output(name))

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def await_line(self, name: str, pattern: str, timeout_s: float = 40.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, text := self.output(name).read_text()):
            assert time.monotonic() < deadline and self.members[name].poll() is None, f"{pattern}: {text[-3000:]}"
            time.sleep(0.02)

    def ends(self, *names: str) -> list[list[str]]:
        """Have these end `last_steps` from now. What they said at their end: digest, lost, joined, seconds."""
        lines, found = self.output(names[0]).read_text().splitlines(), []
        last = next(int(line.split()[1]) for line in reversed(lines) if line.startswith("step"))
        (self.folder / "next").write_text(str(last + self.last_steps))
        (self.folder / "next").rename(self.folder / "end")
        for name in names:
            try:
                code = self.members[name].wait(60)
            except subprocess.TimeoutExpired:
                code = None
            assert code == 0, {name: self.output(name).read_text()[-1500:] for name in self.members}
            found.append(re.search(r"(?m)^done (.*)$", self.output(name).read_text())[1].split())
        return found

    def end(self) -> None:
        for process in (*self.members.values(), self.rendezvous):
            process.kill()
            process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    run.serve()
    yield run
    run.end()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["adam", "delayed", pytest.param("local", marks=pytest.mark.thorough)])
def test_a_killed_member_is_missed_for_seconds_and_a_newcomer_let_in(run: Run, kind: str) -> None:
    for name in "abc":
        run.start(name, 3, kind)
    run.await_line("a", "step 20 of 3")
    run.members["b"].kill()
    run.await_line("a", "of 2 members")
    run.start("new", 3, kind)
    run.await_line("new", "of 3 members")
    copied = re.compile(r": (\S+) of (\S+) MB of the state were copied before this change")
    found = [copied.search(run.output(name).read_text()) for name in "ac"]
    assert kind == "local" or any(float(its[1]) > 0.9 * float(its[2]) for its in found if its)
    a, c, new = run.ends("a", "c", "new")
    assert a[0] == c[0] == new[0] and a[1:3] == c[1:3] == ["1", "1"] and new[1:3] == ["0", "0"]
    assert float(a[3]) < 10  # 1.2 on a quiet machine: a second without a sign of life


@pytest.mark.timeout(120)
def test_nothing_stops_while_the_rendezvous_is_away(run: Run) -> None:
    """Killed amid the run, and empty when it comes back: members tell it who they are, and go on to change."""
    for name in "ab":
        run.start(name, founders=2)
    run.await_line("a", "step 15 of 2")
    run.rendezvous.kill()
    run.rendezvous.wait()
    run.await_line("a", "step 40 of 2")
    run.serve()
    time.sleep(1.0)
    run.start("new", founders=2)
    run.await_line("new", "of 3 members")
    time.sleep(0.5)  # until the first member's next sign of life
    epochs = Onlooker("test").look(network.reach("127.0.0.1", run.port)).epochs
    assert [epoch.has_begun for epoch in epochs] == [True, True] and epochs[1].joined == ("new",)
    a, b, new = run.ends("a", "b", "new")
    assert a[0] == b[0] == new[0]


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_a_stopped_member_is_left_behind_and_comes_back(run: Run) -> None:
    for name in "abc":
        run.start(name, founders=3)
    run.await_line("a", "step 20 of 3")
    run.members["b"].send_signal(signal.SIGSTOP)
    run.await_line("a", "of 2 members")
    run.members["b"].send_signal(signal.SIGCONT)
    run.await_line("a", "(?s)of 2 members.*of 3 members")
    a, b, c = run.ends("a", "b", "c")
    assert a[0] == b[0] == c[0] and a[1] == "1"


def test_a_member_meets_others_after_an_epoch_that_did_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "CONNECT_S", 0.5)
    store = torch.distributed.HashStore()
    rendezvous = Mock()
    with pytest.raises(PeerError, match="epoch 1 does not connect"):
        network._group(rendezvous, lambda: store, 3.0, 0, membership.Roster(1, ("a", "b")), 0)
    transport = network._group(rendezvous, lambda: store, 3.0, 0, membership.Roster(2, ("a",)), 0)
    assert transport.world_size == 1 and not torch.distributed.is_initialized()
    transport.close()


@pytest.mark.timeout(60)
def test_without_a_rendezvous_it_says_what_to_start(tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert ranks.start(str(SCRIPT), "127.0.0.1:1", "a", "1", "none", output=said).wait(50) == 1
    assert "start `onebit rendezvous --port 1`" in said.read_text()


@pytest.mark.timeout(60)
def test_a_program_may_end_while_its_members_give_signs_of_life(tmp_path: Path) -> None:
    """A thread that torch's code holds as Python ends aborts it, and `onebit run` would start it again."""
    program, said = tmp_path / "program.py", tmp_path / "said"
    program.write_text("""
import torch.distributed as dist
from onebit.membership.rendezvous import Patience, Rendezvous
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
reach = lambda: dist.TCPStore("127.0.0.1", store.port, is_master=False)
members = [Rendezvous(reach, name, patience=Patience(beat_s=1e-5, look_s=1e-5)) for name in "abcd"]
""")
    assert (ranks.start(str(program), output=said).wait(50), said.read_text()) == (0, "")
