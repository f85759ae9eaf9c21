"""What a release needs, and whether it is there. The workflow release.yml calls `check` and `collect`.

    python scripts/release.py prepare 0.3.0    # then review, commit, tag v0.3.0, and push the tag
    python scripts/release.py check v0.3.0     # version, changelog, citation and golden files are the tag's
    python -m build                            # source distribution and this machine's wheel, into dist/
    python scripts/release.py collect v0.3.0   # checks dist/, writes release/SHA256SUMS and release/NOTES.md

Needs the standard library alone; `prepare` also needs the package, to write tests/golden/released_VERSION.zip.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = {"onebit/comm/kernels/_kernels.so", "onebit/host/_host.so"}


def prepare(root: Path, version: str) -> None:
    """Write the version where it is named, and the golden files that later versions have to read."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise SystemExit(f"expected a version such as 0.3.0, got {version!r}")
    for name, pattern, text in (
        ("onebit/version.py", r'^VERSION = ".*"$', f'VERSION = "{version}"'),
        ("CITATION.cff", r"^version: .*$", f"version: {version}"),
        ("CHANGELOG.md", r"^## Unreleased$", f"## {version}, {date.today()}"),
    ):
        changed, count = re.subn(pattern, text, (root / name).read_text(), count=1, flags=re.MULTILINE)
        if not count:
            raise SystemExit(f"{name} has no line {pattern}")
        (root / name).write_text(changed)
    env = os.environ | {"PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "tests/golden/write_released.py"], cwd=root, env=env, check=True)


def notes(root: Path, version: str) -> str:
    """The section of the changelog, without its heading; empty if it is not the newest one, or has no date."""
    newest = (root / "CHANGELOG.md").read_text().partition("\n## ")[2].partition("\n## ")[0]
    heading, _, text = newest.partition("\n")
    return text.strip() + "\n" if re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", heading) else ""


def problems(root: Path, tag: str) -> list[str]:
    """What contradicts the tag, in one sentence each."""
    version = tag.removeprefix("v")
    found = [] if tag == f"v{version}" else [f"expected a tag such as v0.3.0, got {tag!r}"]
    for name, pattern in (("onebit/version.py", r'^VERSION = "(.*)"$'), ("CITATION.cff", r"^version: (.*)$")):
        named = re.findall(pattern, (root / name).read_text(), re.MULTILINE)
        if named != [version]:
            found.append(f"{name} has {' and '.join(named) or 'no version'}, the tag {version}")
    if not notes(root, version).strip():
        found.append(f'the first section of CHANGELOG.md is not "## {version}, YYYY-MM-DD", or empty')
    if not (root / f"tests/golden/released_{version}.zip").is_file():
        found.append(f"tests/golden/released_{version}.zip is missing: write_released.py makes it")
    return found


def problems_of_files(dist: Path, version: str) -> list[str]:
    """What is wrong with the files of a release, in one sentence each."""
    source = dist / f"onebit-{version}.tar.gz"
    wheels = sorted(dist.glob("*.whl"))
    found = [f"{path} is not of onebit {version}" for path in sorted(dist.iterdir()) if path not in [source, *wheels]]
    if not source.is_file():
        found.append(f"{source} is missing")
    else:
        with tarfile.open(source) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        absent = {"PKG-INFO", "csrc/kernels.cpp", "onebit/comm/__init__.py", "onebit/zero/__init__.py", "tests"} - names
        found += [f"{source} has no {name}" for name in sorted(absent)]
    if not wheels:
        found.append(f"{dist} has no wheel")
    for wheel in wheels:
        if not re.fullmatch(rf"onebit-{re.escape(version)}-py3-none-(?!any).+\.whl", wheel.name):
            found.append(f"{wheel} is not a wheel of {version} for a platform and any Python 3")
            continue
        with zipfile.ZipFile(wheel) as archive:
            files = set(archive.namelist())
        about = f"onebit-{version}.dist-info"
        found += [
            f"{wheel} has no {name}" for name in sorted(({f"{about}/METADATA", "onebit/py.typed"} | KERNELS) - files)
        ]
        if strays := sorted({name.partition("/")[0] for name in files} - {"onebit", about}):
            found.append(f"{wheel} has {', '.join(strays)} at top level")
    return found


def collect(root: Path, tag: str, dist: Path, out: Path) -> None:
    """Write the checksums of the files and the notes."""
    out.mkdir(exist_ok=True)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(dist.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    (out / "NOTES.md").write_text(notes(root, tag.removeprefix("v")))


def main(words: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=("prepare", "check", "collect"))
    parser.add_argument("version", help="0.3.0 of prepare, the tag v0.3.0 of the others")
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="folder of files (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("release"), help="folder to write (default: %(default)s)")
    args = parser.parse_args(words)
    if args.step == "prepare":
        prepare(root, args.version)
        return 0
    found = problems(root, args.version)
    if args.step == "collect":
        found += problems_of_files(args.dist, args.version.removeprefix("v"))
        if not found:
            collect(root, args.version, args.dist, args.out)
    print("\n".join(found) or f"{args.version}: nothing contradicts it", file=sys.stderr if found else sys.stdout)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
