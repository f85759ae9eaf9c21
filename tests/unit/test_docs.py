"""README.md and docs/: samples run, commands parse, links lead somewhere, and what is named is there.

Python blocks of a page run top to bottom in one namespace. `<!-- fragment -->` in front of a block says that it needs
more than the page has; such a block only compiles. Pages write a name in the code with its file:
`comm/allreduce.py`: `exchange`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn, get_origin

import provenance
import pytest
from ranks import free_port, python_of_forks

import onebit
from onebit.cli import main
from onebit.comm import Transport
from onebit.step.stats import Stats
from onebit.zero.config.local_steps import LocalRounds
from onebit.zero.config.sections import Onebit, Sequence

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("onebit", "comm", "zero", "csrc", "scripts", "tests", "docs")
SCRIPTS = ROOT / "scripts"
MOST_WORDS = 1000
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAMED = re.compile(r"`([\w/]+\.py)`: `([\w.]+)`")
"""A name in the code, with its file."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def in_tree(path: str) -> Path:
    """A file or folder by its name in a checkout; of comm/ and zero/ in a source distribution, too."""
    return ROOT / path if (ROOT / path).exists() else ROOT / "onebit" / path


def source_files(suffix: str) -> Iterator[Path]:
    """Once each, though onebit/ has links to comm/ and zero/."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob(f"*{suffix}")):
            within = [part for part in path.parents if ROOT in part.parents]
            if "records" not in path.parts and not any(part.is_symlink() for part in [path, *within]):
                yield path


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


# ---------------------------------------------------------------- samples


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    is_fragment: bool


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page. A fence without its language, or a mark without its block, is an error."""
    text = page.read_text()
    pattern = re.compile(r"(<!-- fragment -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    found = [
        Block(name_of(page), text[: match.start(3)].count("\n"), match[2], match[3], match[1] is not None)
        for match in pattern.finditer(text)
    ]
    assert all(block.language for block in found), page
    assert text.count("```") == 2 * len(found), page
    assert text.count("<!-- fragment -->") == sum(block.is_fragment for block in found), page
    return found


BLOCKS = {name_of(page): blocks_of(page) for page in PAGES}
WITH_PYTHON = [page for page, blocks in BLOCKS.items() if any(block.language == "python" for block in blocks)]
SAMPLES = {
    block.code.splitlines()[0].removeprefix("# "): block.code
    for block in BLOCKS["README.md"]
    if block.language == "python"
}
"""The scripts that README.md shows, by the names it gives them."""
SCRIPTS_OF_PAGES = {
    line.removeprefix("# ")
    for blocks in BLOCKS.values()
    for block in blocks
    if block.language == "python" and re.fullmatch(r"# \w+\.py", line := block.code.splitlines()[0])
}
"""The names of those that any page shows; `tests/processes/test_recipes.py` runs the recipes."""

RUN = """
import sys
from pathlib import Path
for page in map(Path, sys.argv[1:]):
    namespace = {"__name__": "__main__"}
    for code in sorted(page.iterdir()):
        exec(compile(code.read_text(), str(code), "exec"), namespace)
"""


@pytest.mark.processes
def test_python_blocks_run(tmp_path: Path) -> None:
    """All pages in one process, each with a namespace of its own; in a world of one rank."""
    folders = []
    for page in WITH_PYTHON:
        folders.append(tmp_path / page.replace("/", "_"))
        folders[-1].mkdir()
        for block in BLOCKS[page]:
            if block.language == "python" and not block.is_fragment:
                (folders[-1] / f"line_{block.line:04}.py").write_text(block.code)
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    run = subprocess.run(
        [python_of_forks(), "-c", RUN, *map(str, folders)],
        cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_fragments_compile(page: str) -> None:
    for block in BLOCKS[page]:
        if block.language == "python":
            compile(block.code, f"{page}, line {block.line}", "exec")


@pytest.mark.processes
@pytest.mark.thorough
def test_the_readmes_engine_prints_what_it_says(tmp_path: Path) -> None:
    """But for the last digits. The other sample is run on a slow network, below."""
    (command,) = re.findall(r"^torchrun .* sharded.py$", (ROOT / "README.md").read_text(), re.MULTILINE)
    (tmp_path / "sharded.py").write_text(SAMPLES["sharded.py"])
    port = str(free_port())
    run = subprocess.run(
        [python_of_forks().with_name("torchrun"), *shlex.split(command)[1:]],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PET_MASTER_PORT": port},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    shown = [block.code for block in BLOCKS["README.md"] if block.language == "text"][-1]
    printed, expected = (re.findall(r"^step (\d+): loss (\S+)$", text, re.MULTILINE) for text in (run.stdout, shown))
    assert [step for step, _ in printed] == [step for step, _ in expected]
    assert [float(loss) for _, loss in printed] == pytest.approx([float(loss) for _, loss in expected], rel=0.1)


@pytest.mark.net
@pytest.mark.thorough
@pytest.mark.usefixtures("emulated_hosts")
def test_the_readmes_loop_shows_on_a_slow_network_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SAMPLES["loop.py"])
    run = subprocess.run(
        [python_of_forks(), "-m", "onebit", "emulate", "--hosts", "4", "--rate", "100mbit", "--", "python", "loop.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    (shown, *_) = [block.code for block in BLOCKS["README.md"] if block.language == "text"]
    pattern = r"step (\d+): .* (\S+) bits per parameter"
    assert re.findall(pattern, run.stdout) == re.findall(pattern, shown), run.stdout + run.stderr


# ---------------------------------------------------------------- commands


class Parsed(BaseException):
    """A command has read its arguments: it need not do anything."""


@pytest.fixture
def only_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of scripts/ end once their own parsers have accepted their arguments."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_end(parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        parse(parser, *args)  # type: ignore[call-overload]
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    monkeypatch.setattr(provenance, "changed_files", lambda root: [])  # a page may name a record


def commands_of(page: Path) -> list[str]:
    """What a page tells its reader to type: lines of its shell blocks, and commands in its sentences."""
    lines = [line for block in blocks_of(page) if block.language == "sh" for line in block.code.splitlines()]
    typed = [line.partition("#")[0].strip() for line in lines]
    said = re.findall(
        r"`((?:python|make|pip|torchrun|mpirun|onebit \w+(?= -)) [^`\n]+)`", without_code(page.read_text())
    )
    return [command for command in [*typed, *said] if command]


COMMANDS = sorted({command for page in [*PAGES, ROOT / "CONTRIBUTING.md"] for command in commands_of(page)})


def check_words(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a command, or of what it starts in its turn."""
    if words[0] in ("pip", "make"):
        check_installation(words) if words[0] == "pip" else check_target(words)
        return
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        with pytest.raises(Parsed):
            get_args_parser().parse_args(words[1:])
        is_script = next(k for k, word in enumerate(words) if word.endswith(".py") or word == "onebit")
        words = words[is_script:] if words[is_script] == "onebit" else ["python", *words[is_script:]]
    elif words[0] == "mpirun":
        words = without_launch(words)
    if words[0] == "onebit":
        check_command(words[1:], monkeypatch)
        return
    assert words[0] == "python", words
    if words[1] in ("-m", "-c"):
        check_module(words[2:], monkeypatch)
        return
    if words[1] in SCRIPTS_OF_PAGES:
        assert len(words) == 2, words
        return
    script, arguments = in_tree(words[1]), words[2:]
    assert script.is_file(), words[1]
    if "--" in arguments:
        check_words(arguments[arguments.index("--") + 1 :], monkeypatch)
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(Parsed):
        runpy.run_path(str(script), run_name="__main__")


def without_launch(words: list[str]) -> list[str]:
    """What mpirun starts: its own options come first."""
    if words[1] == "--hostfile":
        assert (ROOT / "scripts/clusters" / words[2]).is_file() and words[3] == "-x" and "=" in words[4], words
        return words[5:]
    assert words[1] == "-np" and int(words[2]) > 0, words
    return words[3:]


def check_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the command line `onebit`."""
    if "--" in words:
        check_words(words[words.index("--") + 1 :], monkeypatch)
    if words[0] in ("--help", "--version"):
        return
    with pytest.raises(Parsed):
        main(words)


def check_module(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if not words[0].startswith("onebit"):
        assert words[0] in ("mpi4py",), words
        return
    if words[0] == "onebit":
        check_command(words[1:], monkeypatch)
        return
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(Parsed):
        importlib.import_module(words[0]).main(words[1:])


def check_installation(words: list[str]) -> None:
    """Extras are there; other packages are of MPI, which onebit does not bring along, and torch's smaller build."""
    if "--index-url" in words:
        assert words[2:3] == ["torch"] and len(words) == 5, words
        return
    if "mpi4py" in words:
        assert set(words[2:]) <= {"mpich", "mpi4py", "--no-binary"}, words
        return
    match = re.fullmatch(r"(?:\.|onebit)(?:\[([\w,]+)\])?", words[-1])
    assert match and words[:-1] in (["pip", "install", "-e"], ["pip", "install"]), words
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert set((match[1] or "dev").split(",")) <= set(re.findall(r"^(\w+) = ", table, re.MULTILINE)), words


def check_target(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[1] in targets and all(word.startswith("ARGS=") for word in words[2:]), words


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_files_and_options_that_are_there(
    command: str, only_parses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_words(shlex.split(command), monkeypatch)


@functools.cache
def known_options() -> set[str]:
    return {option for path in source_files(".py") for option in re.findall(r'"(--[\w-]+)"', path.read_text())}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_in_sentences_are_known(page: Path) -> None:
    assert set(re.findall(r"`(--[\w-]+)[^`]*`", without_code(page.read_text()))) <= known_options()


# ---------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", without_code(text), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def test_links_lead_somewhere() -> None:
    pages = [
        *PAGES,
        *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
        *source_files("README.md"),
    ]
    broken = []
    for page in pages:
        for link in LINK.findall(without_code(page.read_text())):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            inside = os.path.relpath(os.path.normpath(page.parent / path), ROOT) if path else name_of(page)
            target = in_tree(inside)
            is_there = target.exists()
            if is_there and anchor:
                is_there = anchor in anchors(target.read_text())
            if not is_there:
                broken.append(f"{name_of(page)}: {link}")
    assert not broken


def test_every_page_is_reached_from_the_index_and_the_menu() -> None:
    pages = {page.name for page in PAGES if page.parent == ROOT / "docs"} - {"index.md"}
    assert pages <= set(LINK.findall((ROOT / "docs" / "index.md").read_text()))
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    assert set(re.findall(r": ([\w-]+\.md)$", menu, re.MULTILINE)) == pages | {"index.md"}


# ---------------------------------------------------------------- names


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines: functions, classes with their members, and constants."""

    def defined(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
                if isinstance(node, ast.ClassDef):
                    yield from defined(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return frozenset(defined(ast.parse(path.read_text()).body, ""))


@pytest.mark.parametrize("page", ["architecture", "adding", "newcomers"])
def test_names_in_the_code_are_there(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert len(named) >= 15
    wrong = [f"{path}: {name}" for path, name in named if name not in names_in(in_tree(path))]
    assert not wrong


def test_the_walk_names_a_place_for_every_step() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walk = text.partition("## One gradient's walk")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| .+ \| (.+) \|$", walk, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 12
    assert all(NAMED.fullmatch(place) for _, place in rows)


@pytest.mark.parametrize("walk", ["A step", "A configuration", "A checkpoint"])
def test_each_stop_of_a_newcomers_walk_is_a_place(walk: str) -> None:
    text = (ROOT / "docs" / "newcomers.md").read_text().partition(f"\n## {walk}\n")[2].partition("\n## ")[0]
    stops = re.findall(r"^\| (\d+) \| (.+?) \| .+ \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in stops] == list(range(1, len(stops) + 1)) and len(stops) >= 10
    assert all(NAMED.fullmatch(place) for _, place in stops)


FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+\.(?:py|md|inl|cpp|cu))`")


def is_there(file: str, page: Path) -> bool:
    """From the tree's root, or from the folder of the page or one above it; in tests, where no two bear one name."""
    above = [folder for folder in page.parents if folder == ROOT or ROOT in folder.parents]
    if any((folder / file).is_file() for folder in above) or in_tree(file).is_file():
        return True
    return ROOT / "tests" in page.parents and len(list((ROOT / "tests").rglob(file))) == 1


def test_files_in_prose_are_there() -> None:
    """In pages, in the README of each room, in docstrings and comments."""
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", *source_files("README.md"), *source_files(".py")]
    missing = [
        f"{name_of(page)}: {file}"
        for page in pages
        for file in FILE.findall(without_code(page.read_text()) if page.suffix == ".md" else page.read_text())
        if page != Path(__file__) and file not in SCRIPTS_OF_PAGES and not is_there(file, page)
    ]
    assert not missing


def found(dotted: str) -> object:
    """What a dotted name stands for. Raises AttributeError where there is none."""
    parts = dotted.split(".")
    for split in range(len(parts), 0, -1):
        with suppress(ModuleNotFoundError):
            module = importlib.import_module(".".join(parts[:split]))
            return functools.reduce(getattr, parts[split:], module)
    raise AttributeError(dotted)


REFERENCE = [
    dotted
    for page in ("reference", "reference-comm", "reference-zero")
    for dotted in re.findall(r"^::: (.+)$", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE)
]
ROOMS_OF_THE_REFERENCE = (
    "onebit", "onebit.host", "onebit.comm", "onebit.comm.codecs", "onebit.membership", "onebit.zero",
    "onebit.zero.compression", "onebit.zero.compression.helper", "onebit.zero.data_efficiency",
    "onebit.zero.deepspeed.accelerator", "onebit.zero.deepspeed.checkpointing",
    "onebit.zero.deepspeed.comm", "onebit.zero.deepspeed.moe", "onebit.zero.deepspeed.ops",
    "onebit.zero.deepspeed.topology", "onebit.zero.deepspeed.utils", "onebit.zero.deepspeed.zero_to_fp32",
    "onebit.zero.inference", "onebit.zero.offload", "onebit.zero.pipe",
    "onebit.zero.sparse_attention", "onebit.zero.utils", "onebit.zero.zero",
)  # fmt: skip


def test_the_reference_lists_each_name_once_with_its_docstring() -> None:
    assert len(set(REFERENCE)) == len(REFERENCE)
    for dotted in REFERENCE:
        listed = found(dotted)
        if (inspect.isclass(listed) and get_origin(listed) is None) or inspect.isfunction(listed):
            assert listed.__doc__, dotted


@pytest.mark.parametrize("room", ROOMS_OF_THE_REFERENCE)
def test_the_reference_has_every_public_name(room: str) -> None:
    """Of each `__all__`, under this name or another. torch's own names and loggers are not ours to document."""
    listed = [found(dotted) for dotted in REFERENCE]
    missing = [
        name
        for name in importlib.import_module(room).__all__
        if f"{room}.{name}" not in REFERENCE
        and not any(found(f"{room}.{name}") is other for other in listed)
        and not inspect.ismodule(public := found(f"{room}.{name}"))
        and not getattr(public, "__module__", "").startswith("torch.")
        and name not in ("__version__", "logger")
    ]
    assert not missing


def test_a_module_of_deepspeed_has_one_answer() -> None:
    table = (ROOT / "docs" / "deepspeed.md").read_text().partition("## Other modules")[2].partition("\n## ")[0]
    names = [name for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    assert len(names) >= 15 and sorted(names) == sorted(set(names))


OBJECTS = {
    "optimizer.transport": (Transport,),
    "optimizer.stats": (Stats,),
    "stats": (Stats,),
    "optimizer": (onebit.OnebitAdam, onebit.ZeroOneAdam),
    "engine": (onebit.zero.DeepSpeedEngine,),
}
"""What pages call an object by, and its classes."""
PACKAGES = {"onebit": "onebit", "zero": "onebit.zero", "comm": "onebit.comm"}


def is_known(dotted: str) -> bool:
    """A name as a sentence has it: `optimizer.sync`, `zero.grid.start`."""
    for name, kinds in OBJECTS.items():
        if dotted.startswith(f"{name}."):
            return any(hasattr(kind, dotted.removeprefix(f"{name}.")) for kind in kinds)
    package, _, rest = dotted.partition(".")
    try:
        return found(f"{PACKAGES[package]}.{rest}") is not None
    except AttributeError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_attributes_in_sentences_are_there(page: Path) -> None:
    said = re.findall(r"`((?:optimizer|stats|engine|onebit|zero|comm)(?:\.\w+)+)[`(]", without_code(page.read_text()))
    assert [dotted for dotted in said if not is_known(dotted)] == []


# ---------------------------------------------------------------- what pages promise to have


def test_the_readme_says_that_no_gpu_has_run_it_until_one_has() -> None:
    records = list((SCRIPTS / "records").glob("gpu_*.md"))
    assert ("No GPU has run" in (ROOT / "README.md").read_text()) == (not records)


def test_the_readme_takes_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MOST_WORDS


def test_every_key_of_the_block_onebit_is_explained_with_its_default() -> None:
    text = (ROOT / "docs" / "zero.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE))
    keys = {field.name: getattr(Onebit(), field.name) for field in fields(Onebit)}
    assert keys.pop("local_steps") == LocalRounds() and rows.pop("local_steps") == "none"
    assert keys.pop("sequence") == Sequence() and rows.pop("sequence") == "none"
    said = {name: default.strip("`") for name, default in rows.items()}
    assert said == {name: "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
                    for name, value in keys.items()}  # fmt: skip


def test_every_key_of_local_steps_is_explained_with_its_default() -> None:
    table = (ROOT / "docs" / "local-steps.md").read_text().partition("## In the engine")[2].partition("\n## ")[0]
    said = {}
    for names, defaults in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \| ", table, re.MULTILINE):
        said |= dict(zip(re.findall(r"\w+", names), defaults.replace("`", "").split(", "), strict=True))
    assert said.pop("every") == "needed" and set(said) == {f.name for f in fields(LocalRounds)} - {"every"}
    assert said == {name: f"{x:g}" if isinstance(x := getattr(LocalRounds(), name), float) else str(x) for name in said}


def test_messages_under_troubleshooting_are_the_codes() -> None:
    strings = "\n".join(
        node.value
        for path in source_files(".py")
        if path.relative_to(ROOT).parts[0] in ("onebit", "comm", "zero")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    rows = re.findall(r"^\| (`.+?`) \| ", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [part for row in rows for part in re.findall(r"`([^`]+)`", row)]
    assert len(messages) >= 20
    assert [message for message in messages if message not in strings and message != "PeerError"] == []
