"""The classes that every second of a rank falls into, and which activities belong to which class."""

from __future__ import annotations

from enum import StrEnum

from bloomery.events.heartbeat import STARTING, RankActivity


class TimeClass(StrEnum):
    """What a second of a rank was spent on; each second has exactly one class."""

    TRAINING = "training"
    LOST = "lost work"
    FIRST_STEP = "first step: compiling"
    DATA = "waiting for data"
    SAVING = "blocked by saves"
    EVALUATING = "evaluating"
    BETWEEN = "between steps"
    PEERS = "waiting for peers"
    STARTING = "start-up, imports"
    PREPARING = "preparing the data"
    LOADING = "loading"
    ENDING = "last save and end"
    HANG = "hang until noticed"
    FAILURE = "failure until noticed"
    RESTART = "between attempts"
    DOWN = "down after a failure"
    QUEUE = "in the queue"
    STOPPED = "stopped by a person"
    FINISHED = "finished"
    UNEXPLAINED = "unexplained"
    ABSENT = "not in the layout"


MEANINGS: dict[TimeClass, str] = {
    TimeClass.TRAINING: "steps that are part of the run",
    TimeClass.LOST: "steps beyond the checkpoint that the run went back to",
    TimeClass.FIRST_STEP: "what the first step of a process takes beyond its next ones",
    TimeClass.DATA: "steps that waited for their samples",
    TimeClass.SAVING: "the part of saves during which no step runs",
    TimeClass.EVALUATING: "held-out loss",
    TimeClass.BETWEEN: "guards, journal, the outer step",
    TimeClass.PEERS: "averaging with other peers, and waits for them",
    TimeClass.STARTING: "from the launcher to the model, with joining the ranks",
    TimeClass.PREPARING: "tokenizing, or checking prepared data",
    TimeClass.LOADING: "reading a checkpoint, at a start or for a rewind",
    TimeClass.ENDING: "what comes after the last step of a process that ended well",
    TimeClass.HANG: "from the last step to the end of ranks that stood still",
    TimeClass.FAILURE: "from the last step to the end of ranks that failed",
    TimeClass.RESTART: "from the end of an attempt to the next, by the supervisor",
    TimeClass.DOWN: "nothing ran, and nothing had asked for it",
    TimeClass.QUEUE: "the scheduler had the job and did not run it",
    TimeClass.STOPPED: "somebody had stopped the run",
    TimeClass.FINISHED: "between its end and a start that made it longer",
    TimeClass.UNEXPLAINED: "what no rank measured: a clock was set",
    TimeClass.ABSENT: "the run went on with fewer ranks; such time belongs to no rank and is not counted",
}

OF_ACTIVITY: dict[str, TimeClass] = {
    STARTING: TimeClass.STARTING,
    RankActivity.PREPARING: TimeClass.PREPARING,
    RankActivity.BUILDING: TimeClass.STARTING,
    RankActivity.LOADING: TimeClass.LOADING,
    RankActivity.WAITING_FOR_SAMPLES: TimeClass.DATA,
    RankActivity.COMPUTING: TimeClass.TRAINING,
    RankActivity.REDUCING: TimeClass.TRAINING,
    RankActivity.UPDATING: TimeClass.TRAINING,
    RankActivity.REPORTING: TimeClass.TRAINING,
    RankActivity.EVALUATING: TimeClass.EVALUATING,
    RankActivity.BETWEEN_STEPS: TimeClass.BETWEEN,
    RankActivity.WAITING_FOR_PEERS: TimeClass.PEERS,
    RankActivity.SAVING: TimeClass.SAVING,
    RankActivity.ENDING: TimeClass.ENDING,
    RankActivity.ENDED: TimeClass.ENDING,
}
"""The class of what a rank spent in each activity, where the step it belongs to was kept."""

NOT_WANTED = frozenset({TimeClass.STOPPED, TimeClass.FINISHED})
"""Classes of time in which nobody wanted the run to train; ETTR leaves them out."""
