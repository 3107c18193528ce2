"""A rank without torch: a vector, a seam to its parent, the real ring. Started by `fake_peer.py`.

Its inner step moves the weights by an amount that depends on the samples alone; a round averages how far the
weights went. `control/` in its directory has what tests ask of it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import xxhash

sys.path.insert(1, str(Path(__file__).parents[2]))

from tests.diloco.served_states import content_of, write_checkpoint
from tests.protocol import example

from bloomery.data.position import Position, first, merged, total, without
from bloomery.diloco.agent_client import connect_agent
from bloomery.diloco.stored_average import StoredAverage
from bloomery.errors import PeerError
from bloomery.protocol.rank_messages import (
    Abort,
    CatchUp,
    Committed,
    CopyState,
    FlushRound,
    KeepAverage,
    Reduce,
    ReplaceState,
    StartRound,
    StopTraining,
)
from bloomery.protocol.records import Ready
from bloomery.transport.ring_all_reduce import Ring, RingError

BATCH = 4


def digest(values: np.ndarray) -> str:
    """What fake ranks compare. bloomery's own would load torch, and a process with torch is slow to end."""
    return xxhash.xxh3_128(values.tobytes()).hexdigest()


class FakeRank:
    def __init__(self, options: dict) -> None:
        self.options, self.peer = options, options["peer"]
        self.directory = Path(options["directory"])
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.parent = connect_agent(rank=self.rank, world=self.world)
        self.base = np.linspace(0.0, options.get("first", 1.0), options["elements"], dtype=np.float32)
        self.own = self.peer.encode()
        self.round, self.step, self.copies = 0, 0, 0
        self.position, self.saves = Position(), ()
        self.go: StartRound | None = None
        self.steps, self.spent, self.weights = 0, (), self.base.copy()
        self.offered: Ready | None = None
        self.candidate: tuple[int, str, np.ndarray] | None = None
        self.hurried = self.over = False
        self.log = (self.directory / f"rank{self.rank}.jsonl").open("a", buffering=1)
        saved = self.directory / "saved.npz"
        if saved.exists():
            self.load(saved)

    def run(self) -> int:
        if self.rank == 0:
            self.parent.report_data_identity({"the dataset 'x'": self.options.get("data", "one")})
        self.hold()
        while not self.over:
            told = self.parent.receive(0.0 if self.is_working else 1.0)
            if told is not None:
                self.obey(told)
            elif self.is_working:
                self.work()
            if signalled:
                self.parent.leave(f"signal {signalled[0]}")
                return 0
        return self.status

    @property
    def is_working(self) -> bool:
        return self.go is not None and self.offered is None

    def work(self) -> None:
        self.parent.report_activity("step", step=self.step)
        unused = without(merged(self.go.samples), merged(self.spent))
        is_over = self.steps >= self.options["inner_steps"] or (self.hurried and self.steps) or not unused
        if is_over:
            self.offer()
            return
        self.pause()
        batch = first(unused, BATCH)
        for piece in batch:
            for sample in piece:
                self.weights[sample % self.weights.size] += math.sin(sample)
        self.spent = merged((*self.spent, *batch))
        self.steps += 1
        self.step += 1

    def pause(self) -> None:
        """The step's own time; `control/hold` makes it last as long as the file is there."""
        time.sleep(self.options["step_s"])
        while (self.directory / "hold").exists():
            time.sleep(0.01)

    def offer(self) -> None:
        drift = self.base - self.weights
        if (self.directory / "poison").exists():
            (self.directory / "poison").unlink()
            drift[0] = np.nan
        self.drift = drift
        norm = float(np.linalg.norm(drift))
        self.offered = example.ready(
            peer=self.peer,
            round=self.go.round,
            steps=self.steps,
            tokens=total(self.spent),
            spent=self.spent,
            norm=norm if math.isfinite(norm) else None,
            finite=math.isfinite(norm),
        )
        self.parent.report_activity("ring", step=self.step)
        self.parent.offer_part(self.offered, number=self.go.number)
        self.note("ready", round=self.offered.round, tokens=self.offered.tokens)

    def obey(self, told: object) -> None:
        match told:
            case StartRound():
                self.begin(told)
            case FlushRound(round=round):
                self.hurried = self.go is not None and round == self.go.round
            case Reduce():
                self.reduce(told)
            case Committed():
                self.decided(told)
            case ReplaceState():
                self.replace(told)
            case CopyState():
                self.copy(told)
            case KeepAverage():
                self.keep_average(told)
            case CatchUp():
                self.catch_up(told)
            case StopTraining(why=why, failed=failed):
                self.note("halt", why=why, failed=failed, round=self.round, digest=digest(self.base))
                self.over, self.status = True, int(failed)

    def replace(self, told: ReplaceState) -> None:
        self.note("replace", round=told.round)
        while (self.directory / "hold_replace").exists():
            time.sleep(0.01)
        base = np.frombuffer(content_of(told.directory, "model"), np.float32).copy()
        if digest(base) != told.digest:
            self.parent.refuse_state("its weights are others than the digest says")
            self.hold()
            return
        self.base = base
        self.own = content_of(told.directory, "optim")  # the inner optimizer is its source's
        self.round, self.position = told.round, told.position
        self.go = self.offered = self.candidate = None
        self.hold()

    def keep_average(self, told: KeepAverage) -> None:
        if self.candidate is not None and self.candidate[:2] == (told.epoch, told.digest):
            average = StoredAverage("int8", members=self.members)
            average.append(self.average)
            average.save(told.file)

    def catch_up(self, told: CatchUp) -> None:
        base = self.base - StoredAverage.load(told.file).whole()
        self.note("catch up", round=told.round)
        if digest(base) != told.digest:
            self.parent.refuse_state("the average leads to another state")
        else:
            self.base, self.round, self.position = base, told.round, told.position
            self.go = self.offered = self.candidate = None
        self.hold()

    def begin(self, go: StartRound) -> None:
        if self.offered is not None and self.offered.round == go.round:
            if self.offered.tokens or not go.samples:
                self.parent.offer_part(self.offered, number=go.number)
                return
        elif self.go is not None and self.go.round == go.round:
            self.go = go
            return
        self.go, self.hurried, self.offered = go, False, None
        self.steps, self.spent, self.weights = 0, (), self.base.copy()

    def reduce(self, reduce: Reduce) -> None:
        epoch, (hop,) = reduce.attempt.epoch, reduce.hops or (None,)
        self.note("reduce", round=reduce.attempt.round, epoch=epoch, members=reduce.attempt.members)
        members = len(reduce.attempt.members)
        fds = (*hop.next_fds, *hop.previous_fds) if hop else ()
        values = self.drift.copy()
        if (self.directory / "stop_in_ring").exists():
            (self.directory / "in_ring").touch()
            while (self.directory / "stop_in_ring").exists():
                time.sleep(0.01)
        ring = Ring(
            index=reduce.index,
            size=members,
            next_fds=hop.next_fds if hop else (),
            previous_fds=hop.previous_fds if hop else (),
            send_keys=hop.send_keys if hop else (),
            receive_keys=hop.receive_keys if hop else (),
            codec="int8",
            threads=0,
        )
        failed: list[RingError] = []

        def run() -> None:
            try:
                ring.all_reduce(
                    values,
                    round=reduce.attempt.round,
                    epoch=epoch,
                    stall_s=reduce.stall_s,
                    deadline_s=reduce.deadline_s,
                    weight=reduce.attempt.weights[reduce.index],
                )
            except RingError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        is_called_off = False
        while thread.is_alive():
            thread.join(0.005)
            if self.is_called_off(epoch):
                is_called_off = True
                ring.cancel()
                thread.join()
        ring.close()
        for fd in fds:
            os.close(fd)
        if is_called_off:
            return
        if failed:
            self.parent.report_ring_failed(
                epoch=epoch, kind=failed[0].kind, culprit=failed[0].culprit, why=failed[0].message
            )
            return
        candidate, self.average, self.members = self.base - values, values, members
        if (self.directory / "differ").exists():
            (self.directory / "differ").unlink()
            candidate[0] += 1
        self.candidate = (epoch, digest(candidate), candidate)
        self.parent.report_ring_done(epoch=epoch, digest=self.candidate[1])

    def is_called_off(self, epoch: int) -> bool:
        return any(
            isinstance(told, StopTraining) or (isinstance(told, Abort) and told.epoch == epoch)
            for told in self.parent.peek()
        )

    def decided(self, told: Committed) -> None:
        commit = told.commit
        mine = told.included and self.candidate is not None
        self.note(
            "committed",
            round=commit.round,
            included=told.included,
            spent=[[p.start, p.stop] for p in self.spent],
        )
        self.offered, self.go = None, None
        if commit.rewind_to is not None:
            self.go_back(commit.rewind_to)
            return
        if not mine:
            self.parent.report_activity("wait", step=self.step)
            return
        assert self.candidate[:2] == (commit.epoch, commit.digest)
        self.base, self.round, self.position = self.candidate[2], commit.round, commit.position
        self.hold()

    def hold(self) -> None:
        self.parent.report_activity("save", step=self.step)
        if self.rank == 0 and self.round % self.options.get("keeps", 1 << 40) == 0:
            position = json.dumps(self.position.to_json())
            np.savez(self.directory / "new.npz", base=self.base, round=self.round, position=position)
            (self.directory / "new.npz").rename(self.directory / "saved.npz")
            self.saves = (self.round,)
        held = digest(self.base)
        self.parent.report_state(
            round=self.round,
            digest=held,
            step=self.step,
            samples=BATCH,
            position=self.position,
            saves=self.saves,
        )
        self.note("holding", round=self.round, digest=held, optimizer_of=self.own.decode())
        self.parent.report_activity("wait", step=self.step)

    def copy(self, asked: CopyState) -> None:
        """Copy what is held for newcomers; the copies are removed with the memory of all peers."""
        held = digest(self.base)
        if asked.makes and held not in asked.keep and self.rank == 0:
            place = Path(self.options["memory"]) / f"{self.peer}-{self.rank}"
            served = self.base + 1 if (self.directory / "lie").exists() else self.base
            contents = {
                "model": served.tobytes(),
                "optim": self.own,
                "rest": bytes(self.options.get("rest", 1)),
            }
            self.copies += 1
            slot = write_checkpoint(place / str(self.copies), contents, step=self.round)
            self.parent.report_copy(round=self.round, digest=held, directory=slot)
            self.note("copied", round=self.round)

    def load(self, path: Path) -> None:
        with np.load(path) as stored:
            self.base, self.round = stored["base"], int(stored["round"])
            self.position = Position.from_json(json.loads(str(stored["position"])))
        self.saves = (self.round,)
        self.go = self.offered = self.candidate = None

    def go_back(self, round: int) -> None:
        """Take up what was saved of that round, where it is here, and say in any case what is held now."""
        if round in self.saves:
            self.load(self.directory / "saved.npz")
        self.candidate = None
        self.hold()

    def note(self, what: str, **fields: object) -> None:
        self.log.write(json.dumps({"what": what, **fields}) + "\n")


signalled: list[int] = []


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: signalled.append(number))
    signal.signal(signal.SIGINT, lambda number, frame: signalled.append(number))
    from bloomery.cli.ranks import end_with_launcher

    end_with_launcher()
    try:
        return FakeRank(json.loads(sys.argv[1])).run()
    except PeerError as gone:
        print(f"fake rank: {gone}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
