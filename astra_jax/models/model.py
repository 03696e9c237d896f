"""What trainer, engine, planner, sync and serving hold of a model: `Model`, and the trees of arrays that go with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import jax
from jax.typing import DTypeLike

from astra_jax.attention.cache import Caches, Layer
from sandbox.settings import SettingError

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

    from astra_jax.mesh import AnyMesh
    from astra_jax.models.layers.moe import RouterSums
    from astra_jax.models.names import NamedParam

Array = jax.Array

Params = dict[str, Any]
"""Leaves whose suffix spells their axes (`astra_jax.axes`); those below `layers` are stacked over layers."""


Look = Callable[[Layer], Layer]
"""Which rows and positions of a layer's cache are read, so that the others need not be."""


class Model(Protocol):
    """A language model without its weights: a frozen dataclass, so that it is a static argument of compiled programs.

    Attributes:
        family: its name, of which a run's identity is made: models of equal sizes may be of different families.
        vocab_size: rows of the embedding.
        tie_embeddings: the head is the embedding transposed.
        max_positions: the longest sequence that it is for.
        dtype: of activations and matmuls.
        param_dtype: of the parameters.
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

    def stretched(self, tokens: int) -> Self:
        """This model for sequences of `tokens`: as it is where they fit, else with its context stretched."""
        ...

    @property
    def stretch(self) -> float:
        """By which factor the context is stretched; 1 is not."""
        ...

    def in_training_precision(self) -> Self:
        """With bfloat16 activations and float32 parameters."""
        ...

    def check_length(self, tokens: int, field: str) -> None:
        """Raises `ValueError`: the setting `field` asks for sequences of `tokens`, above `max_positions`."""
        ...

    def check_matmul(self, matmul: str, field: str) -> None:
        """Refuse a name of `matmuls.MATMULS` in which these layers are not multiplied.

        Args:
            field: the setting that says so, for the message.

        Raises:
            InputError: there is none, or not for this model.
            Refusal: the library for it is not installed.
        """
        ...

    # ------------------------------------------------------------------------------------------------------ parameters

    def init(self, key: Array) -> Params:
        """Random weights for training from scratch."""
        ...

    def abstract_params(self) -> Params:
        """The shapes and dtypes of `init`, without arrays."""
        ...

    def param_shardings(self, mesh: Mesh) -> Any:
        """A `NamedSharding` for each parameter. Raises `ValueError`: a mesh axis does not divide its dimension."""
        ...

    def for_decoding(self, params: Params, *, apart: bool, stored: str = "none") -> Params:
        """The same as decoding reads them.

        Args:
            apart: with `layers` as a tuple of one tree a layer.
            stored: a name of `matmuls.STORED`.
        """
        ...

    def cache_sharding(self, mesh: Mesh) -> NamedSharding:
        """Where each array of a stacked `cache` lives."""
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
        go_on: bool = False,
        backend: str = "auto",
        mesh: AnyMesh | None = None,
    ) -> tuple[Array, RouterSums | None]:
        """Hidden states [B, T, D] for the head, in `dtype` or, for bfloat16 on CPUs that are slow at it, float32
        (`cpu.programs.trained_dtype`), and the router's statistics, stacked over layers (None for a dense model).

        Args:
            tokens_bt: int32 token ids.
            positions_bt: int32, from 0 in each document that goes on from none.
            segment_ids_bt: int32; 0 is padding, 1, 2, … are a row's documents, which do not see each other, unless one
                goes on from another (`attention.documents`).
            remat: a name of `remat.REMATS`.
            matmul: a name of `matmuls.MATMULS`: in which numbers the layers' matrices are multiplied, forward and for
                the activations' gradient. Embedding and head stay in `dtype`.
            go_on: documents may go on from others; must be said where `is_told_what_goes_on`.
            backend: of `astra_jax.attention`.
            mesh: where parameters and batch live; the sequence is in its zig-zag order. None is one device.

        Raises:
            ValueError: an unknown remat policy, backend or matmul, or a mesh that does not divide heads or sequence.
        """
        ...

    def head_weights(self, params: Params) -> Array:
        """The output head's matrix, [D, V] in `param_dtype`, for training: its gradient is not rounded."""
        ...

    def head_kernel(self, params: Params) -> Array:
        """The output head's matrix, [D, V] in `dtype`."""
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
        """An empty cache for `batch` rows of up to `length` positions; `stacked` as the parameters are.

        Args:
            dtype: of what is kept; None: the model's.
            part: of layers that are apart: so many positions are an array, if that is faster; None: all.
        """
        ...

    def forward_cached(
        self,
        params: Params,
        tokens_bt: Array,
        positions_bt: Array,
        past: Caches,
        *,
        look: Look = ...,
        platform: str | None = None,
    ) -> tuple[Array, Caches]:
        """Hidden states of the next tokens of each row over what is cached of it, and these tokens' keys and values."""
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
        look: Look = ...,
        platform: str | None = None,
    ) -> tuple[Array, Caches]:
        """Hidden states of one more token a row, whose K/V is the `step`-th of `recent`, and `recent` extended."""
        ...

    # ---------------------------------------------------------------------------------------------------------- counts

    def matmul_parameters(self) -> tuple[int, int]:
        """(in all layers, in the head) that each token is multiplied with; of experts only those that it goes to."""
        ...

    def recomputed_parameters(self, remat: str) -> int:
        """Of those in all layers, the ones whose products the backward pass computes again."""
        ...

    def flops_per_token(self, tokens: int) -> tuple[float, float]:
        """(forward and backward, the same with full rematerialisation) of a document of `tokens`."""
        ...

    def batch_flops(self, segment_ids_bt: Any) -> float:
        """Forward and backward of a packed batch: each document by its own length, padding (0) for nothing."""
        ...

    def is_told_what_goes_on(self, mesh: AnyMesh | None) -> bool:
        """Whether `forward` has to be told (`go_on`), on this mesh, that documents of a row go on from others."""
        ...

    # ---------------------------------------------------------------------------------------------------- Hugging Face

    def names(self) -> list[NamedParam]:
        """Which HF tensors each parameter is: one table for load, export and the sync of rollout servers."""
        ...

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json` that transformers and vLLM read."""
        ...

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, dtype: str = "float32", param_dtype: str = "float32") -> Self:
        """From the content of a `config.json`. Raises `ValueError`: it uses what this port does not compute."""
        ...


def check_model(model: Any, field: str) -> None:
    """Check that an object has what `Model` asks for.

    Args:
        field: the setting that holds it, for the message.

    Raises:
        SettingError: it lacks something, which the message names.
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
    """How many the model has."""
    return sum(leaf.size for leaf in jax.tree.leaves(model.abstract_params()))
