"""`bloomery data fetch`: the files of one share from a store elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.bars import data_bar
from bloomery.cli.data_pairs import tell

if TYPE_CHECKING:
    from bloomery.data.fetchplan import Shard

_ABOUT = """\
Bring the files of one share of some datasets here, so that every rank can run without a network.

A SOURCE is NAME=ADDRESS, or an ADDRESS, named after its last part: s3://, gs://, http(s)://, file://, or a
directory. Over http(s) a SHA256SUMS at the address lists its files; elsewhere it gives their checksums where
it exists. Credentials come from the environment (AWS_…, GOOGLE_…).

How many shares there are is fixed for a run; each node or peer owns one, whatever its ranks. A .bin/.idx pair
stays together. The same command goes on where it was broken off."""

_EXAMPLES = """\
examples:
  bloomery data fetch en=s3://corpus/en code=s3://corpus/code --to data --shares 8 --share 3 --dry-run
  bloomery data fetch en=s3://corpus/en code=s3://corpus/code --to data --ratio en=0.9 --ratio code=0.1
  bloomery data fetch https://host/corpus --to data --include '*.parquet' --limit 4"""


def add_parser(commands: Any) -> None:  # Any: argparse names no type for it
    """Add the command to the table of `bloomery data`."""
    parser = commands.add_parser(
        "fetch",
        help="the files of one share, from s3://, gs://, http(s):// or file://",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="[NAME=]ADDRESS of a dataset")
    parser.add_argument("--to", type=Path, required=True, help="directory to fetch into")
    parser.add_argument("--shares", type=int, default=1, help="shares of the run (default: 1)")
    parser.add_argument("--share", type=int, default=0, help="the one to fetch, from 0 (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of files (default: 0)")
    parser.add_argument(
        "--ratio", action="append", default=[], metavar="NAME=PART", help="bytes of a dataset in the whole"
    )
    parser.add_argument("--include", action="append", default=[], metavar="GLOB", help="only these names")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="not these names")
    parser.add_argument("--limit", type=int, help="at most so many shards of each dataset")
    parser.add_argument("--threads", type=int, default=8, help="files at once (default: 8)")
    parser.add_argument("--dry-run", action="store_true", help="list files and sizes, fetch nothing")
    parser.add_argument("--anew", action="store_true", help="replace another share that is there")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_fetch)


def _fetch(options: argparse.Namespace) -> int:
    from bloomery.data.fetch import fetch, refuse_other_share
    from bloomery.data.fetchplan import Wanted, plan_share
    from bloomery.data.remote import Remote

    remotes = {name: Remote(address) for name, address in _named(options.sources).items()}
    wanted = Wanted(
        shares=options.shares,
        share=options.share,
        seed=options.seed,
        ratios=_ratios(options.ratio),
        include=tuple(options.include),
        exclude=tuple(options.exclude),
        limit=options.limit,
    )
    if not options.anew:
        refuse_other_share(options.to, remotes, wanted)
    shards = plan_share({name: remote.files() for name, remote in remotes.items()}, wanted)
    facts: dict[str, Any] = {
        "to": str(options.to),
        "shares": options.shares,
        "share": options.share,
        "datasets": _sizes(shards),
        "bytes": sum(shard.size_bytes for shard in shards),
    }
    lines = [
        f"{name}: {one['shards']:,} shards, {one['files']:,} files, {one['bytes'] / 1e6:,.1f} MB"
        for name, one in facts["datasets"].items()
    ]
    if options.dry_run:
        files = [
            (f"{shard.dataset}/{file.path}", file.size_bytes) for shard in shards for file in shard.files
        ]
        facts["files"] = [{"path": path, "bytes": size} for path, size in files]
        lines = [
            *(f"{size:>16,}  {path}" for path, size in files),
            *lines,
            "Nothing was fetched (--dry-run).",
        ]
        return tell(facts, lines, as_json=options.json)
    with data_bar(shown=not options.json) as progress:
        done = fetch(
            shards, remotes, options.to, wanted, threads=options.threads, anew=options.anew, progress=progress
        )
    facts |= {
        "fetched_files": done.files,
        "fetched_bytes": done.size_bytes,
        "kept_files": done.kept_files,
        "removed_files": done.removed_files,
    }
    lines.append(
        f"{options.to}: share {options.share} of {options.shares}; {done.files:,} files fetched "
        f"({done.size_bytes / 1e6:,.1f} MB), {done.kept_files:,} there before, {done.removed_files:,} removed"
    )
    return tell(facts, lines, as_json=options.json)


def _sizes(shards: list[Shard]) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    for shard in shards:
        one = sizes.setdefault(shard.dataset, {"shards": 0, "files": 0, "bytes": 0})
        one["shards"] += 1
        one["files"] += len(shard.files)
        one["bytes"] += shard.size_bytes
    return sizes


def _named(sources: list[str]) -> dict[str, str]:
    from bloomery.errors import DataError

    named: dict[str, str] = {}
    for source in sources:
        name, equals, address = source.partition("=")
        if not equals or "/" in name:
            name, address = source.rstrip("/").removesuffix("/SHA256SUMS").rpartition("/")[2], source
        if name in named or name in ("", ".", ".."):
            raise DataError(
                f"The source {source!r} has no name of its own ({name!r}).",
                remedy="Give it one: NAME=ADDRESS.",
            )
        named[name] = address
    return named


def _ratios(given: list[str]) -> dict[str, float]:
    from bloomery.errors import DataError

    ratios = {}
    for one in given:
        name, _, part = one.partition("=")
        try:
            ratios[name] = float(part)
        except ValueError:
            raise DataError(
                f"--ratio {one} is not NAME=PART.", remedy="For instance --ratio en=0.9."
            ) from None
    return ratios
