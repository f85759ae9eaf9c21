"""`onebit launch`: a script on the hosts of a hostfile, as DeepSpeed's command starts it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from .. import UserError
from . import hosts
from .running import Commands

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15"
"""Asks no questions, and notices within a minute that a host is gone."""

UNREACHABLE = 255
"""ssh's status if it has no connection."""

LOCAL = "localhost"

_ABOUT = """\
Starts a script on every host of a DeepSpeed hostfile: ssh starts one torchrun on each. Without --hostfile, or if
localhost is its only host, torchrun starts on this machine, without ssh.

  onebit launch --hostfile hosts train.py --deepspeed_config config.json
  onebit launch --hostfile hosts --include worker-0@worker-1:0,2 train.py
  onebit launch --num_gpus 2 train.py
"""

_EPILOG = f"""\
A hostfile has a line `HOST slots=N` for each host. Hosts need the same paths, this Python and this folder included, and
an ssh that asks for no password. They get the variables {", ".join(f"{name}*" for name in hosts.EXPORTED)} of this
environment, and the lines KEY=VALUE of .deepspeed_env (or the name in DS_ENV_FILE) in the home and the working folder.
Users of the hosts can see them in the list of processes. Lines of output carry the host's name. If a rank fails, or
after Ctrl+C or SIGTERM, all hosts are ended: ranks get SIGTERM and, after 30 s, SIGKILL. Exit status: that of the first
host that failed, which is that of its first rank that failed; {UNREACHABLE} if ssh cannot reach a host.
"""


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="onebit launch", usage="onebit launch [--hostfile FILE] [options] SCRIPT [ARGUMENT ...]",
        description=_ABOUT, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    add = parser.add_argument
    add("-H", "--hostfile", type=Path, metavar="FILE", help="read the hosts from FILE (default: this machine alone)")
    add("-i", "--include", default="", metavar="HOSTS", help="take only these hosts and slots: worker-0@worker-1:0,2")
    add("-e", "--exclude", default="", metavar="HOSTS", help="take all but these, in the same form")
    add("--num_nodes", type=int, metavar="N", help="take the first N hosts (default: all)")
    add("--num_gpus", type=int, metavar="N", help="start N ranks on each host (default: one for each slot; without a "
        "hostfile, one for each GPU)")  # fmt: skip
    add("--master_addr", metavar="ADDRESS", help="address of the first host, for the others (default: its name)")
    add("--master_port", type=int, default=29500, metavar="PORT", help="free port of the first host (default: 29500)")
    add("--ssh_port", type=int, metavar="PORT", help="port of the hosts' ssh (default: ssh's own)")
    add("--ssh", default=SSH, metavar="COMMAND", help=f"reach hosts with COMMAND, then HOST and what to run ({SSH})")
    add("--module", action="store_true", help="run SCRIPT as a module, as `python -m` does")
    add("--no_python", action="store_true", help="run SCRIPT itself, without Python")
    add("--local_rank", action="store_true", help="pass --local_rank=N to SCRIPT, as the command deepspeed does")
    add("--no_local_rank", action="store_false", dest="local_rank", help="pass none, as by default")
    add("script", metavar="SCRIPT", help="file to run as each rank")
    add("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="arguments of the script")
    args = parser.parse_args(argv)
    for option in ("master_port", "ssh_port"):
        if not 1 <= (getattr(args, option) or 1) <= 65535:
            parser.error(f"--{option}: expected 1 to 65535, got {getattr(args, option)}")
    if args.num_gpus is not None and args.num_gpus < 1:
        parser.error(f"--num_gpus: expected at least 1, got {args.num_gpus}")
    if args.module and args.no_python:
        parser.error("--module and --no_python exclude each other: a module needs Python")
    return args


def main(argv: Sequence[str]) -> int:
    args = _parse(argv)
    pool = _pool(args)
    chosen = hosts.choose_slots(
        pool, include=args.include, exclude=args.exclude, num_nodes=args.num_nodes, num_gpus=args.num_gpus
    )
    environment = hosts.exported(os.environ, Path.cwd()) | _environment_files()
    if list(pool) == [LOCAL]:
        from . import agent  # imports torch

        os.environ.update(environment | _visible(chosen[LOCAL], os.environ))
        return agent.run(_torchrun(args, chosen, LOCAL, "127.0.0.1"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit_on)
    return _run_over_ssh(args, chosen, environment)


def _pool(args: argparse.Namespace) -> dict[str, int]:
    if args.hostfile is not None:
        return hosts.parse_hostfile(_read(args.hostfile, "--hostfile"), str(args.hostfile))
    import torch  # takes a second, which hosts with a hostfile need not wait for

    count = torch.cuda.device_count() or args.num_gpus
    if not count:
        raise UserError("no GPU here, and no hostfile; give --hostfile FILE, or --num_gpus N for N ranks on the CPU")
    return {LOCAL: count}


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} {path} cannot be read: {error}") from error


def _environment_files() -> dict[str, str]:
    """Those of the home and of the working folder, which counts more."""
    found = dict[str, str]()
    for folder in (Path.home(), Path.cwd()):
        path = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if path.is_file():
            found |= hosts.parse_environment(_read(path, "environment file"), str(path))
    return found


def _visible(slots: list[int], environment: Mapping[str, str]) -> dict[str, str]:
    """Slots other than 0, 1, ..., as the GPUs that the ranks see."""
    name = "CUDA_VISIBLE_DEVICES"
    if slots == list(range(len(slots))):
        return {}
    if name in environment:
        raise UserError(f"{name}={environment[name]} and --include or --exclude both choose GPUs; unset {name}")
    return {name: ",".join(map(str, slots))}


def _torchrun(args: argparse.Namespace, chosen: Mapping[str, list[int]], host: str, master: str) -> list[str]:
    """torchrun's arguments on one host."""
    return [
        "--nnodes", str(len(chosen)), "--node-rank", str(list(chosen).index(host)),
        "--nproc-per-node", str(len(chosen[host])), "--master-addr", master, "--master-port", str(args.master_port),
        *["--module"] * args.module, *["--no-python"] * args.no_python, args.script,
        *["--local_rank=${local_rank}"] * args.local_rank, *args.arguments,
    ]  # fmt: skip


def _run_over_ssh(args: argparse.Namespace, chosen: Mapping[str, list[int]], environment: Mapping[str, str]) -> int:
    first, *others = chosen
    if args.master_addr is None and others and first == LOCAL:
        raise UserError(f"{first} is the first host, and {others[0]} cannot reach it by this name; give --master_addr")
    master = args.master_addr or first.rpartition("@")[2]
    ssh = [*shlex.split(args.ssh), *(["-p", str(args.ssh_port)] if args.ssh_port else [])]
    if not ssh or shutil.which(ssh[0]) is None:
        raise UserError(f"--ssh {args.ssh}: no such command; install OpenSSH's client, or name another")
    commands = Commands()
    try:
        for host, slots in chosen.items():
            variables = [f"{name}={value}" for name, value in {**environment, **_visible(slots, {})}.items()]
            agent = [sys.executable, "-m", "onebit.cli.launch.agent", *_torchrun(args, chosen, host, master)]
            command = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *variables, *agent])}"
            commands.start(host, [*ssh, host, command])
        failed = commands.wait()
        if failed is None:
            return 0
        host, status = failed
        told = f"onebit launch: {host} ended with status {status}; ending the other hosts"
        if status == UNREACHABLE:
            told += f". ssh ends so if it cannot reach a host: try `{shlex.join([*ssh, host, 'true'])}`"
        print(told, file=sys.stderr, flush=True)
        return status
    finally:
        commands.end()


def _exit_on(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
