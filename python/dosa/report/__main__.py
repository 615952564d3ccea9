"""The command line of the report."""

from __future__ import annotations

import argparse
import pathlib
import sys

from .. import Error
from .page import render
from .tables import measure, save


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dosa.report",
        description="Draw what dosa does on a model's activations: one HTML page that loads nothing.",
        epilog="Traces take some ten seconds each; times are only as quiet as the machine.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=pathlib.Path,
        metavar="TRACES",
        help="traces (.safetensors), JSON lines of dosa bench --json or explain --json (.jsonl), and numbers of a report (.json)",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("report.html"),
        help="the page, or its numbers if this ends in .json, to be drawn elsewhere [report.html]",
    )
    parser.add_argument("--topk", type=int, default=2048, help="keys to keep per query [2048]")
    parser.add_argument("--rows", type=int, default=8, help="queries looked into, evenly spread [8]")
    parser.add_argument("--share", type=float, default=0.73, help="indexer's share of the prefill time [0.73]")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 2 for bad input with one line on stderr."""
    options = parse(arguments)
    try:
        from tqdm import tqdm

        if options.out.suffix != ".json":
            import vl_convert  # noqa: F401
    except ImportError as error:
        print(f"dosa.report: {error}; in a checkout of dosa: pip install '.[report]'", file=sys.stderr)
        return 2
    try:
        with tqdm(bar_format="{desc} ({elapsed})", disable=None) as bar:  # silent where there is no terminal
            tables = measure(options.files, options.topk, options.rows, options.share, bar.set_description_str)
        if options.out.suffix == ".json":
            save(options.out, tables)
        else:
            options.out.write_text(render(tables))
    except (Error, OSError) as error:
        print(f"dosa.report: {error}", file=sys.stderr)
        return 2
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
