"""A store of objects that stands for gs:// in a test's process: Google's JSON interface, and fsspec's file system.

As there, a folder is there only while an object has its name before its own, nothing can be renamed, and an object is
written whole or not at all. `installed` must be entered before the first use of a gs:// address; `connect`, in another
process, makes gs:// mean the same store.
"""

import contextlib
import io
import json
import os
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fsspec

OBJECTS: dict[str, bytes] = {}
"""By `bucket/name`."""
GENERATIONS: dict[str, int] = {}
BEFORE_CHANGE = []
"""Called with the name of each object before it is written or removed; may raise OSError, as a quota does."""
_LOCK = threading.Lock()


def put(name: str, content: bytes) -> int:
    """Writes an object."""
    for call in BEFORE_CHANGE:
        call(name)
    with _LOCK:
        OBJECTS[name] = content
        GENERATIONS[name] = GENERATIONS.get(name, 0) + 1
        return GENERATIONS[name]


def delete(name: str) -> bool:
    """Removes an object; False if it is not there."""
    for call in BEFORE_CHANGE:
        call(name)
    return OBJECTS.pop(name, None) is not None


def get(name: str) -> bytes | None:
    """An object's content; None if it is not there."""
    return OBJECTS.get(name)


def sizes(path: str) -> dict[str, int]:
    """The objects whose names begin so."""
    return {name: len(content) for name, content in list(OBJECTS.items()) if name.startswith(path)}


class FileSystem(fsspec.AbstractFileSystem):
    """What epath reads and writes small files by, lists and removes."""

    protocol = ("gs", "gcs")

    def ls(self, path, detail=True, **options):
        path = self._strip_protocol(path).strip("/")
        found = self._ls_from_cache(path) or self._listed(path)
        # As gcsfs does: what is written beside it is not seen again, unless its cache is off.
        self.dircache[path] = found
        return found if detail else [each["name"] for each in found]

    def _listed(self, path):
        objects = sizes(path)
        if path in objects:
            found = {path: {"name": path, "size": objects[path], "type": "file"}}
        else:
            found = {}
            for name in objects:
                if name.startswith(f"{path}/"):
                    child = f"{path}/{name[len(path) + 1 :].split('/')[0]}"
                    kind = "file" if child in objects else "directory"
                    found[child] = {"name": child, "size": objects.get(child, 0), "type": kind}
            if not found:
                raise FileNotFoundError(path)
        return list(found.values())

    def _open(self, path, mode="rb", **options):
        if mode == "rb":
            content = get(path)
            if content is None:
                raise FileNotFoundError(path)
            return io.BytesIO(content)
        return _Written(path)

    def cp_file(self, path1, path2, **options):
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        content = get(source)
        if content is not None:  # fsspec asks for folders too, where there are none
            put(target, content)

    def rm_file(self, path):
        delete(self._strip_protocol(path))

    def rmdir(self, path):
        pass

    def mkdir(self, path, **options):
        pass

    def makedirs(self, path, exist_ok=False):
        pass


class _Written(io.BytesIO):
    def __init__(self, name):
        super().__init__()
        self._name = name

    def close(self):
        if not self.closed:
            put(self._name, self.getvalue())
        super().close()


class _Handler(BaseHTTPRequestHandler):
    """What tensorstore reads and writes arrays by."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        pass

    def _parts(self):
        url = urllib.parse.urlsplit(self.path)
        bucket, _, name = url.path.split("/b/")[1].partition("/o")
        query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
        return bucket, urllib.parse.unquote(name.strip("/")), query

    def _answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def _fits(self, name, query):
        have = GENERATIONS[name] if name in OBJECTS else 0
        return "ifGenerationMatch" not in query or int(query["ifGenerationMatch"]) == have

    def do_GET(self):
        bucket, name, query = self._parts()
        if not name:
            prefix = f"{bucket}/{query.get('prefix', '')}"
            found = [
                {"name": key.removeprefix(f"{bucket}/"), "size": str(len(value)), "generation": str(GENERATIONS[key])}
                for key, value in sorted(OBJECTS.items())
                if key.startswith(prefix) and key >= f"{bucket}/{query.get('startOffset', '')}"
            ]
            self._answer(200, json.dumps({"items": found}).encode(), Content_Type="application/json")
            return
        content = OBJECTS.get(f"{bucket}/{name}")
        if content is None:
            self._answer(404)
            return
        generation = {"x-goog-generation": GENERATIONS[f"{bucket}/{name}"]}
        if query.get("alt") != "media":
            body = {"name": name, "size": str(len(content)), "generation": str(generation["x-goog-generation"])}
            self._answer(200, json.dumps(body).encode(), **generation)
            return
        unit, _, span = self.headers.get("Range", "").partition("=")
        if not unit:
            self._answer(200, content, **generation)
            return
        first, _, last = span.partition("-")
        begin = int(first) if first else max(len(content) - int(last), 0)
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        where = f"bytes {begin}-{end - 1}/{len(content)}"
        self._answer(206, content[begin:end], Content_Range=where, **generation)

    def do_POST(self):
        bucket, _, query = self._parts()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        name = f"{bucket}/{query['name']}"
        if not self._fits(name, query):
            self._answer(412)
            return
        try:
            generation = put(name, content)
        except OSError:
            self._answer(403)
            return
        body = {"name": query["name"], "size": str(len(content)), "generation": str(generation)}
        self._answer(200, json.dumps(body).encode(), Content_Type="application/json")

    def do_DELETE(self):
        bucket, name, _ = self._parts()
        self._answer(204 if delete(f"{bucket}/{name}") else 404)


@contextlib.contextmanager
def installed():
    """A context in which gs:// means the store, in this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["TENSORSTORE_GCS_HTTP_URL"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "none"
    _register()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def empty():
    """Removes all objects, and what is called before changes."""
    OBJECTS.clear()
    BEFORE_CHANGE.clear()


def moments(action):
    """The objects before each change that `action` makes, and after the last."""
    seen = []
    BEFORE_CHANGE.append(lambda name: seen.append(dict(OBJECTS)))
    action()
    BEFORE_CHANGE.clear()
    return [*seen, dict(OBJECTS)]


def stand_at(moment):
    """Makes the objects those of a moment."""
    OBJECTS.clear()
    OBJECTS.update(moment)


def connect():
    """Makes gs:// mean the store of the process whose `installed` has set the environment."""
    global put, delete, get, sizes
    put, delete, get, sizes = _remote_put, _remote_delete, _remote_get, _remote_sizes
    _register()


def _register():
    for name in ("gs", "gcs"):
        fsspec.register_implementation(name, FileSystem, clobber=True)


def _ask(name, query="", content=None, method=None):
    bucket, _, rest = name.partition("/")
    upload = "/upload" if content is not None else ""
    place = f"/o/{urllib.parse.quote(rest, safe='')}" if rest and not upload else "/o"
    url = f"{os.environ['TENSORSTORE_GCS_HTTP_URL']}{upload}/storage/v1/b/{bucket}{place}{query}"
    with urllib.request.urlopen(urllib.request.Request(url, content, method=method)) as answer:
        return answer.read()


def _remote_put(name, content):
    _ask(name, f"?name={urllib.parse.quote(name.partition('/')[2], safe='')}", content)


def _remote_delete(name):
    with contextlib.suppress(urllib.error.HTTPError):
        _ask(name, method="DELETE")


def _remote_get(name):
    try:
        return _ask(name, "?alt=media")
    except urllib.error.HTTPError:
        return None


def _remote_sizes(path):
    bucket, _, prefix = path.partition("/")
    items = json.loads(_ask(bucket, f"?prefix={urllib.parse.quote(prefix, safe='')}"))["items"]
    return {f"{bucket}/{item['name']}": int(item["size"]) for item in items}
