"""Upload a model to the Hugging Face Hub: a run's checkpoints, or a Hugging Face folder.

    astra push --weights=WORKDIR/checkpoints --repository=ORG/NAME [--step=N] [--public]

The repository is created if it does not exist, private unless --public is given. The upload has weights, tokenizer,
chat template, generation configuration and model card. Log in with `hf auth login`, or set HF_TOKEN to a token with
write permission.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from astra_jax.base.terminal import make_output_optional, say
from launch.flags import cli, hub, shared

if TYPE_CHECKING:
    from etils import epath

_WEIGHTS = shared.weights()
_MODEL_CLASS = shared.model_class()
_REPOSITORY = flags.DEFINE_string(
    "repository", None, "Repository on the Hugging Face Hub to upload to: ORG/NAME.", required=True
)
_STEP = shared.step()
_BASE = shared.base()
_DTYPE = shared.param_dtype()
_PUBLIC = flags.DEFINE_bool("public", False, "Make the repository public if it is created; by default it is private.")
_MESSAGE = flags.DEFINE_string("message", None, "Commit message; by default it names what was uploaded.")


def main() -> None:
    from astra_jax.run import weights
    from launch.flags.exports import to_hf

    source = hub.model_folder(_WEIGHTS)
    repository = hub.repository(_REPOSITORY.value or "", f"--repository={_REPOSITORY.value}")
    said = f"--repository={_REPOSITORY.value}"
    if (step := weights.stored_step(source, _STEP.value)) is None:
        if given := [flag.name for flag in (_STEP, _BASE, _DTYPE) if flag.value is not None]:
            raise cli.UsageError(f"--{given[0]} is for a run's checkpoints; {source} is a Hugging Face folder")
        hub.check_may_write(repository, said, public=_PUBLIC.value)
        _upload(Path(source), repository, f"{source.name}")
        return
    hub.check_may_write(repository, said, public=_PUBLIC.value)  # before gigabytes are written
    base = cli.folder(_BASE) if _BASE.value else None
    with tempfile.TemporaryDirectory(prefix="astra-push-", dir=_room_beside(source)) as folder:
        to_hf(source, Path(folder), dtype=_DTYPE.value, step=step, base=base)
        _upload(Path(folder), repository, f"step {step} of {source.parent.name}")


def _room_beside(source: epath.Path) -> Path | None:
    """Return a folder on the same disk as a run's weights, which has room for their copy; None: they are in a
    bucket."""
    from astra_jax.base.files import in_bucket

    return None if in_bucket(source) else Path(source).parent


def _upload(folder: Path, repository: str, what: str) -> None:
    make_output_optional()
    address = hub.upload(folder, repository, f"--repository={_REPOSITORY.value}", message=_MESSAGE.value or what)
    say(f"{address}: {what}")


if __name__ == "__main__":
    cli.run(main, again="files that are there already are not sent again")
