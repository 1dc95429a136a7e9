"""The Hub, on loopback: the part of its HTTP protocol that uploads and downloads of models speak, and faults to order.

Repositories live in memory. LFS by the "basic" transfer; no xet (HF_HUB_DISABLE_XET=1). Every request is noted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

# token -> who it is, where it may write
TOKENS = {
    "hf_writer": {"name": "me", "orgs": ("someone",), "write": True},
    "hf_reader": {"name": "me", "orgs": (), "write": False},
}
WRITER = "hf_writer"
_REGULAR_AT_MOST = 20_000  # bytes; larger files go by LFS, as do weights


@dataclass
class Repository:
    """Branches of files, each an (oid, content); one commit id for each state of a branch."""

    private: bool = False
    branches: dict[str, dict[str, tuple[str, bytes]]] = field(default_factory=lambda: {"main": {}})
    commits: list[dict[str, Any]] = field(default_factory=list)

    def sha(self, branch: str) -> str:
        """The commit a branch is at."""
        state = "".join(f"{name}{oid}" for name, (oid, _) in sorted(self.branches[branch].items()))
        return hashlib.sha1(f"{state}{len(self.commits)}".encode()).hexdigest()

    def branch_of(self, revision: str) -> str | None:
        """The branch that a branch name or a commit id names."""
        return next((name for name in self.branches if revision in (name, self.sha(name))), None)


class Hub(ThreadingHTTPServer):
    """The server and all it holds."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # LFS: sha256 -> content
        self.requests: list[tuple[str, str]] = []  # method and path of each
        self.faults: dict[str, tuple[str, int]] = {}  # sha256 of an object -> (fault, how often); see `_put`
        self.broken = threading.Event()  # set when half of a held object has arrived
        self.lock = threading.RLock()

    @property
    def url(self) -> str:
        """HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is what the tests do; nothing to print."""

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        """What a branch holds."""
        return {name: content for name, (_, content) in self.repositories[repo_id].branches[branch].items()}

    def counts(self) -> Counter[str]:
        """How many requests of each kind there were."""
        kinds = {"PUT /lfs/": "object", "/commit/": "commit", "/repos/create": "create"}
        asked = [f"{method} {path}" for method, path in self.requests]
        return Counter(kind for request in asked for part, kind in kinds.items() if part in request)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A server on a free port, until the block ends."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()


class _RefusedError(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *arguments: object) -> None:
        """Silent."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        with self.server.lock:
            self.server.requests.append((self.command, path))
        try:
            for method, pattern, action in _ROUTES:
                if self.command in method and (match := re.fullmatch(pattern, path)):
                    action(self, **match.groupdict())
                    return
            raise _RefusedError(404, f"no route for {self.command} {path}", "EntryNotFound")
        except _RefusedError as refused:
            self._send(
                refused.status, {"error": str(refused)}, {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
            )

    do_GET = do_POST = do_HEAD = do_PUT = _answer  # noqa: N815

    # What requests bring and answers carry

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._body() or b"{}")
        return found

    def _send(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content if content is not None else {}).encode()
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _user(self) -> dict[str, Any] | None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if not token:
            return None
        if token not in TOKENS:
            raise _RefusedError(401, "Invalid credentials in Authorization header")
        return TOKENS[token]

    def _may_write(self, owner: str) -> None:
        user = self._user()
        if user is None:
            raise _RefusedError(401, "Invalid username or password.")
        if not user["write"] or owner not in (user["name"], *user["orgs"]):
            raise _RefusedError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')

    def _repository(self, repo_id: str, write: bool = False) -> Repository:
        if write:
            self._may_write(repo_id.partition("/")[0])
        found = self.server.repositories.get(repo_id)
        if found is None or (found.private and self._user() is None):
            raise _RefusedError(401 if self._user() is None else 404, "Repository not found", "RepoNotFound")
        return found

    def _branch(self, repository: Repository, revision: str) -> str:
        branch = repository.branch_of(revision)
        if branch is None:
            raise _RefusedError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return branch

    # Uploads

    def whoami(self) -> None:
        user = self._user()
        if user is None:
            raise _RefusedError(401, "Invalid username or password.")
        self._send(200, {"type": "user", "name": user["name"], "orgs": [{"name": name} for name in user["orgs"]]})

    def create(self) -> None:
        asked = self._json()
        owner, name = asked.get("organization") or "me", asked["name"]
        self._may_write(owner)
        repo_id = f"{owner}/{name}"
        with self.server.lock:
            there = repo_id in self.server.repositories
            if not there:
                private = asked.get("visibility") == "private" or bool(asked.get("private"))
                self.server.repositories[repo_id] = Repository(private=private)
        self._send(409 if there else 200, {"url": f"{self.server.url}/{repo_id}", "id": repo_id})

    def branch(self, repo_id: str, branch: str) -> None:
        repository = self._repository(repo_id, write=True)
        self._body()
        there = branch in repository.branches
        repository.branches.setdefault(branch, dict(repository.branches["main"]))
        self._send(409 if there else 200)

    def validate(self) -> None:
        """As the Hub does, in little: metadata is a mapping, a licence a word, results have their parts."""
        content = self._json()["content"]
        block = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
        data = yaml.safe_load(block[1]) if block else {}
        wrong = []
        if not isinstance(data, dict):
            wrong.append("metadata is no mapping")
        elif not re.fullmatch(r"[a-z0-9.-]+", str(data.get("license", "mit"))):
            wrong.append('"license" must be one of the known licences')
        for model in [] if wrong else data.get("model-index", []):
            for result in model["results"]:
                if not {"task", "dataset", "metrics"} <= set(result):
                    wrong.append("a result lacks its parts")
        self._send(400 if wrong else 200, {"errors": [{"message": each} for each in wrong], "warnings": []})

    def preupload(self, repo_id: str, revision: str) -> None:
        repository = self._repository(repo_id, write=True)
        there = repository.branches[self._branch(repository, revision)]
        answers = []
        for file in self._json()["files"]:
            lfs = file["size"] > _REGULAR_AT_MOST or file["path"].endswith(".safetensors")
            oid = there[file["path"]][0] if file["path"] in there else None
            mode = "lfs" if lfs else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send(200, {"files": answers})

    def lfs_batch(self, repo_id: str) -> None:
        self._repository(repo_id, write=True)
        objects = []
        for asked in self._json()["objects"]:
            answer = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.server.objects:
                links = {"upload": f"{self.server.url}/lfs/{asked['oid']}", "verify": f"{self.server.url}/verify"}
                answer["actions"] = {name: {"href": link} for name, link in links.items()}
            objects.append(answer)
        self._send(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        """Take an object; or, if a fault is ordered, `drop` the connection half-way, say `500`, or `hold` it there."""
        size = int(self.headers["Content-Length"])
        fault, times = self.server.faults.get(oid, ("", 0))
        if times:
            self.server.faults[oid] = (fault, times - 1)
            if fault == "500":
                self._body()
                raise _RefusedError(500, "Internal Server Error")
            self.rfile.read(size // 2)
            self.server.broken.set()
            if fault == "hold":
                self.rfile.read(size)  # until the client is killed
            self.close_connection = True
            return
        content = self.rfile.read(size)
        if hashlib.sha256(content).hexdigest() != oid:
            raise _RefusedError(400, "the content is not the object's")
        self.server.objects[oid] = content
        self._send(200)

    def verify(self) -> None:
        asked = self._json()
        content = self.server.objects.get(asked["oid"])
        if content is None or len(content) != asked["size"]:
            raise _RefusedError(422, "the object is not whole")
        self._send(200)

    def commit(self, repo_id: str, revision: str) -> None:
        repository = self._repository(repo_id, write=True)
        branch = self._branch(repository, revision)
        lines = [json.loads(line) for line in self._body().splitlines()]
        files = dict(repository.branches[branch])
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                if value["oid"] not in self.server.objects:
                    raise _RefusedError(400, f"{value['path']}: the LFS object is not there")
                files[value["path"]] = (value["oid"], self.server.objects[value["oid"]])
            elif line["key"] == "file":
                content = base64.b64decode(value["content"])
                blob = b"blob %d\0" % len(content) + content
                files[value["path"]] = (hashlib.sha1(blob).hexdigest(), content)
            else:
                raise _RefusedError(400, f"unknown operation {line['key']}")
        with self.server.lock:
            repository.branches[branch] = files
            repository.commits.append({"title": lines[0]["value"]["summary"], "branch": branch})
            sha = repository.sha(branch)
        self._send(200, {"commitUrl": f"{self.server.url}/{repo_id}/commit/{sha}", "commitOid": sha})

    # Downloads

    def info(self, repo_id: str, revision: str | None = None) -> None:
        repository = self._repository(repo_id)
        branch = self._branch(repository, revision or "main")
        siblings = [{"rfilename": name} for name in sorted(repository.branches[branch])]
        about = {"id": repo_id, "modelId": repo_id, "private": repository.private, "sha": repository.sha(branch)}
        self._send(200, {**about, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def refs(self, repo_id: str) -> None:
        repository = self._repository(repo_id)
        heads = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": repository.sha(n)} for n in repository.branches]
        self._send(200, {"branches": heads, "converts": [], "tags": []})

    def tree(self, repo_id: str, revision: str, folder: str | None = None) -> None:
        repository = self._repository(repo_id)
        files = repository.branches[self._branch(repository, revision)]
        under = f"{folder}/" if folder else ""
        found = [
            {"type": "file", "path": name, "size": len(content), "oid": oid}
            for name, (oid, content) in sorted(files.items())
            if name.startswith(under)
        ]
        if folder and not found:
            raise _RefusedError(404, f"{folder} does not exist", "EntryNotFound")
        self._send(200, found)

    def resolve(self, repo_id: str, revision: str, name: str) -> None:
        repository = self._repository(repo_id)
        branch = self._branch(repository, revision)
        if name not in repository.branches[branch]:
            raise _RefusedError(404, f"{name} does not exist", "EntryNotFound")
        oid, content = repository.branches[branch][name]
        headers = {"X-Repo-Commit": repository.sha(branch), "ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
        status, start = 200, 0
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(asked[1]), int(asked[2] or len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            status, content = 206, content[start : end + 1]
        self._send(status, content, {**headers, "Content-Type": "application/octet-stream"})


_ID = r"(?P<repo_id>[^/]+/[^/]+)"
_REV = r"(?P<revision>.+?)"
_ROUTES: list[tuple[str, str, Any]] = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/{_ID}/branch/(?P<branch>.+)", _Handler.branch),
    ("POST", rf"/api/models/{_ID}/preupload/{_REV}", _Handler.preupload),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.put),
    ("POST", r"/verify", _Handler.verify),
    ("POST", rf"/api/models/{_ID}/commit/{_REV}", _Handler.commit),
    ("GET", rf"/api/models/{_ID}/refs", _Handler.refs),
    ("GET", rf"/api/models/{_ID}/revision/{_REV}", _Handler.info),
    ("GET", rf"/api/models/{_ID}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", _Handler.tree),
    ("GET", rf"/api/models/{_ID}", _Handler.info),
    ("GET HEAD", rf"/{_ID}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
]
