"""What does a client of the Hub need to publish a model?  Its HTTP interface as far as that goes, in memory.

Creating repositories, their information, preupload, LFS in parts, commits. Tokens, owners and faults are set by a test.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_" + "t" * 34  # of ana, who may write under her own name alone
PART = 64_000


@dataclass
class Repo:
    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    commits: int = 1

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(self.commits).encode()).hexdigest()


@dataclass
class Hub:
    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)
    drop_after: int | None = None  # how many parts arrive before the connection is lost, again and again
    address: str = ""


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def reply(self, status: int, content: Any = None, **headers: str) -> None:
        body = json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def handle_any(self) -> None:
        hub, path = self.hub, self.path.partition("?")[0]
        hub.log.append((self.command, path))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path.startswith("/part/"):  # the store behind the Hub: its addresses are signed, no token is sent
            return self.part(path, body)
        if path.startswith("/complete/"):
            return self.complete(path.removeprefix("/complete/"), json.loads(body))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.reply(401, {"error": "Invalid username or password."})
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        found = re.fullmatch(r"/(?:api/models/)?([^/]+/[^/.]+)(?:\.git)?(/.*)?", path)
        if not found or found[1] not in hub.repos:
            return self.reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        repo, rest = hub.repos[found[1]], found[2] or ""
        if rest.startswith(("/preupload", "/commit", "/info")) and not found[1].startswith("ana/"):
            return self.reply(403, {"error": "Forbidden"})
        if rest.startswith("/preupload"):
            return self.reply(200, {"files": [self.mode(repo, file) for file in json.loads(body)["files"]]})
        if rest == "/info/lfs/objects/batch":
            objects = [self.action(one) for one in json.loads(body)["objects"]]
            return self.reply(200, {"objects": objects, "transfer": "multipart"})
        if rest.startswith("/commit"):
            return self.commit(found[1], repo, [json.loads(line) for line in body.splitlines()])
        siblings = [{"rfilename": name} for name in repo.files]
        self.reply(200, {"id": found[1], "sha": repo.sha, "private": repo.private, "siblings": siblings})

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.repos and asked["organization"] == "ana":
            return self.reply(
                409, {"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"}
            )
        if asked["organization"] != "ana":
            return self.reply(403, {"error": "You don't have the rights to create a model under this namespace"})
        self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
        self.reply(200, {"url": f"{self.hub.address}/{name}"})

    def mode(self, repo: Repo, file: dict[str, Any]) -> dict[str, Any]:
        name, oid = file["path"], None
        lfs = name.endswith((".safetensors", ".png", ".gif"))
        if (content := repo.files.get(name)) is not None:
            plain = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
            oid = hashlib.sha256(content).hexdigest() if lfs else plain
        return {"path": name, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False, "oid": oid}

    def action(self, asked: dict[str, Any]) -> dict[str, Any]:
        oid, size = asked["oid"], asked["size"]
        if oid in self.hub.blobs:
            return {"oid": oid, "size": size}
        count = -(-size // PART)
        header = {"chunk_size": str(PART)}
        header |= {str(n): f"{self.hub.address}/part/{oid}/{n}" for n in range(1, count + 1)}
        upload = {"href": f"{self.hub.address}/complete/{oid}", "header": header}
        return {"oid": oid, "size": size, "actions": {"upload": upload}}

    def part(self, path: str, body: bytes) -> None:
        hub, (oid, number) = self.hub, path.removeprefix("/part/").split("/")
        arrived = sum(map(len, hub.parts.values()))
        if hub.drop_after is not None and arrived >= hub.drop_after:
            self.close_connection = True
            return
        hub.parts.setdefault(oid, {})[int(number)] = body
        self.reply(200, ETag=f'"{number}"')

    def complete(self, oid: str, told: dict[str, Any]) -> None:
        parts = self.hub.parts.pop(oid)
        content = b"".join(parts[part["partNumber"]] for part in told["parts"])
        if hashlib.sha256(content).hexdigest() != oid:
            return self.reply(400, {"error": "the checksum is another one"})
        self.hub.blobs[oid] = content
        self.reply(200)

    def commit(self, name: str, repo: Repo, lines: list[dict[str, Any]]) -> None:
        if lines[0]["value"].get("parentCommit", repo.sha) != repo.sha:
            return self.reply(412, {"error": "the branch has moved"})
        files = dict(repo.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del files[value["path"]]
        repo.files, repo.commits = files, repo.commits + 1
        self.reply(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{repo.sha}", "commitOid": repo.sha})

    do_GET = do_POST = do_PUT = do_HEAD = handle_any


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub})) as server:
        server.daemon_threads = True
        hub.address = f"http://127.0.0.1:{server.server_address[1]}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
