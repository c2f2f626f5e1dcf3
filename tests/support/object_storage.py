"""Object storage that fails by plan: moto's server on loopback, and a proxy between it and its clients.

The proxy counts requests by their kind, and a `Fault` says what becomes of the n-th one of a kind. It waits
for nothing but its peers, so that the same requests meet the same faults.
"""

from __future__ import annotations

import http.client
import re
import secrets
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

SILENT_S: Final = 300.0
"""A client that never gives up fails the test."""
_OWN_HEADERS: Final = {"connection", "expect", "content-length", "host", "transfer-encoding", "keep-alive"}
_CHECKED_HEADERS: Final = re.compile(r"x-amz-checksum-|x-amz-sdk-checksum|content-md5|etag", re.IGNORECASE)
_ERROR: Final = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>{0}</Code><Message>{1}</Message></Error>"
_ERRORS: Final = {
    "503": (503, _ERROR.format("SlowDown", "Please reduce your request rate.")),
    "500": (500, _ERROR.format("InternalError", "We encountered an internal error. Please try again.")),
    "error in 200": (200, _ERROR.format("InternalError", "We encountered an internal error.")),
}
_ENDS: Final = {".manifest": "manifest", ".json": "receipt", ".chunk": "chunk"}


def kind_of(method: str, target: str) -> str:
    """The kind of a request, as "PUT manifest"."""
    path, _, query = target.partition("?")
    _, _, key = path.lstrip("/").partition("/")
    if "list-type" in query:
        return "LIST"
    if "uploads" in query:
        return "POST begin"
    if "uploadId" in query:
        return {"PUT": "PUT part", "POST": "POST complete"}.get(method, f"{method} upload")
    named = next((kind for end, kind in _ENDS.items() if key.endswith(end)), "object" if key else "bucket")
    return f"{method} {named}"


@dataclass(frozen=True)
class Fault:
    """What happens to some requests of one kind.

    Attributes:
        kind: of the requests; "" is any.
        action: "503", "500", "error in 200": the answer, of a server that did nothing; "silent": no answer,
            until the client gives up; "reset": the connection ends before the request counts; "lost": it ends
            when the server has done it; "late": it ends, and the request arrives with `Proxy.deliver`;
            "cut": half of the answer's body, and the connection ends; "short": half of it, as if that were
            all; "cut upload": half of the request's body arrives, and the connection ends; "half": half of it
            arrives, as if that were all; "call": `Proxy.meanwhile` is called before the request is done.
        first: number of the first such request that it happens to, from 0.
        times: to how many; None: to all that follow.
        until: a request of this kind ends it.
    """

    kind: str
    action: str
    first: int = 0
    times: int | None = 1
    until: str = ""


@dataclass(frozen=True)
class Request:
    """A request as the client sent it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


class Proxy:
    """Passes requests on to a server, but for those that a plan names.

    Args:
        host: of the server.
        port: of the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._late: list[Request] = []
        self.seen: Counter[str] = Counter()
        self.hits = 0
        self.meanwhile: Callable[[], object] = lambda: None
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy._serve(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the base class's names

            def log_message(self, format: str, *_: Any) -> None:  # noqa: A002 - the base class's name
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A client that ends its connection is no error here."""

        self._http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, name="proxy", daemon=True)
        self._thread.start()

    def arm(self, *faults: Fault) -> None:
        """Replaces the plan, and counts from 0 again."""
        with self._lock:
            self._faults, self._late, self.hits = list(faults), [], 0
            self.seen.clear()

    def take_late(self) -> list[Request]:
        """What is late."""
        with self._lock:
            late, self._late = self._late, []
        return late

    def deliver(self, late: Sequence[Request]) -> None:
        """Sends what was late."""
        for request in late:
            self._forward(request)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _action(self, kind: str) -> str:
        with self._lock:
            self._faults = [one for one in self._faults if one.until != kind]
            action = ""
            for one in self._faults:
                number = self.seen[kind] if one.kind else sum(self.seen.values())
                last = None if one.times is None else one.first + one.times
                if one.kind in ("", kind) and one.first <= number and (last is None or number < last):
                    action = one.action
                    self.hits += 1
                    break
            self.seen[kind] += 1
            return action

    def _serve(self, client: BaseHTTPRequestHandler) -> None:
        body = client.rfile.read(int(client.headers.get("Content-Length", 0)))
        request = Request(client.command, client.path, dict(client.headers.items()), body)
        action = self._action(kind_of(client.command, client.path))
        if action in _ERRORS:
            status, text = _ERRORS[action]
            _answer(client, status, {"Content-Type": "application/xml"}, text.encode())
        elif action == "silent":
            client.connection.settimeout(SILENT_S)
            with suppress(OSError):
                client.connection.recv(1)
            _reset(client)
        elif action in ("reset", "lost", "late", "cut upload"):
            if action == "late":
                with self._lock:
                    self._late.append(request)
            elif action == "lost":
                self._forward(request)
            elif action == "cut upload":
                self._forward_half(request)
            _reset(client)
        else:
            if action == "call":
                self.meanwhile()
            if action == "half":
                kept = {name: text for name, text in request.headers.items() if not _checked(name)}
                request = Request(
                    request.method, request.target, kept, request.body[: len(request.body) // 2]
                )
            status, headers, content = self._forward(request)
            if action == "short":
                headers = {name: text for name, text in headers.items() if not _checked(name)}
                content = content[: len(content) // 2]
            _answer(client, status, headers, content, cut=action == "cut")

    def _forward(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(*self._server, timeout=SILENT_S)
        try:
            connection.request(request.method, request.target, request.body or None, _passed(request))
            answer = connection.getresponse()
            headers = {name: text for name, text in answer.getheaders() if name.lower() not in _OWN_HEADERS}
            if request.method == "HEAD":
                headers["Content-Length"] = answer.headers.get("Content-Length", "0")
            return answer.status, headers, answer.read()
        finally:
            connection.close()

    def _forward_half(self, request: Request) -> None:
        """Sends half of a body whose whole length was announced, and waits for the server's end."""
        head = [f"{request.method} {request.target} HTTP/1.1", f"Host: {self._server[0]}:{self._server[1]}"]
        head += [f"{name}: {text}" for name, text in _passed(request).items()]
        with socket.create_connection(self._server, timeout=SILENT_S) as server:
            server.sendall("\r\n".join([*head, "", ""]).encode() + request.body[: len(request.body) // 2])
            server.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while server.recv(1 << 16):
                    pass


def _checked(header: str) -> bool:
    return _CHECKED_HEADERS.match(header) is not None


def _passed(request: Request) -> dict[str, str]:
    """Headers for the server."""
    passed = {name: text for name, text in request.headers.items() if name.lower() not in _OWN_HEADERS}
    return {**passed, "Content-Length": str(len(request.body)), "Connection": "close"}


def _answer(
    client: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
) -> None:
    client.send_response_only(status)
    for name, text in {"Content-Length": str(len(body)), **headers}.items():
        client.send_header(name, text)
    client.end_headers()
    if client.command != "HEAD":
        client.wfile.write(body[: len(body) // 2] if cut else body)
    if cut:
        client.wfile.flush()
        client.close_connection = True


def _reset(client: BaseHTTPRequestHandler) -> None:
    """Ends a connection at once, as a host does that went away."""
    with suppress(OSError):
        client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close_connection = True


@contextmanager
def moto_server() -> Iterator[tuple[str, int]]:
    """Host and port of a server that speaks S3; any user may access keys."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        yield running.get_host_and_port()
    finally:
        running.stop()


def options_of(endpoint: str, **config: Any) -> dict[str, Any]:
    """Of s3fs, for an endpoint. `config` is botocore's."""
    return {"key": "any", "secret": "any", "endpoint_url": endpoint, "config_kwargs": config}


@dataclass(frozen=True)
class Storage:
    """A server, and a proxy before it.

    Attributes:
        proxy: fails by plan.
        direct: options of s3fs, past the proxy.
    """

    proxy: Proxy
    direct: dict[str, Any]

    def through(self, **config: Any) -> dict[str, Any]:
        """Options of s3fs, through the proxy."""
        return options_of(self.proxy.url, **config)

    def new_url(self) -> str:
        """A folder of a new bucket, without faults until `Proxy.arm`."""
        import s3fs

        self.proxy.arm()
        bucket = f"bucket-{secrets.token_hex(4)}"
        s3fs.S3FileSystem(**self.direct).mkdir(bucket)
        return f"s3://{bucket}/job"


@contextmanager
def storage() -> Iterator[Storage]:
    """A server with a proxy before it."""
    with moto_server() as (host, port):
        proxy = Proxy(host, port)
        try:
            yield Storage(proxy, options_of(f"http://{host}:{port}"))
        finally:
            proxy.close()
