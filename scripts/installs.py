"""Installs the package in every way that people do, each in a fresh environment, and checks that it works there.

    python scripts/installs.py                          # all ways, one table
    python scripts/installs.py wheel editable
    python scripts/installs.py --record runs/installs.md

Every way is checked from another folder: where the package is imported from, two ranks that train with one bit over
Gloo and must agree, and what `onebit doctor` finds wrong. `wheel` and `wheelhouse` let pip find torch and all else; the
others see the torch of this Python through a .pth file, and nothing else of it, so that they take seconds and no extra
is there. Needs pip 22.3, setuptools, and mypy for `editable`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from bench.command import free_port
from provenance import add_record, revision
from reports import publish, table

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900.0
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
WITHOUT_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}
NOT_BUILT = re.compile(r"^\s*onebit: (\S+\.cpp) was not built, pure torch runs instead", re.MULTILINE)

WHERE = "import onebit, onebit.comm as c; print(onebit.__file__); print(c.kernels.describe())"
STEP = """
import torch, onebit
torch.manual_seed(0)
model = torch.nn.Linear(300, 7)
optimizer = onebit.OnebitAdam(model.parameters(), lr=1e-2, freeze_step=2, compression="always")
torch.manual_seed(1 + optimizer.transport.rank)
for _ in range(4):
    model(torch.randn(5, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
assert optimizer.stats.phase == "compressed" and optimizer.transport.world_size == 2, optimizer.stats
print("sum", model.weight.double().sum().item())
optimizer.transport.close()
"""
USER = """import onebit, torch
onebit.OnebitAdam(torch.nn.Linear(2, 2).parameters(), lr=1e-3)
onebit.OnebitAdam(torch.nn.Linear(2, 2).parameters(), bucket_cap=4.0)
"""
EXTRAS = {
    "triton": "import torch; from onebit.comm import kernels; kernels.select('triton', torch.device('cuda'))",
    "zero": "from onebit.zero.checkpoint.weights import check_can_export; check_can_export()",
    "transformers": "import onebit.integrations.trainer",
    "accelerate": "import onebit.integrations.accelerate",
    "lightning": "import onebit.integrations.lightning",
    "openmpi": "from onebit import comm; comm.init('mpi')",
}
"""By extra: what needs it. Without it this is an ImportError of one line that names the extra."""


class InstallError(RuntimeError):
    """A command failed, or a way of installing did not give what it should; the message is one line."""


def run(*command: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """Standard output and errors of a command. Raises InstallError with its last line if it fails."""
    words = [str(word) for word in command]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            words, env=clean | (env or {}), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{' '.join(words)[:80]}: no end after {TIMEOUT_S:g} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise InstallError(f"{' '.join(words)[:80]}: exit status {done.returncode}: {last}")
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Installed:
    """A Python that should find the package. home: the folder where it should. prefix: words before its commands."""

    python: Path
    home: Path
    env: Mapping[str, str] = field(default_factory=dict)
    has_kernels: bool = True
    prefix: tuple[str, ...] = ()

    def run(self, *words: str, cwd: Path, env: Mapping[str, str] | None = None) -> str:
        return run(*self.prefix, self.python, *words, cwd=cwd, env={**self.env, **(env or {})})


@dataclass(frozen=True)
class Shop:
    """What all ways share: a folder for them, the source, what was built of it, and a folder with torch alone."""

    folder: Path
    source: Path
    wheel: Path
    sdist: Path
    torch: Path
    torch_requirement: str

    def environment(self, name: str, *, shares_torch: bool = True) -> Installed:
        """A fresh one without anything but what torch needs; without torch, if not shares_torch."""
        home = self.folder / name
        run(sys.executable, "-m", "venv", "--without-pip", home)
        site = home / "lib" / PYTHON / "site-packages"
        if shares_torch:
            (site / "torch_of_the_other.pth").write_text(f"{self.torch}\n")
        return Installed(home / "bin" / "python", site)

    def pip(self, place: Installed, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """pip install into an environment."""
        pip = [sys.executable, "-m", "pip", "--python", place.python, "--disable-pip-version-check", "install"]
        return run(*pip, *words, env=env)

    def copy(self, name: str) -> Path:
        """A copy of the source."""
        return Path(shutil.copytree(self.source, self.folder / name, symlinks=True))


def open_shop(folder: Path, torch_requirement: str) -> Shop:
    """Copy the tracked files as they are, build the sdist, and the wheel from the sdist."""
    source, dist, torch = folder / "source", folder / "dist", folder / "torch"
    for line in run("git", "-C", ROOT, "ls-files").splitlines():
        if (ROOT / line).is_symlink() or (ROOT / line).exists():
            (source / line).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / line, source / line, follow_symlinks=False)
    dist.mkdir()
    run(sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(dist)!r})", cwd=source)
    (sdist,) = dist.glob("*.tar.gz")
    wheel, _ = build(sdist, dist)
    torch.mkdir()
    for name in needed("torch"):
        for top in {path.parts[0] for path in metadata.files(name) or () if path.parts[0] not in ("..", "__pycache__")}:
            (torch / top).unlink(missing_ok=True)
            (torch / top).symlink_to(metadata.distribution(name).locate_file(top))
    return Shop(folder, source, wheel, sdist, torch, torch_requirement)


def build(sdist: Path, folder: Path, env: Mapping[str, str] | None = None) -> tuple[Path, str]:
    """A wheel from a source distribution, built with the setuptools of this Python; and what the build said."""
    pip = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    said = run(*pip, sdist, env=env)
    (wheel,) = folder.glob("*.whl")
    return wheel, said


def needed(name: str) -> set[str]:
    """The installed distributions that this one and NumPy need, without extras."""
    found: set[str] = set()
    ahead = [name, "numpy"]
    while ahead:
        each = re.sub(r"[-_.]+", "-", ahead.pop()).lower()
        try:
            requires = metadata.requires(each) or []
        except metadata.PackageNotFoundError:
            continue  # of another platform, or torch's Triton
        if each not in found and each not in ("triton", "setuptools"):
            found.add(each)
            ahead += [re.split(r"[^\w.-]", line)[0] for line in requires if "extra ==" not in line]
    return found


# ---------------------------------------------------------------- the ways


def wheel(shop: Shop) -> Installed:
    place = shop.environment("wheel", shares_torch=False)
    shop.pip(place, shop.torch_requirement)
    shop.pip(place, shop.wheel)
    return place


def wheelhouse(shop: Shop) -> Installed:
    """Downloaded first, then installed with no index and no other configuration of pip."""
    house = shop.folder / "wheelhouse"
    run(sys.executable, "-m", "pip", "download", "--quiet", "-d", house, shop.torch_requirement, shop.wheel)
    place = shop.environment("offline", shares_torch=False)
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1"}
    shop.pip(place, "--no-index", "--find-links", house, "onebit", env=offline)
    shutil.rmtree(house)
    return place


def sdist(shop: Shop) -> Installed:
    place = shop.environment("sdist")
    shop.pip(place, "--no-deps", shop.sdist)
    return place


def editable(shop: Shop) -> Installed:
    """mypy must find the wrong option of a user's script, and nothing else."""
    place, source = shop.environment("editable"), shop.copy("editable source")
    shop.pip(place, "--no-deps", "-e", source)
    (shop.folder / "user.py").write_text(USER)
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(place.python), "--follow-imports=silent"]
    try:
        run(*mypy, "user.py", cwd=shop.folder)
    except InstallError as error:
        if "Found 1 error in 1 file" in str(error):
            return Installed(place.python, source)
        raise
    raise InstallError("mypy does not see the types of an editable install: it found nothing wrong with bucket_cap=4.0")


def uv(shop: Shop) -> Installed:
    """uv makes the environment and installs; it comes from the index, unless it is on the path."""
    command = shutil.which("uv")
    if command is None:
        run(sys.executable, "-m", "pip", "install", "--quiet", "--target", shop.folder / "tools", "uv")
        command = str(shop.folder / "tools" / "bin" / "uv")
    home = shop.folder / "uv"
    env, python = {"UV_CACHE_DIR": str(shop.folder / "uv cache")}, home / "bin" / "python"
    run(command, "venv", "--quiet", "--python", sys.executable, home, env=env)
    site = home / "lib" / PYTHON / "site-packages"
    (site / "torch_of_the_other.pth").write_text(f"{shop.torch}\n")
    run(command, "pip", "install", "--quiet", "--no-deps", "--python", python, shop.wheel, env=env)
    return Installed(python, site)


def user(shop: Shop) -> Installed:
    """Into the home of a user, by the Python that this environment was made from."""
    base, home = Path(sys.base_prefix) / "bin" / PYTHON, shop.folder / "home"
    home.mkdir()
    env = {"HOME": str(home), "PYTHONPATH": str(shop.torch), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    run(base, "-m", "pip", "install", "--user", "--no-deps", "--ignore-installed", shop.wheel, env=env)
    return Installed(base, home / ".local" / "lib" / PYTHON / "site-packages", env)


def prefix(shop: Shop) -> Installed:
    """As conda's builds do it: a folder with bin/ and lib/, into which pip only unpacks."""
    place = shop.environment("conda")
    shop.pip(place, "--no-deps", "--no-build-isolation", "--prefix", place.python.parents[1], shop.wheel)
    return place


def target(shop: Shop) -> Installed:
    place, home = shop.environment("bare"), shop.folder / "target"
    shop.pip(place, "--no-deps", "--target", home, shop.wheel)
    return Installed(place.python, home, {"PYTHONPATH": str(home)})


def read_only(shop: Shop) -> Installed:
    """Nothing of the environment can be written, nor the home; root goes on without root's rights."""
    place = shop.environment("read only")
    shop.pip(place, "--no-deps", shop.wheel)
    for path in [place.home, *place.home.rglob("*")]:
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    powerless = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    here = Installed(place.python, place.home, {"HOME": "/nonexistent"}, prefix=powerless)
    try:
        here.run("-c", f"open({str(place.home / 'x')!r}, 'w')", cwd=shop.folder)
    except InstallError as error:
        if "PermissionError" in str(error):
            return here
        raise
    raise InstallError(f"{place.home} can still be written")


def spaces(shop: Shop) -> Installed:
    """From a checkout to an environment, both with spaces in their names."""
    place = shop.environment("a path with spaces")
    shop.pip(place, "--no-deps", shop.copy("my code"))
    return place


def no_compiler(shop: Shop) -> Installed:
    place = shop.environment("no compiler")
    wheel, said = build(shop.sdist, shop.folder / "without", WITHOUT_COMPILER)
    if len(NOT_BUILT.findall(said)) != 2:
        raise InstallError("pip -v does not say once of each library that it was not built")
    shop.pip(place, "--no-deps", wheel)
    return Installed(place.python, place.home, has_kernels=False)


def no_extras(shop: Shop) -> Installed:
    """What needs an extra that is absent says so in one line, with the extra's name."""
    place = shop.environment("no extras")
    shop.pip(place, "--no-deps", shop.wheel)
    for extra, statement in EXTRAS.items():
        try:
            place.run("-c", statement, cwd=shop.folder)
        except InstallError as error:
            if re.search(rf"ImportError: .*onebit\[{extra}\]", str(error)):
                continue
            raise InstallError(
                f"without {extra}: expected an ImportError that names onebit[{extra}], got {error}"
            ) from None
        raise InstallError(f"without {extra}: nothing complained")
    return place


WAYS: dict[str, tuple[str, Callable[[Shop], Installed]]] = {
    "wheel": ("`pip install` of the wheel, torch first", wheel),
    "wheelhouse": ("`pip download`, then `--no-index --find-links`", wheelhouse),
    "sdist": ("`pip install` of the source distribution", sdist),
    "editable": ("`pip install -e`; mypy sees the types", editable),
    "uv": ("`uv venv`, `uv pip install`", uv),
    "user": ("`pip install --user`", user),
    "prefix": ("`pip install --prefix`, as conda builds do", prefix),
    "target": ("`pip install --target`", target),
    "read-only": ("site-packages and home that cannot be written", read_only),
    "spaces": ("a checkout and an environment with spaces in their paths", spaces),
    "no-compiler": ("no compiler: two lines while it installs, one when it runs", no_compiler),
    "no-extras": (f"without {', '.join(EXTRAS)}: one line each", no_extras),
}
"""By name: the title, and the function that installs."""


# ---------------------------------------------------------------- checks


def check(shop: Shop, place: Installed) -> None:
    """Raise InstallError unless the package works there, from a folder with no copy of it."""
    elsewhere = shop.folder / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    said = place.run("-c", WHERE, cwd=elsewhere).splitlines()
    files = [line for line in said if line.endswith("__init__.py")]
    if [Path(line).parents[1].resolve() for line in files] != [place.home.resolve()]:
        raise InstallError(f"imported from {files}, expected {place.home}")
    has_kernels = place.has_kernels and not shop.wheel.name.endswith("-any.whl")  # no compiler here
    if any("host tensors: C++" in line for line in said) != has_kernels:
        raise InstallError(f"kernels: {said[-1]}, expected {'C++' if has_kernels else 'the reference'}")
    _train(place, elsewhere)
    report = shop.folder / "doctor.json"
    report.touch()
    report.chmod(0o666)
    place.run("-m", "onebit", "doctor", "--json", str(report), cwd=elsewhere)
    problems = json.loads(report.read_text())["problems"]
    missing = [line for line in problems if "the C++ kernel is not built" in line]
    if len(missing) != (not has_kernels) or missing != problems:
        raise InstallError(f"onebit doctor: {problems or 'nothing of the missing kernels'}")


def _train(place: Installed, cwd: Path) -> None:
    """Two ranks end with the same parameters."""
    port = str(free_port())
    ranks = []
    shared = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | dict(place.env)
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    for rank in range(2):
        ranks.append(
            subprocess.Popen(
                [*place.prefix, str(place.python), "-c", STEP], cwd=cwd, env=shared | {"RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        ended = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise InstallError(f"two ranks over Gloo: no end after {TIMEOUT_S:g} s") from None
    finally:
        for rank in ranks:
            rank.kill()
    sums = {line for out, _ in ended for line in out.splitlines() if line.startswith("sum ")}
    if len(sums) != 1 or any(rank.returncode for rank in ranks):
        last = [err.strip().splitlines()[-1:] for _, err in ended]
        raise InstallError(f"two ranks over Gloo: {sorted(sums)}, {last}")


@dataclass(frozen=True)
class Row:
    """One way's result. problem: None, or a line."""

    title: str
    problem: str | None
    install_s: float
    check_s: float

    def cells(self) -> tuple[str, ...]:
        return self.title, self.problem or "works", f"{self.install_s:.0f}", f"{self.check_s:.0f}"


def attempt(shop: Shop, name: str) -> Row:
    title, install = WAYS[name]
    began = installed = time.perf_counter()
    problem = None
    try:
        place = install(shop)
        installed = time.perf_counter()
        check(shop, place)
    except InstallError as error:
        problem = str(error).replace("|", "/").replace("\n", " ")
        installed = installed if installed > began else time.perf_counter()
    return Row(title, problem, installed - began, time.perf_counter() - installed)


def report(shop: Shop, rows: list[Row], command: str) -> str:
    sizes = f"{shop.wheel.stat().st_size:,} bytes, the source distribution {shop.sdist.stat().st_size:,}"
    return f"""# Ways of installing

`{command}`

Python {sys.version.split()[0]}, torch {metadata.version("torch")}, {sysconfig.get_platform()}, pip
{metadata.version("pip")}; revision {revision()}. {shop.wheel.name} has {sizes}.
Each way has a fresh environment. Checked from another folder: the package is imported from where it was installed, two
ranks train with one bit over Gloo and agree, and `onebit doctor` finds nothing wrong. Seconds are of one run.

{table(("way", "result", "s to install", "s to check"), (row.cells() for row in rows), names=2)}
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"one or more of {', '.join(WAYS)} (default: all)")
    parser.add_argument(
        "--torch", default=pinned(), metavar="REQUIREMENT", help="what pip installs (default: %(default)s)"
    )
    parser.add_argument("--folder", type=Path, help="install below this folder (default: a temporary one)")
    add_record(parser)
    args = parser.parse_args(argv)
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"unknown ways {', '.join(sorted(unknown))}: choose from {', '.join(WAYS)}")
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="installs-", ignore_cleanup_errors=True) as folder:
        shop = open_shop(Path(folder).resolve(), args.torch)
        for name in args.ways or WAYS:
            rows.append(attempt(shop, name))
            print(*rows[-1].cells(), sep=", ", flush=True)
            if name in ("wheel", "wheelhouse"):  # each has a torch
                shutil.rmtree(shop.folder / {"wheelhouse": "offline"}.get(name, name), ignore_errors=True)
        text = report(shop, rows, " ".join(["python scripts/installs.py", *args.ways]))
    publish(args, text)
    return any(row.problem for row in rows)


def pinned() -> str:
    """The requirement of torch that CI installs."""
    found = re.search(r"^torch==\S+$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE)
    assert found
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
