"""`--data` and `--weights` as users give them: files of conversations, and names on a Hub, which is one of our own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hub_world import TOKEN, Hub, serving_hub
from programs_world import Ended, Programs, programs
from sft_world import make_tokenizer, trajectories

from astra_jax.models.hf_checkpoint import save_hf
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run.metrics import read_metrics
from synthesis.astra_format.sft import write_records
from synthesis.core.chatml import QWEN3
from synthesis.core.datasets import read_card
from synthesis.core.openai_messages import to_openai

ROOT = Path(__file__).parent.parent.parent

WRONG = "hf_" + "wrong" * 6

CONFIG = """
from astra_jax.sft.data import DataConfig
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.sft.config import SFTConfig
from configs.training import SFTRun

MODEL = Qwen3Config(vocab_size=400, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=32, d_ff=64,
                    tie_embeddings=True, max_positions=512)
CONFIG = SFTRun(MODEL, SFTConfig(data=DataConfig(seq_len=512, packing_bins=4), batch_size=2, steps=2, sample_every=0,
                                 learning_rate=2e-2, eval_every=2))
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving_hub() as served:
        yield served


@pytest.fixture(scope="module")
def world(tmp_path_factory, hub: Hub) -> Path:
    """A folder with a configuration and files of conversations, and on the Hub a model, a gated one and a dataset."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "config.py").write_text(CONFIG)
    make_tokenizer(folder / "hf")
    names: dict[str, Qwen3Config] = {}
    exec(CONFIG, names)
    save_hf(names["MODEL"].init(jax.random.key(0)), names["MODEL"], folder / "hf")
    write_records(folder / "own.jsonl", trajectories(12, longest=2), form="openai")
    write_records(folder / "held.parquet", trajectories(16)[12:], form="trl")
    model = {file.name: file.read_bytes() for file in (folder / "hf").iterdir()}
    hub.repositories["models/org/tiny"] = {**model, "original/other.safetensors": b"not read"}
    hub.repositories["models/org/tiny"]["README.md"] = b"---\nlicense: apache-2.0\n---\n# Tiny\n"
    hub.repositories["models/org/gated"] = model
    hub.gated.add("models/org/gated")
    data = (folder / "own.jsonl").read_bytes()
    parquet = (folder / "held.parquet").read_bytes()
    hub.repositories["datasets/org/chats"] = {"README.md": b"#", "data/train-00000-of-00001.parquet": parquet,
                                              "data/test-00000-of-00001.parquet": parquet}  # fmt: skip
    hub.repositories["datasets/org/many"] = {"a.jsonl": data, "b.jsonl": data}
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Programs]:
    """A start knows no Hub but ours: `huggingface_hub` reads its settings as it is imported."""
    with programs("launch.sft", tmp_path_factory.mktemp("said")) as made:
        yield made


def arguments(world: Path, workdir: Path, **changed: str) -> list[str]:
    given = {"config": world / "config.py", "weights": world / "hf", "data": world / "own.jsonl", "workdir": workdir}
    return [f"--{name}={value}" for name, value in {**given, **changed}.items()]


@pytest.fixture(scope="module")
def trained(world, hub, start, tmp_path_factory) -> tuple[Path, Path]:
    """A run from a model of the Hub on files of one's own, and the folder with its caches."""
    folder = tmp_path_factory.mktemp("trained")
    given = arguments(world, folder / "run", weights="org/tiny", held_out=str(world / "held.parquet"))
    ended = start.begin(*given, **hub.environment(folder / "home")).wait()
    assert ended.code == 0, ended.errors
    assert f"own.jsonl: 12 of 12 rows, kept in {folder / 'home' / 'astra-jax' / 'data'}" in ended.out
    return folder / "run", folder / "home"


def test_a_model_of_the_hub_is_trained_on_ones_own_file(world, hub, start, trained) -> None:
    run, home = trained
    kept = home / "astra-jax" / "data"
    assert "eval/loss" in read_metrics(run / "metrics")[-1]
    assert len(list(kept.iterdir())) == 2
    assert not any("original" in path for _, path, _ in hub.asked)
    # The same from what is kept: the Hub is not asked, and both files are read no more.
    asked = len(hub.asked)
    given = arguments(world, run, weights="org/tiny", held_out=str(world / "held.parquet"))
    again = start.begin(*given, **hub.environment(home, HF_HUB_OFFLINE="1")).wait()
    assert again.code == 0 and len(hub.asked) == asked, again.errors
    assert len(list(kept.iterdir())) == 2


def test_a_run_is_a_complete_model(world, trained) -> None:
    """Which transformers takes from the run's own folder, but for the weights."""
    run, home = trained
    folder = run / "checkpoints"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert (
        card.startswith("---\nlibrary_name: transformers\n")
        and "\nlicense: apache-2.0\nbase_model: org/tiny\n---\n" in card
    )
    for one in (home / "astra-jax" / "data").iterdir():
        assert f"`{read_card(one)['digest']}`" in card
    last = read_metrics(run / "metrics")[-1]
    assert f"| eval/loss | {last['eval/loss']:.6g} |" in card and "## Figures at step 2\n" in card
    assert '"learning_rate": 0.02' in card and "tokens_per_second" not in card
    transformers = pytest.importorskip("transformers")
    tokenizer, said = transformers.AutoTokenizer.from_pretrained(folder), trajectories(1)[0]
    text = tokenizer.apply_chat_template(
        to_openai(said.messages), tools=[one.to_openai() for one in said.tools], tokenize=False
    )
    assert text == "".join(one.text for one in QWEN3.render(said.messages, said.tools, keep_reasoning=False))
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert tokenizer.eos_token_id in ends and transformers.AutoConfig.from_pretrained(folder).num_hidden_layers == 1


def pushed(start: Programs, hub: Hub, home: Path, *given: str, **more: str) -> Ended:
    return start(*given, module="launch.push", **hub.environment(home, **more))


def test_a_run_goes_to_the_hub_and_comes_back(world, hub, start, trained, tmp_path) -> None:
    run, _ = trained
    named = "additional_chat_templates/rag.jinja"
    (run / "checkpoints" / named).parent.mkdir()
    (run / "checkpoints" / named).write_text("{{ messages[0].content }}")
    given = (f"--weights={run / 'checkpoints'}", "--repository=me/trained")
    done = pushed(start, hub, tmp_path / "home", *given, HF_TOKEN=TOKEN)
    assert done.code == 0 and f"{hub.address}/me/trained/commit/" in done.out, done.errors
    there = hub.repositories["models/me/trained"]
    assert there["README.md"] == (run / "checkpoints" / "README.md").read_bytes()
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
            "generation_config.json", named} <= there.keys()  # fmt: skip
    assert not list(run.glob("astra-push-*")) and TOKEN not in done.out + done.errors
    back = arguments(world, tmp_path / "more", weights="me/trained")
    ended = start.begin(*back, **hub.environment(tmp_path / "home")).wait()
    assert ended.code == 0, ended.errors
    assert "base_model: me/trained" in (tmp_path / "more" / "checkpoints" / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "more" / "checkpoints" / named).read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("to", "token", "message"),
    [
        ("me/new", "", "nobody is logged in; run hf auth login"),
        ("me/new", WRONG, "it does not know the token"),
        ("new", TOKEN, "--repository=new is not the name of a repository; write ORG/NAME"),
    ],
)
def test_a_push_that_may_not_be_is_one_line(hub, start, trained, tmp_path, to: str, token: str, message: str) -> None:
    done = pushed(start, hub, tmp_path, f"--weights={trained[0] / 'checkpoints'}", f"--repository={to}", HF_TOKEN=token)
    assert done.code == 2 and message in done.errors, done.errors
    assert done.errors.count("\n") == 1 and "hf_" not in done.errors and "models/me/new" not in hub.repositories


@pytest.mark.parametrize(
    ("changed", "more", "message"),
    [
        ({"weights": "org/gone"}, {}, "=org/gone is not a folder here; as a name on the Hub: the Hub shows no model"),
        ({"weights": "hub:org/gated"}, {}, "org/gated is gated; accept its terms at http://127.0.0.1"),
        ({"weights": "hub:org/gated"}, {"HF_TOKEN": WRONG}, "org/gated is gated"),
        ({"weights": "hub:org/tiny@no"}, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and the model org/tiny is"),
        ({"weights": "org/tiny"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached, and"),
        ({"weights": "hub:tiny"}, {}, "is not the name of a model; write hub:ORG/NAME"),
        ({"data": "hub:org/gone"}, {}, "the Hub shows no dataset org/gone"),
        (
            {"data": "hub:org/many"},
            {},
            "that dataset has several files (a.jsonl, b.jsonl); name one with hub:ORG/NAME/FILE",
        ),
        ({"data": "hub:org/chats/gone.jsonl"}, {}, "the dataset org/chats has no such file"),
        ({"data": "hub:org/chats"}, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and this asks the Hub"),
        ({"data": "gone.jsonl"}, {}, "--data: gone.jsonl: there is no such file"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(world, hub, start, tmp_path, changed, more, message) -> None:
    environment = {**hub.environment(tmp_path / "home"), **more}
    ended = start.begin(*arguments(world, tmp_path / "run", **changed), **environment).wait()
    assert message in ended.line, ended.line
    for secret in (TOKEN, WRONG):
        assert secret not in ended.out + ended.errors


def test_the_start_says_what_of_a_file_is_honoured_changed_and_not_read(world, hub, start, tmp_path) -> None:
    tool = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {"city": {}}}}
    call = {"function": {"name": "weather", "arguments": {"city": "Oslo", "day": None}}}
    asked = {"role": "user", "content": "Oslo?"}
    rows = [
        {"messages": [asked, {"role": "assistant", "tool_calls": [call]}], "tools": [tool], "source": "x"},
        {"messages": [asked, {"role": "assistant", "content": "bad", "train": False}, asked,
                      {"role": "assistant", "content": "good", "weight": 0.5}], "source": "y"},
    ]  # fmt: skip
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = hub.environment(tmp_path / "home", NO_COLOR="1")
    given = arguments(world, tmp_path / "run", data=str(tmp_path / "own.jsonl"))
    said = start.begin(*given, "--preview=9", **environment).wait().out
    for line in (
        "1 row with null_argument, such as ", "row 0 (counted from 0): weather.day",
        "not read (in how many rows): source (2)",
        "turns of weight 0 (context, not trained): 1", "turns of weight 0.5: 1", "«weight 0: bad<|im_end|>»",
    ):  # fmt: skip
        assert line in said, said
    assert '"arguments": {"city": "Oslo"}' in said and "good<|im_end|>»" in said


def test_a_dataset_and_a_gated_model_of_the_hub_are_previewed(world, hub, start, tmp_path) -> None:
    environment = hub.environment(tmp_path / "home", HF_TOKEN=TOKEN, NO_COLOR="1")
    given = arguments(world, tmp_path / "run", weights="hub:org/gated", data="hub:org/chats")
    ended = start.begin(*given, "--preview=1", **environment).wait()
    assert ended.code == 0 and "--data=hub:org/chats: 4 of 4 rows" in ended.out, ended.errors
    assert "tokens are trained on" in ended.out and not (tmp_path / "run").exists()
    assert not any("/test-" in path for _, path, _ in hub.asked)
    downloaded = [token for method, path, token in hub.asked if method == "GET" and "/lfs/" in path]
    assert set(downloaded) == {""} and TOKEN not in ended.out
    named = [*given[:2], "--data=hub:org/many/b.jsonl", given[3], "--preview=1"]
    assert "12 of 12 rows" in start.begin(*named, **environment).wait().out


def test_bad_rows_are_refused_by_number_or_left_out_by_a_flag(world, hub, start, tmp_path) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes((world / "own.jsonl").read_bytes() + json.dumps({"text": "a"}).encode() + b"\n")
    environment = {**hub.environment(tmp_path / "home"), "NO_COLOR": "1"}
    given = [*arguments(world, tmp_path / "run", data=str(file)), "--preview=1"]
    refused = start.begin(*given, **environment).wait()
    assert "some.jsonl, row 12 (counted from 0): bad_record: it is of no known form; its keys are text" in refused.line
    assert "--skip_bad skips such rows" in refused.line
    kept = start.begin(*given, "--skip_bad", **environment).wait()
    assert kept.code == 0 and "12 of 13 rows" in kept.out and "left out: 1 bad_record, such as" in kept.out
    assert "use bad_schema" in start.begin(*given, "--accept=typo", **environment).wait().line
    assert os.listdir(tmp_path / "home" / "astra-jax" / "data")
