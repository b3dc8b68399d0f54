"""Compile the request path with mypyc: the same sources, faster, as a copy of the package in `build/compiled`.

    python scripts/compile.py            then run with PYTHONPATH=build/compiled

Needs a C compiler and mypy (in the extra `dev`). Nothing is written beside the sources, so that an edited file is
never shadowed by an old binary. Modules outside MODULES stay as they are, in particular those with msgspec structs,
which are built from their annotations at run time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "http": (
        "alike chunked client_connection connection known_head loop_pass pool reply_head request responder routes "
        "server sse"
    ),
    "gateway": (
        "auth body budget client_request desk driver endpoint estimate flight forecasts health held_reply legs "
        "log_writer loop_guard prefix_hashes quota records reply request_ids splice stats surface usage"
    ),
    "gateway/relays": "desk line link quotas remote_flight",
    "routing": (
        "admission backlog candidates correction cost fairness fleet forecast hold lengths live places placing policy "
        "prefix_index pump recent refinement room router sacrifice shared_kv stability standing sums told turn"
    ),
    "routing/policies": "calibrated least_tokens round_robin",
}
"""What every request passes through, by package."""


CONSTANT = re.compile(r"^(_?[A-Z][A-Z0-9_]*) = ", re.MULTILINE)


def finalise(path: Path) -> None:
    """Declare a module's constants final in the copy: mypyc then reads them directly, not through a dictionary."""
    text = path.read_text(encoding="utf-8")
    found = CONSTANT.findall(text)
    once = [name for name in found if found.count(name) == 1]
    if once:
        text = CONSTANT.sub(lambda match: f"{match[1]}: Final = " if match[1] in once else match[0], text)
        text = text.replace(f"{once[0]}: Final = ", f"from typing import Final\n{once[0]}: Final = ", 1)
        path.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimise", default="2", help="the C compiler's -O level")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "compiled")
    given = parser.parse_args()
    out: Path = given.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "weighbridge", out / "weighbridge", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", out)  # mypy's settings
    os.chdir(out)
    sys.path.insert(0, str(out))
    try:
        from mypyc.build import mypycify
        from setuptools import Distribution
        from setuptools.command.build_ext import build_ext
    except ImportError as error:
        print(f"{error}; install weighbridge[dev]", file=sys.stderr)
        return 2
    files = [f"weighbridge/{package}/{name}.py" for package, names in MODULES.items() for name in names.split()]
    for file in files:
        finalise(Path(file))
    extensions = mypycify(["--config-file", "pyproject.toml", *files], opt_level=given.optimise, debug_level="0")
    command = build_ext(Distribution({"name": "weighbridge", "ext_modules": extensions}))
    command.inplace = True
    command.build_temp = str(out / "objects")
    command.ensure_finalized()
    command.run()
    shutil.rmtree(out / "objects", ignore_errors=True)
    shutil.rmtree(out / "build", ignore_errors=True)
    print(f"compiled {len(files)} modules into {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
