"""`python -m tests.benchmarks NAME`: measured claims of the README, for anyone to run."""

from __future__ import annotations

import argparse
import importlib
import pkgutil

import tests.benchmarks

NAMES = sorted(m.name for m in pkgutil.iter_modules(tests.benchmarks.__path__) if not m.name.startswith("_"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    importlib.import_module(f"tests.benchmarks.{args.name}").run(threads=args.threads)


if __name__ == "__main__":
    main()
