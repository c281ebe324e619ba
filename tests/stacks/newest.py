"""Has pip fetch the newest release of each package that we rely on, and names what of ours is lost in it.

> make stacks-newest

One line a package: what it is called, the version that pip found for this Python, and `ok`, or each name, argument or
call that is gone. Then the exit status is 1. Dependencies are not installed: nothing is imported, and a stack's own
pins would hold the others back.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from helpers.trainer.contract_fixtures import CONTRACTS, broken  # noqa: E402

_SECONDS = 120  # a package


def fetched(package: str, folder: Path) -> str:
    """Install the newest release into `folder`; what pip said last where it could not."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, "--upgrade", "--target", str(folder), package],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip took more than {_SECONDS} s"
    return "" if done.returncode == 0 else (done.stderr.strip() or "pip failed").splitlines()[-1]


def main(folder: Path) -> int:
    """Print the table; 1 where anything is lost or could not be fetched."""
    failed = 0
    for package in sorted({contract.package for contract in CONTRACTS.values()}):
        found = folder / package
        lost = [trouble] if (trouble := fetched(package, found)) else []
        versions = [one.version for one in distributions(path=[str(found)]) if one.name.replace("_", "-") == package]
        for name, contract in CONTRACTS.items():
            if contract.package == package and not trouble:
                lost += [f"{name}: {text}" for text in broken(contract, found)]
        failed += bool(lost)
        print(f"{package:<16}{versions[0] if versions else '-':<14}{'' if lost else 'ok'}", flush=True)
        for text in lost:
            print(f"    LOST {text}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
