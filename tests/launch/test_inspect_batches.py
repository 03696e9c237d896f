"""The pages that show what a GRPO run was trained on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path

import pytest
from pages_world import QUESTION, batches, served
from viewing import INJECTION, send, serving

from astra_jax.grpo.dump import FOLDER, shard_folder
from launch.viewer.batches import BatchPages, stretches
from launch.viewer.cards import ViewerService
from launch.viewer.service import ViewerConfig

EPISODE = "/update/2/group/1/episode/3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    batches(found := tmp_path_factory.mktemp("run") / FOLDER)
    return found


def port_of(run) -> Iterator[int]:
    config = ViewerConfig(port=0, drain_seconds=0.0)
    with served(partial(ViewerService, BatchPages(run), run.card, config)) as address:
        yield int(address.rpartition(":")[2])


@pytest.fixture(scope="module")
def port(folder) -> Iterator[int]:
    with serving(folder) as port:
        yield port


def shown(port: int, path: str) -> str:
    status, _, text = send(port, "GET", path)
    assert status == 200
    return text


def test_groups_of_an_update_lead_to_episodes(port: int) -> None:
    listed = shown(port, "/?sort=-update")
    assert re.findall(r'<td class="question"><a href="/update/(\d)/group', listed) == ["2", "2", "1", "1", "0", "0"]
    assert "0123456789abcdef" in listed and "1–2" in listed and "0.500" in listed
    update = shown(port, "/?update=2")
    links = re.findall(r'<a href="(/update/2/group/\d/episode/\d)">(\d\.\d\d)</a>', update)
    assert len(links) == 10 and ("/update/2/group/1/episode/3", "0.75") in links
    assert QUESTION.replace("'", "&#39;") in update and "/update/1/" not in update
    card = shown(port, "/card")
    assert "PackedGroup" in card and "model.family" in card and "2" * 64 in card


def test_an_episode_shows_tokens_with_logprobs_and_versions(port: int, folder: Path) -> None:
    text = shown(port, EPISODE)
    assert "<dt>reward</dt><dd>0.750</dd>" in text and "<dt>sampled by versions</dt><dd>1, 2</dd>" in text
    tokens = text[text.index('<div class="tokens">') : text.index("<details><summary>Sampled tokens")]
    assert f'<span class="given">{QUESTION[:20]}' in tokens.replace("user: ", "").replace("&#39;", "'")
    assert tokens.count("<b>[1]</b>") == 2 and tokens.count("<b>[2]</b>") == 1 and 'title="79: -' in tokens
    row = r'data-label="position">(\d+)<.*?data-label="logprob">(-?[\d.]+)<.*?data-label="version">(\d)'
    rows = re.findall(row, text)
    assert [float(logprob) for _, logprob, _ in rows] == [pytest.approx(-0.02 * (int(at) % 200)) for at, _, _ in rows]
    assert {version for place, _, version in rows if int(place) >= 700} == {"2"}
    second = shown(port, f"{EPISODE}?page=2")
    assert f'href="{EPISODE}?page=1#tokens"' in second and 'data-label="position">1000<' in second


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/update/3/group/0/episode/0", 404, "there is no update 3"),
        ("/update/2/group/2/episode/0", 404, "update 2 has no group 2"),
        ("/update/2/group/0/episode/5", 404, "has no episode 5"),
        ("/?sort=price", 400, "sort is 'price'; give one of question"),
    ],
)
def test_what_is_not_there_is_refused(port: int, path: str, status: int, words: str) -> None:
    found, _, text = send(port, "GET", path)
    assert found == status and words in unescape(text)


def test_what_strangers_wrote_is_text_and_what_is_damaged_is_said(tmp_path: Path) -> None:
    run = batches(tmp_path / FOLDER, INJECTION + "\ud800")
    for port in port_of(run):
        for path in ("/", EPISODE):
            assert "<script>document" not in shown(port, path)
        shutil.rmtree(shard_folder(run.folder, 2))
        status, _, text = send(port, "GET", EPISODE)
        assert status == 503 and "start it again" in text


def test_stretches_are_of_one_version(tmp_path: Path) -> None:
    group, pieces = batches(tmp_path / FOLDER).group(2, 0)
    episode = group.episodes[0]
    found = stretches(episode, pieces, range(len(episode.token_ids)))
    assert "".join(one.text for one in found) == "".join(map(chr, episode.token_ids))
    assert [one.version for one in found] == [None, 1, None, 1, 2]
    assert sum(len(one.tokens) for one in found) == sum(episode.loss_mask)
    assert {token.likely for one in found for token in one.tokens} == {0, 1, 2, 3}
