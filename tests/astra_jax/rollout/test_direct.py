"""Weights out of the trainer's memory: both ends of it, without vLLM. On a real server: test_vllm.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import direct_hosts
import jax
import ml_dtypes
import numpy as np
import pytest
from emulated_rollouts import emulated
from vllm_world import PLUGIN, SYNC_KEY, model, weights

from astra_jax.models.hf_checkpoint import hf_tensors
from astra_jax.rollout.vllm import direct
from astra_jax.rollout.vllm import wire as ours
from astra_jax.rollout.vllm.direct import DirectPublisher, changes_of, listening_address, pieces
from astra_jax.rollout.vllm.publishing import Publisher
from astra_jax.rollout.vllm.sampler import VLLMConfig, VLLMSampler
from astra_jax.rollout.vllm.sync import sync_way

sys.path.insert(0, str(PLUGIN))  # a distribution of its own, which this environment does not have

from astra_vllm import stream  # noqa: E402
from astra_vllm import wire as theirs  # noqa: E402
from astra_vllm.access import NotTaken, SyncAccess, SyncRoot  # noqa: E402
from astra_vllm.checkpoint import PolicyCheckpoint  # noqa: E402
from astra_vllm.layout import PolicyCheckpointError  # noqa: E402
from astra_vllm.stream import Damaged, PolicyStream, apply_changes  # noqa: E402

MODEL = model(tie=False)
WORLDS = Path(direct_hosts.__file__).parent


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Boxes, so that leaves have several; and a server's patience."""
    monkeypatch.setattr(direct, "BOX_BYTES", 60_000)
    monkeypatch.setattr(stream, "SECONDS", 10.0)


@contextlib.contextmanager
def published(*params, dtype: str = "float32", key: str = SYNC_KEY) -> Iterator[tuple[DirectPublisher, str]]:
    """Of the run r1, as updates 1, 2 and so on."""
    publisher = DirectPublisher(MODEL, key=key, run="r1", host="127.0.0.1", dtype=dtype)
    try:
        for update, one in enumerate(params, 1):
            item = publisher.publish(one, update)
            publisher.wait()
        yield publisher, item
    finally:
        publisher.close()


@contextlib.contextmanager
def updated(first, second) -> Iterator[tuple[str, bytearray, dict]]:
    """An item of two versions, and what is had of the first: its bytes, and what is known of them."""
    with published(first) as (publisher, item):
        found = streamed(item)
        buffer, parts = bytearray(found.bytes), {}
        read(found, buffer, parts)
        publisher.publish(second, 2)
        publisher.wait()
        yield item, buffer, parts


def shapes(config=MODEL) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in hf_tensors(config.init(jax.random.key(0)), config)}


def streamed(item: str, update: int = 1, key: str = SYNC_KEY, config=MODEL) -> PolicyStream:
    found = PolicyStream(item, f"r1:{update}", key)
    found.compare(shapes(config), {}, "float32")
    return found


def read(found: PolicyStream | PolicyCheckpoint, buffer: bytearray | None = None, parts: dict | None = None):
    """All tensors by name."""
    buffer = bytearray(found.bytes) if buffer is None else buffer
    found.read(memoryview(buffer), {} if parts is None else parts)
    kinds = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
    return {
        span.name: np.frombuffer(buffer, kinds[span.dtype], int(np.prod(span.shape)), span.start).reshape(span.shape)
        for span in found.spans
    }


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype and found[name].tobytes() == np.asarray(one).tobytes(), name


# ---------------------------------------------------------------------------------------------------------------------
# What comes is what was published


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_streamed_is_what_a_checkpoint_holds(dtype, tmp_path) -> None:
    params = weights(MODEL, 1)
    publisher = Publisher(tmp_path, MODEL, dtype=dtype)
    item = publisher.publish(params, 1)
    publisher.close()
    checkpoint = PolicyCheckpoint(str(item), SyncRoot(str(tmp_path)))
    checkpoint.compare(shapes(), {}, "float32")
    with published(params, dtype=dtype) as (_, item):
        found = streamed(item)
        assert found.spans == checkpoint.spans and found.bytes == checkpoint.bytes
        assert_equal(read(found), read(checkpoint))


def test_donated_weights_are_published_as_they_were() -> None:
    params = weights(MODEL, 1)
    wanted = dict(hf_tensors(params, MODEL))
    wanted = {name: np.array(one) for name, one in wanted.items()}
    publisher = DirectPublisher(MODEL, key=SYNC_KEY, run="r1", host="127.0.0.1", dtype="float32")
    item = publisher.publish(params, 1)
    params = jax.jit(lambda tree: jax.tree.map(lambda x: x - 1, tree), donate_argnums=0)(params)
    jax.block_until_ready(params)
    publisher.wait()
    assert_equal(read(streamed(item)), wanted)
    publisher.close()


def test_only_what_has_changed_travels() -> None:
    """An update that changes one leaf, and few numbers of another: the rest is there already."""
    first = weights(MODEL, 1)
    second = jax.tree.map(lambda x: x, first)
    up = second["layers"]["mlp"]["up_df"]
    second["layers"]["mlp"]["up_df"] = up + 1
    second["layers"]["mlp"]["gate_df"] = second["layers"]["mlp"]["gate_df"].at[1, 7, ::50].mul(-1)
    with updated(first, second) as (item, buffer, parts):
        found = streamed(item, 2)
        assert_equal(read(found, buffer, parts), dict(hf_tensors(second, MODEL)))
        changed = 6 * 6  # numbers of gate_proj, of six bytes each; and a count for each of its boxes that has one
        assert up.nbytes + changed < found.read_bytes < up.nbytes + changed + 100
        again = streamed(item, 2)
        read(again, buffer, parts)
        assert again.read_bytes == 0


def test_a_box_that_was_not_what_it_seemed_is_had_whole() -> None:
    first = weights(MODEL, 1)
    second = jax.tree.map(lambda x: x.at[0].multiply(1.5) if x.ndim == 1 else x, first)
    assert any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))
    with updated(first, second) as (item, buffer, parts):
        (span,) = (span for span in streamed(item, 2).spans if span.name == "model.norm.weight")
        buffer[span.start + 8 : span.start + 12] = b"junk"
        assert_equal(read(streamed(item, 2), buffer, parts), dict(hf_tensors(second, MODEL)))


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_changes_make_the_one_the_other(size, kind) -> None:
    rng = np.random.default_rng(size)
    old = rng.integers(0, 60_000, size).astype(kind)
    for share in (0, 0.001, 0.1):
        new = np.where(rng.random(size) < share, old + 1, old).astype(kind)
        changes = changes_of(old, new)
        if changes is None:
            assert size == 1  # the counts alone are more than half of it
            continue
        assert len(changes) <= new.nbytes // 2
        made = old.copy()
        apply_changes(made, changes)
        np.testing.assert_array_equal(made, new)
    assert changes_of(old, (old + 1).astype(kind)) is None


def test_odd_changes_are_refused() -> None:
    old = np.arange(70_000, dtype=np.uint16)
    new = old.copy()
    new[69_999] = 0
    good = changes_of(old, new)
    beyond = good[:8] + (65_000).to_bytes(2, "little") + good[10:]
    rng = random.Random(0)
    for odd in (b"", good[:-1], good[:7], good + b"x", b"\xff" * len(good), beyond, rng.randbytes(500)):
        with pytest.raises(Damaged):
            apply_changes(old.copy(), odd)


def test_boxes_are_whole_pieces_of_at_most_so_many_numbers() -> None:
    for shape, most in (((3, 4, 5), 7), ((3, 4, 5), 60), ((3, 4, 5), 1), ((7,), 3), ((2, 100), 30), ((1, 1), 1)):
        array = np.zeros(shape)
        for ranges in pieces(shape, most):
            part = array[tuple(slice(*one) for one in ranges)]
            assert part.flags.c_contiguous and 0 < part.size <= most
            part += 1
        assert (array == 1).all()


# ---------------------------------------------------------------------------------------------------------------------
# Several hosts


@pytest.mark.nightly
def test_several_hosts_serve_what_each_has() -> None:
    """Two processes of two devices each: shards over both, replicas once, boxes that lie in pieces in their leaf."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(WORLDS / "direct_hosts.py"), str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    hosts = [subprocess.Popen([*command, str(i), "2", SYNC_KEY], env=environment, **pipes) for i in range(2)]

    def publish() -> str:
        for host in hosts:
            host.stdin.write("\n")
            host.stdin.flush()
        items = {next(line for line in host.stdout if line.startswith("tcp:")).strip() for host in hosts}
        assert len(items) == 1  # the first one's, on both
        return items.pop()

    expected = shapes(direct_hosts.MODEL)
    try:
        item = publish()
        buffer, parts = bytearray(), {}
        for update in (1, 2):
            found = PolicyStream(item, f"{direct_hosts.RUN}:{update}", SYNC_KEY)
            found.compare(expected, {}, "float32")
            buffer = buffer or bytearray(found.bytes)
            wanted = dict(hf_tensors(direct_hosts.weights(update), direct_hosts.MODEL))
            assert_equal(read(found, buffer, parts), wanted)
            assert [len(boxes) > 0 for boxes in found._boxes.values()] == [True, True]
            publish()
        hosts[1].kill()
        hosts[1].wait()
        with pytest.raises(PolicyCheckpointError, match="cannot be reached"):
            PolicyStream(item, f"{direct_hosts.RUN}:3", SYNC_KEY)
    finally:
        for host in hosts:
            host.kill()
            host.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Who gets what


def test_the_two_ends_speak_the_same() -> None:
    assert ours.MAGIC == theirs.MAGIC and ours.proof(b"k", b"s", b"c") == theirs.proof(b"k", b"s", b"c")
    assert ours.MOST_REQUEST < theirs.MOST_MESSAGE and direct.BOX_BYTES <= stream.MOST_BOX_BYTES


def test_a_server_that_reads_slowly_has_its_time_for_each_slice(monkeypatch) -> None:
    """`sendall` has its time for all that it is given: what is given at once is bounded."""
    sent: list[int] = []

    class Counting(socket.socket):
        def sendall(self, content, *flags) -> None:  # type: ignore[no-untyped-def]
            sent.append(len(content))
            super().sendall(content, *flags)

    monkeypatch.setattr(socket, "socket", Counting)
    content = random.Random(3).randbytes((5 << 20) + 7)
    answer: ours.Answer = {"form": "whole", "bytes": len(content)}, memoryview(content)
    with contextlib.closing(ours.WeightServer("127.0.0.1", 0, SYNC_KEY, lambda message: answer)) as server:
        connection = theirs.TrainerConnection(server.address, SYNC_KEY, 10.0)
        got = connection.ask({"want": "r1:1", "box": 0})
        taken = bytearray(got["bytes"])
        connection.fill(memoryview(taken))
        connection.close()
        assert taken == content
    assert max(sent) == 1 << 20 and sum(sent) > len(content)


def test_who_has_no_key_or_another_gets_nothing() -> None:
    with published(weights(MODEL, 1)) as (_, item):
        with pytest.raises(PolicyCheckpointError, match="takes another key than that of this server's ASTRA_SYNC_KEY_"):
            streamed(item, key="wrong")
        host, port = item.removeprefix("tcp://").split(":")
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, theirs.MAGIC + bytes(32) + bytes(32), b"\0" * 500):
            with socket.create_connection((host, int(port)), 10) as one:
                answer = b""
                with contextlib.suppress(OSError):  # it may have hung up at the first bytes
                    one.sendall(said)
                    one.shutdown(socket.SHUT_WR)
                    while part := one.recv(1 << 16):
                        answer += part
            assert len(answer) <= len(theirs.MAGIC) + 32  # random bytes
        read(streamed(item))  # still there


def test_who_is_not_the_trainer_is_found_out() -> None:
    """It sends back what it is sent, which is no proof of a key; or answers as something else."""

    def echoes(one: socket.socket) -> None:
        while content := one.recv(1 << 16):
            one.sendall(content)

    def greets(one: socket.socket) -> None:
        one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    for behaviour, said in ((echoes, "has not the key of this server's"), (greets, "is not a trainer of this version")):
        with listening(behaviour) as address, pytest.raises(PolicyCheckpointError, match=said):
            PolicyStream(f"tcp://{address}", "r1:1", SYNC_KEY)


def test_weights_of_another_run_or_update_are_not_had() -> None:
    first, second = weights(MODEL, 1), weights(MODEL, 2)
    with published(first) as (publisher, item):
        for label, said in (
            ("r2:1", "this is the run r1, which has no weights 'r2:1'"),
            ("r1:7", r"weights r1:7 are not served \(there are r1:1\)"),
            ("r1:-1", "is not a label"),
        ):
            with pytest.raises(PolicyCheckpointError, match=said):
                PolicyStream(item, label, SYNC_KEY)
        held = streamed(item)
        publisher.publish(second, 2)
        publisher.wait()
        assert_equal(read(streamed(item, 1)), dict(hf_tensors(first, MODEL)))  # as long as none has asked for the next
        assert_equal(read(streamed(item, 2)), dict(hf_tensors(second, MODEL)))
        with pytest.raises(PolicyCheckpointError, match="weights r1:1 are not served"):
            read(held)
        publisher.publish(first, 3)
        publisher.wait()
        publisher.publish(first, 4)
        publisher.wait()
        assert list(publisher._held) == [3, 4]  # two copies, whatever is asked for


def test_another_model_is_refused_before_anything_is_had() -> None:
    other = dataclasses.replace(MODEL, d_ff=96)
    with published(weights(MODEL, 1)) as (_, item):
        with pytest.raises(PolicyCheckpointError, match=r"has shape \[128, 256\], the model's has \[128, 96\]"):
            streamed(item, config=other)
        with pytest.raises(PolicyCheckpointError, match=r"tensor model.layers.3.* is missing"):
            streamed(item, config=dataclasses.replace(MODEL, n_layers=4))
        found = PolicyStream(item, "r1:1", SYNC_KEY)
        with pytest.raises(PolicyCheckpointError, match="is float32, the model is served in bfloat16"):
            found.compare(shapes(), {}, "bfloat16")


def listed(change: Callable[[dict], None]) -> str:
    """Why what a host lists is not taken, after a change of it."""
    with published(weights(MODEL, 1)) as (publisher, item):
        plain = publisher._answer

        def other(message):
            answer, content = plain(message)
            if "boxes" in answer:
                answer["boxes"] = [list(one) for one in answer["boxes"]]
                change(answer)
            return answer, content

        publisher._server._answer = other
        with pytest.raises(PolicyCheckpointError) as why:
            PolicyStream(item, "r1:1", SYNC_KEY)
        return str(why.value)


def test_lists_that_are_not_each_number_once_are_refused() -> None:
    def beyond(answer):
        (low, high), *rest = answer["boxes"][0][1]
        answer["boxes"][0][1] = [(low, high + 999), *rest]

    def twice(answer):
        answer["boxes"][1] = answer["boxes"][0]

    up = "model.layers.{}.mlp.up_proj.weight"
    for change, said in (
        (lambda answer: answer["boxes"].pop(), "its boxes are not each of its"),
        (twice, "its boxes are not each of its"),
        (beyond, "has the box"),
        (lambda answer: answer["boxes"].append(["other", [[0, 1]], ""]), "which is not a leaf"),
        (lambda answer: answer["boxes"].append([1]), "lists boxes in another form"),
        (lambda answer: answer.update(leaves={up: [[-3], "float32"]}), "lists no leaves, or one without a shape"),
        (lambda answer: answer.update(leaves=[]), "lists leaves in another form"),
        (lambda answer: answer.update(hosts=["x"]), "names no hosts"),
        (lambda answer: answer.pop("hosts"), "lists {"),
    ):
        assert said in listed(change)


# ---------------------------------------------------------------------------------------------------------------------
# What breaks on the way


@contextlib.contextmanager
def listening(behaviour: Callable[[socket.socket], None]) -> Iterator[str]:
    """Somebody who does that with each connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = listener.accept()
                    threading.Thread(target=serve, args=(one,), daemon=True).start()

        def serve(one: socket.socket) -> None:
            with one, contextlib.suppress(OSError):
                behaviour(one)

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def through(item: str, spoils: Callable[[int, bytes], bytes | None]) -> Iterator[str]:
    """An item behind a network that does something to what the trainer sends.

    Args:
        spoils: gets the bytes that it has sent before, on all connections, and the next ones; None: it breaks.
    """
    sent, lock = 0, threading.Lock()
    host, port = item.removeprefix("tcp://").split(":")

    def between(one: socket.socket) -> None:
        nonlocal sent
        with socket.create_connection((host, int(port))) as trainer:

            def up() -> None:
                with contextlib.suppress(OSError):
                    while content := one.recv(1 << 16):
                        trainer.sendall(content)
                    trainer.shutdown(socket.SHUT_WR)

            threading.Thread(target=up, daemon=True).start()
            while content := trainer.recv(1 << 16):
                with lock:
                    spoiled = spoils(sent, content)
                    sent += len(content)
                if spoiled is None:
                    one.shutdown(socket.SHUT_RDWR)
                    return
                one.sendall(spoiled)

    with listening(between) as address:
        yield f"tcp://{address}"


def behind(item: str, proxy: str, monkeypatch) -> PolicyStream:
    """What is listed at the item; its boxes come by the proxy."""
    found = streamed(item)
    found._boxes = {proxy.removeprefix("tcp://"): boxes for boxes in found._boxes.values()}
    monkeypatch.setattr("astra_vllm.stream.time.sleep", lambda _: None)
    return found


def test_a_byte_that_flips_on_the_way_is_found_and_the_box_had_again(monkeypatch) -> None:
    params, at = weights(MODEL, 1), 900_000

    def once(sent: int, content: bytes) -> bytes:
        if sent <= at < sent + len(content):
            return content[: at - sent] + bytes([content[at - sent] ^ 64]) + content[at - sent + 1 :]
        return content

    with published(params) as (_, item), through(item, once) as proxy:
        assert_equal(read(behind(item, proxy, monkeypatch)), dict(hf_tensors(params, MODEL)))


def test_a_box_that_never_comes_whole_is_refused_by_name(monkeypatch) -> None:
    def always(sent: int, content: bytes) -> bytes:
        return content[:-1] + bytes([content[-1] ^ 1]) if len(content) > 10_000 else content

    with published(weights(MODEL, 1)) as (_, item), through(item, always) as proxy:
        found = behind(item, proxy, monkeypatch)
        with pytest.raises(PolicyCheckpointError, match=r"leaf .* could not be had of 127.0.0.1:\d+: "):
            read(found)


def test_a_message_that_is_changed_on_the_way_is_no_message() -> None:
    def spoils(sent: int, content: bytes) -> bytes:
        return content.replace(b'"boxes"', b'"boxez"')

    with (
        published(weights(MODEL, 1)) as (_, item),
        through(item, spoils) as proxy,
        pytest.raises(PolicyCheckpointError, match="a message was changed on the way"),
    ):
        PolicyStream(proxy, "r1:1", SYNC_KEY)


def test_a_connection_that_breaks_is_made_again(monkeypatch) -> None:
    params, broken = weights(MODEL, 1), []

    def twice(sent: int, content: bytes) -> bytes | None:
        if sent > 400_000 * (1 + len(broken)) and len(broken) < 2:
            broken.append(sent)
            return None
        return content

    with published(params) as (_, item), through(item, twice) as proxy:
        assert_equal(read(behind(item, proxy, monkeypatch)), dict(hf_tensors(params, MODEL)))
    assert len(broken) == 2


def test_a_trainer_that_ends_in_the_middle_is_named(monkeypatch) -> None:
    """What was had of the next version is known by its digests, and the sync after it goes on from there."""
    params = weights(MODEL, 1)
    with published(params) as (publisher, item):
        taken, buffer, parts = [], bytearray(streamed(item).bytes), {}
        plain, closing = publisher._answer, threading.Lock()

        def ends(message):
            if "box" in message:
                with closing:  # it takes a while, and no other connection is to be answered meanwhile
                    taken.append(message)
                    if len(taken) == 12:
                        publisher.close()
            return plain(message)

        publisher._server._answer = ends
        found = streamed(item)
        monkeypatch.setattr("astra_vllm.stream.time.sleep", lambda _: None)
        with pytest.raises(PolicyCheckpointError, match="could not be had of|are not served"):
            read(found, buffer, parts)
    assert 0 < len(parts) <= 12
    with published(params) as (_, item):
        assert_equal(read(streamed(item), buffer, parts), dict(hf_tensors(params, MODEL)))


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def test_direct_wants_a_key_on_both_sides(tmp_path) -> None:
    with pytest.raises(ValueError, match="VLLMConfig.sync='direct' without sync_key.*--rollout_sync_key_file"):
        VLLMConfig(("http://a:1",), sync="direct")
    with pytest.raises(ValueError, match="VLLMConfig.sync is 'direct', which reads what a DirectPublisher writes"):
        sync_way("direct", Publisher(tmp_path, MODEL), "", SYNC_KEY)
    (tmp_path / "key").write_text(SYNC_KEY)
    of = {"host": "127.0.0.1", "socket": None, "api_keys": []}
    keyless = SyncAccess.of({"ASTRA_SYNC_ROOT": str(tmp_path)}, **of)
    with pytest.raises(NotTaken, match="started without ASTRA_SYNC_KEY_FILE"):
        keyless.key_of_streams("tcp://a:1")
    rootless = SyncAccess.of({"ASTRA_SYNC_KEY_FILE": str(tmp_path / "key")}, **of)
    assert rootless.key_of_streams("tcp://a:1") == SYNC_KEY
    with pytest.raises(NotTaken, match="is of files, and this server was started without ASTRA_SYNC_ROOT"):
        rootless.below(str(tmp_path))


def test_items_that_are_no_address_are_refused() -> None:
    for item in ("tcp://", "tcp://a", "tcp://a:0", "tcp://:1", "tcp://a:99999", "tcp://a:1x", "tcp://" + "a" * 900):
        with pytest.raises(PolicyCheckpointError, match="is not an address of a trainer"):
            PolicyStream(item, "r1:1", SYNC_KEY)


def test_where_weights_are_served() -> None:
    assert listening_address(["http://127.0.0.1:8000"]) == ("127.0.0.1", 0)
    assert listening_address(["dns+http://localhost:8000"], ":9000")[1] == 9000
    assert listening_address([], "10.0.0.1:9000") == ("10.0.0.1", 9000)
    assert listening_address([], "[::1]:9000") == ("::1", 9000)
    for odd in ("10.0.0.1:x", "a/b", ":", "u@h:1"):
        with pytest.raises(ValueError, match="--publish_address is "):
            listening_address(["http://127.0.0.1:8000"], odd)
    with pytest.raises(ValueError, match="give --publish_address"):
        listening_address(["http://no.such.name.invalid:1"])
    with pytest.raises(ValueError, match="weights cannot be served at 192.0.2.1:0 .*--publish_address"):
        DirectPublisher(MODEL, key=SYNC_KEY, run="r1", host="192.0.2.1")


@pytest.mark.asyncio
async def test_a_policy_hands_its_address_over_as_it_hands_over_a_folder() -> None:
    """The servers are told where, under which label; the same two versions are had as of files."""
    publisher = DirectPublisher(MODEL, key=SYNC_KEY, run="r1", host="127.0.0.1", dtype="float32")
    async with emulated(1) as (server,):
        config = VLLMConfig((server.url,), sync="direct", sync_key=SYNC_KEY, run_id="r1")
        server.config = MODEL.to_hf()
        async with VLLMSampler(config, publisher, vocabulary="", max_length=100) as policy:
            for update in (1, 2):
                await policy.load_weights(weights(MODEL, update), update)
                (item,) = set(server.items)
                assert server.syncs[-1] == f"r1:{update}"
                wanted = dict(hf_tensors(weights(MODEL, update), MODEL))
                assert_equal(read(streamed(item, update)), wanted)
    publisher.close()
