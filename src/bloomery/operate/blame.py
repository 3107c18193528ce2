"""Finds the cause of a failure, as a pure function of the evidence that was collected."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bloomery.errors import RankLost
from bloomery.operate.collective_timeout import REPORTS_TIMEOUT, diagnose_timeout
from bloomery.operate.diagnosis import Cause, Culprit, Diagnosis
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.known_texts import (
    DRIVER_OUT_OF_MEMORY,
    GPU_MEMORY,
    HANDLED_ERROR,
    KNOWN_TEXTS,
    LINK_DOWN,
    MAYBE_TIMEOUT,
    MOST_CHARACTERS,
    NCCL_NETWORK,
    bad_gpu_of,
    killed_process,
    transient_cause_of,
)
from bloomery.operate.last_exception import (
    exception_of,
    is_store_client_error,
    log_of_exception,
    possible_causes,
)
from bloomery.operate.process_tree import signal_name

_PYTHON_KILLED = re.compile(r"Killed process \d+ \((?:python|pt_)")
"""A process that a rank may have started: torch's data workers call themselves pt_data_worker."""
_CHILD_KILLED = re.compile(
    # by number: of Python, which has signals below 0, and of shells, which add 128
    r"(?:\bstatus|\bcode|exit ?code):? (?:-(?:[46-9]|11)|13[2-79])\b"
    r"|\bsignal 9\b|SIGKILL|was killed|died with <Signals|terminated with signal"
    r"|\{SIG\w+\(-"  # of loky
    r"|terminated abruptly|died unexpectedly|exited unexpectedly"
)
_BY_SIGBUS = re.compile(r"SIGBUS|\b[Bb]us error|\bsignal 7\b|(?:status|code):? (?:-7|135)\b")
_DISK_FAILED = re.compile(r"(?i:\bI/O error\b|I/O Cmd.*error|server \S+ not responding)")
"""What the kernel says where a page of a mapped file cannot be read, which ends the process by SIGBUS."""
_KILLED_BY_SYSTEMD = re.compile(r"systemd-oomd\[\d+\]: Killed ")
_NAMES_PATH = re.compile(r"['\"( ]/\S|\bdisk space\b|StorageFull\b|ephemeral-storage")
_ROOMY_GIB = 4.0
"""Free space in /dev/shm after which a bus error is not blamed on its size."""
_CONSEQUENCES = re.compile(
    r"RankLost|ReportedElsewhere|Connection closed by peer|Connection reset by peer|ncclRemoteError"
    r"|Broken pipe|Another rank of this run is gone|The agent of this rank is gone"
    r"|remote process exited or there was a network error|network error or a remote process exiting"
    r"|NCCL communicator was aborted on rank \d+\.?\s*$"
)
_OF_THE_AGENT = "The agent of this rank is gone"
_OF_HTTP = re.compile(r"ProtocolError|HTTPS?Connection|urllib3|aiohttp|httpx|botocore|Request ID")
"""A client's connection to a server that is no rank."""
_OF_A_SOCKET = re.compile(r"^(?:ConnectionResetError|BrokenPipeError)\b")
"""What Python raises of its own sockets; ranks are connected by libraries that raise something else."""
_DEALT_WITH = {Cause.NETWORK: HANDLED_ERROR, Cause.STORAGE: HANDLED_ERROR}
_ABORTED_BY_TORCH = re.compile(
    r"watchdog thread terminated with exception: (?!(?:CUDA|HIP) error)|taking the entire process down"
    r"|Terminating the process after attempting to dump debug info|NCCL operations have failed or timed out"
    r"|dump signal due to a collective timeout|detected by watchdog at work"
)
"""What torch prints on a rank that it aborts because of others, or because of a time-out."""
_ABORTED_BY_ITS_GPU = re.compile(r"watchdog thread terminated with exception: (?:CUDA|HIP) error")
_OTHERS_HOLD_IT = re.compile(r"Process \d+ has [\d.]+ [GM]iB memory in use")
_SCHEDULER = {
    "PREEMPTED": Cause.PREEMPTED,
    "TIMEOUT": Cause.PREEMPTED,
    "NODE_FAIL": Cause.NODE_LOST,
    "OUT_OF_MEMORY": Cause.OOM_KILLER,
}
_OF_SHELLS = {128 + number: -number for number in (4, 5, 6, 7, 8, 9, 11, 31)}
"""What a shell makes of a child that a signal ended; 130 and 143 are ends that somebody asked for."""
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS}


def diagnose(evidence: FailureEvidence) -> Diagnosis:
    """Return the cause that explains the most: hardware before signals, and signals before exceptions."""
    ranks = [replace(end, status=_OF_SHELLS.get(end.status or 0, end.status)) for end in evidence.ranks]
    ranks = [replace(end, log=log_of_exception(end)) for end in ranks]
    evidence = _JudgedEvidence(**{**vars(evidence), "ranks": ranks})
    rules = (
        _kernel,
        _scheduler,
        _gpu_memory,
        _texts,
        _link,
        _lost,
        _signals,
        _hang,
        _killed_children,
        _exceptions,
        _aborted,
    )
    for rule in rules:
        for diagnosis in rule(evidence):
            return diagnosis
    return _network(evidence)


@dataclass(frozen=True, kw_only=True)
class _JudgedEvidence(FailureEvidence):
    """Evidence whose logs are searched once for the ranks that failed by themselves, of perhaps hundreds."""

    @cached_property
    def failed(self) -> list[RankEnd]:
        return [end for end in _ended(self) if not _is_consequence(end)]


def _kernel(evidence: FailureEvidence) -> Iterator[Diagnosis]:
    for host, lines in sorted(evidence.kernel.items()):
        for line in lines:
            bad = bad_gpu_of(line)
            if bad is not None:
                bus, words = bad
                # the kernel may add the function's number to the bus, "0000:c9:00.0"
                theirs = [end for end in evidence.ranks if end.host == host and end.bus == bus[:10] != ""]
                culprit = theirs[0].culprit if theirs else Culprit(host=host, gpu=bus)
                yield _found(Cause.BAD_GPU, culprit, words, f"{host}: {line}")
            pid, by_systemd = killed_process(line), _KILLED_BY_SYSTEMD.search(line)
            for end in evidence.ranks:
                is_killed = end.status == -signal.SIGKILL and not end.is_killed_here
                if end.host != host:
                    continue
                if (pid and end.pid == pid) or (by_systemd and is_killed):
                    yield _found(
                        Cause.OOM_KILLER, end.culprit, "killed by the kernel for want of memory", line
                    )


def _scheduler(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    cause = _SCHEDULER.get(evidence.scheduler)
    if cause is not None:
        host = evidence.silent_hosts[0] if cause == Cause.NODE_LOST and evidence.silent_hosts else ""
        yield _found(
            cause,
            Culprit(host=host),
            f"the scheduler says {evidence.scheduler}",
            f"scheduler: {evidence.scheduler}",
        )


def _texts(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    """Look for texts that name their cause, those of the ranks that failed by themselves first."""
    for cause, pattern in KNOWN_TEXTS:
        # torch aborts a rank whose own GPU is bad in the words by which it aborts those that wait for others
        ends = _ended(evidence) if cause == Cause.BAD_GPU else _failed(evidence)
        for end in ends:
            line = _line(f"{end.error}\n{end.log}", pattern, unless=_DEALT_WITH.get(cause))
            if line:
                if cause == Cause.NCCL_TIMEOUT:
                    if not _raised_beside(evidence, end):
                        yield diagnose_timeout(evidence, end, line)
                    continue
                if cause == Cause.NETWORK and is_store_client_error(end) and "esolution" not in line:
                    yield _found(Cause.STORAGE, end.culprit, line, f"log of rank {end.rank}: {line}")
                    continue
                culprit = end.culprit
                culprit = Culprit() if cause == Cause.BAD_RECIPE else culprit
                if cause == Cause.NO_SPACE and _is_full(evidence) and not _NAMES_PATH.search(line):
                    yield _found(Cause.BUS_ERROR, culprit, f"{line}: /dev/shm is full", line)
                    continue
                if cause == Cause.BUS_ERROR and (evidence.shm_free_gib or 0.0) >= _ROOMY_GIB:
                    yield _bus_error_beside_room(evidence, culprit, line)
                    continue
                yield _found(cause, culprit, line, f"log of rank {end.rank}: {line}")
        for message in evidence.messages:
            line = _line(message, pattern)
            if line:
                host = _host_in(line, evidence) or _host_of_srun(evidence)
                yield _found(cause, Culprit(host=host), line, line)


def _raised_beside(evidence: _JudgedEvidence, reporter: RankEnd) -> bool:
    """Return whether another rank failed by an error of its own, for which the reporter waited in vain."""
    others = [end for end in _failed(evidence) if end.rank != reporter.rank]
    if any(_ABORTED_BY_ITS_GPU.search(end.log) for end in others):
        return True
    others = [end for end in others if (end.status or 0) > 0]
    errors = [exception_of(end) for end in others]
    return any(error and not REPORTS_TIMEOUT.search(error) for error in errors)


def _is_full(evidence: _JudgedEvidence) -> bool:
    return evidence.shm_free is not None and evidence.shm_free < 0.02


def _bus_error_beside_room(evidence: _JudgedEvidence, culprit: Culprit, line: str) -> Diagnosis:
    """Return what a bus error means where /dev/shm is large: the next start may succeed.

    The 13B model of BigScience saw one after ten hours with 1% of 94 GB in use, and none in weeks after it.
    """
    room = f"/dev/shm has {evidence.shm_free_gib:.0f} GiB free, so its size is not the cause"
    return Diagnosis(
        cause=Cause.CRASH,
        culprit=culprit,
        summary=f"{line} ({room})",
        evidence=(f"log of rank {culprit.rank}: {line}", room),
        sure=False,
    )


def _gpu_memory(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    for end in _failed(evidence):
        line = _line(f"{end.error}\n{end.log}", GPU_MEMORY.pattern)
        if line:
            # torch's allocator names its own use; the driver's error also counts what others hold
            others = bool(
                _OTHERS_HOLD_IT.search(f"{end.error}\n{end.log}") or DRIVER_OUT_OF_MEMORY.search(line)
            )
            at_start = end.step <= evidence.first_step and others
            cause = Cause.GPU_MEMORY_AT_START if at_start else Cause.GPU_MEMORY
            yield _found(cause, end.culprit, line, f"log of rank {end.rank}: {line}")


def _link(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    """Yield a network failure: NCCL reports an error of its adapter, or the kernel that a link is down."""
    for end in evidence.ranks:
        line = _line(f"{end.error}\n{end.log}", NCCL_NETWORK.pattern)
        if line and end.status not in (0, None):
            yield _found(Cause.NETWORK, end.culprit, line, f"log of rank {end.rank}: {line}", sure=False)
    for host, lines in sorted(evidence.kernel.items()):
        for line in lines:
            if LINK_DOWN.search(line):
                yield _found(Cause.NETWORK, Culprit(host=host), line, f"{host}: {line}")


def _lost(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    for host in evidence.silent_hosts:
        yield _found(
            Cause.NODE_LOST, Culprit(host=host), f"{host} has gone silent", f"no heartbeat from {host}"
        )


def _signals(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    ended = [end for end in evidence.ranks if end.status is not None and end.status < 0]
    for end in ended:
        line = f"rank {end.rank} was ended by {signal_name(-(end.status or 0))}"
        if end.status == -signal.SIGBUS:
            for failed in filter(_DISK_FAILED.search, evidence.kernel.get(end.host, ())):
                yield _found(Cause.STORAGE, end.culprit, f"{line}: {failed}", f"{end.host}: {failed}")
            is_full = _is_full(evidence)
            cause = Cause.BUS_ERROR if is_full or evidence.shm_free is None else Cause.CRASH
            why = ": a file that it had mapped became shorter, or its disk failed"
            cut = why if cause == Cause.CRASH else ""
            yield _found(cause, end.culprit, f"{line}{cut}", line, sure=is_full)
        if -(end.status or 0) in _CRASHES and not _is_torchs_abort(end):
            yield _found(Cause.CRASH, end.culprit, line, line, sure=False)
        is_told = end.status in (-signal.SIGTERM, -signal.SIGINT, -signal.SIGABRT)
        if not is_told and not end.is_killed_here and evidence.hang is None:
            yield _found(Cause.KILLED, end.culprit, line, line)
    if any(end.status in (143, -signal.SIGTERM) for end in evidence.ranks) and not _own_errors(evidence):
        yield _found(
            Cause.PREEMPTED, Culprit(), "all ranks were asked to end (SIGTERM)", "status 143", sure=False
        )


def _hang(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    hang = evidence.hang
    if hang is not None:
        only_culprit = hang.culprits[0] if len(hang.culprits) == 1 else None
        culprit = Culprit(host=hang.hosts[0] if len(hang.hosts) == 1 else "", rank=only_culprit)
        suspects = [end for end in evidence.ranks if end.host == culprit.host and end.rank in hang.culprits]
        for line in evidence.kernel.get(culprit.host, ()):
            if _is_of_ranks(line, suspects):
                summary = f"the kernel killed a process for want of memory, and {hang.summary}"
                shown = (f"{culprit.host}: {line}", *hang.evidence)
                yield Diagnosis(
                    cause=Cause.OOM_KILLER, culprit=culprit, summary=summary, evidence=shown, sure=False
                )
        yield Diagnosis(
            cause=Cause.HANG, culprit=culprit, summary=hang.summary, evidence=hang.evidence, sure=hang.sure
        )


def _is_of_ranks(line: str, ranks: Sequence[RankEnd]) -> bool:
    """Return whether the kernel killed a process of these ranks, or may have, where it is not known which
    processes are theirs. A neighbour's process on the same node says nothing of them.
    """
    known = [end.children for end in ranks if end.children is not None]
    if len(known) < len(ranks) or not ranks:
        return bool(_PYTHON_KILLED.search(line))
    return any(killed_process(line) in children for children in known)


def _killed_children(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    """Look for ranks whose log says that a process which they had started, such as a data worker, died."""
    for end in _failed(evidence):
        line = _line(f"{end.error}\n{end.log}", _CHILD_KILLED.pattern)
        for kernel_line in evidence.kernel.get(end.host, ()) if line else ():
            if killed_process(kernel_line):
                summary = "the kernel killed a process of the rank for want of memory"
                yield _found(Cause.OOM_KILLER, end.culprit, summary, f"{end.host}: {kernel_line}", sure=False)
        if line:
            is_full = _is_full(evidence) and bool(_BY_SIGBUS.search(line))
            cause = Cause.BUS_ERROR if is_full else Cause.CRASH
            yield _found(cause, end.culprit, line, f"log of rank {end.rank}: {line}", sure=is_full)


def _exceptions(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    for end in _failed(evidence):
        if end.status == 2:
            line = next((line for line in end.log.splitlines() if line.strip()), "refused at its start")
            yield _found(Cause.BAD_RECIPE, Culprit(), line, f"rank {end.rank} ended with status 2")
        line = exception_of(end)
        shown = next((text for text in (line, *possible_causes(end)) if transient_cause_of(text)), line)
        cause = transient_cause_of(shown)
        if cause == Cause.NETWORK and is_store_client_error(end):
            cause = Cause.STORAGE
        if shown:
            first, proof = shown.splitlines()[0], f"rank {end.rank}: {shown}"
            yield _found(cause or Cause.EXCEPTION, end.culprit, first, proof, sure=cause is None)


def _aborted(evidence: _JudgedEvidence) -> Iterator[Diagnosis]:
    """Look for ranks that torch has aborted, where no rank failed by itself."""
    for end in evidence.ranks:
        pattern = f"{MAYBE_TIMEOUT.pattern}|{REPORTS_TIMEOUT.pattern}"
        line = _line(end.log, pattern) if _is_torchs_abort(end) else ""
        if line:
            yield diagnose_timeout(evidence, end, line)


def _is_aborted(end: RankEnd) -> bool:
    """Return whether torch aborted a rank because of others, and not for a time-out that it reports."""
    return _is_torchs_abort(end) and not REPORTS_TIMEOUT.search(f"{end.error}\n{end.log}")


def _is_torchs_abort(end: RankEnd) -> bool:
    text = f"{end.error}\n{end.log}"
    patterns = (_ABORTED_BY_TORCH, _CONSEQUENCES, REPORTS_TIMEOUT)
    return end.status == -signal.SIGABRT and any(pattern.search(text) for pattern in patterns)


def _network(evidence: _JudgedEvidence) -> Diagnosis:
    lost = [end for end in evidence.ranks if end.status == RankLost.exit_status or _is_consequence(end)]
    if lost and len(lost) == len([end for end in evidence.ranks if end.status != 0]):
        alone = [end for end in lost if _OF_A_SOCKET.search(exception_of(end))]
        if len(alone) == 1:
            end, line = alone[0], exception_of(alone[0])
            return _found(Cause.NETWORK, end.culprit, line, f"rank {end.rank}: {line}", sure=False)
        summary = "ranks lost each other and none failed by itself"
        if any(_OF_THE_AGENT in exception_of(end) for end in lost):
            summary = "the agent of this peer ended before its ranks; it has logged why"
        return _found(Cause.NETWORK, Culprit(), summary, f"{len(lost)} ranks ended as lost", sure=False)
    alone = _failed(evidence)
    culprit = alone[0].culprit if len(alone) == 1 else Culprit()
    return _found(Cause.UNKNOWN, culprit, "nothing that was collected names a cause", "", sure=False)


def _found(cause: Cause, culprit: Culprit, summary: str, line: str, *, sure: bool = True) -> Diagnosis:
    evidence = (line,) if line else ()
    return Diagnosis(cause=cause, culprit=culprit, summary=summary.strip(), evidence=evidence, sure=sure)


def _failed(evidence: _JudgedEvidence) -> list[RankEnd]:
    """Return the ranks that failed by themselves, without those that ended because another rank was lost."""
    return evidence.failed


def _ended(evidence: _JudgedEvidence) -> list[RankEnd]:
    """Return the ranks that did not end well."""
    return [end for end in evidence.ranks if end.status not in (0, None)]


def _own_errors(evidence: _JudgedEvidence) -> bool:
    return any(exception_of(end) for end in _failed(evidence))


def _is_consequence(end: RankEnd) -> bool:
    text = exception_of(end)
    is_told = bool(text and _CONSEQUENCES.search(text) and not _OF_HTTP.search(text))
    return end.status == RankLost.exit_status or is_told or _is_aborted(end)


def _line(text: str, pattern: str, *, unless: re.Pattern[str] | None = None) -> str:
    search = re.compile(pattern).search
    lines = (line[:MOST_CHARACTERS] for line in text.splitlines())
    found = (line.strip() for line in lines if search(line))
    return next((line for line in found if unless is None or not unless.search(line)), "")


def _host_of_srun(evidence: _JudgedEvidence) -> str:
    """Return the only host of which srun reports that a task failed; "" where there are several or none."""
    pattern = re.compile(r"srun: error: (\S+): tasks? ")
    hosts = {match[1] for message in evidence.messages for match in pattern.finditer(message)}
    return hosts.pop() if len(hosts) == 1 else ""


def _host_in(line: str, evidence: _JudgedEvidence) -> str:
    hosts = {end.host for end in evidence.ranks if end.host} | set(evidence.silent_hosts)
    return next((host for host in sorted(hosts, key=len, reverse=True) if host in line), "")
