"""Cloud Storage's JSON API by plain HTTP, one connection for each request: what clients hide, tests
see."""

from __future__ import annotations

import http.client
import json
from contextlib import closing
from urllib.parse import quote, urlsplit

__all__ = ["Objects", "ask"]


def ask(url, method, target, body=None, headers=None, timeout=60):
    """Status, headers and body of the answer to one request on a connection of its own."""
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)) as connection:
        connection.request(method, target, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()


class Objects:
    """One bucket through the JSON API, one function per kind of request; each returns the answer's
    status."""

    def __init__(self, url, bucket):
        self.url = url
        self.upload_path = f"/upload/storage/v1/b/{bucket}/o"
        self.path = f"/storage/v1/b/{bucket}/o"

    def media(self, name, condition="", data=b"new"):
        return ask(
            self.url,
            "POST",
            f"{self.upload_path}?uploadType=media&name={quote(name, safe='')}&{condition}",
            data,
        )[0]

    def multipart(self, name, condition="", data=b"new"):
        head = json.dumps({"name": name}).encode()
        body = (
            b"--x\r\n"
            b"Content-Type: application/json\r\n"
            b"\r\n"
            b"%b\r\n"
            b"--x\r\n"
            b"Content-Type: a/b\r\n"
            b"\r\n"
            b"%b\r\n"
            b"--x--" % (head, data)
        )
        headers = {"Content-Type": "multipart/related; boundary=x"}
        return ask(
            self.url, "POST", f"{self.upload_path}?uploadType=multipart&{condition}", body, headers
        )[0]

    def begin(self, name, condition=""):
        """Begin a resumable upload; the path to send it to."""
        headers = {"Content-Type": "application/json"}
        body = json.dumps({"name": name})
        status, headers, _ = ask(
            self.url, "POST", f"{self.upload_path}?uploadType=resumable&{condition}", body, headers
        )
        assert status == 200
        place = urlsplit(headers["Location"])
        return f"{place.path}?{place.query}"

    def resumable(self, name, condition="", data=b"new"):
        return ask(
            self.url,
            "PUT",
            self.begin(name, condition),
            data,
            {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"},
        )[0]

    def compose(self, name, condition=""):
        assert self.media("part", data=b"new") == 200
        body = json.dumps(
            {"sourceObjects": [{"name": "part"}], "destination": {"contentType": "a/b"}}
        )
        headers = {"Content-Type": "application/json"}
        return ask(
            self.url,
            "POST",
            f"{self.path}/{quote(name, safe='')}/compose?{condition}",
            body,
            headers,
        )[0]

    def copy(self, name, condition=""):
        assert self.media("source", data=b"new") == 200
        target = self.path.removeprefix("/storage/v1")
        return ask(
            self.url,
            "POST",
            f"{self.path}/source/rewriteTo{target}/{quote(name, safe='')}?{condition}",
            "{}",
        )[0]

    def delete(self, name, condition=""):
        return ask(self.url, "DELETE", f"{self.path}/{quote(name, safe='')}?{condition}")[0]

    def read(self, name, condition=""):
        return ask(self.url, "GET", f"{self.path}/{quote(name, safe='')}?alt=media&{condition}")[0]

    def stat(self, name, condition=""):
        return ask(self.url, "GET", f"{self.path}/{quote(name, safe='')}?{condition}")[0]

    def content(self, name):
        """Content of the object; None if there is none."""
        status, _, data = ask(self.url, "GET", f"{self.path}/{quote(name, safe='')}?alt=media")
        return data if status == 200 else None

    def generation(self, name):
        return int(
            json.loads(ask(self.url, "GET", f"{self.path}/{quote(name, safe='')}")[2])["generation"]
        )
