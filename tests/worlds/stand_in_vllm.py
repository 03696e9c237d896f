"""The program `vllm` of a test, without a model: it speaks the plugin's protocol, and calls a tool for odd seeds.

    vllm serve FOLDER --port=PORT --max-model-len=N --dtype=DTYPE [other flags, which are printed]

STAND_IN_DIES_AFTER: number of syncs after which the first process ends with code 9.
"""

import json
import os
import signal
import sys
from pathlib import Path

from aiohttp import web
from tokenizers import Tokenizer

CALL = '<tool_call>{"name": "stock_of", "arguments": {"item": "bolts"}}</tool_call><|im_end|>'
ANSWERS = ("There are 40.<|im_end|>", "There are none.<|im_end|>")
LOGPROB = -0.5


class StandIn:
    """One server of the folder's model."""

    def __init__(self, folder: Path, given: dict[str, str]) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._config = json.loads((folder / "config.json").read_text())
        self._given, self._version, self._syncs, self._tokens = given, "none", 0, 0

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            return web.Response(status=401)
        described = {
            "version": self._version,
            "vocab_size": self._config["vocab_size"],
            "vocabulary": None,
            "max_model_len": int(self._given["max-model-len"]),
            "logprobs_mode": self._given["logprobs-mode"],
            "protocol": 4,
            "wants_key": True,
            "on_tpus": False,
            "config": self._config,
            "dtype": self._given["dtype"],
            "sampling": {},
        }
        return web.json_response(described)

    async def sync(self, request: web.Request) -> web.Response:
        body = await request.json()
        key = Path(os.environ["ASTRA_SYNC_KEY_FILE"]).read_text().strip()
        if request.headers["X-Astra-Sync-Key"] != key or not body["item"].startswith(os.environ["ASTRA_SYNC_ROOT"]):
            return web.json_response({"error": "not allowed"}, status=403)
        self._version, self._syncs = body["version"], self._syncs + 1
        died = Path("died")
        if self._syncs == int(os.environ.get("STAND_IN_DIES_AFTER", -1)) and not died.exists():
            died.touch()
            print("out of memory", flush=True)
            os._exit(9)
        return web.json_response({"seconds": {"read": 0.0}})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not body:
            return web.json_response({}, status=400)
        sampling, prompt = body["sampling_params"], body["token_ids"]
        seed = sampling.get("seed") or 0
        is_first = "tool_response" not in self._tokenizer.decode(prompt, skip_special_tokens=False)
        text = CALL if is_first and seed % 2 else ANSWERS[0 if not is_first else 1]
        new = self._tokenizer.encode(text, add_special_tokens=False).ids
        drawn = new[: sampling["max_tokens"]]
        self._tokens += len(drawn)
        choice = {
            "token_ids": drawn,
            "logprobs": {"content": [{"logprob": LOGPROB}] * len(drawn)},
            "weight_versions": [{"version": self._version, "start": 0, "end": len(drawn)}],
            "finish_reason": "stop" if len(drawn) == len(new) else "length",
        }
        return web.json_response({"choices": [choice]})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {self._tokens}\n')


def main() -> None:
    given = dict(one.removeprefix("--").partition("=")[::2] for one in sys.argv[3:])
    print(json.dumps(given | {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}), flush=True)
    server = StandIn(Path(sys.argv[2]), given)
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/v1/policy/version", server.version),
            web.post("/v1/policy/lease", server.version),
            web.post("/v1/policy/sync", server.sync),
            web.post("/inference/v1/generate", server.generate),
            web.get("/metrics", server.metrics),
        ]
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    web.run_app(app, host="127.0.0.1", port=int(given["port"]), print=None)


if __name__ == "__main__":
    main()
