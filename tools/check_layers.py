#!/usr/bin/env python3
"""Checks who may include whom: a folder of src/ sees only what lies before it in the data flow.

Prints one line per offending include and exits 1 if there is any.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# In data-flow order. "pipeline" is every file that lies directly in src/.
FLOW = ["base", "score", "seed", "certificate", "screen", "refine", "select", "decode", "pipeline", "io", "shard"]

# backend/ hangs below the stages: everybody may call backend.hpp, which itself sees only base; one backend's kernels
# may use the words of every stage, and nobody but they sees their headers.
BACKEND_DOOR = "backend/backend.hpp"

# Reviewed exceptions: (including file, included header).
EXCEPTIONS = {
    ("cli/bench.cpp", "backend/cpu/peak.hpp"),  # a benchmark prints the denominator, which is no part of a run
}

QUOTED = re.compile(r'^\s*#\s*include\s*"([^"]+)"')


def ours(source: str, header: str) -> str | None:
    """`header` relative to src/ (or cli/, python/src/), or None if it is a third party's."""
    for base in (ROOT / "src", ROOT / "cli", ROOT / "include", (ROOT / source).parent):
        if (base / header).exists():
            path = (base / header).relative_to(ROOT)
            return path.relative_to("src").as_posix() if path.parts[0] == "src" else header
    return None


def layer_of(path: str) -> str:
    """Layer of a path relative to src/ ("screen/screen.hpp" -> "screen")."""
    head, _, tail = path.partition("/")
    return head if tail else "pipeline"


def allowed(source: str, header: str) -> bool:
    """May `source` (relative to the repository) include `header` (relative to src/, or to its own folder)?"""
    if (source, header) in EXCEPTIONS or header.startswith("dosa/"):
        return True
    if source.startswith("include/"):
        return False
    if source.startswith(("cli/", "python/")):
        return (ROOT / source).parent.joinpath(header).exists() or header == BACKEND_DOOR or layer_of(header) in FLOW
    source = source.removeprefix("src/")
    own, other = layer_of(source), layer_of(header)
    if header == BACKEND_DOOR:
        return own != "base"
    if source == BACKEND_DOOR:
        return other == "base"
    if own == "backend":
        same_backend = header.split("/")[:2] == source.split("/")[:2]
        return same_backend or other in FLOW[: FLOW.index("pipeline")]
    return other in FLOW and own in FLOW and FLOW.index(other) <= FLOW.index(own)


def main() -> int:
    offences = 0
    for folder in ("include", "src", "cli", "python"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix not in {".hpp", ".cpp", ".h", ".inc", ".cuh", ".cu"}:
                continue
            source = path.relative_to(ROOT).as_posix()
            for number, line in enumerate(path.read_text().splitlines(), 1):
                match = QUOTED.match(line)
                header = ours(source, match[1]) if match else None
                if header and not allowed(source, header):
                    print(f"{source}:{number}: may not include {header}")
                    offences += 1
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
