"""An S3 server in its own process: moto's implementation of S3, in memory, behind a threaded HTTP server.

    with S3Server() as server:
        os.environ |= server.environment()        # the variables that users set for their store: address, region, keys
        server.url("bucket")                      # "s3://bucket", created

    with Proxy(server) as proxy:                  # faults between a job and the server
        os.environ |= server.environment(proxy.port)
        proxy.judge = lambda method, path: 500 if method == "PUT" else None

    python -m recycle_pp.testing.s3_server       # prints its port; ends with its standard input

moto has conditional puts: a put with `If-None-Match: *` fails with 412 if the object exists. Its own server needs
flask; this one calls the same functions.
"""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REGION, KEY, SECRET = "us-east-1", "the-key", "the-secret"


class S3Server(contextlib.AbstractContextManager["S3Server"]):
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "recycle_pp.testing.s3_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Environment variables for clients. port: the port of a proxy in front of the server."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{port or self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": REGION,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def url(self, bucket: str) -> str:
        """Creates the bucket. Returns its URL."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{bucket}", method="PUT")
        urllib.request.urlopen(request).close()
        return f"s3://{bucket}"

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Proxy(contextlib.AbstractContextManager["Proxy"]):
    """Forwards requests to the server, in threads of this process.

    judge    called with the method and the path of each request, possibly concurrently. Returns None to forward it,
             a status or (status, body) as the answer, or "close" to close the connection
    without  names of headers that are not forwarded
    """

    def __init__(self, server: S3Server) -> None:
        self.judge: Callable[[str, str], int | tuple[int, bytes] | str | None] = lambda method, path: None
        self.without: set[str] = set()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _handle(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                verdict = proxy.judge(self.command, self.path)
                if isinstance(verdict, str):
                    self.close_connection = True
                    return
                if verdict is not None:
                    status, text = (verdict, b"") if isinstance(verdict, int) else verdict
                    self._answer(status, text, {})
                    return
                onward = http.client.HTTPConnection("127.0.0.1", server.port)
                headers = {name: value for name, value in self.headers.items() if name.lower() not in proxy.without}
                onward.request(self.command, self.path, body, headers)
                answer = onward.getresponse()
                self._answer(answer.status, answer.read(), dict(answer.getheaders()))
                onward.close()

            def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in ("connection", "content-length", "date", "server", "transfer-encoding"):
                        self.send_header(name, value)
                length = headers.get("content-length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def main() -> None:
    from moto import mock_aws
    from moto.core.request import Request
    from moto.s3.responses import S3Response
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *arguments: object) -> None:
            pass

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        request = Request(environ)
        request.from_wsgi_server = True
        of_key = "/" in request.path.strip("/")
        respond = S3Response.key_dispatch if of_key else S3Response.bucket_dispatch
        status, headers, content = respond(request, request.raw_url, dict(request.headers))
        body = content.encode() if isinstance(content, str) else content
        headers = {name.lower(): str(value) for name, value in headers.items()}
        if request.method != "HEAD":
            headers["content-length"] = str(len(body))
        start_response(f"{status} .", list(headers.items()))
        return [b"" if request.method == "HEAD" else body]

    with mock_aws():
        server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
