"""The settings in force in a run: what a start may change, their values at a position, changes on the way.

`StartOptions` holds what the command line asks for beside the recipe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from bloomery import durable
from bloomery.checkpoint.format.state import Json
from bloomery.config.checkpoint import GuardSection
from bloomery.config.convert import dump_recipe, toml_value
from bloomery.config.load import LoadedRecipe, load_recipe, parse_recipe
from bloomery.config.recipe import Recipe
from bloomery.config.resume import SettingChanges, apply_free, compare, refuse_fixed
from bloomery.errors import ConfigError, DataError, storage_error
from bloomery.events.journal import Journal, read_journal
from bloomery.events.records import Facts, ProgressCallback, ignore_progress
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.judge import build_guards
from bloomery.guard.restraint import Restraint
from bloomery.guard.verdict import Rung
from bloomery.optim.clip import Clamps
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import resolve_precision
from bloomery.plan.recomputation import Recomputation
from bloomery.plan.schedule import (
    Phase,
    learning_rate,
    length_in_unit,
    phase_at,
    progress,
    steps_of_peer,
    total_samples,
)
from bloomery.train.checkpoint_store import Store
from bloomery.train.data_stream import DataStream, demand_of, indices_left
from bloomery.train.held_out import HeldOutLoss
from bloomery.train.peering import Peering
from bloomery.train.state import Goal, TrainState


def changes_of(loaded: LoadedRecipe, rundir: RunDirectory) -> SettingChanges:
    """Return how `loaded` differs from the run's recipe. Raises ConfigError if a fixed setting differs."""
    if not rundir.recipe.exists():
        return SettingChanges()
    kept_recipe = _kept_recipe(rundir)
    if kept_recipe is None:
        return SettingChanges()
    changes = compare(kept_recipe, loaded.recipe)
    refuse_fixed(changes, dict(loaded.sources))
    return changes


def _kept_recipe(rundir: RunDirectory) -> Recipe | None:
    """Return the run's recipe. A damaged one is restored from the journal, or given up if the journal has
    none.

    Only the process that holds the run may call this. None means that it was given up, and the start's own
    recipe takes its place.
    """
    try:
        return load_recipe(str(rundir.recipe)).recipe
    except ConfigError as damage:
        problem = damage.mistakes[0].problem
    journalled = ""
    for event in read_journal(rundir.journal()):
        journalled = str(event.get("recipe") or journalled)
    if journalled:
        recipe = parse_recipe(journalled, label=f"the last start in {rundir.journal()}").recipe
        try:
            durable.write_whole(rundir.recipe, journalled)
        except OSError as error:
            raise storage_error(error, path=rundir.recipe, doing="Mending the run's recipe") from error
        log.warning("%s was damaged (%s) and is mended from the journal", rundir.recipe, problem)
        return recipe
    aside = rundir.recipe.with_name("recipe.damaged.toml")
    durable.replace(rundir.recipe, aside)
    log.warning(
        "the run's own %s is damaged (%s): it is kept as %s, and the recipe of this start takes its place. "
        "Whether what is fixed has changed cannot be told.",
        *(rundir.recipe, problem, aside.name),
    )
    return None


def keep_recipe(loaded: LoadedRecipe, rundir: RunDirectory) -> None:
    """Make `loaded` the run's recipe. Only its holder calls this, once the changes are in the journal.

    So a start that fails or is killed on the way changes nothing, and the next one finds the changes again.
    """
    lines = [f"{toml_value(key)} = {toml_value(source)}" for key, source in sorted(loaded.sources.items())]
    try:
        durable.remove_drafts(rundir.path)
        durable.write_whole(rundir.recipe, dump_recipe(loaded.recipe))
        durable.write_whole(rundir.sources, "\n".join(lines) + "\n")
    except OSError as error:
        raise storage_error(error, path=rundir.recipe, doing="Writing the run's recipe") from error


def _nothing_shown() -> AbstractContextManager[ProgressCallback]:
    return nullcontext(ignore_progress)


def _emit_nothing(event: Mapping[str, Json]) -> None:
    """Print nothing: the console is for people."""


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Choices of one start. They are not settings: the next start may choose otherwise.

    take_fallback: resume from the newest intact checkpoint if the newest of all is damaged.
    form: what the console shows of steps: 'bar', 'short', 'full' or 'json'; '' is the form of `log.form`.
    columns: the length of short lines.
    say: prints a line for people.
    emit: prints an event for programs; called only in the form 'json'.
    data_progress: opens the callback that gets the progress of preparing the data.
    started: `time.perf_counter()` when the command began.
    peering: the connection to a peer's agent, for a run between peers; else None.
    ends_process: whether the process ends with this training.
    """

    say: Callable[[str], None]
    emit: Callable[[Mapping[str, Json]], None] = _emit_nothing
    form: str = ""
    columns: int = 100
    take_fallback: bool = False
    data_progress: Callable[[], AbstractContextManager[ProgressCallback]] = _nothing_shown
    started: float = 0.0
    peering: Peering | None = None
    ends_process: bool = False


log = logging.getLogger(__name__)


class RunSettings:
    """The current recipe of a run, and the parts that follow its free settings.

    recipe: the recipe with every change applied so far. A change replaces it as a whole, so whoever keeps
        something that was computed from it can compare by identity.
    guards: the guards that the recipe asks for. A change replaces them too; they keep their histories.

    Methods are functions of the recipe and their arguments, equal on every rank; `apply_requests` and
    `spread_budgets` are collective over the peer.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        mesh: Mesh,
        data_stream: DataStream,
        store: Store,
        held_out: HeldOutLoss | None,
        journal: Journal,
        say: Callable[[str], None],
        auto_recompute: Callable[[Recipe], Recomputation],
    ) -> None:
        """auto_recompute: returns what a recipe's `train.recompute` means here."""
        self.recipe, self._auto_recompute = recipe, auto_recompute
        self.guards = build_guards(checkpoint=recipe.checkpoint, guard=_guard_section(recipe))
        self._mesh, self._data_stream = mesh, data_stream
        self._store, self._held_out, self._journal, self._say = store, held_out, journal, say

    @property
    def goal(self) -> Goal:
        """Return where the recipe says the run ends."""
        if self.recipe.train.steps:
            return Goal(steps=self.recipe.train.steps)
        return Goal(samples=self._total_samples)

    @property
    def run_length_steps(self) -> int:
        """Return how many steps this peer makes in the whole run."""
        recipe = self.recipe
        return steps_of_peer(recipe.train, recipe.elastic, sequence_length=recipe.data.sequence_length)

    def phase(self, state: TrainState) -> Phase:
        """Return the batch and precision at a position, with 'auto' resolved for this device."""
        phase = phase_at(self.recipe.train, state.consumed())
        return replace(
            phase,
            precision=resolve_precision(phase.precision, self._mesh.device),
            recompute=self._auto_recompute(self.recipe).mode,
        )

    def learning_rate(self, state: TrainState) -> float:
        """Return the learning rate of the step from `state`: schedules are read at the step's end.

        After a rewind it may be restrained for a while.
        """
        recipe, batch = self.recipe, self.phase(state).global_batch
        at = progress(
            recipe.schedule,
            step=state.step + 1,
            consumed=state.consumed(beyond=batch),
            sequence_length=recipe.data.sequence_length,
        )
        length = length_in_unit(recipe.train, recipe.schedule, sequence_length=recipe.data.sequence_length)
        return state.restraint.rate * learning_rate(recipe.optim, recipe.schedule, at=at, length=length)

    def clip(self, state: TrainState) -> float:
        """Return the largest gradient norm of the step from `state`, 0 for none; restrained likewise."""
        factor, largest = state.restraint.clip, self.recipe.optim.clip
        return largest if factor == 1.0 else factor * (largest or 1.0)

    def clamps(self, state: TrainState) -> Clamps:
        """Return the clamps of the step from `state`, which a rewind may have put on for a while."""
        restraint, guard = state.restraint, _guard_section(self.recipe)
        # A checkpoint may hold a restraint of before peers were without QK-clip.
        return Clamps(
            z_score=restraint.z_score,
            holds_norm=restraint.clip < 1.0,
            qk_clip=restraint.qk_clip if guard.clamp_qk else 0.0,
        )

    def restraint(self, rung: Rung, state: TrainState, *, before: TrainState) -> Restraint | None:
        """Return what restrains the steps from `state` on after a rewind of this rung; None for nothing.

        before: the state when the rewind was decided.
        """
        recipe = self.recipe
        peers = recipe.elastic.peers if recipe.elastic.inner_steps else 1
        return self.guards.ladder.restraint(
            rung,
            consumed=state.position.consumed,
            # Within a round the last commit, which is the same on all peers.
            problem=before.under_way.committed if before.under_way else before.position.consumed,
            samples_per_step=self.phase(state).global_batch * peers,
        )

    def stream_end(self, *, cursor: int, consumed: int) -> int:
        """Return the stream index at which the run ends, counting the skips that the cursor has passed."""
        return self._total_samples + cursor - consumed

    def indices_left(self, state: TrainState) -> int:
        """Return how many stream indices lie between the state's position and the run's end."""
        return indices_left(self.recipe, step=state.step, position=state.position)

    def apply_requests(
        self, state: TrainState, facts: Facts, *, skip: Callable[[TrainState, range], TrainState]
    ) -> TrainState:
        """Apply what control files asked for, journal and say it, and return the state to go on with.

        A setting that cannot be changed is logged and journalled as refused; the run goes on without it.

        skip: leaves samples out of a state from now on, or from the next round between peers on.
        """
        if not (facts.skip_requested or facts.settings_requested):
            return state
        for first, end in facts.skip_requested:
            if why := self._why_not_skipped(state, range(first, end)):
                log.warning("control/skip was refused: %s", why)
                self._record("setting_refused", state, key="control/skip", value=f"{first}:{end}", why=why)
                continue
            state = skip(state, range(first, end))
            skips: list[Json] = [[samples.start, samples.stop] for samples in state.position.skips]
            self._record("skip", state, first=first, end=end, skips=skips)
            self._say(f"control/skip: samples {first:,} to {end - 1:,} are left out from now on")
            self.spread_budgets(state)
        for key, value in facts.settings_requested:
            try:
                changed = apply_free(
                    self.recipe,
                    key,
                    value,
                    data_degree=self._mesh.data.degree,
                    consumed=state.position.consumed,
                )
                self._replace_recipe(changed, state)
            except (ConfigError, DataError) as refused:
                log.warning("control/set was refused: %s", refused)
                self._record("setting_refused", state, key=key, value=value, why=str(refused))
            else:
                self._record("setting", state, key=key, value=value)
                self._say(
                    f"control/set: {key} = {value} from step {state.step + 1} on, until this process ends; "
                    f"give the next start {key}={value} to keep it"
                )
        return replace(state, goal=self.goal)

    def spread_budgets(self, state: TrainState, *, recipe: Recipe | None = None) -> None:
        """Spread what is left of each dataset's budget over the rest of the run, and journal a new mixture.

        Raises DataError, and changes nothing, where the budgets do not fit.

        recipe: the recipe whose budgets and length count; None means the current one.
        """
        recipe = recipe or self.recipe
        mixture = self._data_stream.demand(
            demand_of(recipe, self._data_stream.stream.demand.claims),
            at=state.position.cursor,
            left=indices_left(recipe, step=state.step, position=state.position),
        )
        if mixture is not None:
            self._record("mixture", state, **mixture)

    def _replace_recipe(self, recipe: Recipe, state: TrainState) -> None:
        """Go on with a recipe that differs in free settings. Raises DataError where budgets do not fit it."""
        self.spread_budgets(state, recipe=recipe)
        guards = build_guards(checkpoint=recipe.checkpoint, guard=_guard_section(recipe))
        guards.load_state_values(self.guards.state_values())
        self.guards = guards
        self._store.section = recipe.checkpoint
        self._store.reach_steps = recipe.guard.reach_steps
        if self._held_out is not None:
            self._held_out.section = recipe.evaluate
        self.recipe = recipe

    def _why_not_skipped(self, state: TrainState, samples: range) -> str:
        """Return why a request to skip is refused; '' if it is followed.

        Budgets would be spread over what is skipped, and quotas counted through it, which may take hours.
        """
        ahead = samples.stop - max(samples.start, state.position.cursor)
        run, epoch = self._total_samples, sum(self._data_stream.stream.windows)
        if ahead <= max(run, epoch):
            return ""
        return (
            f"{samples.start}:{samples.stop} leaves out {ahead:,} samples, and the run takes {run:,} of the "
            f"{epoch:,} of its datasets"
        )

    @property
    def _total_samples(self) -> int:
        return total_samples(self.recipe.train, sequence_length=self.recipe.data.sequence_length)

    def _record(self, event: str, state: TrainState, **fields: Json) -> None:
        self._journal.write(event, incarnation=self._store.incarnation, step=state.step, **fields)


def _guard_section(recipe: Recipe) -> GuardSection:
    """Return the settings of guards, without QK-clip between peers.

    There each peer would rescale heads by the logits of its own samples, and the outer momentum would carry a
    rescaling on in the rounds after it, until queries and keys are too small or point the other way.
    """
    return replace(recipe.guard, clamp_qk=0.0) if recipe.elastic.inner_steps else recipe.guard
