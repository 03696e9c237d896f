"""Whom the OpenAI service answers; tests/astra_jax/base/test_http_service.py has what holds for every service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import openai
import pytest
from certificates import make_certificate
from serving_world import Drip, serving
from sft_world import make_tokenizer

from astra_jax.base.access import trusting

BODY = {"model": "tiny", "prompt": [1, 2], "max_tokens": 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_pages_of_other_sites_draw_nothing(tokenizer) -> None:
    with serving(lambda: Drip(tokenizer), tokenizer) as server:
        for headers, status in (
            ({}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Content-Type": "text/plain"}, 415),
        ):
            sent = {"Content-Type": "application/json"} | headers
            request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(BODY).encode(), sent)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    got, body = answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as error:
                got, body = error.code, json.loads(error.read())
            assert got == status and (status == 200 or "message" in body["error"])


def test_the_openai_client_reads_a_stream_over_tls(tokenizer, tmp_path) -> None:
    cert, key = make_certificate(tmp_path)
    with serving(lambda: Drip(tokenizer), tokenizer, tls_cert=cert, tls_key=key) as server:
        secure = trusting(cert)
        assert secure is not None
        url = server.url.replace("http://", "https://")
        with openai.DefaultHttpxClient(verify=secure) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60, http_client=http)
            parts = list(client.completions.create(model="tiny", prompt=[1, 2], max_tokens=6, stream=True))
        assert "".join(part.choices[0].text for part in parts)
