"""What queues, watches and coordinators do with the options of their commands, and what is refused early."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.in_process import status_of

from bloomery.cli import coordinate, status, watch
from bloomery.cli.early_refusals import _refuse_unusable, refuse_missing
from bloomery.cli.run_inputs import existing_run, is_checkpoint, refuse_existing, run_directory
from bloomery.config.data import DataSection
from bloomery.errors import (
    BloomeryError,
    CheckpointError,
    CoordinatorError,
    DataError,
    StorageError,
    TrainingFailed,
)
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.schedulers.interface import JobState, QueuedJob


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *((59, "59 s"), (119, "119 s"), (120, "2 min"), (3599, "60 min")),
        *((3600, "1.0 h"), (86_399, "24.0 h"), (86_400, "1.0 d"), (1_080_000, "12.5 d")),
    ],
)
def test_durations_have_the_unit_that_suits_them(seconds: float, shown: str) -> None:
    assert status._duration(seconds) == shown


def test_moments_of_today_are_times_and_others_have_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    noon = time.mktime((2026, 3, 4, 12, 0, 0, 0, 0, -1))
    monkeypatch.setattr(
        status,
        "time",
        SimpleNamespace(
            time=lambda: noon,
            strftime=time.strftime,
            localtime=lambda moment=None: time.localtime(noon if moment is None else moment),
        ),
    )
    assert status._moment(noon - 3661) == "10:58:59" and status._moment(noon + 86_400) == "03-05 12:00"
    assert status._moment(None) == "" and status._ago(noon - 180) == "3 min ago"
    assert status._ago(noon + 9) == "0 s ago", "another clock is ahead"
    assert (status._loss(2.34567), status._loss("NaN"), status._loss(None)) == ("2.3457", "NaN", "-")


class Queue:
    """A scheduler that notes which jobs it is told to end."""

    def __init__(self, *states: JobState) -> None:
        self.ended = list[list[str]]()
        self._jobs = [
            QueuedJob(job=str(number), state=state, state_text="") for number, state in enumerate(states)
        ]

    def jobs(self, *, name: str, run: Path) -> list[QueuedJob]:
        assert name == "demo" and run.is_absolute()
        return self._jobs

    def cancel(self, jobs: list[str]) -> None:
        self.ended.append([*jobs])


def test_jobs_that_wait_are_ended_before_those_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.operate import submission

    over = next(state for state in JobState if state.is_over)
    waits = next(state for state in JobState if state.is_queued)
    queue = Queue(JobState.RUNNING, over, waits)
    recipe = SimpleNamespace(submit=None, run=SimpleNamespace(name="demo"))
    kept = SimpleNamespace(load=lambda: SimpleNamespace(recipe=recipe))
    monkeypatch.setattr(submission, "kept_submission", lambda rundir: kept)
    monkeypatch.setattr(submission, "scheduler_of", lambda submit, path: queue)
    run = str(RunDirectory(tmp_path).create().path)
    assert status.cancel([run, "--json"]) == 0 and queue.ended == [["2"], ["0"]]
    assert json.loads(capsys.readouterr().out)["cancelled"] == ["2", "0"]
    queue.ended.clear()
    assert status.cancel([run, "--queued"]) == 0 and queue.ended == [["2"], []]
    assert capsys.readouterr().out == "cancelled 2\n"


def test_jobs_are_ended_by_the_runs_own_recipe_though_the_submitted_file_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.config.convert import dump_recipe
    from bloomery.config.load import load_recipe
    from bloomery.operate import submission

    queue = Queue(JobState.RUNNING)
    monkeypatch.setattr(submission, "scheduler_of", lambda submit, path: queue)
    rundir = RunDirectory(tmp_path).create()
    gone = str(tmp_path / "gone.toml")
    submission.keep_submission(
        rundir, submission.Submission(recipe=gone, overrides=(), directory=str(tmp_path))
    )
    rundir.recipe.write_text(dump_recipe(load_recipe("demo", ["run.name=demo"]).recipe))
    assert status.cancel([str(rundir.path)]) == 0 and queue.ended == [[], ["0"]]


def test_addresses_of_alerts_come_from_the_words_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "to").write_text("# people\n json://one \n\n  #json://none\njson://two\n")
    monkeypatch.setenv("BLOOMERY_WATCH_TO", "json://three json://four")
    given = Namespace(to=["json://zero"], to_file=tmp_path / "to")
    assert watch._addresses(given) == [f"json://{name}" for name in ["zero", "one", "two", "three", "four"]]
    with pytest.raises(BloomeryError, match="cannot be read"):
        watch._addresses(Namespace(to=[], to_file=tmp_path / "none"))


@pytest.mark.parametrize(
    "refused", [StorageError("its journal is damaged", remedy=""), OSError(5, "no disk")]
)
def test_a_run_that_cannot_be_read_is_told_and_the_others_are_looked_at(
    refused: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked: list[str] = []

    def refuse() -> None:
        raise refused

    monkeypatch.setattr(watch, "EndSignal", lambda: SimpleNamespace(wait=lambda seconds: True))
    rundir = SimpleNamespace(path="runs/broken")
    watchers: Any = [
        SimpleNamespace(check=refuse, rundir=rundir),
        SimpleNamespace(check=lambda: looked.append("runs/well")),
    ]
    watch._watch(watchers, Namespace(ping=None, interval=15))
    assert looked == ["runs/well"] and f"runs/broken: {refused}" in caplog.text


def test_limits_of_a_watch_are_taken_in_their_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bloomery.operate.watch import watcher

    got: list[Any] = []

    def made(rundir: RunDirectory, deliver: Any, *, limits: Any, rules: Any) -> Any:
        got.append((limits, rules))
        return SimpleNamespace(
            close=lambda: got.append("closed"), check=lambda: None, incidents={}, rundir=rundir, state="well"
        )

    monkeypatch.setattr(watcher, "RunWatcher", made)
    run = str(RunDirectory(tmp_path).create().path)
    words = ["--once", "--pending-h", "0.5", "--idle-h", "2", "--disk-h", "3", "--escalate-min", "7"]
    assert watch.run([run, *words]) == 0
    (limits, rules), closed = got
    assert (limits.pending_s, limits.idle_s, limits.disk_s) == (1800.0, 7200.0, 10_800.0)
    assert rules.escalate_s == 420.0 and closed == "closed"
    assert watch.run([run, "--once"]) == 0
    (limits, rules), _ = got[2:]
    assert (limits.pending_s, limits.idle_s, limits.disk_s) == (3600.0, None, 86_400.0)
    assert rules.escalate_s == 1800.0
    got.clear()
    assert watch.run([run, run, "--once"]) == 0 and got[2:] == ["closed"] * 2
    assert got[0][1] is not got[1][1], "each run has alerts of its own"
    assert watch._parse([run, "--ping", "http://x/1"]).ping == "http://x/1"
    assert status_of("watch", run, "--json") == 2 == status_of("watch", run, "--ping", "example.org")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--renew",), "--renew goes with --init-certs"),
        (("--peers", "a"), "--peers goes with --init-certs"),
        (("--hosts", "a"), "--hosts goes with --init-certs"),
        (("--json",), "--json goes with --status"),
        (("--init-certs", "c", "--run", "x"), "needs the run and its peers"),
        (("--init-certs", "c", "--peers", "a"), "needs the run and its peers"),
        (("--grant",), "--grant needs --certificates"),
        (("--revoke", "a", "--run", "x"), "--revoke needs --certificates DIR and --run"),
        (("--revoke", "a", "--certificates", "c"), "--revoke needs --certificates DIR and --run"),
        (("--listen", "0.0.0.0:0"), "without certificates anybody could control"),
        (("--status", "a/b"), "--status"),
        (("--init-certs", "c", "--run", "x", "--peers", "ok,a b"), "--peers"),
    ],
)
def test_a_coordinator_that_lacks_an_option_or_certificates_is_refused(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of("coordinate", *words) == 2
    assert told in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_a_coordinator_that_refuses_connections_is_told_at_once_and_one_of_several_suffices() -> None:
    import socket

    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as open_one:
        closed.bind(("127.0.0.1", 0))
        refuses = f"http://127.0.0.1:{closed.getsockname()[1]}"
        listens = f"http://127.0.0.1:{open_one.getsockname()[1]}"
        with pytest.raises(CoordinatorError, match=refuses):
            coordinate._refuse_unless_listening([refuses])
        coordinate._refuse_unless_listening([refuses, listens])
        coordinate._refuse_unless_listening(
            [refuses, "http://localhost"]
        )  # the client takes etcd's usual port
    assert coordinate._listed(" a, b ,,c") == ("a", "b", "c")


def test_a_run_that_was_only_submitted_is_one_and_other_directories_are_not(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run")
    with pytest.raises(TrainingFailed, match="does not exist"):
        existing_run(rundir.path)
    rundir.path.mkdir()
    with pytest.raises(TrainingFailed, match="is no run directory"):
        existing_run(rundir.path)
    with pytest.raises(CheckpointError, match="neither a run directory"):
        run_directory(rundir.path)
    rundir.operations.touch()
    assert existing_run(rundir.path) == rundir
    rundir.checkpoints.mkdir()
    assert run_directory(rundir.path) == rundir
    assert is_checkpoint(Path("step-7")) and not is_checkpoint(rundir.path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    refuse_existing(tmp_path / "new")
    for there in (link, rundir.path):
        with pytest.raises(CheckpointError, match="exists already"):
            refuse_existing(there)


def test_what_a_start_lacks_is_told_before_it(tmp_path: Path) -> None:
    from bloomery.config.data import DatasetSection

    def data(**settings: Any) -> DataSection:
        return DataSection(sequence_length=8, **settings)

    with pytest.raises(DataError, match="Cannot read the tokenizer"):
        refuse_missing(data(tokenizer=str(tmp_path / "none.json")))
    for ending in ("idx", "bin"):
        pair = DatasetSection(name="x", path=str(tmp_path / "pair"))
        for field in ("datasets", "held_out_datasets"):
            with pytest.raises(DataError, match=rf"pair\.{ending}"):
                refuse_missing(data(**{field: (pair,)}))
        (tmp_path / f"pair.{ending}").touch()
    refuse_missing(data(datasets=(pair, DatasetSection(name="x", path="s3://bucket/there"))))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file is a file"):
        _refuse_unusable(tmp_path / "file" / "run")
    _refuse_unusable(tmp_path / "new" / "run")


class Called:
    """Stands for the functions of certificates and revocations, and keeps their calls in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        returned = {
            "init_certificates": SimpleNamespace(bundles=["certs/night/oslo"], is_server_renewed=False),
            "apply_access": 3,
            "restore_revocations": None,
            "revoke": ("77",),
        }
        for name, value in returned.items():
            monkeypatch.setattr(coordinate, name, self._noted(name, value))
        monkeypatch.setattr(coordinate, "root_access", lambda directory: f"root of {directory}")
        monkeypatch.setattr(coordinate, "accounts_in", lambda directory: f"accounts of {directory}")

    def _noted(self, name: str, value: object) -> Any:
        def call(*given: Any, **named: Any) -> object:
            self.calls.append((name, *given, named))
            return value

        return call


def test_certificates_are_made_for_the_peers_run_and_hosts_that_were_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = Called(monkeypatch)
    words = ["--init-certs", "certs", "--run", "night", "--peers", "oslo,lyon", "--days", "9", "--renew"]
    assert coordinate.run([*words, "--hosts", "a.example.org, 203.0.113.7"]) == 0
    given = {"run": "night", "peers": ("oslo", "lyon"), "days": 9, "renews": True}
    hosts = ("a.example.org", "203.0.113.7")
    assert called.calls == [("init_certificates", Path("certs"), {**given, "hosts": hosts})]
    told = capsys.readouterr().out
    assert "made    certs/night/oslo\n" in told and "elastic.certificates=…/oslo" in told
    assert coordinate.run(words) == 0 and called.calls[1][2]["hosts"] == ("127.0.0.1",)
    server = SimpleNamespace(certificate=Path("certs/coordinator/server.pem"))
    made = SimpleNamespace(bundles=[], server=server, is_server_renewed=True)
    monkeypatch.setattr(coordinate, "init_certificates", lambda *given, **named: made)
    capsys.readouterr()
    assert coordinate.run(words) == 0
    told = capsys.readouterr().out
    assert "every peer has its bundle already, in certs/night" in told
    assert "made    certs/coordinator/server.pem anew: start the coordinator again" in told


def test_who_was_revoked_stays_so_in_an_etcd_that_is_granted_accounts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = Called(monkeypatch)
    words = ["--certificates", "certs", "--endpoints", "https://a:2379,https://b:2379"]
    assert coordinate.run([*words, "--grant"]) == 0
    endpoints = ("https://a:2379", "https://b:2379")
    certs = Path("certs")
    assert called.calls == [
        ("apply_access", endpoints, "root of certs", "accounts of certs", {}),
        ("restore_revocations", certs, "root of certs", endpoints, {}),
    ]
    assert capsys.readouterr().out == "https://a:2379, https://b:2379: 3 peers may connect\n"
    with monkeypatch.context() as patch:
        patch.setattr(coordinate, "apply_access", lambda *given: 1)
        assert coordinate.run([*words, "--grant"]) == 0
    assert capsys.readouterr().out.endswith(": 1 peer may connect\n")
    clients: list[tuple[Any, ...]] = []

    class Client:
        """A client of the coordinator that says nothing."""

        def __init__(self, *given: Any) -> None:
            clients.append(given)

        def __enter__(self) -> Client:
            return self

        def __exit__(self, *given: object) -> None: ...

    monkeypatch.setattr(coordinate, "Etcd", Client)
    called.calls.clear()
    assert coordinate.run([*words, "--revoke", "lyon", "--run", "night"]) == 0
    ((name, directory, _, named),) = called.calls
    assert (name, directory, named) == ("revoke", certs, {"run": "night", "peer": "lyon"})
    assert clients == [(endpoints, "root of certs")]
    assert "revoked  lyon of night: its account, and its certificate 77\n" in capsys.readouterr().out
    monkeypatch.setattr(coordinate, "revoke", lambda *given, **named: ("77", "78"))
    assert coordinate.run([*words, "--revoke", "lyon", "--run", "night"]) == 0
    assert "its account, and its certificates 77, 78\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("adopted", "told"),
    [
        ({"round": -1}, "epochs go on at 8; no peer remembers a commit"),
        ({"peers_ahead": ("a", "b")}, "goes on after round 5, epoch 8, as told by a, b\n"),
        ({}, "goes on after round 5, epoch 8, as the coordinator knew it\n"),
        ({"holders": ()}, "No peer that is here holds the state of that round."),
    ],
)
def test_a_run_that_is_adopted_says_from_whom_and_whether_anybody_holds_it(
    adopted: dict[str, Any],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from contextlib import nullcontext

    given = {"round": 5, "epoch": 8, "peers_ahead": (), "holders": ("a",), **adopted}
    monkeypatch.setattr(
        coordinate, "adopt",
        lambda etcd, keys: SimpleNamespace(**given) if (etcd, keys.run) == ("etcd", "night") else None,
    )  # fmt: skip
    monkeypatch.setattr(coordinate, "_client", lambda options: nullcontext("etcd"))
    assert coordinate.run(["--adopt", "night"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("night: ") and told in said
    assert ("No peer" in said) == (given["holders"] == ())


def test_a_coordinator_gives_accounts_before_its_address_and_stops_its_etcd_however_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = Called(monkeypatch)
    monkeypatch.setattr(coordinate, "_handle_stop_signals", lambda: [2])
    member = SimpleNamespace(listens="https://0.0.0.0:2379")
    process = SimpleNamespace(pid=9, wait=lambda timeout: 7)
    server: Any = SimpleNamespace(
        endpoint="https://a:2379", member=member, process=process, stop=lambda: called.calls.append(("stop",))
    )

    def attended(*words: str, version: tuple[int, ...] = (3, 5, 6)) -> str:
        options = coordinate._parser().parse_args(["--data", str(tmp_path), *words])
        assert coordinate._attend(server, options, version) == 0
        return capsys.readouterr().out

    told = attended("--certificates", "certs")
    assert [call[0] for call in called.calls] == ["apply_access", "restore_revocations", "stop"]
    assert called.calls[0][1] == ["https://a:2379"] and called.calls[1][3] == ["https://a:2379"]
    assert f"etcd 3.5.6 at https://0.0.0.0:2379, data in {tmp_path}" in told
    assert "elastic.coordinator=https://a:2379" in told and "on other machines" in told
    assert told.endswith("stopped\n") and "may lose data" not in told
    called.calls.clear()
    assert "may lose data" in attended(version=(3, 5, 2)) and called.calls == [("stop",)]
    assert "may lose data" in attended(version=(3, 5, 0))
    for version in ((3, 5, 3), (3, 4, 30)):
        assert "may lose data" not in attended(version=version)
    monkeypatch.setattr(coordinate, "_handle_stop_signals", list)
    called.calls.clear()
    options = coordinate._parser().parse_args(["--data", str(tmp_path)])
    with pytest.raises(CoordinatorError, match="etcd ended by itself, with status 7"):
        coordinate._attend(server, options, (3, 5, 6))
    assert called.calls == [("stop",)]


def test_a_coordinator_takes_over_an_etcd_or_starts_one_with_its_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from contextlib import nullcontext

    monkeypatch.chdir(tmp_path)
    left: list[Any] = [None]
    got: list[tuple[Any, ...]] = []
    monkeypatch.setattr(coordinate, "find_etcd", lambda: "etcd")
    monkeypatch.setattr(coordinate, "version_of", lambda program: (3, 5, 6))
    monkeypatch.setattr(coordinate, "raise_descriptor_limit", lambda: got.append(("limit",)))
    monkeypatch.setattr(coordinate, "server_certificates", lambda directory: f"files of {directory}")
    monkeypatch.setattr(coordinate, "serving", lambda data: nullcontext(got.append(("serving", data))))
    monkeypatch.setattr(coordinate, "take_over", lambda data, **given: got.append((data, given)) or left[0])
    monkeypatch.setattr(
        coordinate, "start_single", lambda data, **given: got.append((data, given)) or "started"
    )
    monkeypatch.setattr(coordinate, "_attend", lambda server, options, version: got.append((server, version)))
    coordinate.run(["--data", "d", "--certificates", "c", "--listen", "0.0.0.0:99"])
    where = {"host": "0.0.0.0", "port": 99, "certificates": "files of c"}
    assert got[:3] == [("limit",), ("serving", Path("d")), (Path("d"), where)]
    assert got[3:] == [(Path("d"), {**where, "program": "etcd"}), ("started", (3, 5, 6))]
    got.clear()
    left[0] = SimpleNamespace(process=SimpleNamespace(pid=4321))
    coordinate.run([])
    where = {"host": "127.0.0.1", "port": 2379, "certificates": None}
    assert got[2:] == [(Path("coordinator"), where), (left[0], (3, 5, 6))]
    assert "process 4321" in capsys.readouterr().out
