"""Fuzzes one target for a while: `python -m tests.fuzz.run TARGET SECONDS` in an environment that has Atheris.

New inputs that reach new code are kept beside the corpus in `.fuzz/TARGET`; what breaks is written to `.fuzz/crash-*`
and ends the run with a failure. Copy an input to `tests/fuzz/corpus/TARGET` to have it tested for ever.
"""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["weighbridge.http", "weighbridge.gateway"]):
    from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    name, seconds = sys.argv[1], int(sys.argv[2])
    found = Path(".fuzz") / name
    found.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-max_len=2048", "-artifact_prefix=.fuzz/crash-", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *options, str(found), str(CORPUS / name)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
