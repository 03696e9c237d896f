"""Models and datasets of the Hugging Face Hub by name, and uploads, through `huggingface_hub`.

    Qwen/Qwen3-0.6B        instead of a model's folder, if there is no folder of that name
    hub:ORG/NAME           the same, and for datasets; hub:ORG/NAME@REVISION pins a revision
    hub:ORG/NAME/FILE      one file of a dataset

Settings of `huggingface_hub` apply: HF_TOKEN or a login, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE=1 (use only its cache). A
token is never printed. Errors name the repository and the fix.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from astra_jax.base.errors import UserError
from astra_jax.base.proxies import via
from launch.flags import cli

if TYPE_CHECKING:
    from etils import epath

PREFIX = "hub:"
_NAME = re.compile(r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?")
_FILE = re.compile(
    r"(?P<repo>\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:/(?P<file>[^@]{1,500}))?(?:@(?P<revision>[\w./-]{1,200}))?"
)


class HubError(UserError):
    """The Hub does not have or provide the repository, or cannot be reached; the message has the fix."""


class Repository(NamedTuple):
    """A repository, one of its files or None for all, and a revision or None for the newest."""

    repo: str
    file: str | None = None
    revision: str | None = None


def model_folder(flag: flags.FlagHolder[str | None]) -> epath.Path:
    """Return the folder of a flag that may name a model of the Hub, which is downloaded to the Hub's cache. For a run's
    folder it is its checkpoints.

    Raises:
        UsageError: it is neither a folder nor a name.
        HubError: the Hub does not provide it.
    """
    found = _downloaded(flag.value or "", f"--{flag.name}={flag.value or ''}")
    return cli.checkpoints_of(cli.folder(flag)) if found is None else found


def named_folder(text: str, said: str) -> epath.Path:
    """Return the folder that a text names, which may be a model of the Hub, as in `model_folder`.

    Args:
        said: source of the text, for errors.

    Raises:
        UsageError: it starts with `hub:` and is not a name.
        HubError: the Hub does not provide it.
    """
    from astra_jax.base.files import location

    return _downloaded(text, said) or cli.checkpoints_of(location(text))


def _downloaded(text: str, said: str) -> epath.Path | None:
    """Return the folder of a model of the Hub; None: the text is not such a name, or a local folder has that name."""
    plain = text.removeprefix(PREFIX)
    named = _NAME.fullmatch(plain)
    if text.startswith(PREFIX) and named is None:
        raise cli.UsageError(f"{said} is not the name of a model; write hub:ORG/NAME or hub:ORG/NAME@REVISION")
    if named is None or (plain == text and Path(text).exists()):
        return None
    from astra_jax.base.files import location

    return location(_snapshot(Repository(named["repo"], None, named["revision"]), said))


@cache
def _snapshot(wanted: Repository, said: str) -> Path:
    import huggingface_hub

    from astra_jax.chat_files import TOKENIZER_FILES
    from astra_jax.models.hf_checkpoint import ADAPTER

    files = ["*.safetensors", "*.safetensors.index.json", "config.json", "README.md", ADAPTER, *TOKENIZER_FILES]
    with _in_our_words(wanted.repo, said, "model"):
        # Weights in folders are other forms of the same ones, such as original/.
        found = huggingface_hub.snapshot_download(
            wanted.repo,
            revision=wanted.revision,
            allow_patterns=files,
            ignore_patterns=["*/*.safetensors", "*/*.safetensors.index.json"],
        )
    return Path(str(found))


def dataset_files(text: str, said: str, suffixes: Sequence[str]) -> list[Path]:
    """Download and return the files of `hub:ORG/NAME`: the named one, or those of its `train` split, or all.

    Args:
        said: the flag as the user gave it, for errors.
        suffixes: suffixes of files that can be read.

    Raises:
        UsageError: it is not a name.
        HubError: the Hub does not provide it, it has no such files, or it has several of which none is called train.
    """
    import huggingface_hub

    if (named := _FILE.fullmatch(text.removeprefix(PREFIX))) is None:
        raise cli.UsageError(f"{said} is not the name of a dataset; write hub:ORG/NAME or hub:ORG/NAME/FILE")
    repo, revision = named["repo"], named["revision"]
    with _in_our_words(repo, said, "dataset"):
        names = [named["file"]]
        if named["file"] is None:
            every = huggingface_hub.list_repo_files(repo, repo_type="dataset", revision=revision)
            names = _of_training([name for name in sorted(every) if name.endswith(tuple(suffixes))], said)
        return [
            Path(str(huggingface_hub.hf_hub_download(repo, name, repo_type="dataset", revision=revision)))
            for name in names
        ]


def _of_training(names: Sequence[str], said: str) -> list[str]:
    """Return the files of a dataset to read. Raises `HubError`."""
    if not names:
        raise HubError(
            f"{said}: that dataset has no file of .jsonl, .json or .parquet; name one with hub:ORG/NAME/FILE"
        )
    train = [name for name in names if "train" in Path(name).name.replace("-", "_").split(".")[0].split("_")]
    train = train or [name for name in names if "train" in Path(name).parts]
    chosen = train or names
    if len({(str(Path(name).parent), Path(name).name.partition("-")[0].partition(".")[0]) for name in chosen}) > 1:
        shown = ", ".join(names[:8])
        raise HubError(f"{said}: that dataset has several files ({shown}); name one with hub:ORG/NAME/FILE")
    return list(chosen)


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


@contextlib.contextmanager
def _in_our_words(repo: str, said: str, kind: str) -> Iterator[None]:
    """Translate errors of `huggingface_hub`, which quote requests and are a page long, to `HubError`."""
    import httpx2
    from huggingface_hub import constants, errors

    if constants.HF_HUB_CACHE.startswith(("~", os.devnull)):  # see `user_cache`
        raise HubError(
            f"{said}: HOME is not set, and user id {os.getuid()} has no home directory; set HF_HOME to a folder that "
            "can be written"
        )
    hub = constants.ENDPOINT + via(constants.ENDPOINT)
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    if not said.partition("=")[2].startswith(PREFIX):
        said += " is not a folder here; as a name on the Hub"
    try:
        yield
    except errors.GatedRepoError:
        raise HubError(
            f"{said}: the {kind} {repo} is gated; accept its terms at {page}, and log in (hf auth login) or "
            "set HF_TOKEN to a token of that account"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{said}: the Hub shows no {kind} {repo}; check its name, or, if it is private, log in "
            "(hf auth login) or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(f"{said}: the {kind} {repo} has no such revision; see {page}/commits/main") from None
    except errors.LocalEntryNotFoundError as error:
        cause = error.__cause__
        state = (
            f"said {cause.response.status_code}" if isinstance(cause, errors.HfHubHTTPError) else "cannot be reached"
        )
        why = "HF_HUB_OFFLINE is set" if _is_offline() else f"{hub} {state}"
        raise HubError(
            f"{said}: {why}, and the {kind} {repo} is not complete in the cache {constants.HF_HUB_CACHE}; download it "
            f"where there is a network (hf download {'--repo-type=dataset ' if kind == 'dataset' else ''}{repo}), or "
            "give a folder"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        remedy = "name a file that is in its cache, with hub:ORG/NAME/FILE" if kind == "dataset" else "give a folder"
        raise HubError(f"{said}: HF_HUB_OFFLINE is set, and this asks the Hub; unset it, or {remedy}") from error
    except errors.EntryNotFoundError:
        raise HubError(f"{said}: the {kind} {repo} has no such file; see {page}/tree/main") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        who = {401: "it does not know the token", 403: "the token may not do that"}.get(status, f"it said {status}")
        raise HubError(f"{said}: {hub} refused {kind} {repo}: {who}; log in again (hf auth login)") from None
    except errors.HFValidationError as error:
        raise HubError(f"{said}: {error}") from None
    except OSError as error:
        if not isinstance(error.filename, str) or not error.filename.startswith(constants.HF_HOME):
            raise
        raise HubError(
            f"{said}: {error.filename}: {error.strerror}; set HF_HOME to a folder that can be written, with room for "
            f"the {kind}"
        ) from None
    except httpx2.HTTPError as error:
        raise HubError(
            f"{said}: {hub} cannot be reached ({type(error).__name__}); check the network and "
            "HF_ENDPOINT, or give a folder"
        ) from None


def repository(text: str, said: str) -> str:
    """Return ORG/NAME of a model. Raises `UsageError`: it is not a name."""
    named = _NAME.fullmatch(text.removeprefix(PREFIX))
    if named is None or named["revision"]:
        raise cli.UsageError(f"{said} is not the name of a repository; write ORG/NAME")
    return named["repo"]


def check_may_write(repo: str, said: str, *, public: bool) -> None:
    """Create a repository unless it exists. Raises `HubError`: the user is not logged in or has no permission."""
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise HubError(f"{said}: nobody is logged in; run hf auth login, or set HF_TOKEN to a token that may write")
    with _in_our_words(repo, f"{said[: said.index('=')]}={PREFIX}{repo}", "model"):
        huggingface_hub.create_repo(repo, private=not public, exist_ok=True)


def upload(folder: Path, repo: str, said: str, *, message: str) -> str:
    """Upload a model's folder in one commit: its files, and the named chat templates of its subfolder.

    Returns:
        URL of the commit.

    Raises:
        HubError: the Hub does not accept it.
    """
    import huggingface_hub

    from synthesis.core.chat_template import OTHER_TEMPLATES

    names = [escape(file.name) for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    with _in_our_words(repo, f"{said[: said.index('=')]}={PREFIX}{repo}", "model"):
        done = huggingface_hub.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=message,
            allow_patterns=[*names, f"{OTHER_TEMPLATES}/*.jinja"],
            ignore_patterns=["*/*/*"],
        )
    return str(done.commit_url)
