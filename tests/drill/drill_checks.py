"""What a drill leaves on disk: nothing lost, nothing counted twice, nothing trained on other weights than named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
from drill_faults import HOSTS
from drill_parts import ROOT, Member
from drill_run import GROUP_SIZE, UPDATE_GROUPS, Drill, free_ports
from drill_server import MODEL, print_of
from programs_world import as_users
from secrets_world import in_files
from vllm_world import trainer_logprobs

from astra_jax.grpo.dump import DumpedBatches
from astra_jax.models.model import Params
from astra_jax.run.checkpoints import Checkpointer
from astra_jax.run.metrics import read_metrics

_REPLAY_SECONDS = 600.0
_ABORTED = 128 + signal.SIGABRT
_LEADER_IS_GONE = "Terminating process because the JAX distributed service detected fatal errors"
"""What JAX's client says, before it aborts its process, of the host that all others meet at."""
_MENDS = 2
"""Code of what somebody has to mend: of the faults only a full disk is that."""


_QUIET = """
import asyncio, sys
from pathlib import Path
from chaos_run import synthesize
from flaky_endpoint import Flaky
async def quiet(folder, count):
    async with Flaky() as url:
        await synthesize(folder, url, "off", count)
asyncio.run(quiet(Path(sys.argv[1]), int(sys.argv[2])))
"""


async def problems(drill: Drill, *, fast: bool) -> list[str]:
    """All that is wrong with what is there; [] is what a drill is to come to."""
    return [
        *_ends(drill),
        *_metrics(drill),
        *_batches(drill),
        *await _weights(drill, fast),
        *_synthesis(drill),
        *(f"{log}: a traceback" for log in _tracebacks(drill)),
        *(f"{path}: a secret" for path in in_files(drill.folder)),
    ]


def _ends(drill: Drill) -> Iterator[str]:
    """Every wait ended in time, and named what it waited for."""
    for number, end in enumerate(drill.ends):
        life = f"life {number}, over at {end.at:.0f} s"
        if 75 in end.codes and any(code == 0 for code in end.codes):
            yield f"{life}: {end.codes}, though it was told to stop on all of them"
        for host, (code, excused, said) in enumerate(zip(end.codes, end.excused, end.said, strict=True)):
            if excused:
                continue
            errors = [line for line in said.splitlines() if line.startswith("error: ")]
            if code == _ABORTED and host and _LEADER_IS_GONE in said:
                continue
            if code is None or code >= 128 and not end.told:
                yield f"{life}: host {host} ended with {code}, and nobody has killed it"
            elif code == 75 and not end.told:
                yield f"{life}: host {host} ended as told, and nobody told it"
            elif code == _MENDS and not end.full:
                yield f"{life}: host {host} is refused: {errors}"
            elif code not in (0, 75) and code < 128 and not errors:
                yield f"{life}: host {host} ended with {code} and does not say why"
    if not drill.ends or drill.ends[-1].codes != [0, 0]:
        yield f"the run ended with {drill.ends[-1].codes if drill.ends else None}"
    elif f"{drill.steps} steps, finished" not in drill.ends[-1].said[0]:
        yield "the run does not say that it is finished"


def _metrics(drill: Drill) -> Iterator[str]:
    rows, steps = read_metrics(drill.workdir / "metrics"), drill.steps + 1
    if drill.moved != 0:
        yield f"going on on one host ended with {drill.moved}"
    if [row["step"] for row in rows] != [*range(1, steps + 1)]:
        yield f"metrics have the steps {[row['step'] for row in rows]}, not each of {steps} once"
    shares = [row["goodput/share"] for row in rows]
    kept = [row["goodput/kept_seconds"] for row in rows]
    began = {row["goodput/started_at"] for row in rows}
    if not all(0 <= share <= 1 for share in shares) or kept != sorted(kept) or len(began) > 1:
        yield f"goodput is not one count over all starts: {shares}"
    if left := sorted(path.name for path in (drill.workdir / "rollouts").glob("*")):
        yield f"a finished run has journals: {left}"


def _batches(drill: Drill) -> Iterator[str]:
    """Each update has its batch once, of whole groups that no other has; tokens are of versions that may be."""
    batches = DumpedBatches(drill.workdir / "batches")
    if sorted(batches.updates) != [*range(drill.steps + 1)]:
        yield f"there are batches of updates {sorted(batches.updates)}, not of each of {drill.steps + 1}"
    lines = [batches.updates[update] for update in sorted(batches.updates)]
    if broken := [two.update for one, two in pairwise(lines) if one.after != two.before]:
        yield f"updates {broken} began from other weights than the one before came to"
    groups: Counter[int] = Counter()
    for line in lines:
        found, _ = batches.groups(line.update)
        groups.update(group.index for group in found)
        if len(found) != UPDATE_GROUPS or {len(group.episodes) for group in found} != {GROUP_SIZE}:
            yield f"update {line.update} has {[len(group.episodes) for group in found]} episodes"
        oldest = line.update - drill.async_steps
        drew = {version for group in found for episode in group.episodes for version in episode.sampled_by}
        # Surplus of a strictly online batch may wait for an update.
        if not drew <= set(range(min(oldest, line.update - 1), line.update + 1)):
            yield f"update {line.update} has tokens of versions {sorted(drew)}"
        if any(episode.score is None for group in found for episode in group.episodes):
            yield f"update {line.update} has an episode without a score"
    if twice := [index for index, count in groups.items() if count > 1]:
        yield f"groups {twice} were trained on twice"


async def _weights(drill: Drill, fast: bool) -> list[str]:
    """The same batches from the same start come to the same weights, to the bit, which drew what they are said to."""
    workdir = drill.folder / "replay"
    (port,) = free_ports(1)
    environment = {} if fast else {"XLA_FLAGS": as_users().get("XLA_FLAGS", "")}
    paths = ":".join(map(str, [ROOT, Path(__file__).parent]))
    environment |= {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "ASTRA_CPU": "set"}
    hosts = []
    for index, name in enumerate(HOSTS):
        flags = [f"--coordinator=127.0.0.1:{port}", "--hosts=2", f"--host_index={index}", f"--workdir={workdir}"]
        flags += [*drill.config, f"--replay={drill.workdir / 'batches'}", f"--config.grpo.steps={drill.steps}"]
        flags += ["--config.grpo.checkpoint_every=1", "--config.grpo.keep_params=null"]
        flags += ["--config.grpo.dump_batches=false"]
        log = drill.folder / "logs" / f"replay-{name}.log"
        hosts.append(Member(name, [sys.executable, "-m", "launch.grpo", *flags], log, environment))
    try:
        for host in hosts:
            host.start()
        codes = [await host.ended(_REPLAY_SECONDS) for host in hosts]
    finally:
        for host in hosts:
            host.end()
    if codes != [0, 0]:
        return [f"the batches trained on again: {codes}, {hosts[0].said()[-1000:]}"]
    return [*(_drawn_by_vllm if drill.real else _drawn)(drill, workdir / "checkpoints")]


def _drawn(drill: Drill, checkpoints: Path) -> Iterator[str]:
    prints = _prints(drill, checkpoints)
    batches = DumpedBatches(drill.workdir / "batches")
    for update in sorted(batches.updates):
        for group in batches.groups(update)[0]:
            for episode in group.episodes:
                for version, logprob, masked in zip(episode.versions, episode.logprobs, episode.loss_mask, strict=True):
                    if masked and logprob != prints[version]:
                        yield f"update {update}, group {group.index}: a token of version {version} has {logprob}"
                        return


def _drawn_by_vllm(drill: Drill, checkpoints: Path) -> Iterator[str]:
    """The logprobs that real servers gave are those of the weights that are named, and not of the version before or
    after, nearly as they are."""
    params = _versions(drill, checkpoints)
    batches = DumpedBatches(drill.workdir / "batches")
    for update in sorted(batches.updates):
        for group in batches.groups(update)[0]:
            for episode in group.episodes:
                given = np.asarray(episode.logprobs)[1:]
                for version in episode.sampled_by:
                    drawn = (np.asarray(episode.loss_mask) * (np.asarray(episode.versions) == version))[1:] > 0
                    off = {
                        other: np.abs(trainer_logprobs(params[other], MODEL, episode.token_ids) - given)[drawn].max()
                        for other in (version, version - 1, version + 1)
                        if other in params
                    }
                    if off[version] > 1e-3 or min(off, key=off.__getitem__) != version:
                        yield f"update {update}, group {group.index}: tokens of version {version} are off by {off}"
                        return


def _prints(drill: Drill, checkpoints: Path) -> dict[int, float]:
    """What servers make of each version's weights."""
    versions = _versions(drill, checkpoints)
    return {version: print_of(np.asarray(params["final_norm_d"])) for version, params in versions.items()}


def _versions(drill: Drill, checkpoints: Path) -> dict[int, Params]:
    """The weights after each update. The folder is opened once: it takes the longer the more are in it."""
    found = {0: MODEL.init(jax.random.key(0))}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), found[0])
    with contextlib.closing(Checkpointer(checkpoints, reading=True)) as saved:
        for step in range(1, drill.steps + 1):
            found[step] = saved.restore_params(step, like)
    return found


def _synthesis(drill: Drill) -> Iterator[str]:
    """The bytes of a run that nobody disturbed, and nothing in its journal twice."""
    folder, quiet = drill.folder / "synthesis", drill.folder / "quiet"
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as journal:
        rows = journal.execute("SELECT stage, key FROM done").fetchall()
    if len(rows) != len(set(rows)) or not rows:
        yield f"the synthesis' journal has {len(rows)} records, {len(set(rows))} different ones"
    quiet.mkdir()
    command = [sys.executable, "-c", _QUIET, str(quiet), str(drill.records)]
    paths = ":".join(map(str, [ROOT, ROOT / "tests" / "worlds"]))
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT, capture_output=True)
    if (folder / "out.json").read_bytes() != (quiet / "out.json").read_bytes():
        yield "the synthesis gave other bytes than one that nobody disturbed"


def _tracebacks(drill: Drill) -> Iterator[str]:
    for log in sorted((drill.folder / "logs").glob("*.log")):
        if "Traceback (most recent call last)" in log.read_text(errors="replace") and log.stem != "synthesis":
            yield log.name


def figures(drill: Drill) -> dict[str, Any]:
    """What a drill was, for people."""
    rows = read_metrics(drill.workdir / "metrics")
    faults = [json.loads(line) for line in (drill.folder / "faults.jsonl").read_text().splitlines()]
    return {
        "seconds": round(drill.seconds),
        "async_steps": drill.async_steps,
        "updates": drill.steps,
        "goodput": round(rows[-1]["goodput/share"], 3) if rows else 0.0,
        "faults": dict(Counter(f"{fault['part']} {fault['kind']}" for fault in faults)),
        "lives": [end.codes for end in drill.ends],
        "restarts": drill.restarts,
    }
