"""What a vLLM server with our plugin lets whom load: the plugin's own code, without vLLM and without a model."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from peak_memory import peak_memory
from processor_time import at_most
from vllm_world import KEY, PLUGIN, SYNC_KEY, model, sync_settings, weights

from astra_jax.models.hf_checkpoint import hf_tensors
from astra_jax.rollout.vllm import sync
from astra_jax.rollout.vllm.publishing import FolderPublisher, Publisher
from astra_jax.rollout.vllm.sampler import VLLMConfig
from astra_jax.rollout.vllm.server import PolicyError, RolloutServer
from astra_jax.rollout.vllm.sync import sync_way

sys.path.insert(0, str(PLUGIN))  # a distribution of its own, which this environment does not have

from astra_vllm import access  # noqa: E402
from astra_vllm.access import NotTaken, SyncAccess, SyncRoot  # noqa: E402
from astra_vllm.checkpoint import PolicyCheckpoint  # noqa: E402
from astra_vllm.layout import PolicyCheckpointError  # noqa: E402
from astra_vllm.lease import Held, Lease, is_run, run_of  # noqa: E402

UP = "model.layers.{}.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """A root with a good version, 1."""
    folder = tmp_path_factory.mktemp("published") / "policy"
    publisher = Publisher(folder, model(tie=False), dtype="float32")
    publisher.publish(weights(model(tie=False), 0), 1)
    publisher.close()
    return folder


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    config = model(tie=False)
    return {name: tensor.shape for name, tensor in hf_tensors(weights(config, 0), config)}


@pytest.fixture
def root(published: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    shutil.copytree(published, tmp_path / "policy")
    return tmp_path / "policy"


def crafted(root: Path, version: int, leaves: dict[str, dict], **metadata) -> Path:
    """A committed item of leaves that were described and not written; each is zarr's metadata."""
    item = root / str(version) / "params"
    item.mkdir(parents=True)
    for name, one in leaves.items():
        store = {"driver": "ocdbt", "base": f"file://{item}/", "path": f"{name}/"}
        described = {"dtype": "<f4", "compressor": None, "fill_value": None, "filters": None, "order": "C", **one}
        ts.open({"driver": "zarr", "kvstore": store, "metadata": described}, create=True).result()
    tree = {name: {"key_metadata": [{"key": name, "key_type": 2}]} for name in leaves}
    (item / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "use_zarr3": False, **metadata}))
    (item.parent / "_CHECKPOINT_METADATA").write_text('{"commit_timestamp_nsecs": 1}')
    return item


def refused(item: Path, root: Path, shapes: dict, dtype: str = "float32") -> str:
    """Why a checkpoint is not taken; no step of which may cost what it claims to hold."""
    with peak_memory() as peak, at_most(5), pytest.raises((NotTaken, PolicyCheckpointError)) as why:
        checkpoint = PolicyCheckpoint(str(item), SyncRoot(str(root)))
        checkpoint.compare(shapes, {}, dtype)
        checkpoint.read(memoryview(bytearray(checkpoint.bytes)), {})
    assert peak.bytes < 32 << 20
    return str(why.value)


def test_a_good_checkpoint_is_read_to_the_bit(published, shapes) -> None:
    checkpoint = PolicyCheckpoint(str(published / "1" / "params"), SyncRoot(str(published)))
    checkpoint.compare(shapes, {}, "float32")
    buffer = bytearray(checkpoint.bytes)
    checkpoint.read(memoryview(buffer), {})
    wanted = dict(hf_tensors(weights(model(tie=False), 0), model(tie=False)))
    assert {span.name for span in checkpoint.spans} == wanted.keys()
    for span in checkpoint.spans:
        read = np.frombuffer(buffer, np.float32, span.bytes // 4, span.start).reshape(span.shape)
        np.testing.assert_array_equal(read, wanted[span.name])


def test_what_is_equal_to_zarrs_fill_value_is_stored(tmp_path) -> None:
    """A tensor of zeros is there, and no chunk of it is missing."""
    import jax

    config = model(tie=False)
    publisher = Publisher(tmp_path, config, dtype="float32")
    publisher.publish(jax.tree.map(lambda x: 0 * x, weights(config, 0)), 1)
    publisher.close()
    checkpoint = PolicyCheckpoint(str(tmp_path / "1" / "params"), SyncRoot(str(tmp_path)))
    checkpoint.compare({name: x.shape for name, x in hf_tensors(weights(config, 0), config)}, {}, "float32")
    checkpoint.read(memoryview(bytearray(checkpoint.bytes)), {})


def test_nothing_beside_the_root_is_opened(root, shapes, tmp_path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(root, outside)
    (root / "link").symlink_to(outside / "1")
    (root / "circle").symlink_to(root / "circle")
    for item in (
        outside / "1" / "params",
        root / ".." / "outside" / "1" / "params",
        root / "link" / "params",
        root,
        root.parent,
        Path(f"{root}2/1/params"),
        Path("1/params"),
        Path("/proc/self/root", *(outside / "1" / "params").parts[1:]),
    ):
        assert "is not below ASTRA_SYNC_ROOT=" in refused(item, root, shapes), item
    for text in (
        f"file://{root}/1/params",
        "http://127.0.0.1:9/1/params",
        "https://evil.example/policy/1/params",
        "gs://bucket/policy/1/params",
        "s3://bucket/policy/1/params",
        f"{root}/1/params\0",
        "",
    ):
        with pytest.raises(NotTaken, match="is not below ASTRA_SYNC_ROOT="):
            SyncRoot(str(root)).store(text)
    with pytest.raises(PolicyCheckpointError, match="is not there"):  # an escape is a name, and followed by nobody
        PolicyCheckpoint(f"{root}/%2e%2e/outside/1/params", SyncRoot(str(root)))
    with pytest.raises(NotTaken, match="cannot be followed|is not below"):
        SyncRoot(str(root)).store(str(root / "circle" / "params"))
    assert "is not a file below" in (
        os.mkfifo(root / "1" / "params" / "pipe") or refused(root / "1" / "params", root, shapes)
    )


def test_a_link_inside_a_checkpoint_leads_nowhere_else(root, shapes, tmp_path) -> None:
    (data, *_) = sorted((root / "1" / "params").rglob("d/*"), key=lambda path: -path.stat().st_size)
    shutil.move(data, tmp_path / "moved")
    data.symlink_to(tmp_path / "moved")
    assert f"{data} is not a file below ASTRA_SYNC_ROOT=" in refused(root / "1" / "params", root, shapes)


def test_a_bucket_is_a_root_by_its_whole_name() -> None:
    root = SyncRoot("gs://bucket/policy/")
    wanted = {"driver": "gcs", "bucket": "bucket", "path": "policy/1/params/"}
    assert root.store("gs://bucket/policy/1/params") == wanted
    for item in (
        "gs://bucket/policy",
        "gs://bucket/policy2/1/params",
        "gs://bucket/other/1/params",
        "gs://buckets/policy/1/params",
        "gs://bucket/policy/../other/1/params",
        "gs://bucket/policy/./1",
        "gs://bucket/policy//1",
        "gs://bucket/policy/1?x=2",
        "gs://bucket/policy/%2e%2e/1",
        "gs://bucket/policy/1|zip:x",
        "/policy/1/params",
        "s3://bucket/policy/1/params",
    ):
        with pytest.raises(NotTaken, match="is not below ASTRA_SYNC_ROOT=gs://bucket/policy, "):
            root.store(item)


@pytest.mark.parametrize(
    "text", ["policy", "/", "s3://bucket/policy", "http://host/policy", "gs://bucket", "gs://b/../x"]
)
def test_a_root_is_a_folder_or_a_bucket(text: str) -> None:
    with pytest.raises(RuntimeError, match="astra_sync: ASTRA_SYNC_ROOT="):
        SyncRoot(text)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints that claim much


CLAIMS = {
    "many tensors": ({UP: {"shape": [1 << 40, 8, 8], "chunks": [1, 8, 8]}}, "more than the model has"),
    "many empty tensors": ({UP: {"shape": [1 << 22, 0], "chunks": [1, 1]}}, "more than the model has"),
    "a large tensor": (
        {"lm_head.weight": {"shape": [1 << 30, 1 << 20], "chunks": [1, 1024]}},
        r"tensor lm_head.weight has shape \[1073741824, 1048576\], the model's has \[640, 128\]",
    ),
    "another axis": ({"lm_head.weight": {"shape": [640, 128, 1], "chunks": [640, 128, 1]}}, "the model's has"),
    "large chunks": ({"lm_head.weight": {"shape": [640, 128], "chunks": [1 << 20, 1 << 20]}}, "has larger chunks"),
    "unpacked": (
        {"lm_head.weight": {"shape": [640, 128], "chunks": [640, 128], "compressor": {"id": "zlib", "level": 9}}},
        "stored with zlib, which may unpack to any size; publish it uncompressed",
    ),
    "numbers that are none": (
        {"lm_head.weight": {"shape": [640, 128], "chunks": [640, 128], "dtype": "<f8"}},
        "float64",
    ),
    "a name twice": (
        {
            "model.layers.{}.input_layernorm.weight": {"shape": [3, 128], "chunks": [3, 128]},
            "model.layers.0.input_layernorm.weight": {"shape": [128], "chunks": [128]},
        },
        "model.layers.0.input_layernorm.weight is there twice",
    ),
    "a name of the model's and one more": ({"model.other": {"shape": [1], "chunks": [1]}}, "is not part of the model"),
    "more leaves than tensors": (
        {f"model.x{i}": {"shape": [0], "chunks": [1]} for i in range(40)},
        "it has 40 leaves, the model 36 tensors",
    ),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_what_a_checkpoint_claims_costs_nothing(case: str, tmp_path, shapes) -> None:
    leaves, words = CLAIMS[case]
    item = crafted(tmp_path, 1, leaves)
    said = refused(item, tmp_path, shapes)
    assert re.search(words, said), said


def test_tensors_that_were_described_and_not_stored_are_no_zeros(tmp_path) -> None:
    """Few bytes with the right names and shapes."""
    item = crafted(tmp_path, 1, {"lm_head.weight": {"shape": [640, 128], "chunks": [640, 128]}})
    assert sum(path.stat().st_size for path in item.rglob("*") if path.is_file()) < 2_000
    assert "leaf lm_head.weight cannot be read" in refused(item, tmp_path, {"lm_head.weight": (640, 128)})


def test_names_are_names(tmp_path, shapes) -> None:
    """A name was a format once: `{:>99999999999}` made a text of as many letters."""
    for name in ("model.{:>99999999999}.weight", "model.{0.__class__}", "../../1/params", "a/b", "", "model..x"):
        item = crafted(tmp_path, 1, {})
        tree = {"x": {"key_metadata": [{"key": name, "key_type": 2}]}}
        (item / "_METADATA").write_text(json.dumps({"tree_metadata": tree}))
        assert "is nested, or no name" in refused(item, tmp_path, shapes)
        shutil.rmtree(item.parent)


def test_metadata_are_small_and_of_their_form(tmp_path, shapes) -> None:
    item = crafted(tmp_path, 1, {})
    for text, words in (
        ("{" + " " * (17 << 20) + "}", "more than the 16777216 bytes of any metadata"),
        ("[" * 200_000, "cannot be read"),
        ("[]", "is not a JSON object"),
        ('{"tree_metadata": []}', "is not of an Orbax item"),
    ):
        (item / "_METADATA").write_text(text)
        assert words in refused(item, tmp_path, shapes)


@pytest.mark.parametrize(("dtype", "fits"), [("float32", True), ("bfloat16", False), ("float16", False)])
def test_a_checkpoint_has_the_models_dtype_or_one_that_it_holds(published, shapes, dtype: str, fits: bool) -> None:
    checkpoint = PolicyCheckpoint(str(published / "1" / "params"), SyncRoot(str(published)))
    if fits:
        checkpoint.compare(shapes, {}, dtype)
    else:
        with pytest.raises(PolicyCheckpointError, match=f"is float32, the model is served in {dtype}: publish that"):
            checkpoint.compare(shapes, {}, dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Who may


def test_a_server_that_anybody_could_sync_does_not_start(tmp_path) -> None:
    settings = sync_settings(tmp_path)
    rooted = {access.ROOT: str(tmp_path)}
    (tmp_path / "empty").touch()
    (tmp_path / "api_key").write_text(KEY)
    dev = {"VLLM_SERVER_DEV_MODE": "1"}
    for environment, host, words in (
        ({}, "127.0.0.1", "ASTRA_SYNC_ROOT is not set: give the folder"),
        (rooted, None, "--host=everywhere can be reached from other machines, and ASTRA_SYNC_KEY_FILE is not set"),
        (rooted, "0.0.0.0", "--host=0.0.0.0 can be reached"),
        (rooted, "gpu1", "--host=gpu1 can be reached"),
        (rooted | {access.KEY_FILE: "/nowhere"}, "127.0.0.1", "ASTRA_SYNC_KEY_FILE=/nowhere cannot be read"),
        (rooted | {access.KEY_FILE: str(tmp_path / "empty")}, "127.0.0.1", "has no key on its first line"),
        (rooted | {access.KEY_FILE: str(tmp_path / "api_key")}, None, "is the --api-key too"),
        (settings | dev, None, "VLLM_SERVER_DEV_MODE opens /pause, /update_weights"),
        (settings | dev, "127.0.0.1", "VLLM_SERVER_DEV_MODE opens"),
    ):
        with pytest.raises(RuntimeError, match=f"astra_sync: .*{words}"):
            SyncAccess.of(environment, host=host, socket=None, api_keys=[KEY])
    assert SyncAccess.of(settings, host=None, socket=None, api_keys=[KEY]).key == SYNC_KEY
    for host in ("127.0.0.1", "::1", "localhost"):
        assert SyncAccess.of(rooted | dev, host=host, socket=None, api_keys=[KEY]).key is None
    assert SyncAccess.of(rooted, host=None, socket="/tmp/x", api_keys=[]).local


def test_who_may_sample_may_ask_for_the_version_and_not_sync(tmp_path) -> None:
    asked = SyncAccess.of(sync_settings(tmp_path), host=None, socket=None, api_keys=[KEY])
    typed, right = {"content-type": "application/json"}, {access.KEY_HEADER: SYNC_KEY}
    assert asked.refusal({}, syncs=False) is None
    assert asked.refusal({access.KEY_HEADER: "wrong"}, syncs=False)[0] == 403
    assert asked.refusal(typed | right, syncs=True) is None
    for headers, words in (
        (typed, "give the trainer --rollout_sync_key_file; one that is older than this plugin has no such flag"),
        (typed | {access.KEY_HEADER: KEY}, "another key"),
        (typed | {access.KEY_HEADER: "\udcff"}, "another key"),
        (typed | right | {"origin": "null"}, "pages of other sites"),
    ):
        status, text = asked.refusal(headers, syncs=True)
        assert status == 403 and words in text
    assert asked.refusal(right | {"content-type": "text/plain"}, syncs=True)[0] == 415


def test_without_a_key_this_machine_is_asked_by_its_name(tmp_path) -> None:
    asked = SyncAccess.of({access.ROOT: str(tmp_path)}, host="127.0.0.1", socket=None, api_keys=[])
    typed = {"content-type": "application/json; charset=utf-8"}
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000"):
        assert asked.refusal(typed | {"host": host}, syncs=True) is None
    for host in ("evil.example", "127.0.0.1.evil.example", "[", ""):
        assert asked.refusal(typed | {"host": host}, syncs=True)[0] == 403
    assert asked.refusal(typed | {"host": "localhost", "origin": "http://localhost"}, syncs=True)[0] == 403


def test_a_server_is_one_runs_at_a_time() -> None:
    now = 0.0
    held = Lease(lambda: now)
    assert held.state is None
    held.take("a", 10.0)
    with pytest.raises(Held, match="is held by the run a for 10 more seconds, and b is another: give this run servers"):
        held.take("b", 10.0)
    held.take("a", 20.0)  # a look of the same run, from any process
    now = 15.0
    assert held.state == {"run": "a", "seconds": 5.0}
    with held.syncing("a"):
        now = 500.0  # a sync that takes long
        with pytest.raises(Held):
            held.take("b", 1.0)
        with pytest.raises(Held), held.syncing("b"):
            pass
    now = 519.0
    with pytest.raises(Held):
        held.take("b", 1.0)
    now = 520.0
    with held.syncing("b"):
        assert held.state["run"] == "b"
    with pytest.raises(Held):
        held.check("a")


def test_labels_are_a_runs_and_an_updates() -> None:
    assert run_of("0f:12") == "0f" and is_run("a-b_c.9")
    for label in ("12", "a:", ":1", "a:1:2", "a b:1", "a:-1", "a:1, unchecked", "x" * 65 + ":1", "\u0661:1", 3, None):
        assert run_of(label) is None, label
    for name in ("", "a:b", "é", "../x/", 3, None):
        assert not is_run(name), name
    with pytest.raises(ValueError, match="VLLMConfig.run_id is 'a b'"):
        VLLMConfig(("http://a:1",), run_id="a b")
    with pytest.raises(ValueError, match="lease_seconds is 5, check_seconds 2: a lease is renewed by looks"):
        VLLMConfig(("http://a:1",), lease_seconds=5)


# ---------------------------------------------------------------------------------------------------------------------
# The trainer's side


def test_the_two_sides_speak_the_same() -> None:
    assert (sync.KEY_HEADER, sync.PROTOCOL) == (access.KEY_HEADER, access.PROTOCOL)


def test_keys_that_do_not_part_who_may_what_are_refused() -> None:
    with pytest.raises(ValueError, match="VLLMConfig.sync_key is the api_key too"):
        VLLMConfig(("http://a:1",), api_key=KEY, sync_key=KEY)
    with pytest.raises(ValueError, match="VLLMConfig.sync_key with sync='reload'"):
        VLLMConfig(("http://127.0.0.1:1",), sync_key=SYNC_KEY, sync="reload")
    with pytest.raises(ValueError, match="/nowhere is not a file of certificates"):
        VLLMConfig(("https://a:1",), ca_file="/nowhere")


class Describes(RolloutServer):
    """Says of itself what it is told to, and notes what it was shown."""

    def __init__(self, **description) -> None:
        super().__init__("http://server:8000", 1)
        plain = {"version": "1", "vocab_size": 640, "vocabulary": None, "max_model_len": 2048, "on_tpus": False}
        served = {"config": model(tie=False).to_hf(), "dtype": "bfloat16", "sampling": {}}
        self.described = plain | served | {"logprobs_mode": "processed_logprobs"} | description
        self.shown: list = []

    async def get(self, path, remedy, headers=None, *, seconds):
        self.shown.append(headers)
        return self.described

    async def tell(self, path, remedy, body, headers=None, *, seconds):
        self.shown.append((path, body["seconds"]))
        return self.described


@pytest.mark.asyncio
async def test_another_plugin_and_a_missing_key_are_told_apart_by_name(tmp_path) -> None:
    publisher = Publisher(tmp_path, model(tie=False))
    keyed, keyless = (sync_way("plugin", publisher, "", key) for key in (SYNC_KEY, None))
    with pytest.raises(PolicyError, match="does not say its protocol: its plugin is older than this trainer"):
        await keyed.check(Describes(), 2048, 60.0)
    with pytest.raises(PolicyError, match="has a plugin of protocol 2, this trainer speaks 4: install this version's"):
        await keyed.check(Describes(protocol=2, wants_key=True), 2048, 60.0)
    with pytest.raises(
        PolicyError, match="from who shows the key of its ASTRA_SYNC_KEY_FILE: .*--rollout_sync_key_file"
    ):
        await keyless.check(Describes(protocol=4, wants_key=True), 2048, 60.0)
    server = Describes(protocol=4, wants_key=True)
    await keyed.check(server, 2048, 60.0)
    await keyless.check(Describes(protocol=4, wants_key=False), 2048, 60.0)
    assert server.shown == [{access.KEY_HEADER: SYNC_KEY}, ("/v1/policy/lease", 60.0)]
    publisher.close()
    with pytest.raises(ValueError, match="reads what a Publisher writes"):
        sync_way("plugin", FolderPublisher(tmp_path / "folders", model(tie=False)), "", None)
