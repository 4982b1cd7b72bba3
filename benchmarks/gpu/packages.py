"""Packages for a machine without a network: made here as archives, unpacked there. `make gpu-packages`.

Nothing that the machine has is carried, and never torch, vLLM or NVIDIA's libraries. Each archive stays below
`MOST_MB`, so that a narrow way takes them one after the other.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
FOLDER = Path(".gpu-packages")
MOST_MB = 60
PLATFORM = "x86_64-manylinux_2_34"
PARTS = {
    "node": (
        *(
            "cryptography",
            "deltalake",
            "gguf",
            "google-re2",
            "jinja2",
            "math-verify[antlr4-13-2]",
            "peft",
            "psutil",
        ),
        *(
            "pyarrow",
            "pydantic",
            "reasoning-gym",
            "safetensors",
            "scipy",
            "setproctitle",
            "tomli-w",
            "tokenizers",
            "trl",
        ),
    ),
    "history": ("duckdb",),
    "swarm": (
        *("crc32c", "httpx", "kafka-python", "lz4", "mlflow", "prefect", "rich", "sqlalchemy<2.1"),
        *("typer", "zstandard"),
    ),
}
"""What each archive is for, in order of worth; a later one has nothing of an earlier."""
HEAVY = ("torch", "triton", "vllm", "nvidia-", "cuda-")
SOURCES = ("pycosat",)
"""Have no wheel: their sources are carried, and built there."""
DONE = "unpacked"


def unpack(folder: Path, site: Path) -> Path | None:
    """Unpack the archives for this Python into a folder, each once, and install the checkout there.

    Returns None if there are none.
    """
    archives = sorted(folder.glob(f"*.python{sys.version_info[0]}.{sys.version_info[1]}.tar.xz"))
    if not archives:
        return None
    site.mkdir(parents=True, exist_ok=True)
    for archive in archives:
        done = site / f".{archive.name}.{archive.stat().st_size}.{DONE}"
        if not done.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(site, filter="data")
            for source in sorted(site.glob("*.tar.gz")):
                _build(source, site)
            done.touch()
    if not _pip(ROOT, site):
        raise SystemExit(f"{ROOT} could not be installed into {site}: see what pip says above")
    return site.absolute()


def _build(source: Path, site: Path) -> None:
    """Compile a package for this Python; where that fails, put a module in its place that says so when used.

    ReasoningGYM imports pycosat, and one data set, zebra_puzzles, which no step asks, calls it.
    """
    name = source.name.partition("-")[0]
    if not _pip(source, site):
        text = f"def __getattr__(_):\n    raise AttributeError('{name} was not compiled here')\n"
        (site / f"{name}.py").write_text(text, encoding="utf-8")
    source.unlink()


def _pip(source: Path, site: Path) -> bool:
    """Build a package from its source, with what is here; returns whether it is in the folder now."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    command += ["--no-build-isolation", "--target", str(site), str(source)]
    return subprocess.run(command, check=False).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the archives; returns 1 if one is too large."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.gpu.packages", description=__doc__)
    options.add_argument(
        "--there", type=Path, required=True, help="names of packages that it has, one a line"
    )
    options.add_argument("--python", default="3.12", help="its version of Python [3.12]")
    options.add_argument("--out", type=Path, default=ROOT / FOLDER, metavar="DIR", help=f"[{FOLDER}]")
    given = options.parse_args(arguments)
    there = {line.strip().lower() for line in given.there.read_text(encoding="utf-8").splitlines()}
    given.out.mkdir(parents=True, exist_ok=True)
    wanted: list[str] = []
    for part, roots in PARTS.items():
        wanted += roots
        names = [one for one in resolved(wanted, given.python) if one.partition("==")[0] not in there]
        there |= {one.partition("==")[0] for one in names}
        archive = make(part, names, given.python, given.out)
        size = archive.stat().st_size / 2**20
        print(f"{archive}: {len(names)} packages, {size:.0f} MiB", flush=True)
        if size > MOST_MB:
            return 1
    return 0


def resolved(roots: Sequence[str], python: str) -> list[str]:
    """Pinned packages that these need on that machine, without the heavy ones."""
    command = ["pip", "compile", "--quiet", "--no-annotate", "--no-header", "--constraint", "constraints.txt"]
    command += ["--python-version", python, "--python-platform", PLATFORM, "-"]
    done = _uv(command, "\n".join(roots))
    names = [line.strip() for line in done.splitlines() if "==" in line]
    return [one for one in names if not one.startswith(HEAVY)]


def make(part: str, names: Sequence[str], python: str, out: Path) -> Path:
    """An archive of these packages as they lie in `site-packages`."""
    archive = out / f"{list(PARTS).index(part) + 1}-{part}.python{python}.tar.xz"
    built = [one for one in names if not one.startswith(SOURCES)]
    with TemporaryDirectory(prefix="sapo-gpu-") as scratch:
        site = Path(scratch) / "site"
        command = [
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(site),
            "--python-version",
            python,
        ]
        _uv([*command, "--python-platform", PLATFORM, *built])
        for one in names:
            if one.startswith(SOURCES):
                fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
                subprocess.run([*fetch, "--dest", str(site), one], check=True)
        for cache in site.rglob("__pycache__"):
            shutil.rmtree(cache)
        packed = Path(scratch) / archive.name
        subprocess.run(["tar", "--create", "--xz", "--file", str(packed), "-C", str(site), "."], check=True)
        shutil.move(packed, archive)
    return archive


def _uv(words: Sequence[str], text: str = "") -> str:
    """Run uv, which lies beside this Python, in the checkout; returns what it says."""
    uv = Path(sys.executable).parent / "uv"
    done = subprocess.run([uv, *words], input=text, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
