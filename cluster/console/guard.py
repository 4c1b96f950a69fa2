"""Who may talk to the console, and what a page of it may do: checks before every request, headers on every answer.

- **Host**: only names and addresses that are ours, so that no foreign name can be rebound to this address.
- **Origin**: what changes something must come from our own page, and bring the token that only it could read.
- **Token**: needed for everything but the health check once the console listens to other machines.
- **Content-Security-Policy**: nothing but our own files; no inline code, no markup from strings (Trusted Types).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE: Final = "dledger-console"
CSRF_HEADER: Final = "x-csrf-token"
TOKEN_CHARACTERS_MIN: Final = 16
OPEN_PATHS: Final = ("/healthz", "/login", "/static/")
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with "no-referrer" browsers call the origin of our own sign-in form "null"
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """``hosts``: further names that a browser may know the console by. ``remote``: other machines may ask."""

    token: str = field(default="", repr=False)
    hosts: frozenset[str] = frozenset()
    remote: bool = False
    https: bool = False

    def knows_host(self, header: str) -> bool:
        """Whether a Host header names us; the port does not matter, for it may have been published as another."""
        name = _host_name(header)
        if name is None:
            return False
        if name in self.hosts or name == "localhost":
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.remote or address.is_loopback

    def session(self) -> str:
        """What the cookie holds: proof of the token, not the token."""
        return hmac.new(self.token.encode(), b"dledger console session", hashlib.sha256).hexdigest()

    def admits(self, headers: Headers) -> bool:
        """Whether the request brings the token, or the cookie made of it."""
        if not self.token:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and same(given.strip(), self.token):
            return True
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return same(cookie, self.session())

    def signed_in(self, response: Response) -> Response:
        """Have the browser remember it."""
        response.set_cookie(COOKIE, self.session(), httponly=True, samesite="strict", secure=self.https, path="/")
        return response


def same(given: str, expected: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _host_name(header: str) -> str | None:
    """The name in ``name``, ``name:port``, ``[v6]:port``."""
    if header.startswith("["):
        name, bracket, rest = header[1:].partition("]")
        return name.lower() if bracket and (not rest or _is_port(rest)) else None
    name, colon, _ = header.partition(":")
    if colon and not _is_port(header[len(name) :]):
        return None
    return name.lower().rstrip(".") or None


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isascii() and text[1:].isdigit()


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, rules: Rules) -> None:
        self._app = app
        self._rules = rules
        self.csrf = secrets.token_urlsafe(24)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or pass on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket: uvicorn answers 403 by itself
        path: str = scope["path"]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        scope.setdefault("state", {})["csrf"] = self.csrf
        refusal = self._refusal(scope["method"], path, Headers(scope=scope), scope.get("query_string", b""))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, method: str, path: str, headers: Headers, query: bytes) -> Response | None:
        if not self._rules.knows_host(headers.get("host", "")):
            return _refused(
                421, "this is not the console's address: ask for it by the address that it was started with"
            )
        if method not in ("GET", "HEAD", "POST"):
            return _refused(405, "not allowed")
        site = headers.get("sec-fetch-site", "none")
        if path.startswith("/api/") and site not in ("same-origin", "none"):
            return _refused(403, "asked for by another site")
        if method == "POST" and (why := self._foreign(path, headers)):
            return _refused(403, why)
        if path == "/" and self._rules.token and (given := parse_qs(query.decode("latin-1")).get("token")):
            arrived = same(given[0], self._rules.token)
            return self._rules.signed_in(RedirectResponse("/", 303)) if arrived else RedirectResponse("/login", 303)
        is_open = any(path == one or (one.endswith("/") and path.startswith(one)) for one in OPEN_PATHS)
        if is_open or self._rules.admits(headers):
            return None
        if path == "/":
            return RedirectResponse("/login", 303)
        return _refused(401, "sign in first: open the console's address, or send 'Authorization: Bearer TOKEN'")

    def _foreign(self, path: str, headers: Headers) -> str:
        """Why a request that changes something does not come from our page; empty if it does."""
        origin = headers.get("origin")
        host = headers.get("host", "")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):  # a proxy may add the TLS
            return "sent by another site"
        if path == "/login":
            return ""
        if not same(headers.get(CSRF_HEADER, ""), self.csrf):
            return f"the {CSRF_HEADER} header is missing or old: reload the page"
        return ""


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"ok": False, "error": why}, status)
