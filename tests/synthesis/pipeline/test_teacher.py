"""The OpenAI-compatible teacher against a real HTTP server on loopback, and the offline teacher's failure modes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

import synthesis.pipeline.prompts
from synthesis.offline.teacher import OfflineTeacher
from synthesis.pipeline.structured_output import prompt_name
from synthesis.pipeline.teacher import OpenAITeacher, OpenAITeacherConfig, TeacherError


class CapitalAnswer(msgspec.Struct, frozen=True):
    city: str
    certain: bool


class Endpoint:
    """Plays a list of (status, content) answers, one a request, and keeps the requests."""

    def __init__(self, answers: list[tuple[int, str]]) -> None:
        self.requests: list[dict[str, Any]] = []
        outer, queue = self, iter(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status, content = next(queue)
                message = {"role": "assistant", "content": content}
                body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
                body["choices"] = [{"index": 0, "finish_reason": "stop", "message": message}]
                data = json.dumps(body if status == 200 else {"error": {"message": content}}).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def teacher(self, tries: int = 3) -> OpenAITeacher:
        url = f"http://127.0.0.1:{self.server.server_port}/v1"
        return OpenAITeacher(OpenAITeacherConfig(base_url=url, model="m", tries=tries, structured_output="json_schema"))


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "capital_answer.jinja").write_text("The capital of {{ country }}? QUERY stays.")
    monkeypatch.setattr(synthesis.pipeline.prompts, "PROMPTS", tmp_path)
    synthesis.pipeline.prompts.packaged.cache_clear()
    yield
    synthesis.pipeline.prompts.packaged.cache_clear()


async def ask(teacher: OpenAITeacher) -> CapitalAnswer:
    return await teacher.ask(CapitalAnswer, {"country": "QUERY {{x}}"}, language="en", seed=5)


async def test_an_answer_is_asked_for_by_schema_and_decoded(prompts):
    endpoint = Endpoint([(200, '<think>hm</think>\n```json\n{"city": "Oslo", "certain": true}\n```')])
    assert await ask(endpoint.teacher()) == CapitalAnswer("Oslo", True)
    (request,) = endpoint.requests
    assert request["messages"] == [{"role": "user", "content": "The capital of QUERY {{x}}? QUERY stays."}]
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["city", "certain"]


async def test_repaired_answers_are_counted_and_printed(prompts, capsys):
    exact, fenced, spelled = (
        '{"city": "Oslo", "certain": true}',
        '```json\n{"city": "Oslo", "certain": true}\n```',
        '{"city": "Oslo", "certain": "yes"}',
    )
    endpoint = Endpoint([(200, exact), (200, f"<think>hm</think>{exact}"), (200, fenced), (200, spelled)])
    teacher = endpoint.teacher()
    for _ in range(4):
        assert await ask(teacher) == CapitalAnswer("Oslo", True)
    await teacher.close()
    printed = capsys.readouterr().err
    assert "2 of 4 accepted answers were not exact JSON of their schema, and were repaired" in printed
    assert "```json" in printed


async def test_a_bad_answer_is_asked_for_again_with_another_seed_and_a_failure_with_the_same(prompts):
    endpoint = Endpoint([(200, '{"city": 3}'), (503, "busy"), (200, '{"city": "Oslo", "certain": false}')])
    assert await ask(endpoint.teacher()) == CapitalAnswer("Oslo", False)
    assert [r["seed"] for r in endpoint.requests] == [5, 6, 6]


async def test_it_fails_closed_when_no_answer_fits(prompts):
    endpoint = Endpoint([(200, "I am not sure."), (200, '{"city": "Oslo"}')])
    with pytest.raises(TeacherError, match="CapitalAnswer: no valid answer in 2 tries.*certain"):
        await ask(endpoint.teacher(tries=2))


async def test_a_refused_request_is_not_repeated(prompts):
    endpoint = Endpoint([(200, '{"city": "Oslo", "certain": true}'), (400, "too long")])
    teacher = endpoint.teacher()
    await ask(teacher)
    with pytest.raises(TeacherError, match="refused the request with status 400.*too long"):
        await ask(teacher)
    assert len(endpoint.requests) == 2


def test_prompt_names():
    assert prompt_name(CapitalAnswer) == "capital_answer"


async def test_the_offline_teacher_answers_no_unknown_request():
    with pytest.raises(TeacherError, match="no rule for CapitalAnswer"):
        await OfflineTeacher().ask(CapitalAnswer, {}, language="en", seed=0)
