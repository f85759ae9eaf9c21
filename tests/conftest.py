"""The path to tests/support, and the tiers: see support/tiers.py. Tests import their oracles by name.

torch's store looks up the name of whoever connects. A resolver that is silent may cost a second here, not five.
"""

from __future__ import annotations

import fcntl
import gc
import os
import random
import re
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

gc.disable()  # until all is collected: what modules import stays, and looking through it took 5 s of CPU a process
TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS / "support"))
torch.set_num_threads(1)
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
if hasattr(os, "SCHED_BATCH"):
    # For all processes of the tests: what wakes waits for its turn. Otherwise Gloo's thread, woken by a message, takes
    # the processor from the thread that holds its lock, and spins on it: a quarter of the time of ranks on two cores.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# A test or a draw may take long beside other processes.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

import tiers  # noqa: E402  (on the path since the line above)

GUARD = tiers.Guard()
TOO_OLD = pytest.StashKey[bool]()
LONGEST = ("test_membership.py",)
"""Files that take a worker minutes, mostly of waiting. They begin first: else the others wait for it at the end."""
CPUS = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.TIERS, default="all", help="run this tier of tests (default: %(default)s)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders and files that a tier leaves out are not imported: half of its start, and two seconds of Lightning's."""
    tier, is_file = config.getoption("tier"), collection_path.suffix == ".py"
    is_left_out = tier == "fast" and collection_path.name in tiers.PROCESS_FOLDERS and collection_path.parent == TESTS
    is_thorough = tier != "all" and is_file and tiers.IS_THOROUGH.search(collection_path.read_text())
    return True if is_left_out or is_thorough else None


class Rotated(pytest.Dir):
    """A folder that each worker of xdist begins to collect elsewhere: what one has compiled, the others read."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        found = list(super().collect())
        first = WORKER * len(found) // WORKERS
        return found[first:] + found[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector:
    return Rotated.from_parent(parent, path=path)


def first_tier(item: pytest.Item) -> str:
    return tiers.tier_of(tiers.folder_of(item.path, TESTS), {mark.name for mark in item.iter_markers()})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests of this tier, and of products the pairwise cases."""
    products: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise"):
            products[item.nodeid.partition("[")[0]].append(item)
    left_out = {item for item in items if not tiers.runs_in(config.getoption("tier"), first_tier(item))}
    for cases in products.values():
        # Those that this machine skips come last: what they would show of others, others show.
        cases.sort(key=lambda item: any(mark.args[0] for mark in item.iter_markers("skipif")))
        chosen = tiers.pairwise([{k: id(x) for k, x in item.callspec.params.items()} for item in cases])
        left_out |= {item for k, item in enumerate(cases) if k not in chosen}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    if WORKERS > 1:
        items.sort(key=lambda item: item.path)  # the same order in each worker, whichever it began with
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Tests that collect garbage look at what they made, not at torch and all of its modules: 0.2 s each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """The test's threads share one processor, if no other worker has all of them for such a test.

    Each operation of torch gives up Python's lock. On another processor another rank would take it then, and the two
    would wake each other for every operation: ranks that are threads took twice the CPU.
    """
    with ExitStack() as held:
        for cpu in CPUS:
            with suppress(OSError):  # of another worker, or of another user
                file = held.enter_context(Path(tempfile.gettempdir(), f"onebit-tests-cpu-{cpu}").open("a"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.sched_setaffinity(0, {cpu})
                break
        try:
            yield
        finally:
            for thread in Path("/proc/self/task").iterdir():  # also those that it has started, as torch's
                with suppress(OSError):
                    os.sched_setaffinity(int(thread.name), CPUS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    GUARD.test = item.nodeid if first_tier(item) == "fast" else ""
    is_simulated = tiers.folder_of(item.path, TESTS) == "sim" and not item.get_closest_marker("processes")
    try:
        with on_one_cpu() if is_simulated and CPUS else nullcontext():
            return (yield)
    finally:
        GUARD.test = ""


@contextmanager
def skips_what_torch_lacks(item: pytest.Item) -> Iterator[None]:
    """What an old torch cannot do is skipped: the error that says so is `comm/torch_versions.py`: `require`'s."""
    try:
        yield
    except BaseException as error:
        lacks = re.search(r"[^:\n]* needs torch (\d+)\.(\d+) or later, this is [^;\s]*", str(error))
        here = tuple(map(int, torch.__version__.split(".")[:2]))
        if lacks and here < (int(lacks[1]), int(lacks[2])):
            item.stash[TOO_OLD] = True
            pytest.skip(lacks[0].strip())
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with skips_what_torch_lacks(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """A test that names no seed has its own, of its name: alone, among others or tomorrow it draws the same.

    Neither torch nor `random` starts from a seed, so a failure by bad luck could not be repeated.
    """
    seed = zlib.crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)
    with skips_what_torch_lacks(item):  # also the runs at which a module's tests look
        return (yield)


@pytest.fixture(scope="session")
def emulated_hosts() -> None:
    """Of tests that lay hosts, which are skipped where there can be none."""
    from onebit.cli.cluster import available

    if reason := available():
        pytest.skip(f"emulated hosts: {reason}")


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test starts with this Python are forks."""
    from ranks import python_of_forks

    monkeypatch.setattr(sys, "executable", str(python_of_forks()))


@pytest.fixture(autouse=True)
def _leaves_no_process_group(request: pytest.FixtureRequest) -> Iterator[None]:
    """A group of torch that a test leaves behind is found by the tests after it, as if a launcher had made it."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        if TOO_OLD not in request.node.stash:
            pytest.fail("this test has left a process group of torch behind: destroy it, or use a process of its own")
