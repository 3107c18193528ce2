"""`bloomery data fetch`: downloads one share of datasets' files from an object store or the Hub."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import not_negative, positive, whole
from bloomery.cli.arguments import data_bar
from bloomery.cli.data_pairs import print_result

if TYPE_CHECKING:
    from bloomery.data.remote_files import FileSource, Shard

_ABOUT = """\
Download the files of one share of some datasets, so that every rank can train without a network.

A SOURCE is NAME=ADDRESS, or just an ADDRESS, which is named after its last part. An address is s3://, gs://,
az://, http(s)://, file:// or a directory. Over http(s), a file SHA256SUMS at the address must list the files;
at other addresses it is optional and gives their checksums. hf:OWNER/NAME is a dataset of the Hugging Face
Hub, or of the mirror that HF_ENDPOINT names; hf:OWNER/NAME@REVISION:FOLDER is some of it. Credentials come
from the environment (AWS_…, GOOGLE_…, AZURE_STORAGE_…, HF_TOKEN).

The number of shares is fixed for a run. Each node or peer owns one share, however many ranks it has. A
.bin/.idx pair is never divided. After an interruption the same command resumes."""

_EXAMPLES = """\
examples:
  bloomery data fetch en=s3://corpus/en code=s3://corpus/code --to data --shares 8 --share 3 --dry-run
  bloomery data fetch en=s3://corpus/en code=s3://corpus/code --to data --ratio en=0.9 --ratio code=0.1
  bloomery data fetch https://host/corpus --to data --include '*.parquet' --limit 4
  bloomery data fetch web=hf:HuggingFaceFW/fineweb:sample/10BT --to data --include '*.parquet'"""


def add_parser(commands: Any) -> None:  # Any: argparse names no type for it
    """Add the command to the table of `bloomery data`."""
    parser = commands.add_parser(
        "fetch",
        help="download one share of some datasets from s3://, gs://, az://, http(s)://, file:// or hf:",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="[NAME=]ADDRESS of a dataset")
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="directory to download into")
    parser.add_argument(
        "--shares", metavar="N", type=positive, default=1, help="number of shares of the run (default: 1)"
    )
    parser.add_argument(
        "--share",
        metavar="I",
        type=not_negative,
        default=0,
        help="the share to download, from 0 (default: 0)",
    )
    parser.add_argument(
        "--seed", metavar="N", type=int, default=0, help="seed of the order of files (default: 0)"
    )
    parser.add_argument(
        "--ratio",
        action="append",
        default=[],
        metavar="NAME=PART",
        help="part of all bytes that a dataset shall have, for instance en=0.9 (once for each dataset)",
    )
    parser.add_argument(
        "--include", action="append", default=[], metavar="GLOB", help="take only files with these names"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="GLOB", help="leave out files with these names"
    )
    parser.add_argument("--limit", metavar="N", type=positive, help="take at most N shards of each dataset")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=whole(1, 1024),
        default=8,
        help="files to download at once (default: 8)",
    )
    parser.add_argument("--dry-run", action="store_true", help="list files and sizes, and download nothing")
    parser.add_argument("--anew", action="store_true", help="replace another share that DIR holds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(command=_fetch)


def _fetch(options: argparse.Namespace) -> int:
    from bloomery.data.fetch import fetch, refuse_other_share
    from bloomery.data.remote_files import FetchRequest, plan_share

    remotes = {name: _opened(address) for name, address in _named(options.sources).items()}
    request = FetchRequest(
        shares=options.shares,
        share=options.share,
        seed=options.seed,
        ratios=_ratios(options.ratio),
        include=tuple(options.include),
        exclude=tuple(options.exclude),
        limit=options.limit,
    )
    if not options.anew:
        refuse_other_share(options.to, remotes, request)
    shards = plan_share({name: remote.files() for name, remote in remotes.items()}, request)
    facts: dict[str, Any] = {
        "to": str(options.to),
        "shares": options.shares,
        "share": options.share,
        "datasets": _sizes(shards),
        "bytes": sum(shard.size_bytes for shard in shards),
    }
    lines = [
        f"{name}: {size['shards']:,} shards, {size['files']:,} files, {size['bytes'] / 1e6:,.1f} MB"
        for name, size in facts["datasets"].items()
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
        return print_result(facts, lines, as_json=options.json)
    with data_bar(shown=not options.json) as progress:
        done = fetch(
            shards,
            remotes,
            options.to,
            request,
            threads=options.threads,
            anew=options.anew,
            progress=progress,
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
    return print_result(facts, lines, as_json=options.json)


def _opened(address: str) -> FileSource:
    from bloomery.config.data import HUB_PREFIX
    from bloomery.data.hub_dataset import HubDataset
    from bloomery.data.remote_files import Remote

    if address.startswith(HUB_PREFIX):
        return HubDataset(address.removeprefix(HUB_PREFIX))
    return Remote(address)


def _sizes(shards: list[Shard]) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    for shard in shards:
        size = sizes.setdefault(shard.dataset, {"shards": 0, "files": 0, "bytes": 0})
        size["shards"] += 1
        size["files"] += len(shard.files)
        size["bytes"] += shard.size_bytes
    return sizes


def _named(sources: list[str]) -> dict[str, str]:
    from bloomery.config.data import HUB_PREFIX
    from bloomery.errors import UsageError

    named: dict[str, str] = {}
    for source in sources:
        name, equals, address = source.partition("=")
        if not equals or "/" in name:
            name, address = source.rstrip("/").removesuffix("/SHA256SUMS").rpartition("/")[2], source
            if source.startswith(HUB_PREFIX):
                name = re.split("[@:]", source.removeprefix(HUB_PREFIX))[0].rpartition("/")[2]
        if name in named or name in ("", ".", ".."):
            raise UsageError(
                f"The source {source!r} has no name of its own ({name!r}).",
                remedy="Give it one: NAME=ADDRESS.",
            )
        named[name] = address
    return named


def _ratios(arguments: list[str]) -> dict[str, float]:
    from bloomery.errors import UsageError

    ratios = {}
    for argument in arguments:
        name, _, part = argument.partition("=")
        try:
            ratios[name] = float(part)
        except ValueError:
            raise UsageError(
                f"--ratio {argument} is not NAME=PART.", remedy="For instance --ratio en=0.9."
            ) from None
    return ratios
