"""`onebit run --join` and `onebit status`: scripts as members, and what an onlooker sees and believes."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import ranks
from errors import refused
from test_member_processes import Run, run
from torch.distributed import HashStore

from onebit import membership
from onebit.cli import main
from onebit.cli.status import page, tables
from onebit.comm.open_files import may_open
from onebit.membership import network
from onebit.membership.published import Onlooker, sign

HERE = Path(__file__).parent


__all__ = ["run"]  # the fixture


def start_as_member(said: Path, port: int, *command: str, options: tuple[str, ...] = ()) -> Any:
    """Its output goes to `said`, its errors to a file beside it."""
    words = ("run", "--join", f"127.0.0.1:{port}", *options, "--", *command)
    return ranks.start(*words, output=said, errors=errors_beside(said))


def errors_beside(said: Path) -> Path:
    return said.with_suffix(".errors")


def status(run: Run, token: str = "test", *options: str) -> tuple[int, dict]:
    """What `onebit status` returns and writes as JSON."""
    secret, found = run.folder / "token", run.folder / "status.json"
    secret.write_text(f"{token}\n")
    found.unlink(missing_ok=True)
    code = main(["status", f"127.0.0.1:{run.port}", "--token-file", str(secret), "--json", str(found), *options])
    return code, json.loads(found.read_text())


class Page(HTMLParser):
    """A page's tags, what they refer to, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.text, self.open = "", list[str]()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.open += [] if tag == "meta" else [tag]
        assert not {name for name, _ in attributes} & {"src", "href", "onerror", "onload", "data", "srcset"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(text: str) -> Page:
    """A whole page by itself: nothing of it comes from elsewhere, and no script runs."""
    found = Page(text)
    assert not found.open and {"title", "style"} <= set(found.tags)
    assert not {"script", "img", "link", "iframe", "object", "image", "use"} & set(found.tags)
    assert not re.search(r"https?:|url\(|@import", text)
    return found


# ---------------------------------------------------------------- onebit run


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_a_script_that_crashed_is_let_in_again(run: Run) -> None:
    """Under another name, with the run's state; and no more once SIGTERM has been passed on."""
    script = run.folder / "member.py"
    script.write_text(
        f"import os, sys\nfrom pathlib import Path\nsys.path.insert(0, {str(HERE)!r})\n"
        "import member_ranks\n"
        "crashes = not Path(sys.argv[1]).exists()\n"
        "Path(sys.argv[1]).touch()\n"
        "def say(line, **options):\n"
        "    print(line, **options)\n"
        "    if crashes and line.startswith('step 40 '):\n"
        "        os._exit(7)\n"
        "member_ranks.print = say\n"
        "member_ranks.main('', '', '', sys.argv[2])\n"
    )
    token = run.folder / "secret"
    token.write_text("test\n")
    run.start("a", founders=2)
    options = ("--founders", "2", "--token-file", str(token))
    files, said = map(str, (run.folder / "crashed", run.folder / "end")), run.folder / "said"
    command = start_as_member(said, run.port, "python", str(script), *files, options=options)
    for change in ("of 2 members", "of 2 members.*of 1 members", "of 2 members.*of 1 members.*of 2 members"):
        run.await_line("a", f"(?s){change}")  # two of them take a fresh start of Python
    code, found = status(run)
    names = [member["name"] for member in found["members"]]
    assert code == 0 and names[0] == "a" and all(member["is_alive"] for member in found["members"])
    lost, joined = ([epoch[what] for epoch in found["epochs"]] for what in ("lost", "joined"))
    assert len(lost) == 3 and set(joined[0]) == {"a", *lost[1]}
    assert joined[2] == names[1:] != lost[1]
    command.send_signal(signal.SIGTERM)
    assert command.wait(30) == 128 + signal.SIGTERM and "step" in said.read_text()
    errors = errors_beside(said).read_text()
    assert errors.count("restart 1 of 10 in 1 s") == 1 and "restart 2" not in errors
    run.await_line("a", "(?s)of 2 members.*of 1 members.*of 2 members.*of 1 members")


@pytest.mark.timeout(60)
def test_a_script_is_started_again_as_often_as_asked_and_its_status_kept(tmp_path: Path) -> None:
    """Not after a success, after SIGTERM, or once the run has ended."""
    store, starts = network.serve(0), [tmp_path / name for name in ("fails", "ends", "stopped", "late")]
    said = [tmp_path / f"{file.name} says" for file in starts]
    processes = [
        start_as_member(words, store.port, "sh", "-c", f"echo >> {file}; {script}", options=("--restarts", "1"))
        for words, file, script in zip(
            said, starts, ("exit 3", "exit 0", "trap 'exit 5' TERM; while :; do sleep .1; done"), strict=False
        )
    ]
    while not starts[2].exists():
        time.sleep(0.02)
    time.sleep(0.2)  # until the shell has set its trap
    processes[2].send_signal(signal.SIGTERM)
    assert [process.wait(40) for process in processes] == [3, 0, 5]
    assert [file.read_text().count("\n") for file in starts[:3]] == [2, 1, 1]
    errors = [errors_beside(words).read_text() for words in said[:3]]
    assert "it is not started again (--restarts 1)" in errors[0] and errors[1] == errors[2] == ""
    store.set("ended", sign("", "ended", {"why": "its members have closed", "at": time.time()}))
    assert start_as_member(said[3], store.port, "sh", "-c", f"echo >> {starts[3]}; exit 4").wait(40) == 4
    assert starts[3].read_text() == "\n" and "the run has ended: its members" in errors_beside(said[3]).read_text()


@pytest.mark.parametrize("command", [["run", "--join", "127.0.0.1:1", "--", "true"], ["status", "127.0.0.1:1"]])
def test_without_a_rendezvous_one_line_says_what_to_start(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "LISTENER_S", 0.3)
    assert main(command) == 1
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "start `onebit rendezvous --port 1`" in said


def test_the_address_is_an_argument_or_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(network.ADDRESS, raising=False)
    refused(ValueError, r'connect\("host:port"\).*onebit run --join', membership.connect)
    monkeypatch.setenv(network.ADDRESS, "of-the-environment")
    refused(ValueError, "'of-the-environment'", membership.connect)
    refused(ValueError, "'argument:0'", membership.connect, "argument:0")
    monkeypatch.setenv(network.FOUNDERS, "two")
    refused(ValueError, "ONEBIT_FOUNDERS must be a number", membership.connect, "127.0.0.1:1")


@pytest.mark.parametrize("form", ["{}:{}", "[{}]:{}"])
def test_an_address_of_ipv6_is_reached_in_both_spellings(form: str) -> None:
    store = network.serve(0)
    network.reach(*network.parse_address(form.format("::1", store.port))).set("here", "yes")
    assert store.get("here") == b"yes"
    refused(ValueError, "address must be", network.parse_address, "[]:29500")


@pytest.fixture
def few_files() -> Iterator[int]:
    """How many this process may open: 20 more than it has, until it raises the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_rendezvous_takes_more_connections_than_a_process_may_open_at_first(few_files: int) -> None:
    store = network.serve(0)
    with ExitStack() as connections:
        for _ in range(few_files):
            connections.enter_context(socket.create_connection(("127.0.0.1", store.port)))
        network.reach("127.0.0.1", store.port).set("here", "yes")
    assert store.get("here") == b"yes"


@pytest.mark.parametrize("more", [1, 10**9])
def test_only_what_the_system_forbids_is_missing(few_files: int, more: int) -> None:
    most = min(few_files + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert may_open(few_files + more) == most == may_open(0)


# ---------------------------------------------------------------- onebit status


@pytest.mark.timeout(120)
def test_status_of_a_run_that_loses_a_member(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(run)[0] == 0 and "no member has come" in capsys.readouterr().out
    for name in "ab":
        run.start(name, founders=2)
    run.await_line("a", "step 30 of 2")
    code, found = status(run)
    assert code == 0 and sorted(member["name"] for member in found["members"]) == ["a", "b"]
    for member in found["members"]:
        assert member["is_alive"] and member["host"] == socket.gethostname()
        assert member["pid"] == run.members[member["name"]].pid and member["steps"] > 0
        assert 0.02 < member["step_s"] < 2 and 0 <= member["waits_s"] < member["step_s"]
    assert [epoch["step"] for epoch in found["epochs"]] == [1] and found["founders"] == 2
    run.members["b"].kill()
    run.await_line("a", "of 1 members")
    time.sleep(0.5)  # until its next sign of life
    code, found = status(run, "test", "--html", str(run.folder / "page.html"))
    last = found["epochs"][-1]
    assert last["names"] == ["a"] and last["lost"] == ["b"] and last["joined"] == []
    assert found["strangers"] == [] and last["has_begun"] and 0 < last["seconds"] < 20 and last["step"] > 30
    shown = check_page((run.folder / "page.html").read_text())
    text = shown.text
    assert shown.tags.count("svg") == 3  # the member's speed, and a line for each of both names
    assert "epoch 2 of 1 member" in text and "lost: b" in text
    code, found = status(run, "guessed")
    said = capsys.readouterr()
    assert code == 1 and not found["members"] and not found["epochs"] and found["strangers"]
    assert "give the run's by --token-file" in said.err and "not signed with this token" in said.out
    run.ends("a")
    code, found = status(run)
    last_step = int(re.findall("step (\\d+) of", run.output("a").read_text())[-1])
    assert found["ended"] == "its members have closed" and found["members"][0]["steps"] == last_step
    assert "the run has ended" in capsys.readouterr().out


def test_a_rendezvous_that_hangs_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network, "LISTENER_S", 0.3)
    monkeypatch.setattr(network, "STORE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert main(["status", f"127.0.0.1:{silent.getsockname()[1]}"]) == 1
    assert time.monotonic() - began < 10 and "no rendezvous answers" in capsys.readouterr().err


JUNK = [
    b"\xff\x00\x1b[31m<script>alert(1)</script>",
    b'forged {"epoch": "7", "names": ["x"], "name": "<img src=x onerror=alert(1)>", "at": 1}',
    b"[" * 100_000,
    b"",
]


@pytest.mark.parametrize("junk", JUNK)
def test_what_a_stranger_writes_is_shown_as_unsigned_and_not_believed(junk: bytes) -> None:
    """Every entry in turn; all of them then, of a run that has none of its own."""
    values = {
        "newest": {"epoch": "2"},
        "roster/1": {"epoch": 1, "names": ["a", "b"]},
        "roster/2": {"epoch": 2, "names": ["a"]},
        "change/2": {"names": ["a"], "at": time.time(), "step": 4, "seconds": 1.5, "why": "b was lost"},
        "about/a": {"beats": 3, "at": time.time(), "tell_s": 0, "founders": 2, "host": "h", "pid": 7, "steps": 5},
        "here/3/1": {"name": "n", "missed": []},
        "copy/2": {"name": "c", "giver": "a"},
        "about/c": {"beats": 1, "at": time.time(), "tell_s": 0, "founders": 2, "host": "h", "pid": 8, "copied": 0.4},
    }
    for forged in (None, *values, "here/3", "ended", "change/1", "roster/3", "about/n", "all"):
        store = HashStore()
        store.add("here/3", 1)
        store.add("copy", 2)  # the first one has not written its name yet, and may be gone
        for key, value in values.items():
            store.set(key, junk if forged == "all" else sign("secret", key, value))
        if forged not in (None, "all"):
            store.set(forged, junk)
        seen = Onlooker("secret").look(store)
        assert [its.key for its in seen.strangers if its.key in (forged, "newest", "roster/3", "change/1")] == (
            ["newest"] if forged == "all" else [forged] if forged else []
        )
        current = [member.name for member in seen.members]
        assert current == ([] if forged == "all" else ["a"])
        come = [] if forged in ("all", "here/3", "here/3/1") else ["n"]
        assert [member.name for member in seen.waiting] == (
            come + ([] if forged in ("all", "copy/2", "about/c") else ["c"])
        )
        assert seen.ended is None and all(epoch.number <= 2 for epoch in seen.epochs)
        shown = "\n".join(table.text() for table in tables(seen))
        assert shown.replace("\n", "").isprintable()
        check_page(page("h:1", seen))


def test_values_of_another_form_are_not_believed_even_if_they_are_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a token every process can sign."""
    monkeypatch.setattr("onebit.membership.published.MOST_LOOK_S", 0.1)
    store = HashStore()
    store.set("newest", sign("", "newest", {"epoch": "1"}))
    store.set("roster/1", sign("", "roster/1", {"names": ["a", "<b>", 3, "\ud800"]}))
    about = {"beats": 3, "at": 1e300, "tell_s": 0.1, "founders": 2, "host": "h", "pid": 7}
    store.set("about/a", sign("", "about/a", about))
    store.set("about/<b>", sign("", "about/<b>", about | {"at": 1.0, "host": "[red]<i>", "tell_s": 1e9}))
    store.set("ended", sign("", "ended", {"why": ["no", "text"], "at": float("nan")}))
    seen = Onlooker().look(store)
    assert [its.key for its in seen.strangers] == ["ended", "about/a"] and len(seen.members) == 4
    assert "<i>" in check_page(page("h:1", seen)).text
