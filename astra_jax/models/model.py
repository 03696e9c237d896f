"""Interface of a model for trainer, engine, planner, sync and serving: `Model`, and its trees of arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax
from jax.typing import DTypeLike

from astra_jax.attention.cache import Caches, Layer
from astra_jax.base.settings import SettingError

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from astra_jax.mesh import AnyMesh
    from astra_jax.models.layers.moe import RouterSums
    from astra_jax.models.names import NamedParam

Array = jax.Array

Params = dict[str, Any]
"""Parameters: leaves whose suffix spells their axes (`astra_jax.axes`); below `layers` they are stacked over layers."""


CacheView = Callable[[Layer], Layer]
"""Function that selects the rows and positions of a layer's cache to read, so that the others are not read."""


class Model(Protocol):
    """Language model without its weights: a frozen dataclass, so that it is a static argument of compiled programs.

    Attributes:
        family: name of the family, a part of a run's identity: models of equal sizes may be of different families.
        vocab_size: rows of the embedding.
        tie_embeddings: True if the head is the embedding transposed.
        max_positions: length of the longest sequence.
        dtype: dtype of activations and matmuls.
        param_dtype: dtype of the parameters.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    family: ClassVar[str]

    @property
    def vocab_size(self) -> int: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def param_dtype(self) -> str: ...

    # ---------------------------------------------------------------------------------------------------- other models

    def with_context_length(self, tokens: int) -> Self:
        """Return the model for sequences of `tokens`: unchanged if they fit, else with its context stretched."""
        ...

    @property
    def stretch(self) -> float:
        """Factor by which the context is stretched; 1 if it is not."""
        ...

    def in_training_precision(self) -> Self:
        """Return the model with bfloat16 activations and float32 parameters."""
        ...

    def check_length(self, tokens: int, field: str) -> None:
        """Check a length. Raises `ValueError` if `field` needs sequences of `tokens`, above `max_positions`."""
        ...

    def check_matmul(self, matmul: str, field: str) -> None:
        """Check that the layers support a name of `matmuls.MATMULS`.

        Args:
            field: the setting, for the message.

        Raises:
            InputError: the name is unknown, or not supported by this model.
            UserError: its library is not installed.
        """
        ...

    # ------------------------------------------------------------------------------------------------------ parameters

    def init(self, key: Array) -> Params:
        """Return random weights for training from scratch."""
        ...

    def abstract_params(self) -> Params:
        """Return the shapes and dtypes of `init`, without arrays."""
        ...

    def param_shardings(self, mesh: Mesh) -> Any:
        """Return a `NamedSharding` per parameter. Raises `ValueError` if a mesh axis does not divide its dimension."""
        ...

    def for_decoding(self, params: Params, *, apart: bool, stored: str = "none") -> Params:
        """Return the parameters in the form for decoding.

        Args:
            apart: True for `layers` as a tuple with one tree per layer.
            stored: a name of `matmuls.STORED`.
        """
        ...

    def cache_sharding(self, mesh: Mesh) -> NamedSharding:
        """Return the sharding of each array of a stacked `cache`."""
        ...

    # ------------------------------------------------------------------------------------------------------- computing

    def forward(
        self,
        params: Params,
        tokens_bt: Array,
        positions_bt: Array,
        segment_ids_bt: Array,
        *,
        remat: str = "none",
        matmul: str = "none",
        has_shared_prefix: bool = False,
        backend: str = "auto",
        mesh: AnyMesh | None = None,
    ) -> tuple[Array, RouterSums | None]:
        """Return hidden states [B, T, D] for the head, and the router's statistics.

        The states are in `dtype` or, for bfloat16 on CPUs that are slow at it, float32 (`cpu.programs.trained_dtype`).
        The statistics are stacked over layers (None for a dense model).

        Args:
            tokens_bt: int32 token ids.
            positions_bt: int32, from 0 in each document that continues none.
            segment_ids_bt: int32. 0 is padding; 1, 2, … are a row's documents. They do not see each other, unless one
                continues another (`attention.documents`).
            remat: a name of `remat.REMATS`.
            matmul: a name of `matmuls.MATMULS`: the number format in which the layers' matrices are multiplied, forward
                and for the activations' gradient. Embedding and head stay in `dtype`.
            has_shared_prefix: True if documents may continue others; needed if `needs_prefix_flag`.
            backend: a backend of `astra_jax.attention`.
            mesh: mesh of parameters and batch; the sequence is in its zig-zag order. None is one device.

        Raises:
            ValueError: an unknown remat policy, backend or matmul, or a mesh that does not divide heads or sequence.
        """
        ...

    def head_weights(self, params: Params) -> Array:
        """Return the output head's matrix, [D, V] in `param_dtype`, for training: its gradient is not rounded."""
        ...

    def head_kernel(self, params: Params) -> Array:
        """Return the output head's matrix, [D, V] in `dtype`."""
        ...

    def cache(
        self,
        batch: int,
        length: int,
        *,
        stacked: bool = True,
        dtype: DTypeLike | None = None,
        part: int | None = None,
    ) -> Caches:
        """Return an empty cache for `batch` rows of up to `length` positions; `stacked` as the parameters are.

        Args:
            dtype: dtype of the cache; None: the model's.
            part: for separate layers, positions per array, if that is faster; None: all.
        """
        ...

    def forward_cached(
        self,
        params: Params,
        tokens_bt: Array,
        positions_bt: Array,
        past: Caches,
        *,
        look: CacheView = ...,
        platform: str | None = None,
    ) -> tuple[Array, Caches]:
        """Return hidden states of each row's next tokens over its cache, and these tokens' keys and values."""
        ...

    def forward_next(
        self,
        params: Params,
        tokens_b1: Array,
        positions_b1: Array,
        past: Caches,
        recent: Caches,
        step: Array,
        *,
        look: CacheView = ...,
        platform: str | None = None,
    ) -> tuple[Array, Caches]:
        """Return hidden states of one more token per row, and `recent` extended with its K/V at index `step`."""
        ...

    # ---------------------------------------------------------------------------------------------------------- counts

    def matmul_parameters(self) -> tuple[int, int]:
        """Return the number of parameters (in all layers, in the head) by which each token is multiplied.

        Only a token's own experts count.
        """
        ...

    def recomputed_parameters(self, remat: str) -> int:
        """Return the parameters of all layers whose products the backward pass recomputes."""
        ...

    def flops_per_token(self, tokens: int) -> tuple[float, float]:
        """Return flops per token of one document: (forward and backward, the same with full rematerialisation)."""
        ...

    def batch_flops(self, segment_ids_bt: Any) -> float:
        """Return flops of a packed batch, forward and backward: each document by its length, without padding (0)."""
        ...

    def needs_prefix_flag(self, mesh: AnyMesh | None) -> bool:
        """Return whether `forward` needs `has_shared_prefix`, on this mesh, if documents of a row continue others."""
        ...

    # ---------------------------------------------------------------------------------------------------- Hugging Face

    def names(self) -> list[NamedParam]:
        """Return the HF tensors of each parameter: one table for load, export and the sync of rollout servers."""
        ...

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a `config.json` that transformers and vLLM read."""
        ...

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        """Return the model of a `config.json`'s content. Raises `ValueError` for features that are not supported."""
        ...


def check_model(model: Any, field: str) -> None:
    """Check that an object has everything in `Model`.

    Args:
        field: the setting that contains it, for the message.

    Raises:
        SettingError: something is missing; the message names it.
    """
    wanted = [name for name in (*Model.__annotations__, *vars(Model)) if name == "family" or not name.startswith("_")]
    if missing := [name for name in wanted if not hasattr(model, name)]:
        raise SettingError(
            f"{field} is {type(model).__name__}, which lacks {', '.join(missing)}; give a model of a preset, or an "
            "object with all members of astra_jax.models.model.Model"
        )
    if not dataclasses.is_dataclass(model):
        raise SettingError(
            f"{field} is {type(model).__name__}; make it a frozen dataclass, which programs are keyed by"
        )


def parameters(model: Model) -> int:
    """Return the number of the model's parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params()))
