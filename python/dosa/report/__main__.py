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


def wrong(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, found before minutes go by; None: nothing."""
    if options.rows < 0:
        return f"--rows is {options.rows}; allowed are 0 (all) and more"
    if not 0 <= options.share <= 1:
        return f"--share is {options.share}; allowed are 0 to 1"
    if not options.out.parent.is_dir():
        return f"--out is {options.out}; there is no directory {options.out.parent}"
    if options.out.exists() and any(file.exists() and file.samefile(options.out) for file in options.files):
        return f"--out is {options.out}, a file that is read; give another one"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0, or 2 for bad input with one line on stderr."""
    options = parse(arguments)
    if error := wrong(options):
        print(f"dosa.report: {error}", file=sys.stderr)
        return 2
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
