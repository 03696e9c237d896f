"""Outcome of a run in a sentence, its results before and after, and reasons: what `astra watch` shows first.

All of it is derived from `Watched`; no file is read here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from astra_jax.pages.html import figure
from launch.viewer.watched import Stage, Training, Watched, lasted

_SILENT_SECONDS = 300.0
"""Seconds without a write after which a run is said to wait for something."""
_RECENT = 10
"""Newest rows of metrics that the reasons are derived from."""
_FEW = 0.1
"""Share of valid groups, or of records that pass a stage, below which it is a reason."""
_MANY = 0.5
_LEAST_SEEN = 5
"""Inputs of a stage, or episodes, from which a share of them is a reason."""
_MAX_REASONS = 3
_HELD_OUT = {
    "eval/loss": "held-out loss",
    "eval/greedy/reward": "held-out reward, greedy",
    "eval/sampled/reward": "held-out reward, sampled",
    "eval/greedy/solved": "held-out solved, greedy",
    "eval/sampled/solved": "held-out solved, sampled",
}
_TRAINED = {"rollout/reward": "reward while training", "train/loss": "training loss"}
_QUICKSTART = {"f1": "held-out F1", "answer_accuracy": "held-out answers", "mean_calls": "calls an episode"}
_NOUNS = {"train": "environments to train on", "held_out": "held-out environments"}
_RESUMES = "The same command resumes it."


@dataclass(frozen=True)
class RunOutcome:
    """Outcome of a run.

    Attributes:
        state: of the run; `short` if a synthesis made less than half of the records that it was to make.
        headline: the outcome, for people.
        why: reasons and advice, the first cause first; empty if nothing is wrong.
        columns: moments, or models, that `rows` compares.
        rows: values of a metric, one for each column.
    """

    state: str
    headline: str
    why: Sequence[str]
    columns: Sequence[str]
    rows: Mapping[str, Sequence[float | None]]


def outcome_of(run: Watched) -> RunOutcome:
    """Return the outcome of a run."""
    columns, rows = _comparison(run)
    state = "short" if run.state == "finished" and _fell_short(run) else run.state
    return RunOutcome(state, _headline(run, rows), list(dict.fromkeys(_reasons(run))), columns, rows)


def _fell_short(run: Watched) -> bool:
    made = sum(run.datasets[name] or 0 for name in run.wanted if name in run.datasets)
    return made < _MANY * sum(run.wanted.values())


# ---------------------------------------------------------------------------------------------------------------------
# Results


def _comparison(run: Watched) -> tuple[list[str], dict[str, list[float | None]]]:
    if run.held_out:  # a quickstart
        metrics = {title: [one.get(name) for one in run.held_out.values()] for name, title in _QUICKSTART.items()}
        return list(run.held_out), {title: values for title, values in metrics.items() if set(values) != {None}}
    if run.scores:
        return ["score, %"], {title: [score] for title, score in run.scores.items()}
    for training in reversed(run.trainings):
        titles = _HELD_OUT | {
            name: f"held-out {name.rpartition('/')[2].replace('_', ' ')}" for name in _pass_at(training)
        }
        points = {title: found for name, title in titles.items() if (found := _known(training, name))}
        if points:
            first, last = (end(step for found in points.values() for step, _ in found) for end in (min, max))
            if first == last:
                return [f"step {first:,}"], {title: [found[-1][1]] for title, found in points.items()}
            columns = [f"before (step {first:,})", f"after (step {last:,})"]
            return columns, {title: [found[0][1], found[-1][1]] for title, found in points.items()}
        points = {title: found for name, title in _TRAINED.items() if (found := _known(training, name))}
        if points and len(training.rows) > 1:
            columns = [f"step {training.rows[0]['step']:,}", f"step {training.step:,}"]
            return columns, {title: [found[0][1], found[-1][1]] for title, found in points.items()}
    return [], {}


def _pass_at(training: Training) -> list[str]:
    names = dict.fromkeys(name for row in training.rows for name in row if name.startswith("eval/sampled/pass_at_"))
    return list(names)[:1]


def _known(training: Training, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), row[name]) for row in training.rows if row.get(name) is not None]


def _result(run: Watched, rows: Mapping[str, Sequence[float | None]]) -> str:
    """Return the results as the end of a sentence."""
    if run.trainings or run.scores:
        parts = [f"{name} {' → '.join(map(figure, values))}" for name, values in rows.items()]
        note = "" if any(name.startswith("held-out") for name in rows) or run.scores else "; nothing is held out"
        return f"{'; '.join(parts[:2])}{note}" if parts else ""
    made = [name for name in run.wanted if name in run.datasets] or list(run.datasets)
    parts = []
    for name in made:
        of = f" of {run.wanted[name]:,}" if name in run.wanted else ""
        count = run.datasets[name]
        parts.append(f"{'?' if count is None else f'{count:,}'}{of} {_NOUNS.get(name, name.replace('_', ' '))}")
    return f"{', '.join(parts)} stored" if parts else ""


# ---------------------------------------------------------------------------------------------------------------------
# Headline


def _headline(run: Watched, rows: Mapping[str, Sequence[float | None]]) -> str:
    result, at = _result(run, rows), _position(run)
    why = run.ending.why if run.ending else ""
    ago = f"the last write was {lasted(run.written)} ago"
    if run.state == "failed" and _has_results(run):
        return f"All of it is done{f': {result}' if result else ''}. The last command failed: {why}"
    endings = {
        "empty": "Nothing is written here yet. Start a run with this folder as its --workdir; it is shown here.",
        "finished": f"{'Fell short' if _fell_short(run) else 'Finished'}{at}{f': {result}' if result else ''}.",
        "failed": f"Failed{at}: {why}",
        "killed": f"Killed{at}: the process ended without a message, {ago}. It ran out of memory, got SIGKILL, or its "
        f"machine went away. {_RESUMES}",
        "preempted": f"Stopped by SIGTERM{at}, and saved. {_RESUMES}",
        "interrupted": f"Interrupted by Ctrl-C{at}. {_RESUMES}",
        "exhausted": f"Exhausted{at}: too few groups were valid for another batch.",
        "stopped": f"Stopped by a hook{at}, and saved. {_RESUMES}"
        if run.ending
        else f"No process works on it{at}; {ago}. {_resumes(run)}",
    }
    if run.state in endings:
        return endings[run.state]
    return _activity(run) + (f" Results so far: {result}." if result and rows else "")


def _resumes(run: Watched) -> str:
    known = not run.trainings or any(one.total is not None for one in run.trainings)
    return _RESUMES if known else "If it is not done, the same command resumes it."


def _has_results(run: Watched) -> bool:
    """Return whether all steps are done, or all datasets are stored, so that only a later command can have failed."""
    if run.trainings:
        return all(_is_done(one) for one in run.trainings)
    return bool(run.wanted) and not _fell_short(run)


def _is_done(one: Training) -> bool:
    return one.total is not None and one.step >= one.total and one.evaluation is None


def _position(run: Watched) -> str:
    if not run.trainings:
        return ""
    one = run.trainings[-1]
    name, of = f" of {one.kind} ({one.name})" if one.name else "", f" of {one.total:,}" if one.total else ""
    return f" after step {one.step:,}{of}{name}" if one.rows else f" before the first step{name}"


def _activity(run: Watched) -> str:
    current = run.trainings[-1] if run.trainings else None
    if current is not None and not _is_done(current):
        text = _training_activity(current)
    elif run.stages:
        total = sum(one.seen for one in run.stages)
        text = f"Running: stage {run.stages[-1].name}; {total:,} inputs of {len(run.stages)} stages are finished."
    else:
        text = "Running: it has started."
    if run.state == "elsewhere":
        text = f"Held by {run.holder}, if that still runs. {text}"
    if run.written > _SILENT_SECONDS:
        ago = f" The last write was {lasted(run.written)} ago"
        text += f"{ago}: it may wait for servers, a sandbox or a teacher, or compile."
    return text


def _training_activity(one: Training) -> str:
    name, of = f"{one.kind}{f' ({one.name})' if one.name else ''}", f" of {one.total:,}" if one.total else ""
    if one.evaluation is not None:
        played = f"{one.evaluation.episodes:,} episodes are finished"
        return f"Running: {name} evaluates held-out environments after step {one.evaluation.update:,}: {played}."
    left = f" {_left(one)}" if _left(one) else ""
    if one.batch is not None:
        played = f"{one.batch.episodes:,} episodes are finished"
        return f"Running: {name} samples the batch of step {one.batch.update:,}{of}: {played}.{left}"
    if one.rows:
        return f"Running: {name} works on step {one.step + 1:,}{of}.{left}"
    return f"Running: {name} is before its first step: it reads weights, compiles or makes the first batch."


def _left(one: Training) -> str:
    times = [
        (row["step"], row["goodput/kept_seconds"]) for row in one.rows[-_RECENT:] if row.get("goodput/kept_seconds")
    ]
    if one.total is None or len(times) < 2 or times[-1][0] <= times[0][0]:
        return ""
    each = (times[-1][1] - times[0][1]) / (times[-1][0] - times[0][0])
    return f"About {lasted(each * (one.total - one.step))} are left."


# ---------------------------------------------------------------------------------------------------------------------
# Reasons


def _reasons(run: Watched) -> Iterator[str]:
    if run.trainings:
        one = run.trainings[-1]
        if one.exhausted:
            yield from _exhausted(one, run)
        yield from _not_finite(one)
        yield from _rewards(one)
        yield from _masked(one)
        yield from _limits(one)
        yield from _servers(one)
        yield from _held_out(one)
        yield from _mismatch(one)
    yield from _rejections(run)
    for spent in run.spending:
        if spent.requests >= _LEAST_SEEN and not spent.tokens:
            yield f"The endpoint has answered none of {spent.requests:,} requests of {spent.stage} ({spent.model})."


def _exhausted(one: Training, run: Watched) -> Iterator[str]:
    found = {name: value for name, value in one.exhausted.items() if value is not None}
    if run.ending and run.ending.state == "exhausted" and run.ending.why:
        yield run.ending.why
    rewards = ""
    if "reward_mean" in found:
        mean, low, high = (f"{found[f'reward_{name}']:.3g}" for name in ("mean", "min", "max"))
        rewards = f" Rewards: mean {mean}, min {low}, max {high}."
    masked = f" {found['masked_episodes']:,.0f} episodes were masked." if found.get("masked_episodes") else ""
    yield (
        f"{found.get('groups_sampled', 0):,.0f} groups were sampled after step {one.step:,}.{rewards}{masked} The "
        "newest page of sampled episodes says what to try."
    )


def _not_finite(one: Training) -> Iterator[str]:
    skipped = one.latest.get("train/skipped_steps")
    if skipped:
        rate = one.latest.get("train/learning_rate")
        it_is = f" (it is {rate:.3g})" if rate else ""
        yield (
            f"{skipped:,.0f} of {one.step:,} steps changed nothing, since their loss or gradient was not finite. Lower "
            f"learning_rate{it_is}, or check the data of these steps."
        )


def _recent(one: Training, name: str) -> list[float]:
    return [value for _, value in _known(one, name)[-_RECENT:]]


def _rewards(one: Training) -> Iterator[str]:
    rewards = _recent(one, "rollout/reward")
    batch = one.batch
    if batch is not None and batch.scored >= _LEAST_SEEN and batch.best == batch.worst:
        yield f"All {batch.scored:,} scored episodes of the batch in progress have the reward {batch.best:.3g}."
    if rewards and not any(rewards):
        yield f"Every episode of the last {len(rewards)} logged steps scored 0. {_why_zero(one)}"
        return
    shares = _recent(one, "filling/valid_share")
    if shares and fmean(shares) < _FEW:
        kinds = {
            "equal": "equal rewards",
            "below_min_std": "rewards within min_reward_std",
            "unscored": "unscored",
        }
        counts = {title: sum(_recent(one, f"filling/groups_{name}")) for name, title in kinds.items()}
        listed = ", ".join(f"{count:,.0f} {title}" for title, count in counts.items() if count)
        yield (
            f"Only {fmean(shares):.0%} of the groups are valid ({listed}). Give environments that the model solves "
            "sometimes (`astra difficulty`, --config.grpo.solve_rates), or a larger --config.grpo.group_size."
        )


def _why_zero(one: Training) -> str:
    calls, failed = one.latest.get("rollout/calls"), one.latest.get("rollout/failed_calls")
    if calls == 0:
        return "It makes no tool calls: check the chat format of the weights, or train with SFT first."
    if calls and failed and failed / calls > _MANY:
        return f"{failed / calls:.0%} of its tool calls fail: open the newest page of episodes for the errors."
    return "Train with SFT first, or give environments that it solves sometimes (`astra difficulty`)."


def _masked(one: Training) -> Iterator[str]:
    masked, scored = sum(_recent(one, "filling/masked_episodes")), sum(_recent(one, "filling/episodes"))
    if masked and masked / (masked + scored) > _FEW:
        prefix = "filling/masked_"
        names = {name for row in one.rows[-_RECENT:] for name in row if name.startswith(prefix)}
        reasons = Counter({name: sum(_recent(one, name)) for name in names - {f"{prefix}episodes", f"{prefix}share"}})
        listed = _counted({name.removeprefix(prefix): int(count) for name, count in reasons.items()})
        yield f"{masked / (masked + scored):.0%} of the episodes are masked, so they have no score: {listed}."


def _limits(one: Training) -> Iterator[str]:
    for limit, setting in (("token", "max_response_tokens"), ("turn", "max_turns")):
        shares = _recent(one, f"rollout/finish_{limit}_limit")
        if shares and fmean(shares) > _MANY:
            ended = f"{fmean(shares):.0%} of the episodes end at the {limit} limit"
            yield f"{ended}: raise --config.grpo.episode.{setting}."


def _servers(one: Training) -> Iterator[str]:
    away = [name for name, metrics in one.servers.items() if metrics.get("serving") == 0]
    if away:
        names = ", ".join(away[:_MAX_REASONS]) + (" …" if len(away) > _MAX_REASONS else "")
        yield f"{len(away)} of {len(one.servers)} rollout servers are out of service: {names}."


def _held_out(one: Training) -> Iterator[str]:
    losses = _known(one, "eval/loss")
    if len(losses) > 1:
        step, lowest = min(losses, key=lambda point: point[1])
        if losses[-1][1] > 1.02 * lowest:
            yield (
                f"The held-out loss rises again: {figure(lowest)} at step {step:,}, {figure(losses[-1][1])} now. Train "
                "fewer steps, or use the checkpoint of that step."
            )
    rewards = _known(one, "eval/greedy/reward") or _known(one, "eval/sampled/reward")
    if len(rewards) > 1 and rewards[-1][1] < rewards[0][1]:
        yield f"The held-out reward fell from {figure(rewards[0][1])} to {figure(rewards[-1][1])}."


def _mismatch(one: Training) -> Iterator[str]:
    values = [value for _, value in _known(one, "train/mismatch_kl")]
    quarter = len(values) // 4
    if quarter and fmean(values[-quarter:]) > max(0.01, 5 * fmean(values[:quarter])):
        yield (
            f"The mismatch of sampler and trainer grew from {figure(fmean(values[:quarter]))} to "
            f"{figure(fmean(values[-quarter:]))} nats: check precision, weights and versions of the servers."
        )


def _rejections(run: Watched) -> Iterator[str]:
    blocking = [one for one in run.stages if one.seen >= _LEAST_SEEN and one.passed <= _FEW * one.seen]
    if not blocking and run.state != "running" and _fell_short(run):
        blocking = sorted(run.stages, key=lambda one: -sum(one.rejected.values()))[:1]
    for one in blocking[:_MAX_REASONS]:
        if one.rejected:
            yield _rejection(one)


def _rejection(one: Stage) -> str:
    example = f" For example {one.example}" if one.example else ""
    return f"Stage {one.name} let {one.passed:,} of {one.seen:,} through: {_counted(one.rejected)}.{example}"


def _counted(reasons: Mapping[str, int]) -> str:
    most = Counter(reasons).most_common(_MAX_REASONS)
    more = len(reasons) - len(most)
    named = ", ".join(f"{reason.replace('_', ' ')} {count:,}" for reason, count in most)
    return f"{named}, and {more} further reasons" if more > 0 else named
