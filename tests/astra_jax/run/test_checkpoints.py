"""Checkpoints: what is saved comes back to the bit; half of one is none; and metrics that survive a crash."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_world import cut_in_half, in_its_own_process
from processor_time import at_most

from astra_jax.run import checkpoints
from astra_jax.run.checkpoints import BucketError, Checkpointer, CheckpointError, DamagedError
from astra_jax.run.crash_loop import is_fault
from astra_jax.run.digests import digests_of
from astra_jax.run.metrics import MetricWriter, read_metrics


def make_params(seed: int = 0, width: int = 8) -> dict:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "embed_vd": jax.random.normal(keys[0], (16, width)),
        "layers": {"w_ldd": jax.random.normal(keys[1], (2, width, width), jnp.bfloat16)},
    }


def make_state(params: dict) -> tuple:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0, 10)))
    return optimizer.init(params)


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path / "checkpoints")
    yield made
    made.close()


@pytest.mark.parametrize("reopened", [False, True])
def test_params_state_and_extra_come_back_exactly(checkpointer, reopened):
    params = make_params()
    state = make_state(params)
    extra = {"batches": {"parent": {"next_index": 7}}, "loss": 0.1 + 0.2, "name": "北京"}
    checkpointer.save(3, params=params, state=state, extra=extra)
    if reopened:  # as a resumed run does
        checkpointer.wait()
        checkpointer = Checkpointer(checkpointer.dir)
    like = jax.tree.map(jnp.zeros_like, (params, state))
    restored_params, restored_state, restored_extra = checkpointer.restore(checkpointer.latest(), like)
    assert_equal(restored_params, params)
    assert_equal(restored_state, state)
    assert restored_extra == checkpointer.read_extra(3) == extra
    assert_equal(checkpointer.restore_params(3, jax.eval_shape(lambda: params)), params)


def test_all_weights_are_kept_and_the_newest_two_states(checkpointer):
    params = make_params()
    for step in (10, 20, 30, 40):
        checkpointer.save(step, params=params, state=make_state(params), extra={"step": step})
    assert checkpointer.params_steps() == [10, 20, 30, 40]
    assert checkpointer.latest() == 40
    assert checkpointer.read_extra(30) == {"step": 30}
    with pytest.raises(CheckpointError, match="no full state of step 20; steps there: 30, 40"):
        checkpointer.restore(20, (params, make_state(params)))


def test_keep_params_is_never_less_than_keep_states(tmp_path):
    params = make_params()
    checkpointer = Checkpointer(tmp_path, keep_states=2, keep_params=1)
    for step in (1, 2, 3):
        checkpointer.save(step, params=params, state=make_state(params))
    assert checkpointer.params_steps() == [2, 3]
    checkpointer.close()


def test_weights_of_a_state_that_is_kept_are_kept(tmp_path):
    params = make_params()
    checkpointer = Checkpointer(tmp_path, keep_states=2, keep_params=2)
    for step in range(1, 7):
        checkpointer.save(step, params=params, state=make_state(params) if step in (1, 2, 6) else None)
        kept = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 3, 4], 5: [1, 2, 4, 5], 6: [2, 5, 6]}[step]
        assert checkpointer.params_steps() == kept and checkpointer.latest() == (step if step in (1, 2, 6) else 2)
    checkpointer.close()
    assert sorted(int(path.name) for path in (tmp_path / "states").iterdir()) == [2, 6]


KILLED = """
import os, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from astra_jax.run.checkpoints import Checkpointer
folder, slow = Path(sys.argv[1]), sys.argv[2]
large, small = {"x": jax.random.normal(jax.random.key(0), (1500, 10_000))}, {"x": jnp.zeros(10)}
params, state = (large, small) if slow == "params" else (small, large)
checkpointer = Checkpointer(folder, keep_states=1, keep_params=1)
checkpointer.save(1, params=params, state=state, extra={})
checkpointer.wait()
checkpointer.save(2, params=params, state=state, extra={})
halves, quick = [folder / "params", folder / "states"], folder / ("states" if slow == "params" else "params")
until = time.monotonic() + 100
while (quick / "1").exists() and not all((half / "2").exists() for half in halves) and time.monotonic() < until:
    time.sleep(0.001)
os._exit(9)
"""


@pytest.mark.parametrize("slow", ["params", "states"])
def test_a_kill_between_the_halves_of_a_step_leaves_one_to_go_on_from(tmp_path, slow):
    """With one state kept: as soon as the old one goes, the new one has to be whole in both folders."""
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path, slow], capture_output=True, text=True, timeout=200)
    assert ended.returncode == 9, ended.stderr
    with contextlib.closing(Checkpointer(tmp_path, reading=True)) as checkpointer:
        assert checkpointer.latest() is not None


def test_weights_alone_are_not_a_step_to_resume_from(checkpointer):
    params = make_params()
    checkpointer.save(1, params=params)
    assert checkpointer.latest() is None
    assert_equal(checkpointer.restore_params(1, params), params)
    with pytest.raises(ValueError, match="pass state"):
        checkpointer.save(2, params=params, extra={})


@pytest.mark.parametrize("half", ["state_missing", "params_missing", "temporary_folder"])
def test_a_half_written_step_is_ignored_and_can_be_saved_again(tmp_path, half):
    first, second = make_params(1), make_params(2)
    before = Checkpointer(tmp_path)
    for step, params in ((1, first), (2, first)):
        before.save(step, params=params, state=make_state(params), extra={"step": step})
    before.close()
    if half == "state_missing":
        shutil.rmtree(tmp_path / "states" / "2")
    elif half == "params_missing":
        shutil.rmtree(tmp_path / "params" / "2")
    else:  # as a killed save leaves it
        (tmp_path / "states" / "2").rename(tmp_path / "states" / "2.orbax-checkpoint-tmp-7")

    after = Checkpointer(tmp_path)
    assert after.latest() == 1
    after.save(2, params=second, state=make_state(second), extra={"step": "again"})
    assert after.latest() == 2
    params, _, extra = after.restore(2, (first, make_state(first)))
    assert_equal(params, second)
    assert extra == {"step": "again"}
    after.close()


def test_arrays_may_be_donated_while_the_save_is_under_way(checkpointer):
    params = {"w": jax.random.normal(jax.random.key(0), (1024, 2048))}
    expected = np.array(params["w"])
    overwrite = jax.jit(lambda w: w * 0 + 7, donate_argnums=0)
    checkpointer.save(1, params=params, state={"m": jnp.zeros(3)})
    for _ in range(3):
        params["w"] = overwrite(params["w"])
    params["w"].block_until_ready()
    np.testing.assert_array_equal(checkpointer.restore_params(1, params)["w"], expected)


def test_saving_a_million_parameters_costs_well_under_a_second(checkpointer):
    params = {"w": jnp.ones((1000, 1000))}
    state = make_state(params)
    checkpointer.save(1, params=params, state=state)
    checkpointer.wait()
    with at_most(1):
        checkpointer.save(2, params=params, state=state)
        checkpointer.wait()


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            make_params(width=4),
            r"'embed_vd' is float32\[16,8\] in the checkpoint, float32\[16,4\] is asked for.*workdir",
        ),
        ({"embed_vd": jnp.zeros((16, 8))}, "the checkpoint has 'layers.w_ldd'"),
        ({**make_params(), "head": jnp.zeros(2)}, "the checkpoint lacks 'head'"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(checkpointer, like, message):
    params = make_params()
    checkpointer.save(1, params=params, state=make_state(params))
    with pytest.raises(CheckpointError, match=message):
        checkpointer.restore(1, (like, make_state(params)))


def test_an_empty_folder_has_no_step(checkpointer):
    assert checkpointer.latest() is None
    with pytest.raises(CheckpointError, match="no weights of step 5; steps there: none"):
        checkpointer.restore_params(5, make_params())


# ---------------------------------------------------------------------------------------------------------------------
# Metrics

IMPORTS = """
import sys
from astra_jax.run.metrics import UNUSED, MetricWriter

with MetricWriter(sys.argv[1]) as writer:
    writer.write(1, {"train/loss": 1.0})
print(*[name for name in UNUSED if name in sys.modules])
"""


def test_what_tensorboard_does_not_need_is_neither_imported_nor_hidden_for_good(tmp_path) -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTS, tmp_path], capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "\n"), ended.stderr
    assert list(tmp_path.glob("events*"))


def test_metrics_are_rows_in_order_and_resume_drops_the_steps_that_come_again(tmp_path):
    with MetricWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"train/loss": jnp.float32(1 / step), "lr": np.float64(step)})
    with MetricWriter(tmp_path) as writer:
        writer.truncate(3)
        writer.write(4, {"train/loss": 9.0})
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[1] == {"step": 2, "train/loss": 0.5, "lr": 2.0}
    assert rows[3] == {"step": 4, "train/loss": 9.0}
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_a_line_that_a_crash_cut_off_is_dropped(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')
    with MetricWriter(tmp_path) as writer:
        writer.write(2, {"train/loss": 2.0})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"step": 1, "train/loss": 1.0}, {"step": 2, "train/loss": 2.0}]


def test_not_a_number_is_written_as_null(tmp_path):
    with MetricWriter(tmp_path) as writer:
        writer.write(1, {"train/loss": float("nan"), "norm": float("inf")})
    assert read_metrics(tmp_path) == [{"step": 1, "train/loss": None, "norm": None}]


def test_a_spoilt_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.mark.parametrize("kind", ["params", "states"])
def test_a_corrupt_checkpoint_is_left_out_with_a_warning_that_names_it(tmp_path, caplog, kind):
    params = make_params()
    like = (params, make_state(params))
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, params=make_params(step), state=make_state(params), extra={"step": step})
    cut_in_half(tmp_path / kind / "2")
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer, caplog.at_level("WARNING"):
        step, restored, _, extra = checkpointer.restore_latest(like)
        assert step == 1 and extra == {"step": 1}
        assert_equal(restored, make_params(1))
        assert ": step 2 cannot be read: " in caplog.text and "it is left out" in caplog.text
        # The run goes on from there and saves its own step 2.
        checkpointer.save(2, params=make_params(7), state=make_state(params), extra={"step": 2})
        step, restored, _, _ = checkpointer.restore_latest(like)
        assert step == 2
        assert_equal(restored, make_params(7))


@pytest.mark.parametrize("kind", ["params", "states"])
def test_one_bit_that_flips_is_refused_by_name(tmp_path, caplog, kind):
    """Orbax's chunks have no checksum: what the compression does not notice would come back as another number."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((64, 64)), jnp.float32), "b": jnp.asarray(rng.random(700))}
    state, like = {"m": params["w"] * 2}, jax.tree.map(jnp.zeros_like, (params, {"m": params["w"]}))
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, params=params, state=state, extra={"step": 1})
        checkpointer.save(2, params=params, state=state, extra={"step": 2})
    sizes = {path: path.stat().st_size for path in (tmp_path / kind / "2").rglob("*") if "d" in path.parts}
    file = max(sizes, key=sizes.__getitem__)
    whole, silent = file.read_bytes(), 0
    for at in np.linspace(len(whole) // 8, len(whole) - len(whole) // 8, 12, dtype=int):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << int(at) % 8
        file.write_bytes(flipped)
        with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
            with pytest.raises(DamagedError, match="step 2 cannot be read: .* use an older step") as refused:
                checkpointer.restore(2, like)
            silent += "is not what was saved" in str(refused.value)
    assert silent >= 6  # what nothing but the digest sees
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer, caplog.at_level("WARNING"):
        assert checkpointer.restore_latest(like)[0] == 1
    assert re.search(rf"{kind}: step 2 cannot be read: '\w' is not what was saved", caplog.text)


def test_an_extra_that_is_not_what_was_saved_is_refused(tmp_path):
    params = make_params()
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, params=params, state=make_state(params), extra={"loss": 1.5})
    (file,) = (path for path in (tmp_path / "states" / "1" / "extra").iterdir() if b"1.5" in path.read_bytes())
    file.write_bytes(file.read_bytes().replace(b"1.5", b"1.7"))
    refused = pytest.raises(DamagedError, match=r"step 1 cannot be read: '\(extra\)' is not what was saved")
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer, refused:
        checkpointer.read_extra(1)


def test_what_was_saved_without_digests_is_read(tmp_path):
    params = make_params()
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, params=params, state=make_state(params), extra={"loss": 1.5})
    for kind in ("params", "states"):
        shutil.rmtree(tmp_path / kind / "1" / "digests")
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        step, restored, _, extra = checkpointer.restore_latest((params, make_state(params)))
    assert (step, extra) == (1, {"loss": 1.5})
    assert_equal(restored, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "int8", "bool"])
def test_a_digest_is_the_same_however_an_array_lies(dtype):
    from astra_jax.mesh import make_mesh

    values = jnp.asarray(np.random.default_rng(1).integers(-100, 100, (8, 16, 4)), dtype)
    whole = digests_of({"x": values})
    for axes, spec in (({"fsdp": 8}, (None, "fsdp")), ({"data": 2, "tensor": 4}, ("data", None, "tensor"))):
        lies = jax.sharding.NamedSharding(make_mesh(**axes), jax.sharding.PartitionSpec(*spec))
        assert digests_of({"x": jax.device_put(values, lies)}) == whole
    # Other places of the same values are another array; so is each bit.
    assert digests_of({"x": values[:, ::-1]}) != whole and digests_of({"x": values.reshape(16, 8, 4)}) == whole
    raw = np.asarray(values).view(np.uint8).copy()
    for bit in () if dtype == "bool" else range(0, raw.size * 8, raw.size // 3):
        raw.reshape(-1)[bit // 8] ^= 1 << bit % 8
        assert digests_of({"x": jnp.asarray(raw.view(values.dtype))}) != whole
        raw.reshape(-1)[bit // 8] ^= 1 << bit % 8


def test_when_no_checkpoint_can_be_read_nothing_is_begun_anew(tmp_path):
    params = make_params()
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        assert checkpointer.restore_latest((params, make_state(params))) is None
        checkpointer.save(1, params=params, state=make_state(params), extra={})
    for path in (tmp_path / "params" / "1").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with (
        contextlib.closing(Checkpointer(tmp_path)) as checkpointer,
        pytest.raises(CheckpointError, match="none of the checkpoints there can be read: 1"),
    ):
        checkpointer.restore_latest((params, make_state(params)))


def test_weights_and_states_of_different_steps_are_no_new_beginning(tmp_path):
    params = make_params()
    like = (params, make_state(params))
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, params=params)  # as a first save leaves it that was killed
        assert checkpointer.restore_latest(like) is None
        checkpointer.save(2, params=params, state=make_state(params), extra={})
    shutil.rmtree(tmp_path / "params" / "2")
    with (
        contextlib.closing(Checkpointer(tmp_path)) as checkpointer,
        pytest.raises(CheckpointError, match="weights of steps 1 and full states of steps 2, and none of the"),
    ):
        checkpointer.restore_latest(like)


def test_what_the_caller_refuses_is_refused(checkpointer):
    params = make_params()
    checkpointer.save(1, params=params, state=make_state(params), extra={"identity": "other"})

    def check(extra):
        raise KeyError(extra["identity"])

    with pytest.raises(KeyError, match="other"):
        checkpointer.restore_latest((params, make_state(params)), check)


@pytest.mark.parametrize(
    "error",
    [ValueError("UNAVAILABLE: Error reading: HTTP response code: 503"), TimeoutError(), OSError("connection reset")],
)
def test_a_bucket_that_does_not_answer_is_no_damage(tmp_path, monkeypatch, caplog, error):
    """The same command may go well; to leave the step out would train what is there again."""

    def no_answer(*arguments, **options):
        raise error

    params = make_params()
    like = (params, make_state(params))
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, params=params, state=make_state(params), extra={"step": step})
        checkpointer.wait()
        monkeypatch.setattr(checkpoints, "in_bucket", lambda path: True)
        for name, call, said in (
            ("read", lambda: checkpointer.restore_latest(like), "step 2 could not be read"),
            ("save", lambda: checkpointer.save(3, params=params), "a checkpoint could not be written"),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(checkpoints.CheckpointManager, name, no_answer)
                with pytest.raises(BucketError, match=f"{said} .*check the bucket") as raised:
                    call()
                assert raised.value.away and is_fault(raised.value)
        cut_in_half(tmp_path / "params" / "2")  # damage is damage there too
        with caplog.at_level("WARNING"):
            assert checkpointer.restore_latest(like)[0] == 1


def test_disks_that_are_full() -> None:
    """`failing_saves.py`, where a thread of Orbax or TensorStore that outlives a save that failed harms nobody else."""
    assert "1 passed" in in_its_own_process(Path(__file__).with_name("failing_saves.py"))
