"""HTTP with `ebbd`: over its UNIX socket, or over TLS with a token."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import urllib.parse
from typing import Any, Dict, Iterator, Optional, Tuple, Type, TypeVar, Union

from .convert import Misfit, from_json, to_json
from .error import EbbError

RUN_DIR = "/run/ebb"
SOCKET_FILE = "ebbd.sock"
CONNECT_S = 30.0
"""Longest wait for a connection, in seconds."""
HTTPS_PORT = 443

C = TypeVar("C", bound="Connection")
Path = Union[str, "os.PathLike[str]"]
Values = Dict[str, Any]


class _UnixSocket(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("ebbd")
        self._path = path

    def connect(self) -> None:
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.settimeout(CONNECT_S)
            stream.connect(self._path)
        except OSError:
            stream.close()
            raise
        self.sock = stream


class Connection:
    """What all calls have in common. `Client` has the calls."""

    def __init__(self, place: str, timeout: Optional[float]) -> None:
        self._place = place
        self._timeout = timeout
        self._headers = {"Accept": "application/json, text/event-stream"}
        self._tls: Optional[Tuple[str, int, ssl.SSLContext]] = None

    @classmethod
    def local(cls: Type[C], run_dir: Path = RUN_DIR, timeout: Optional[float] = None) -> C:
        """Asks the `ebbd` of this host. That takes its user, which is root.

        Args:
            run_dir: the run directory of `ebbd`.
            timeout: the longest wait for a part of an answer, in seconds; None: no limit.
        """
        return cls(os.path.join(os.fspath(run_dir), SOCKET_FILE), timeout)

    @classmethod
    def remote(
        cls: Type[C],
        url: str,
        token_file: Path,
        ca: Optional[Path] = None,
        timeout: Optional[float] = None,
    ) -> C:
        """Asks the `ebbd` of another host, over TLS.

        Args:
            url: where it listens, as `https://web1:7443`.
            token_file: a file with the token to show there, and nothing else.
            ca: a file with certificates, PEM; None: those that this machine trusts. Only hosts that
                these vouch for are trusted.
            timeout: the longest wait for a part of an answer, in seconds; None: no limit.

        Raises:
            EbbError: the URL or a file cannot be used.
        """
        parts = urllib.parse.urlsplit(url)
        beyond = parts.path.strip("/") or parts.query or parts.fragment or parts.username
        try:
            port = parts.port or HTTPS_PORT
        except ValueError:
            port = 0
        if parts.scheme != "https" or not parts.hostname or beyond or not port:
            raise EbbError(f"{url}: write https://HOST:PORT")
        try:
            tls = ssl.create_default_context(cafile=None if ca is None else os.fspath(ca))
            with open(token_file, encoding="ascii") as file:
                words = file.read().split()
        except (OSError, UnicodeError) as error:
            raise EbbError(str(error)) from error
        if len(words) != 1:
            raise EbbError(f"{os.fspath(token_file)} has one line, the token alone")
        tls.minimum_version = ssl.TLSVersion.TLSv1_3
        client = cls(url.rstrip("/"), timeout)
        client._tls = (parts.hostname, port, tls)
        client._headers["Authorization"] = f"Bearer {words[0]}"
        return client

    @classmethod
    def from_environment(cls: Type[C], timeout: Optional[float] = None) -> C:
        """Asks what `ebb` would ask: the host in `EBB_HOST`, with the token in the file
        `EBB_TOKEN_FILE` and the authorities in the file `EBB_CA`; or this host, in `EBB_RUN_DIR`.

        Raises:
            EbbError: a variable is missing or wrong.
        """
        host, token_file = os.environ.get("EBB_HOST"), os.environ.get("EBB_TOKEN_FILE")
        if not host:
            return cls.local(os.environ.get("EBB_RUN_DIR") or RUN_DIR, timeout)
        if not token_file:
            raise EbbError("EBB_HOST needs EBB_TOKEN_FILE: a file with the token to show there")
        return cls.remote(host, token_file, os.environ.get("EBB_CA") or None, timeout)

    def _call(
        self,
        method: str,
        path: str,
        answer: Any,
        request: Any = None,
        query: Optional[Values] = None,
        headers: Optional[Values] = None,
    ) -> Any:
        """Sends a request, and returns its answer as a value of the type `answer`."""
        connection = self._connection()
        try:
            response = self._ask(connection, method, path, request, query, headers)
            return self._understood(answer, response.read())
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            connection.close()

    def _events(
        self,
        path: str,
        kind: Any,
        query: Optional[Values] = None,
        headers: Optional[Values] = None,
    ) -> Iterator[Any]:
        """Yields the data of each server-sent event as a value of the type `kind`, until the stream
        ends. Leaving the loop closes the connection."""
        connection = self._connection()
        try:
            response = self._ask(connection, "GET", path, None, query, headers)
            for data in event_data(response):
                yield self._understood(kind, data)
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(error) from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return _UnixSocket(self._place)
        host, port, tls = self._tls
        return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=tls)

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        request: Any,
        query: Optional[Values],
        headers: Optional[Values],
    ) -> http.client.HTTPResponse:
        given = _texts(query)
        target = path + ("?" + urllib.parse.urlencode(given) if given else "")
        body = None if request is None else json.dumps(to_json(request)).encode()
        fields = {**self._headers, **_texts(headers)}
        if body is not None:
            fields["Content-Type"] = "application/json"
        connection.connect()
        connection.sock.settimeout(self._timeout)
        connection.request(method, target, body, fields)
        response = connection.getresponse()
        if response.status // 100 != 2:
            raise _refusal(response.status, response.read())
        return response

    def _understood(self, kind: Any, content: bytes) -> Any:
        try:
            return from_json(kind, json.loads(content))
        except (ValueError, Misfit) as error:
            raise EbbError(
                f"this client does not understand the answer of {self._place}, which may be of "
                f"another release: {error}"
            ) from error

    def _lost(self, error: Exception) -> EbbError:
        return EbbError(f"{self._place}: {error or type(error).__name__}")


def _refusal(status: int, content: bytes) -> EbbError:
    try:
        body = json.loads(content)
        return EbbError(str(body["error"]), status, body.get("code"), body.get("hint"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return EbbError(f"ebbd answered {status}: {content[:200]!r}", status)


def _texts(values: Optional[Values]) -> Dict[str, str]:
    """The values that are given, as they are sent."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in (values or {}).items()
        if value is not None
    }


def quoted(name: str) -> str:
    """A name as a part of a path."""
    return urllib.parse.quote(name, safe="")


def event_data(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the data of each server-sent event. Comments and other fields are left out, as `ebbd`
    says everything in the data. What a stream ends in the middle of is left out, too."""
    data = []
    for line in lines:
        line = line.rstrip(b"\r\n")
        name, _, value = line.partition(b":")
        if name == b"data":
            data.append(value[1:] if value.startswith(b" ") else value)
        elif not line and data:
            yield b"\n".join(data)
            data = []
