"""A Hugging Face Hub of our own on loopback: what `huggingface_hub` asks of one to download and to upload.

Model and dataset information, a tree of files, `resolve` with a redirect to where large files lie (as LFS has it), and,
for uploads, the batch of LFS and the commit. A repository may be gated. What was asked, and with which token, is kept.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "hf_" + "loopback" * 4
LARGE = (".safetensors", ".parquet", "tokenizer.json")
"""Files that lie elsewhere, behind a redirect."""


@dataclass
class Hub:
    """Repositories by `models/ORG/NAME` or `datasets/ORG/NAME`, each its files by path.

    Attributes:
        gated: repositories that only `TOKEN` may read.
        asked: (method, path, token) of each request.
        objects: what was uploaded, by sha256.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    address: str = ""

    def environment(self, home: Any, **more: str) -> dict[str, str]:
        """For a program that is to know no other Hub, with its cache in `home`."""
        ours = {"HF_ENDPOINT": self.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "",
                "HF_HUB_DISABLE_PROGRESS_BARS": "1", "XDG_CACHE_HOME": str(home)}  # fmt: skip
        return {**ours, **more}

    @property
    def elsewhere(self) -> str:
        """Where large files lie: by another host's name, as theirs do, which is to get no token."""
        return self.address.replace("127.0.0.1", "localhost")

    # ------------------------------------------------------------------------------------------------------- requests

    @web.middleware
    async def _noted(self, request: web.Request, handler: Any) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.asked.append((request.method, request.path, token))
        return await handler(request)

    def _found(self, request: web.Request) -> tuple[str, dict[str, bytes]]:
        kind = request.match_info.get("kind", "models")
        name = f"{kind}/{request.match_info['org']}/{request.match_info['name']}"
        may = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name not in self.repositories:
            raise web.HTTPUnauthorized(headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "not found"})
        if name in self.gated and not may:
            raise web.HTTPForbidden(headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"})
        return name, self.repositories[name]

    def _commit(self, files: dict[str, bytes]) -> str:
        return hashlib.sha1(
            repr(sorted((n, hashlib.sha256(d).hexdigest()) for n, d in files.items())).encode()
        ).hexdigest()

    async def info(self, request: web.Request) -> web.Response:
        name, files = self._found(request)
        siblings = [{"rfilename": path} for path in files]
        return web.json_response({"id": name.partition("/")[2], "sha": self._commit(files), "siblings": siblings,
                                  "private": False, "gated": name in self.gated})  # fmt: skip

    async def tree(self, request: web.Request) -> web.Response:
        _, files = self._found(request)
        return web.json_response([self._entry(path, data) for path, data in files.items()])

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    async def resolve(self, request: web.Request) -> web.Response:
        _, files = self._found(request)
        path = request.match_info["path"]
        headers = {"X-Repo-Commit": self._commit(files)}
        if path not in files:
            raise web.HTTPNotFound(headers={**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "no file"})
        data = files[path]
        if not path.endswith(LARGE):
            return web.Response(body=data, headers={**headers, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        digest = hashlib.sha256(data).hexdigest()
        self.objects[digest] = data
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        return web.Response(status=302, headers={**headers, "Location": f"{self.elsewhere}/lfs/{digest}"})

    async def large(self, request: web.Request) -> web.Response:
        digest = request.match_info["digest"]
        if request.method == "PUT":
            data = await request.read()
            assert hashlib.sha256(data).hexdigest() == digest
            self.objects[digest] = data
            return web.Response()
        return web.Response(body=self.objects[digest], headers={"ETag": f'"{digest}"'})

    # -------------------------------------------------------------------------------------------------------- uploads

    def _may(self, request: web.Request) -> None:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise web.HTTPUnauthorized(headers={"X-Error-Message": "Invalid credentials"})

    async def create(self, request: web.Request) -> web.Response:
        self._may(request)
        body = await request.json()
        name = f"models/{body['organization']}/{body['name']}"
        new = name not in self.repositories
        self.repositories.setdefault(name, {})
        return web.json_response({"url": f"{self.address}/{name.partition('/')[2]}"}, status=200 if new else 409)

    async def checked(self, request: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    async def preupload(self, request: web.Request) -> web.Response:
        self._may(request)
        body = await request.json()
        files = [{"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                  "shouldIgnore": False} for one in body["files"]]  # fmt: skip
        return web.json_response({"files": files})

    async def batch(self, request: web.Request) -> web.Response:
        self._may(request)
        body = await request.json()
        objects = [{**one, "actions": {"upload": {"href": f"{self.elsewhere}/lfs/{one['oid']}"}}}
                   for one in body["objects"]]  # fmt: skip
        answer = {"transfer": "basic", "objects": objects}
        return web.json_response(answer, content_type="application/vnd.git-lfs+json")

    async def commit(self, request: web.Request) -> web.Response:
        self._may(request)
        name, files = self._found(request)
        for line in (await request.text()).splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
        oid = self._commit(files)
        url = f"{self.address}/{name.partition('/')[2]}/commit/{oid}"
        return web.json_response({"success": True, "commitOid": oid, "commitUrl": url})

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._noted], client_max_size=1 << 30)
        kinds, repo = "{kind:models|datasets}", "{org}/{name}"
        for path in (f"/api/{kinds}/{repo}", f"/api/{kinds}/{repo}/revision/{{revision}}"):
            app.router.add_get(path, self.info)
        app.router.add_get(f"/api/{kinds}/{repo}/tree/{{revision}}", self.tree)
        app.router.add_get(f"/{{kind:datasets}}/{repo}/resolve/{{revision}}/{{path:.+}}", self.resolve)
        app.router.add_get(f"/{repo}/resolve/{{revision}}/{{path:.+}}", self.resolve)
        app.router.add_get("/lfs/{digest}", self.large)
        app.router.add_put("/lfs/{digest}", self.large)
        app.router.add_post("/api/repos/create", self.create)
        app.router.add_post("/api/validate-yaml", self.checked)
        app.router.add_post(f"/api/{kinds}/{repo}/preupload/{{revision}}", self.preupload)
        app.router.add_post("/{org}/{name}.git/info/lfs/objects/batch", self.batch)
        app.router.add_post(f"/api/{kinds}/{repo}/commit/{{revision}}", self.commit)
        return app


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A Hub that serves, in a thread of its own."""
    hub, loop, ready = Hub(), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(hub.application(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        hub.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield hub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
