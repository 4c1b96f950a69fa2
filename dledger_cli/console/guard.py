"""Access checks before every request of the console, and security headers on every response.

- **Host**: only our own names and addresses, so that no foreign name can be rebound to this address.
- **Origin**: a request that changes something must come from our own page, with the token that only it could read.
- **Token**: required for everything but the health check once the console listens to other machines. Failed guesses
  are logged and throttled; a browser that has sent the token stays signed in for ``SESSION_S``.
- **Content-Security-Policy**: only our own files; no inline code, no markup from strings (Trusted Types).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)
COOKIE: Final = "dledger-console"
SESSION_S: Final = 12 * 3600
GUESSES_MAX: Final = 10
"""Allowed wrong tokens per address within ``GUESSES_S``."""
GUESSES_IN_ALL_MAX: Final = 100
GUESSES_S: Final = 60.0
CSRF_HEADER: Final = "x-csrf-token"
TOKEN_CHARACTERS_MIN: Final = 16
_SECONDS_DIGITS: Final = 12
OPEN_PATHS: Final = ("/healthz", "/login", "/static/")
PAGES: Final = ("/", "/group")
"""Opened by people, whom a bare refusal would not help."""
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
    "referrer-policy": "same-origin",  # with "no-referrer", browsers send the origin "null" from our own sign-in form
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class ConsoleRules:
    """``hosts``: additional names that browsers may use for the console. ``remote``: other machines may connect."""

    token: str = field(default="", repr=False)
    hosts: frozenset[str] = frozenset()
    remote: bool = False
    https: bool = False

    def knows_host(self, header: str) -> bool:
        """Whether a Host header names this console; its port is ignored, because another one may be published."""
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

    def session(self, began_s: int) -> str:
        """The cookie's value: proof of the token without revealing it, and the time of sign-in (s since 1970)."""
        proof = hmac.new(self.token.encode(), b"dledger console session %d" % began_s, hashlib.sha256).hexdigest()
        return f"{began_s}.{proof}"

    def knows_session(self, cookie: str, now_s: float) -> bool:
        """Whether we issued the cookie, at most ``SESSION_S`` ago."""
        began = cookie.partition(".")[0]
        if not (began.isascii() and began.isdigit() and len(began) <= _SECONDS_DIGITS):
            return False
        return 0 <= now_s - int(began) < SESSION_S and same(cookie, self.session(int(began)))

    def brings_token(self, headers: Headers) -> bool | None:
        """Whether the token in the Authorization header is correct; None if there is none."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return same(given.strip(), self.token) if scheme.lower() == "bearer" else None

    def admits(self, headers: Headers) -> bool:
        """Whether the request contains the token, or a valid cookie."""
        if not self.token:
            return True
        if self.brings_token(headers):
            return True
        return self.knows_session(cookie_parser(headers.get("cookie", "")).get(COOKIE, ""), time.time())

    def signed_in(self, response: Response) -> Response:
        """Set the session cookie."""
        response.set_cookie(
            COOKIE,
            self.session(int(time.time())),
            max_age=SESSION_S,
            httponly=True,
            samesite="strict",
            secure=self.https,
            path="/",
        )
        return response


class Guesses:
    """Wrong tokens of the last minute, by address. Used on one event loop."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._wrong: deque[tuple[float, str]] = deque()

    def too_many(self, address: str) -> bool:
        """Whether this address must wait; all must while too many addresses guess."""
        now = self._clock_s()
        while self._wrong and self._wrong[0][0] <= now - GUESSES_S:
            self._wrong.popleft()
        return len(self._wrong) >= GUESSES_IN_ALL_MAX or sum(who == address for _, who in self._wrong) >= GUESSES_MAX

    def note(self, address: str) -> None:
        """Record a wrong token; ``too_many`` was called before, which bounds what is stored and logged."""
        self._wrong.append((self._clock_s(), address))
        _log.warning("console: a wrong token from %s", address, extra={"event": "sign_in_refused", "address": address})


def same(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _host_name(header: str) -> str | None:
    """The host in ``name``, ``name:port`` or ``[v6]:port``."""
    if header.startswith("["):
        name, bracket, rest = header[1:].partition("]")
        return name.lower() if bracket and (not rest or _is_port(rest)) else None
    name, colon, _ = header.partition(":")
    if colon and not _is_port(header[len(name) :]):
        return None
    return name.lower().rstrip(".") or None


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isascii() and text[1:].isdigit()


class ConsoleGuard:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, rules: ConsoleRules) -> None:
        self._app = app
        self._rules = rules
        self.guesses = Guesses()
        self.csrf = secrets.token_urlsafe(24)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a websocket: uvicorn answers 403
        path: str = scope["path"]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        client = scope.get("client")
        address = client[0] if client else ""
        scope.setdefault("state", {}).update(csrf=self.csrf, wrong_token=lambda: self.guesses.note(address))
        headers, query = Headers(scope=scope), scope.get("query_string", b"")
        refusal = self._refusal(scope["method"], path, headers, query, address)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, method: str, path: str, headers: Headers, query: bytes, address: str) -> Response | None:
        if not self._rules.knows_host(headers.get("host", "")):
            return _refused(421, "wrong host name: use the address the console was started with")
        if method not in ("GET", "HEAD", "POST"):
            return _refused(405, "not allowed")
        site = headers.get("sec-fetch-site", "none")
        if path.startswith("/api/") and site not in ("same-origin", "none"):
            return _refused(403, "request from another site")
        if method == "POST" and (why := self._foreign(path, headers)):
            return _refused(403, why)
        if self._rules.token:
            guess = parse_qs(query.decode("latin-1")).get("token") if path == "/" else None
            bearer = self._rules.brings_token(headers)
            guesses = guess or bearer is not None or (path == "/login" and method == "POST")
            if guesses and self.guesses.too_many(address):
                return _refused(429, "too many wrong tokens: wait a minute")
            if bearer is False:
                self.guesses.note(address)
            if guess:
                if same(guess[0], self._rules.token):
                    return self._rules.signed_in(RedirectResponse("/", 303))
                self.guesses.note(address)
                return RedirectResponse("/login", 303)
        is_open = any(path == one or (one.endswith("/") and path.startswith(one)) for one in OPEN_PATHS)
        if is_open or self._rules.admits(headers):
            return None
        if path in PAGES:
            return RedirectResponse("/login", 303)
        return _refused(401, "sign in first: open the console's address, or send 'Authorization: Bearer TOKEN'")

    def _foreign(self, path: str, headers: Headers) -> str:
        """Why a request that changes something does not come from our page; empty if it does."""
        origin = headers.get("origin")
        host = headers.get("host", "")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):  # a proxy may add TLS
            return "request from another site"
        if path == "/login":
            return ""
        if not same(headers.get(CSRF_HEADER, ""), self.csrf):
            return f"the {CSRF_HEADER} header is missing or stale: reload the page"
        return ""


def _refused(status: int, why: str) -> Response:
    return JSONResponse({"ok": False, "error": why}, status)


class RateBound:
    """At most ``most`` times within any ``per_s`` seconds. Used on one event loop."""

    def __init__(self, most: int, per_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._per_s = per_s
        self._clock_s = clock_s
        self._times: deque[float] = deque()

    def admit(self) -> bool:
        """Whether it may be done now; then it counts."""
        now = self._clock_s()
        while self._times and self._times[0] <= now - self._per_s:
            self._times.popleft()
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True
