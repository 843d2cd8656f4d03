"""A model Hub on the loopback interface: the part of its HTTP protocol that `push_to_hub` and `from_pretrained` use.

Point a process at it with `HF_ENDPOINT=server.endpoint` and `HF_HUB_DISABLE_XET=1`. Repositories live in memory; every
request is recorded in `server.requests`, and a request outside the protocol below is answered 501 and also recorded in
`server.unknown`, so that a test can tell "the client asked for something new" from a failure of the code under test.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


NAME = r"(?P<repo>[\w.-]+/[\w.-]+)"


class HubServer(ThreadingHTTPServer):
    """Serves on a free port of 127.0.0.1 from a background thread; use as a context manager.

    Attributes: `endpoint` (str), `commits` (repo id -> list of (sha, {path: bytes}), oldest first; a branch has a list
    of its own under "repo id@branch"), `messages` (of commits), `visibility` (asked for, by repo id), `is_full`
    (uploads of large files are refused), `requests` and `unknown` (lists of "METHOD path").
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubRequestHandler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        self.messages: list[str] = []
        self.visibility: dict[str, str | None] = {}
        self.is_full = False
        self.large_files: dict[str, bytes] = {}  # SHA-256 -> content, uploaded but not necessarily committed
        self.requests: list[str] = []
        self.unknown: list[str] = []

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()  # seconds to a shutdown
        return self

    def __exit__(self, *exc_info):
        self.shutdown()
        self.server_close()

    def files(self, repo: str, revision: str = "main") -> tuple[str, dict[str, bytes]]:
        """(commit sha, files) of a revision. Raises KeyError("repo") or KeyError("revision") when there is none."""
        if repo not in self.commits:
            raise KeyError("repo")
        branch = f"{repo}@{revision}"
        for sha, files in reversed(self.commits.get(branch) or self.commits[repo]):
            if revision in ("main", sha) or branch in self.commits:
                return sha, files
        raise KeyError("revision")


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


class HubRequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    ROUTES = (
        ("POST", r"/api/repos/create", "create_repo"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("POST", rf"/api/models/{NAME}/branch/(?P<branch>[^/]+)", "create_branch"),
        ("POST", rf"/api/models/{NAME}/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "large_file_batch"),
        ("PUT", r"/upload/(?P<oid>[0-9a-f]{64})", "large_file_upload"),
        ("POST", rf"/api/models/{NAME}/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", rf"/api/models/{NAME}(/revision/(?P<revision>[^/]+))?", "model_info"),
        ("GET", rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "tree"),
        ("GET", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
        ("HEAD", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    )

    def dispatch(self):
        path = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} {path}")
        for method, pattern, handler in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if method == self.command and match:
                try:
                    return getattr(self, handler)(**match.groupdict())
                except KeyError as missing:
                    code = {"repo": "RepoNotFound", "revision": "RevisionNotFound"}.get(
                        missing.args[0], "EntryNotFound"
                    )
                    return self.reply(404, {"error": code}, {"X-Error-Code": code})
        self.server.unknown.append(f"{self.command} {path}")
        self.reply(501, {"error": f"not part of this server: {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = dispatch

    def log_message(self, *args):
        """Quiet: `server.requests` is the log."""

    def reply(self, status: int, content: object = b"", headers: dict[str, str] | None = None):
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    # --- push -----------------------------------------------------------------------------------------------------

    def create_repo(self):
        request = json.loads(self.body)
        repo = f"{request.get('organization') or 'user'}/{request['name']}"
        self.server.commits.setdefault(repo, [(hashlib.sha1(repo.encode()).hexdigest(), {})])
        self.server.visibility[repo] = request.get("visibility", request.get("private"))
        self.reply(200, {"url": f"{self.server.endpoint}/{repo}", "name": repo, "id": repo})

    def create_branch(self, repo: str, branch: str):
        exists = f"{repo}@{branch}" in self.server.commits
        self.server.commits.setdefault(f"{repo}@{branch}", list(self.server.commits[repo]))
        self.reply(409 if exists else 201, {"error": "branch exists"} if exists else {})

    def validate_yaml(self):
        self.reply(200, {"errors": [], "warnings": []})

    def preupload(self, repo: str, revision: str):
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if is_large(f["path"]) else "regular", "shouldIgnore": False}
            for f in json.loads(self.body)["files"]
        ]
        self.reply(200, {"files": modes})

    def large_file_batch(self, repo: str):
        objects = [
            {
                "oid": o["oid"],
                "size": o["size"],
                "actions": {"upload": {"href": f"{self.server.endpoint}/upload/{o['oid']}", "header": {}}},
            }
            for o in json.loads(self.body)["objects"]
        ]
        self.reply(200, {"transfer": "basic", "objects": objects})

    def large_file_upload(self, oid: str):
        if self.server.is_full:
            return self.reply(507, {"error": "no space left"})
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.reply(400, {"error": "content does not match its SHA-256"})
        self.server.large_files[oid] = self.body
        self.reply(200)

    def commit(self, repo: str, revision: str):
        _, files = self.server.files(repo, revision)
        files = dict(files)
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.large_files[value["oid"]]
            elif entry["key"] == "deletedFile":
                del files[value["path"]]
            elif entry["key"] == "header":
                self.server.messages.append(value["summary"])
            else:
                return self.reply(501, {"error": f"commit entry {entry['key']}"})
        commits = self.server.commits[repo if revision == "main" else f"{repo}@{revision}"]
        sha = hashlib.sha1(self.body + str(len(commits)).encode()).hexdigest()
        commits.append((sha, files))
        self.reply(
            200, {"success": True, "commitOid": sha, "commitUrl": f"{self.server.endpoint}/{repo}/commit/{sha}"}
        )

    # --- pull -----------------------------------------------------------------------------------------------------

    def model_info(self, repo: str, revision: str | None):
        sha, files = self.server.files(repo, revision or "main")
        siblings = [{"rfilename": path} for path in files]
        self.reply(200, {"id": repo, "modelId": repo, "sha": sha, "private": False, "tags": [], "siblings": siblings})

    def tree(self, repo: str, revision: str, folder: str | None):
        _, files = self.server.files(repo, revision)
        prefix = f"{folder}/" if folder else ""
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
            if path.startswith(prefix)
        ]
        if not entries and folder:
            raise KeyError(folder)
        self.reply(200, entries)

    def resolve(self, repo: str, revision: str, path: str):
        sha, files = self.server.files(repo, revision)
        content = files[path]
        digest = (hashlib.sha256 if is_large(path) else hashlib.sha1)(content).hexdigest()
        self.reply(
            200, content, {"ETag": f'"{digest}"', "X-Repo-Commit": sha, "Content-Type": "application/octet-stream"}
        )
