"""Low-rank adapters of each family: against `peft` on transformers, merged and not, there and back."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mesh_world import DENSE, EXPERTS, packed_batch
from parity_world import hf_model, logits_of, tokens_of
from plain_world import make_folder
from selection import by_day

from astra_jax import chat_files
from astra_jax.base.errors import InputError
from astra_jax.base.settings import SettingError
from astra_jax.mesh import batch_sharding, make_mesh
from astra_jax.models import adapters, hf_checkpoint
from astra_jax.models.layers.adapted import is_adapted
from astra_jax.models.layers.quantized import is_quantized
from astra_jax.models.llama.presets import LlamaConfig
from astra_jax.models.lora import LoRA
from astra_jax.models.peft import load, names_table, save
from astra_jax.models.qwen2.presets import Qwen2Config
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run import frozen, weights
from astra_jax.run.optimizers import make_optimizer
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.step import loss_sums
from astra_jax.tokenizer import ChatTokenizer

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

SIZES = dict(vocab_size=131, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, d_ff=80)
QWEN3 = Qwen3Config(**SIZES, tie_embeddings=True)
CASES = {
    "qwen3": (QWEN3, LoRA(rank=4, alpha=8.0)),
    "qwen3, experts": (replace(QWEN3, n_experts=5, experts_per_token=2, d_ff=24), LoRA(rank=3)),
    "llama": (LlamaConfig(**SIZES, tie_embeddings=True), LoRA(rank=6, alpha=3.0, targets=("q_proj", "down_proj"))),
    "qwen2": (Qwen2Config(**SIZES, tie_embeddings=False), LoRA(rank=4, rank_stabilized=True)),
    "tied, with tokens": (LlamaConfig(**SIZES, tie_embeddings=True), LoRA(rank=2, tokens=(130, 3))),
    # Tokens that are read: a row of an untied embedding has no gradient otherwise.
    "untied, with tokens": (Qwen2Config(**SIZES, tie_embeddings=False), LoRA(rank=2, tokens=(98, 61, 4))),
}


def base_of(model, folder):
    hf_model(model).save_pretrained(folder)
    return hf_checkpoint.load_hf(folder, model)


def drawn(model, lora):
    """Adapters as after some training: B is no longer zero, and trained rows are no longer those of the weights."""
    made = adapters.initial_adapters(model, lora, jax.random.key(0), model.init(jax.random.key(1)))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), made)


def loss_of(model, lora, base, tokens):
    """Of the adapters: the mean negative logprob of the next token."""

    @jax.jit
    def loss(trained):
        params = adapters.attach_lora(trained, base, lora)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), jnp.ones(tokens.shape, jnp.int32)
        x, _ = model.forward(params, jnp.asarray(tokens), *places)
        logps = jax.nn.log_softmax(jnp.einsum("btd,dv->btv", x[:, :-1], model.head_kernel(params)))
        return -jnp.take_along_axis(logps, jnp.asarray(tokens)[:, 1:, None], -1).mean()

    return loss


@pytest.mark.parametrize("name", by_day(CASES, "qwen3, experts"))
def test_new_adapters_change_no_logit(name, tmp_path) -> None:
    model, lora = CASES[name]
    base, tokens = base_of(model, tmp_path), tokens_of(model, length=40)
    trained = adapters.initial_adapters(model, lora, jax.random.key(0), base)
    joined = adapters.attach_lora(trained, base, lora)
    assert sum(map(is_adapted, jax.tree.leaves(joined, is_leaf=is_adapted))) == len(adapters.targeted(model, lora))
    np.testing.assert_array_equal(logits_of(joined, model, tokens), logits_of(base, model, tokens))


def test_a_is_drawn_as_peft_draws_it() -> None:
    """Uniform within 1 / √in, other numbers in each matrix and layer; B is zero."""
    model, lora = CASES["qwen3"]
    made = adapters.initial_adapters(model, replace(lora, rank=64), jax.random.key(0), {})["layers"]
    for leaf, inputs in ((made["attention"]["o_nhd"]["a_nhr"], 48), (made["mlp"]["down_fd"]["a_fr"], 80)):
        bound = inputs**-0.5
        assert 0.95 * bound < float(jnp.abs(leaf).max()) <= bound
        assert float(leaf.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not np.array_equal(made["attention"]["k_dkh"]["a_dr"], made["attention"]["v_dkh"]["a_dr"])
    assert not np.array_equal(*made["attention"]["q_dnh"]["a_dr"])
    assert all(not jnp.any(leaf) for path, leaf in jax.tree.leaves_with_path(made) if path[-1].key.startswith("b_"))


@pytest.mark.parametrize("name", by_day(CASES, "qwen3, experts", "untied, with tokens"))
def test_logits_and_gradients_are_those_of_peft_which_reads_what_we_write(name, tmp_path) -> None:
    model, lora = CASES[name]
    base, trained, tokens = base_of(model, tmp_path / "base"), drawn(model, lora), tokens_of(model, length=40)
    save(trained, model, lora, tmp_path / "peft", base=str(tmp_path / "base"))
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(hf_model(model)), str(tmp_path / "peft"), is_trainable=True)
    ids = torch.tensor(tokens)
    output = theirs(ids, labels=ids)
    output.loss.backward()
    joined = adapters.attach_lora(trained, base, lora)
    logits = logits_of(joined, model, tokens)
    np.testing.assert_allclose(logits, output.logits.detach().numpy(), atol=2e-4, rtol=0)
    assert np.abs(logits - logits_of(base, model, tokens)).max() > 0.1, "the adapters do nothing"

    loss, gradients = jax.jit(jax.value_and_grad(loss_of(model, lora, base, tokens)))(trained)
    assert float(loss) == pytest.approx(output.loss.item(), abs=1e-5)
    ours = dict(hf_checkpoint.tensors_of(gradients, names_table(model, lora)))
    expected = {
        key.replace(".default", ""): parameter.grad.numpy()
        for key, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    assert ours.keys() == expected.keys()
    for key, gradient in expected.items():
        assert np.abs(gradient).max() > 1e-6, key
        np.testing.assert_allclose(ours[key], gradient, atol=2e-5, rtol=1e-3, err_msg=key)


@pytest.mark.parametrize("name", by_day(CASES, "qwen3, experts", "tied, with tokens"))
def test_merged_weights_compute_the_same_here_and_in_transformers(name, tmp_path) -> None:
    model, lora = CASES[name]
    base, trained, tokens = base_of(model, tmp_path), drawn(model, lora), tokens_of(model, length=40)
    merged = adapters.without_adapters(adapters.attach_lora(trained, base, lora))
    loss = loss_of(model, lora, base, tokens)(trained)
    assert float(loss_of(model, lora, None, tokens)(merged)) == pytest.approx(float(loss), abs=1e-5)
    hf_checkpoint.save_hf(merged, model, tmp_path / "merged")
    theirs = type(hf_model(model)).from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    joined = adapters.attach_lora(trained, base, lora)
    np.testing.assert_allclose(logits_of(joined, model, tokens), expected, atol=2e-4, rtol=0)
    for apart in (True, False):  # as decoding reads them
        served = model.for_decoding(joined, unstacked=apart)
        assert not any(map(is_adapted, jax.tree.leaves(served, is_leaf=is_adapted)))
    jax.tree.map(np.testing.assert_array_equal, model.for_decoding(merged, unstacked=False), served)


def test_what_peft_made_is_read_and_written_again(tmp_path) -> None:
    model, _ = CASES["qwen2"]
    config = peft.LoraConfig(r=5, lora_alpha=7, target_modules=["k_proj", "up_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(hf_model(model)), config)
    theirs.save_pretrained(tmp_path / "theirs")
    lora, trained = load(tmp_path / "theirs", model)
    assert lora == LoRA(rank=5, alpha=7.0, targets=("k_proj", "up_proj"))
    base, tokens = base_of(model, tmp_path / "base"), tokens_of(model, length=40)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    joined = adapters.attach_lora(trained, base, lora)
    np.testing.assert_allclose(logits_of(joined, model, tokens), expected, atol=2e-4, rtol=0)
    save(trained, model, lora, tmp_path / "ours")
    again, same = load(tmp_path / "ours", model)
    assert again == lora
    jax.tree.map(np.testing.assert_array_equal, trained, same)


@pytest.mark.parametrize("how", [False, "gaussian", "orthogonal"])
def test_adapters_that_begin_beside_the_weights_are_read(how, tmp_path) -> None:
    model, lora = CASES["qwen3"]
    save(drawn(model, lora), model, lora, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_lora_weights": how}))
    assert load(tmp_path, model)[0].rank == lora.rank


def written_run(folder, model, base, lora, origin):
    """The `checkpoints/` of a run with adapters, and those."""
    trained = drawn(model, lora)
    folder.mkdir()
    weights.save_orbax(trained, model, folder)
    frozen.write(frozen.frozen(base, lora, origin), folder)
    return trained


@pytest.mark.parametrize("name", by_day(["llama", "tied, with tokens", "untied, with tokens"], "untied, with tokens"))
def test_a_run_over_bfloat16_is_merged_in_the_type_that_is_asked_for(name, tmp_path) -> None:
    """In float32 no update is lost: of sums that were rounded to bfloat16 first many would be the base again."""
    model, lora = replace(CASES[name][0], param_dtype="bfloat16"), CASES[name][1]
    base = jax.tree.map(lambda x: x.astype("bfloat16"), CASES[name][0].init(jax.random.key(0)))
    hf_checkpoint.save_hf(base, model, tmp_path / "base")
    trained = written_run(tmp_path / "run", model, base, lora, frozen.WeightsSource(str(tmp_path / "base")))
    wide = jax.tree.map(lambda x: x.astype("float32"), base)
    exact = adapters.without_adapters(adapters.attach_lora(trained, wide, lora))
    whole = weights.load(tmp_path / "run", replace(model, param_dtype="float32"))
    jax.tree.map(np.testing.assert_array_equal, whole, exact)
    assert jax.tree.leaves(whole)[0].dtype == jnp.float32
    half = weights.load(tmp_path / "run", model)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y.astype("bfloat16")), half, exact)
    # What is published for servers in float32 is merged so too.
    tied = adapters.without_adapters(adapters.attach_lora(trained, base, lora), "float32")
    for entry in adapters.targeted(model, lora).values():
        np.testing.assert_array_equal(adapters.at_path(tied, entry.path), adapters.at_path(exact, entry.path))


def test_of_weights_that_lie_elsewhere_now_the_step_under_the_adapters_is_read(tmp_path) -> None:
    model, lora = CASES["llama"]
    base = model.init(jax.random.key(0))
    for folder in ("base", "moved"):
        weights.save_orbax(base, model, tmp_path / folder, step=3)
        weights.save_orbax(jax.tree.map(lambda x: x + 1, base), model, tmp_path / folder, step=7)
    weights.save_orbax(base, model, tmp_path / "one", step=0)
    written_run(tmp_path / "run", model, base, lora, frozen.WeightsSource(str(tmp_path / "base"), 3))
    expected = weights.load(tmp_path / "run", model)
    for folder in ("moved", "one"):
        found = weights.load_orbax(tmp_path / "run", model, base=tmp_path / folder)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    with pytest.raises(InputError, match="trained all weights, and none are under them; leave --base="):
        weights.load_orbax(tmp_path / "one", model, base=tmp_path / "base")


@pytest.mark.parametrize("name", by_day(["tied, with tokens", "untied, with tokens"], "untied, with tokens"))
def test_rows_of_tokens_that_peft_trained_are_read_and_written_again(name, tmp_path) -> None:
    model, lora = CASES[name]
    modules = ["embed_tokens"] if model.tie_embeddings else ["embed_tokens", "lm_head"]
    ids = list(lora.tokens)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={one: ids for one in modules})
    theirs = peft.get_peft_model(copy.deepcopy(hf_model(model)), config)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "trainable_tokens_delta" in key:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    theirs.save_pretrained(tmp_path / "theirs")
    read, trained = load(tmp_path / "theirs", model)
    assert read == replace(lora, alpha=8.0, targets=("q_proj",))
    base, tokens = base_of(model, tmp_path / "base"), tokens_of(model, length=40)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    logits = logits_of(adapters.attach_lora(trained, base, read), model, tokens)
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)
    save(trained, model, read, tmp_path / "ours")
    again, same = load(tmp_path / "ours", model)
    assert again == read
    jax.tree.map(np.testing.assert_array_equal, trained, same)


def test_peft_makes_room_for_added_tokens_by_the_tokenizer_beside_adapters(tmp_path) -> None:
    """The base's folder has 384 rows, the tokenizer 388 tokens, our model rows up to the next multiple of 128."""
    tokenizer = ChatTokenizer.load(make_folder(tmp_path / "base"))
    stored = LlamaConfig(**(SIZES | {"vocab_size": 384}), tie_embeddings=True)
    hf_model(stored).save_pretrained(tmp_path / "base")
    model, lora = replace(stored, vocab_size=tokenizer.rows(384)), LoRA(rank=2, tokens=(384, 385, 386, 387))
    base = weights.load(tmp_path / "base", model, rows=384, new_token_pieces=tokenizer.new_token_pieces(384))
    trained = drawn(model, lora)
    save(trained, model, lora, tmp_path / "peft", base=str(tmp_path / "base"))
    chat_files.save_tokenizer(tmp_path / "base", tmp_path / "peft", tokenizer.changed_files)
    theirs = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "peft"))
    tokens = np.concatenate([tokens_of(stored, length=40), np.array([[384, 387], [385, 386]])], axis=1)
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    logits = logits_of(adapters.attach_lora(trained, base, lora), model, tokens)
    np.testing.assert_allclose(logits[..., :388], expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"use_dora": True}, "use_dora is True.*--from_peft"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"target_modules": ["embed_tokens"]}, "'embed_tokens'"),
        ({"r": 0}, "r is 0; it is a whole number from 1"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .'lm_head'..*--from_peft"),
        ({"layers_to_transform": [0]}, "layers_to_transform is .0."),
        ({"bias": "all"}, "bias is 'all'"),
        ({"r": 3}, "has shape"),
        ({"trainable_token_indices": {"lm_head": [1]}}, "the same tokens of embed_tokens"),
        ({"trainable_token_indices": [131]}, "lora.tokens has 131, the model 131 rows"),
        ({"trainable_token_indices": [1, 1]}, "tokens has 1 twice"),
        ({"trainable_token_indices": [1]}, "missing"),
        ({"target_modules": ["q_proj"]}, "do not belong to this model"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
    ],
)
def test_other_adapters_of_peft_are_refused_by_name(change, said, tmp_path) -> None:
    model, lora = CASES["llama"]
    save(drawn(model, lora), model, lora, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(hf_checkpoint.WeightsError, match=said):
        load(tmp_path, model)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, "rank is 0"),
        ({"rank": 4, "alpha": 0.0}, "alpha is 0"),
        ({"rank": 4, "targets": ()}, "targets is empty"),
        ({"rank": 4, "targets": ("q_proj", "q_proj")}, "q_proj twice"),
        ({"targets": ("q_proj",)}, "give a rank too"),
        ({"alpha": 8.0}, "give a rank too"),
        ({"tokens": (1,)}, "give a rank too"),
        ({"rank": 4, "tokens": (5, 2, 5)}, "tokens has 5 twice"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, said) -> None:
    with pytest.raises(SettingError, match=said):
        LoRA(**settings)


def test_targets_that_a_model_does_not_have_are_refused_with_those_that_it_has() -> None:
    dense, experts = CASES["qwen3"][0], CASES["qwen3, experts"][0]
    every = ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert sorted(adapters.targeted(experts, LoRA(rank=2))) == sorted(every)
    assert sorted(adapters.targeted(dense, LoRA(rank=2))) == sorted([*every, "gate_proj", "up_proj", "down_proj"])
    with pytest.raises(InputError, match="'qproj'.*q_proj, k_proj, v_proj, o_proj.*the nearest is q_proj"):
        adapters.targeted(dense, LoRA(rank=2, targets=("qproj",)))
    for none in ("embed_tokens", "lm_head", "q_norm", "input_layernorm"):
        with pytest.raises(InputError, match=none):
            adapters.targeted(dense, LoRA(rank=2, targets=(none,)))
    with pytest.raises(InputError, match="gate_proj.*q_proj, k_proj, v_proj, o_proj, or all-linear"):
        adapters.targeted(experts, LoRA(rank=2, targets=("gate_proj",)))


def test_muon_and_adapters_are_refused_together() -> None:
    data = DataConfig(seq_len=64)
    assert make_optimizer(SFTConfig(data=data, optimizer="muon"), 1e-3)
    with pytest.raises(SettingError, match="optimizer is muon"):
        SFTConfig(data=data, optimizer="muon", lora=LoRA(rank=4))


def lying(base, lora):
    """What adapters lie on."""
    kept = jax.tree.map(lambda x: x, base)
    adapters.store(kept, lora)
    return kept


IN_8_BITS = [name for name, (model, _) in CASES.items() if not model.n_experts]


@pytest.mark.parametrize("name", by_day(IN_8_BITS, "tied, with tokens"))
def test_adapters_over_8_bits_train_as_over_the_numbers_that_these_are(name) -> None:
    """Loss and gradients; and those numbers are the weights', to half a step of their output's scale."""
    model, lora = CASES[name][0], replace(CASES[name][1], weight_quantization="int8")
    base, trained, tokens = model.init(jax.random.key(0)), drawn(model, lora), tokens_of(model, length=40)
    under = lying(base, lora)
    numbers = adapters.without_adapters(under)
    matrices = [path for path, x in jax.tree.leaves_with_path(under, is_leaf=is_quantized) if is_quantized(x)]
    assert len(matrices) == len(adapters.adaptable(model))
    for entry in adapters.adaptable(model).values():
        stored, near = (adapters.at_path(tree, entry.path) for tree in (under, numbers))
        assert stored.qvalue.dtype == jnp.int8
        far = np.abs(near - adapters.at_path(base, entry.path))
        assert far.max() > 0 and (far <= 0.501 * stored.scale).all()

    ours = jax.jit(jax.value_and_grad(loss_of(model, lora, under, tokens)))(trained)
    expected = jax.jit(jax.value_and_grad(loss_of(model, lora, numbers, tokens)))(trained)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(x - y) < 1e-4 * np.linalg.norm(y)
    assert abs(float(loss_of(model, lora, base, tokens)(trained)) - float(ours[0])) > 1e-6

    joined = adapters.attach_lora(trained, under, lora)
    merged = adapters.without_adapters(joined)
    assert float(loss_of(model, lora, None, tokens)(merged)) == pytest.approx(float(ours[0]), abs=1e-5)
    for apart in (True, False):
        served, plain = (model.for_decoding(one, unstacked=apart) for one in (joined, merged))
        jax.tree.map(np.testing.assert_array_equal, served, plain)


@pytest.mark.parametrize("mesh", [None, {"fsdp": 4, "tensor": 2}])
def test_what_lies_under_adapters_in_8_bits_is_planned_as_it_is_laid_down(mesh) -> None:
    """Shapes, types and places; a quarter of the bytes of float32, but for embedding, norms and scales."""
    lora = LoRA(rank=3, weight_quantization="int8")
    devices = None if mesh is None else make_mesh(**mesh)
    like = adapters.abstract_base(DENSE, lora, devices)
    base = lying(DENSE.init(jax.random.key(0)), lora)
    assert jax.tree.structure(like) == jax.tree.structure(base)
    placed = jax.device_put(base, jax.tree.map(lambda x: x.sharding, like))
    jax.tree.map(lambda x, y: (x.shape, x.dtype) == (y.shape, y.dtype) or pytest.fail(f"{x} {y}"), like, placed)
    matrices = [x for x in jax.tree.leaves(base, is_leaf=is_quantized) if is_quantized(x)]
    numbers = sum(x.qvalue.size for x in matrices)
    assert numbers == DENSE.matmul_parameters()[0]
    assert sum(x.qvalue.nbytes + x.scale.nbytes for x in matrices) < 1.2 * numbers


def test_8_bits_that_adapters_cannot_lie_on_are_refused() -> None:
    with pytest.raises(SettingError, match="weight_quantization is int8, but rank is None"):
        LoRA(weight_quantization="int8")
    with pytest.raises(InputError, match="lora.weight_quantization is int8; the grouped matmuls of experts"):
        adapters.check(CASES["qwen3, experts"][0], LoRA(rank=3, weight_quantization="int8"))
    with pytest.raises(SettingError, match="matmul_quantization is int8, lora.weight_quantization int8"):
        SFTConfig(
            data=DataConfig(seq_len=64), matmul_quantization="int8", lora=LoRA(rank=4, weight_quantization="int8")
        )


def loss_and_gradients(model, lora, mesh, matmul="none"):
    base, trained, batch = model.init(jax.random.key(0)), drawn(model, lora), packed_batch()
    adapters.store(base, lora)
    if mesh is not None:
        places = jax.tree.map(lambda x: x.sharding, adapters.abstract_base(model, lora, mesh))
        base = jax.device_put(base, places)
        trained = jax.device_put(trained, adapters.trained_shardings(model, lora, mesh))
        batch = jax.device_put(batch, batch_sharding(mesh))

    def loss(trained, base, batch):
        how = {"remat": "full", "matmul": matmul, "mesh": mesh}
        return loss_sums(trained, batch, model=model, base=base, lora=lora, **how)

    (loss, (count, _)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained, base, batch)
    return jax.device_get((loss / count, jax.tree.map(lambda g: g / count, gradients)))


@cache
def on_one_device(model, lora):
    return loss_and_gradients(model, lora, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "axes", "stored"),
    [
        (DENSE, {"fsdp": 2, "context": 2, "tensor": 2}, "int8"),
        *by_day(
            [
                (DENSE, {"fsdp": 2, "context": 2, "tensor": 2}, "none"),
                (DENSE, {"data": 2, "fsdp": 2, "tensor": 2}, "int8"),
                (DENSE, {"fsdp": 8}, "none"),
                (DENSE, {"tensor": 8}, "none"),
                (DENSE, {"data": 2, "fsdp": 4}, "none"),
                (DENSE, {"fsdp": 4, "context": 2}, "int8"),
                (EXPERTS, {"expert": 2, "fsdp": 2, "tensor": 2}, "none"),
            ]
        ),
    ],
)
def test_eight_devices_equal_one(model, axes, stored) -> None:
    lora = LoRA(rank=3, tokens=(1, 5, 6), weight_quantization=stored)  # tokens which divide into no axis
    expected_loss, expected = on_one_device(model, lora)
    loss, gradients = loss_and_gradients(model, lora, make_mesh(**axes))
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    jax.tree.map(lambda ours, one: np.testing.assert_allclose(ours, one, atol=1e-5), gradients, expected)


@pytest.mark.nightly
def test_adapters_over_matmuls_in_8_bits_are_near_those_over_whole_ones() -> None:
    """Matrices are multiplied in 8 bits, adapters are not; on a mesh with replicas too."""
    lora = LoRA(rank=3)
    whole, _ = loss_and_gradients(DENSE, lora, None)
    for mesh in (None, make_mesh(data=2, fsdp=4)):
        loss, gradients = loss_and_gradients(DENSE, lora, mesh, "int8")
        assert loss != whole and loss == pytest.approx(whole, rel=0.01)
        exact = loss_and_gradients(DENSE, lora, mesh)[1]
        for ours, one in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
            assert np.linalg.norm(ours - one) < 0.1 * np.linalg.norm(one)


def test_adapters_are_spread_as_their_matrices_are() -> None:
    mesh, lora = make_mesh(fsdp=4, tensor=2), LoRA(rank=3)
    places = adapters.trained_shardings(DENSE, lora, mesh)["layers"]
    base = DENSE.param_shardings(mesh)["layers"]
    q, o, down = places["attention"]["q_dnh"], places["attention"]["o_nhd"], places["mlp"]["down_fd"]
    width, heads = base["attention"]["q_dnh"].spec[1:3]
    assert (q["a_dr"].spec, q["b_rnh"].spec) == (P(None, width, None), P(None, None, heads, None))
    assert (o["a_nhr"].spec, o["b_rd"].spec) == (P(None, heads, None, None), P(None, None, width))
    assert (down["a_fr"].spec, down["b_rd"].spec) == (P(None, "tensor", None), P(None, None, width))
