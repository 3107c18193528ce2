"""What the words of a command line become: numbers, paths, spans and targets, and how amounts are shown."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli import peer, train
from bloomery.cli.argument_values import (
    MOST,
    amount,
    json_file,
    page_file,
    pair_prefix,
    picture_file,
    read_endpoint,
    whole,
)
from bloomery.cli.arguments import ProgressLines, parsed_with_target, run_subcommand
from bloomery.cli.control import _span
from bloomery.cli.tables import size_words
from bloomery.errors import BloomeryError


def refused(parse: Callable[[str], Any], text: str) -> str:
    with pytest.raises(ArgumentTypeError) as error:
        parse(text)
    return str(error.value)


def test_whole_numbers_are_taken_up_to_both_bounds_and_not_beyond() -> None:
    parse = whole(3, 1200)
    assert [parse(text) for text in ("3", "1200", "007")] == [3, 1200, 7]
    for text in ("2", "-3", "3.0", "", "x", "1e3"):
        assert refused(parse, text) == f"{text!r} is not a whole number of at least 3"
    assert "at most 1,200" in refused(parse, "1201")
    assert whole(0)(str(MOST)) == MOST and "too much" in refused(whole(0), str(MOST + 1))


def test_amounts_are_finite_and_keep_to_their_bounds() -> None:
    assert amount("x", above=0)("0.001") == 0.001 and amount("x", least=0)("0") == 0.0
    for text in ("0", "-1", "nan", "inf", "-inf", "x"):
        assert refused(amount("a number above 0", above=0), text) == f"{text!r} is not a number above 0"
    assert refused(amount("x", least=0), "-0.001") and amount("x")("-7.5") == -7.5


@pytest.mark.parametrize("text", ["node", "node:", ":5", "node:0", "node:65536", "node:x", "node:-1"])
def test_an_endpoint_without_a_host_or_a_port_is_refused(text: str) -> None:
    with pytest.raises(BloomeryError, match="is not HOST:PORT"):
        read_endpoint(text)


def test_an_endpoint_is_a_host_and_a_port() -> None:
    assert read_endpoint("node-1:65535") == ("node-1", 65535)
    assert read_endpoint("fe80::1:29400") == ("fe80::1", 29400) and read_endpoint("a:1") == ("a", 1)


def test_files_to_write_have_their_ending_and_a_directory(tmp_path: Path) -> None:
    for ending in ("png", "SVG", "pdf"):
        assert picture_file(f"{tmp_path}/x.{ending}") == tmp_path / f"x.{ending}"
    assert page_file(f"{tmp_path}/x.htm") == tmp_path / "x.htm"
    assert "ends in none of .html, .htm" in refused(page_file, f"{tmp_path}/x.png")
    assert "no directory" in refused(picture_file, f"{tmp_path}/none/x.png")
    assert pair_prefix("data/train") == Path("data/train")
    for nameless in ("..", "data/..", "/", "."):
        assert "names no file" in refused(pair_prefix, nameless)
    kept, other = tmp_path / "kept.json", tmp_path / "other.txt"
    kept.touch()
    other.touch()
    assert json_file(str(kept)) == kept and json_file(f"{tmp_path}/new") == tmp_path / "new"
    assert "no .json" in refused(json_file, str(other)) and "directory" in refused(json_file, str(tmp_path))
    (tmp_path / "prepared.json").touch()
    assert "data of a run" in refused(json_file, str(kept))


def test_a_span_is_two_numbers_of_which_the_first_is_lower() -> None:
    assert _span("4_096:8192") == range(4096, 8192) and _span("0:1") == range(1)
    for text in ("5:5", "6:5", "5", ":5", "5:", "-1:5", "a:b"):
        assert "is not FIRST:END" in refused(_span, text)
    assert _span(f"0:{MOST}").stop == MOST and "too much" in refused(_span, f"0:{MOST + 1}")


def test_sizes_change_their_unit_at_thousands() -> None:
    shown = [size_words(count) for count in (0, 999, 1000, 999_949, 1.5e6, 2.25e9, 999.9e9, 3.4e12, 5e15)]
    assert shown == [
        "0 B",
        "999 B",
        "1.0 kB",
        "999.9 kB",
        "1.5 MB",
        "2.2 GB",
        "999.9 GB",
        "3.4 TB",
        "5000.0 TB",
    ]


def test_a_target_is_the_second_word_or_an_option_and_never_both(capsys: pytest.CaptureFixture[str]) -> None:
    def parsed(*words: str, required: bool = True) -> Path | None:
        options = ArgumentParser()
        options.add_argument("path")
        args = parsed_with_target(options, [*words], metavar="TARGET", about="where", required=required)
        to: Path | None = args.to
        return to

    assert parsed("a", "b") == Path("b") == parsed("a", "--to", "b") and parsed("a", required=False) is None
    for words, told in (
        (("a", "b", "--to", "c"), "two targets to write to: b and c"),
        (("a",), "is missing"),
    ):
        with pytest.raises(SystemExit) as ended:
            parsed(*words)
        assert ended.value.code == 2 and told in capsys.readouterr().err


def test_a_part_of_a_command_gets_the_words_after_its_name_and_its_status_is_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    got: list[list[str]] = []

    def first(words: list[str]) -> int:
        got.append(words)
        return 7

    parts = {"first": (first, "does the first"), "other": (lambda words: 3, "does the other")}
    assert run_subcommand("both", ["first", "a", "--b"], parts, about="Two parts.") == 7
    assert got == [["a", "--b"]] and run_subcommand("both", ["other"], parts, about="") == 3
    assert run_subcommand("both", ["--help"], parts, about="Two parts.", examples="both first x") == 0
    told = capsys.readouterr().out
    assert "  first  does the first\n  other  does the other" in told and "  both first x" in told
    assert run_subcommand("both", [], parts, about="") == 2
    assert run_subcommand("both", ["--version"], parts, about="") == 0
    capsys.readouterr()
    assert run_subcommand("both", ["frist"], parts, about="") == 2
    assert "Did you mean `bloomery both first`?" in capsys.readouterr().err
    assert run_subcommand("both", ["zzz"], parts, about="") == 2
    assert "Commands: first, other." in capsys.readouterr().err


def test_lines_of_progress_come_every_ten_seconds_with_share_amount_and_note() -> None:
    said, now = list[str](), [100.0]
    lines = ProgressLines(said.append, clock=lambda: now[0])
    for seconds, call in (
        (9.9, ("reading", 1, 8, "files")),
        (0.1, ("reading", 2_500_000, 10_000_000, "bytes", "3 a second")),
        (9.9, ("reading", 3, 8, "files")),
        (0.2, ("joining", 1234, 0, "documents")),
    ):
        now[0] += seconds
        lines(*call)  # type: ignore[arg-type]
    assert said == ["reading: 2.5 MB of 10.0 MB (25%), 3 a second", "joining: 1,234 documents"]


def test_a_run_directory_may_be_named_by_an_option_that_torchrun_leaves_alone() -> None:
    for parse in (train._parse, peer._parse):
        assert parse(["demo", "--rundir", "x"]).run == "x" == parse(["demo", "--run", "x"]).run
