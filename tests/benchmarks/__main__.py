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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="benchmarks-out", help="folder of tables, figures and plots")
    args = parser.parse_args()
    module = importlib.import_module(f"tests.benchmarks.{args.name}")
    module.run(threads=args.threads, rounds=args.rounds, out=args.out)


if __name__ == "__main__":
    main()
