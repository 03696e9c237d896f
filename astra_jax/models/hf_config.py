"""`config.json`, reading and writing: fields of all families of decoders, and features that all of them refuse.

Names and meanings are transformers'; missing fields have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from astra_jax.base.errors import InputError
from astra_jax.models.layers.sizes import Llama3Scaling, Sizes, Yarn

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Fields that `config.json` must have; otherwise transformers would use another model's."""


def read_fields(
    config: Mapping[str, Any],
    *,
    released: str,
    architectures: Sequence[str],
    needed: Sequence[str] = SIZES,
    width: str = "intermediate_size",
    head_dim: int | None = None,
    max_positions: int,
    refused: Iterable[str] = (),
) -> dict[str, Any]:
    """Read the fields of `Sizes` that all families have.

    Args:
        released: the family's name, for messages.
        architectures: transformers' classes that compute the family's model; the file names one of them, or none.
        needed: fields that the file must have, besides `width`.
        width: the file's name for `d_ff`.
        head_dim: default if the file has none; None is hidden_size / num_attention_heads.
        max_positions: default if the file has none.
        refused: features of this file that the family does not support, each in a sentence.

    Raises:
        InputError: sizes are missing, or features are not supported; the message lists all of it.
    """
    missing = [name for name in (*needed, width) if name not in config]
    lacks = [f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; copy the checkpoint's config.json "
             "again, or write them there"] if missing else []  # fmt: skip
    if found := [*lacks, *_wrong_architecture(config, architectures), *not_computed(config, released), *refused]:
        raise InputError("; ".join(found))
    rope = _rope(config)
    positions = config.get("max_position_embeddings", max_positions)
    original = config.get("original_max_position_embeddings", rope.get("original_max_position_embeddings")) or positions
    scaling = _scaling(rope, positions, original)
    if (yarn := scaling.get("yarn")) is not None:
        # Released files keep the trained length in max_position_embeddings when users add YaRN by hand.
        positions = max(positions, round(yarn.factor * yarn.original_max_positions))
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    return dict(
        vocab_size=config["vocab_size"],
        d_model=config["hidden_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=config.get("head_dim", head_dim) or config["hidden_size"] // heads,
        d_ff=config[width],
        tie_embeddings=config.get("tie_word_embeddings", False),
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        max_positions=positions,
        **scaling,
    )


def _wrong_architecture(config: Mapping[str, Any], known: Sequence[str]) -> Iterator[str]:
    named = config.get("architectures")
    # Early conversions of Llama say LLaMAForCausalLM.
    if named and not {str(one).lower() for one in named} & {one.lower() for one in known}:
        computed = " and ".join(known)
        yield f"architectures is {named!r}; this port computes {computed}: give a checkpoint of a language model"


def not_computed(config: Mapping[str, Any], released: str) -> Iterator[str]:
    """Yield features that this port supports for no family, each in a sentence with the field and its value.

    Args:
        released: a family's name, for messages.
    """
    if (quantised := config.get("quantization_config") or config.get("compression_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        yield (
            f"quantization_config is of {method!r}; this port computes float32 and bfloat16: give the release that "
            "is not quantised"
        )
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        yield f"hidden_act is {activation!r}; every released {released} has 'silu', all that this port computes"
    kinds = config.get("layer_types") or ()
    if _has_windows(config) or any(kind != "full_attention" for kind in kinds):
        yield (
            f"use_sliding_window is {config.get('use_sliding_window')}, layer_types {sorted(set(kinds))}; no "
            f"released {released} has windows and this port does not compute them"
        )
    rope = _rope(config)
    if not isinstance(rope, Mapping):
        yield f"rope_scaling or rope_parameters is {rope!r}; it is an object with a rope_type"
        return
    if nested := sorted(str(name) for name, value in rope.items() if isinstance(value, Mapping)):
        yield f"rope_parameters has one object each for {', '.join(nested)}; this port turns all layers alike"
    if (part := rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        yield (
            f"rope_parameters has partial_rotary_factor {part}; no released {released} uses it and this port "
            "turns whole heads"
        )
    kind = _rope_type(rope)
    if kind not in _NEEDED:
        yield f"rope_type is {kind!r}; this port computes {', '.join(map(repr, _NEEDED))}"
    elif kind != "default" and (rope.get("mscale") or rope.get("mscale_all_dim")):
        yield f"rope_parameters has mscale; no released {released} uses it and this port does not compute it"
    for name in _NEEDED.get(kind, ()):
        if rope.get(name) is None:
            yield f"rope_parameters has rope_type {kind!r} and no {name}; copy the config.json again"


def _has_windows(config: Mapping[str, Any]) -> bool:
    """Return whether `use_sliding_window` affects a layer; without `layer_types`, those from `max_window_layers` on."""
    if not config.get("use_sliding_window") or config.get("layer_types"):
        return bool(config.get("use_sliding_window"))
    first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


# ---------------------------------------------------------------------------------------------------------------------
# The rotary embedding

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Required fields of each supported `rope_type`."""


def _rope(config: Mapping[str, Any]) -> Any:
    # transformers 5 keeps the rotary settings in one dictionary. Earlier versions had another one for scaling alone,
    # which still has precedence as a whole: users add YaRN in the old place.
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type", rope.get("type", "default")))


def _scaling(rope: Mapping[str, Any], max_positions: int, original: int) -> dict[str, Any]:
    """Return the field of `Sizes` that scales the rotary embedding; none if it is plain."""
    kind = _rope_type(rope)
    if kind == "yarn":
        return {"yarn": _yarn(rope, max_positions, original)}
    if kind == "linear":
        return {"linear": float(rope["factor"])}
    if kind == "llama3":
        return {
            "llama3": Llama3Scaling(
                factor=float(rope["factor"]),
                original_max_positions=original,
                low_turns=float(rope["low_freq_factor"]),
                high_turns=float(rope["high_freq_factor"]),
            )
        }
    return {}


def _yarn(rope: Mapping[str, Any], max_positions: int, original: int) -> Yarn:
    return Yarn(
        factor=float(rope.get("factor") or max_positions / original),
        original_max_positions=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=rope.get("attention_factor"),
        truncate=rope.get("truncate", True),
    )


def _rope_content(model: Sizes) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if (yarn := model.yarn) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "truncate": yarn.truncate,
        }
        if yarn.attention_factor is not None:
            rope["attention_factor"] = yarn.attention_factor
    if model.linear is not None:
        rope |= {"rope_type": "linear", "factor": model.linear}
    if (llama3 := model.llama3) is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": llama3.factor,
            "original_max_position_embeddings": llama3.original_max_positions,
            "low_freq_factor": llama3.low_turns,
            "high_freq_factor": llama3.high_turns,
        }
    return rope


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def content(model: Sizes, *, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the content that `read_fields` reads, in a form that transformers 4 and 5 and vLLM read too.

    Args:
        model_type: the family's `model_type`.
        architecture: name of transformers' class.
    """
    rope = _rope_content(model)
    scaled = rope["rope_type"] != "default"
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.d_ff,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rope_theta,
        "rope_parameters": rope,
        **({"rope_scaling": rope} if scaled else {}),
        "rms_norm_eps": model.rms_eps,
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "torch_dtype": model.param_dtype,
    }
