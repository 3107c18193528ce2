import errno
import importlib
import inspect
import io
import os
import subprocess
import sys
from types import ModuleType

import pytest

from bloomery import cli
from bloomery.cli import commit_of
from bloomery.cli.arguments import ProgressLines
from bloomery.errors import BloomeryError, RankLost, StorageError


def with_command(monkeypatch, run):
    """Make `bloomery try` run a function."""
    module = ModuleType("a_command")
    module.run = run
    monkeypatch.setitem(sys.modules, "a_command", module)
    monkeypatch.setattr(cli, "COMMANDS", {**cli.COMMANDS, "try": ("a_command:run", "tried")})


def raising(error):
    def run(arguments):
        raise error

    return run


def python(code, *arguments, **options):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_help_lists_every_command_with_examples(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert sorted(" ".join(cli.GROUPS.values()).split()) == sorted(cli.COMMANDS)  # each is in one group
    for name, (_, line) in cli.COMMANDS.items():
        assert f"  {name} " in shown
        assert line in shown
    assert "examples:" in shown
    assert all(len(line) <= 100 for line in shown.splitlines())


def test_help_of_a_command_may_be_asked_for_before_its_name(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["help", "plot"])
    assert ended.value.code == 0 and "usage: bloomery plot" in capsys.readouterr().out


def test_no_command_shows_the_help_and_is_an_error(capsys):
    assert cli.main([]) == 2
    assert "begin:" in capsys.readouterr().out


def test_help_imports_next_to_nothing():
    """So it answers at once: how fast is measured by benchmarks/plan.py."""
    code = (
        "import sys; from bloomery.cli import main; status = main(['--help']);"
        "heavy = {'torch', 'numpy', 'argparse', 'dataclasses', 'rich', 'transformers'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy else status)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_starts_without_the_compiler_of_torch():
    """It takes as long to load as all else of a start, and most runs never need it."""
    code = (
        "import sys, bloomery.train.assemble, bloomery.train.loop;"
        "heavy = {'torch._dynamo', 'torch._inductor', 'sympy', 'transformers'} & set(sys.modules);"
        "sys.exit(f'{heavy}' if heavy else 0)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_checking_a_recipe_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from bloomery.cli import main; status = main(['config', 'check', 'demo']);"
        "heavy = {'torch', 'numpy'} & set(sys.modules); sys.exit(f'{heavy}' if heavy else status)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_command_of_the_table_names_a_function_of_one_argument():
    for target, _ in cli.COMMANDS.values():
        module, _, function = target.partition(":")
        assert list(inspect.signature(getattr(importlib.import_module(module), function)).parameters) == [
            "arguments"
        ], target


def test_an_unknown_command_suggests_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "Did you mean `bloomery train`?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "Commands: demo" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_the_packages(word, capsys):
    assert cli.main([word]) == 0
    assert capsys.readouterr().out.startswith("bloomery 0.")


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_that_is_asked_for_is_no_error(word, capsys):
    assert cli.main([word]) == 0
    assert "begin:" in capsys.readouterr().out


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 5.0)])
def test_a_clone_without_git_has_a_version_without_a_commit(error, tmp_path, monkeypatch):
    def refused(*command, **how):
        raise error

    (tmp_path / ".git").mkdir()
    monkeypatch.setattr("subprocess.run", refused)
    assert commit_of(tmp_path / "src" / "bloomery") == ""


def test_the_version_names_the_commit_of_a_wheel_and_of_a_clone(tmp_path):
    package = tmp_path / "src" / "bloomery"
    package.mkdir(parents=True)
    assert commit_of(package) == ""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (package / "module.py").write_text("")
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    assert commit_of(package) == commit[:12]
    (package / "module.py").write_text("changed")
    assert commit_of(package) == f"{commit[:12]}-dirty"
    (package / "commit.txt").write_text("0123456789ab\n")
    assert commit_of(package) == "0123456789ab"


def test_a_command_gets_its_arguments_and_gives_its_status(monkeypatch):
    seen = []

    def run(arguments):
        seen.append(arguments)
        return 7

    with_command(monkeypatch, run)
    assert cli.main(["try", "a", "--b"]) == 7
    assert seen == [["a", "--b"]]


@pytest.mark.parametrize("error", [BloomeryError, StorageError])
def test_what_a_user_can_fix_is_a_message_with_its_remedy_and_no_traceback(monkeypatch, capsys, error):
    with_command(monkeypatch, raising(error("the disk is full", remedy="Make room.")))
    assert cli.main(["try"]) == 1
    told = capsys.readouterr().err
    assert told == "bloomery try: the disk is full\n  Make room.\n"


def test_a_file_that_the_system_refuses_is_a_message_with_its_path(monkeypatch, capsys):
    with_command(monkeypatch, raising(FileNotFoundError(errno.ENOENT, "No such file", "/proc/exported")))
    assert cli.main(["try"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("bloomery try: The command failed at /proc/exported: No such file\n  ")
    with_command(monkeypatch, raising(OSError(errno.ECONNREFUSED, "refused")))
    with pytest.raises(ConnectionRefusedError):
        cli.main(["try"])


@pytest.mark.parametrize(
    "error",
    [StorageError("the disk is full"), FileNotFoundError(errno.ENOENT, "No such file", "/proc/exported")],
)
def test_what_was_printed_before_an_error_stands_above_it(monkeypatch, error):
    both = io.BytesIO()

    def run(arguments):
        print("half of it is done")
        raise error

    with_command(monkeypatch, run)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(both, encoding="utf-8"))
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(both, encoding="utf-8", write_through=True))
    assert cli.main(["try"]) == 1
    assert both.getvalue().startswith(b"half of it is done\nbloomery try: ")


def test_where_the_network_is_forbidden_the_libraries_of_a_command_are_told_too(monkeypatch):
    seen = []
    with_command(monkeypatch, lambda arguments: seen.append(os.environ.get("HF_HUB_OFFLINE")) or 0)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for switch in ("0", "1"):
        monkeypatch.setenv("BLOOMERY_OFFLINE", switch)
        assert cli.main(["try"]) == 0
    assert seen == [None, "1"]


def test_what_nobody_expected_keeps_its_traceback(monkeypatch):
    with_command(monkeypatch, raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["try"])


def test_ctrl_c_is_one_line_and_status_130(monkeypatch, capsys):
    with_command(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["try"]) == 130
    assert capsys.readouterr().err == "bloomery: interrupted\n"


def test_a_process_that_was_started_for_one_training_ends_at_once_when_it_is_interrupted(monkeypatch):
    ended = []
    with_command(monkeypatch, raising(KeyboardInterrupt()))
    monkeypatch.setattr("os._exit", ended.append)
    monkeypatch.setattr("sys.argv", ["bloomery", "try"])
    monkeypatch.delenv("BLOOMERY_ENVIRONMENT", raising=False)
    assert cli.main() == 130 and not ended
    monkeypatch.setenv("BLOOMERY_ENVIRONMENT", "own")
    assert cli.main(["try"]) == 130 and not ended, "it is called by a program"
    assert cli.main() == 130 and ended == [130]


def test_a_lost_rank_is_told_by_its_launcher_where_it_has_one(monkeypatch, capsys):
    with_command(monkeypatch, raising(RankLost("rank 3 is gone", remedy="Start it again.")))
    monkeypatch.delenv("BLOOMERY_LAUNCHER", raising=False)
    assert cli.main(["try"]) == RankLost.exit_status
    assert capsys.readouterr().err == "bloomery try: rank 3 is gone\n  Start it again.\n"
    monkeypatch.setenv("BLOOMERY_LAUNCHER", "77")
    assert cli.main(["try"]) == RankLost.exit_status and capsys.readouterr().err == ""
    with_command(monkeypatch, raising(StorageError("the disk is full", remedy="Make room.")))
    assert cli.main(["try"]) == 1 and "the disk is full" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error_message():
    # Closed before the command writes: a pipe would hold the whole page.
    code = (
        "import os, subprocess, sys; read, write = os.pipe(); os.close(read);"
        "done = subprocess.run([sys.executable, '-m', 'bloomery', 'config', 'reference'],"
        " stdout=write, stderr=subprocess.PIPE);"
        "sys.stderr.buffer.write(done.stderr); sys.exit(done.returncode)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_behind_the_output_is_told_in_a_line():
    command = ["sh", "-c", 'exec "$0" -m bloomery --help > /dev/full', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = "bloomery: what it prints cannot be written: No space left on device\n  Free"
    assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_behind_a_file_without_a_name_is_told_in_a_line(number, monkeypatch, capsys):
    with_command(monkeypatch, raising(OSError(number, os.strerror(number))))
    assert cli.main(["try"]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"bloomery: {os.strerror(number)}: a file that it wrote is not whole")
    with_command(monkeypatch, raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        cli.main(["try"])


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "bloomery", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("bloomery ")


@pytest.mark.parametrize("words", ["--help >&-", "--help"])
def test_an_output_that_is_closed_or_lacks_a_sign_is_no_error(words):
    command = ["sh", "-c", f'exec "$0" -m bloomery {words}', sys.executable]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"" if ">&-" in words else b"usage: bloomery COMMAND ?")


def test_progress_off_a_terminal_is_a_line_each_ten_seconds():
    lines, now = [], [0.0]
    progress = ProgressLines(lines.append, clock=lambda: now[0])
    for second in range(0, 35):
        now[0] = float(second)
        progress("tokenising", second * 1_000_000, 40_000_000, "bytes", note="5 tokens/s")
        progress("reading", second, 0, "files")
    shares = ((10, "25%"), (20, "50%"), (30, "75%"))
    assert lines == [f"tokenising: {done}.0 MB of 40.0 MB ({share}), 5 tokens/s" for done, share in shares]
