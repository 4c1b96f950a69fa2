"""The console's routes: the page, its events, lookups and actions."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeVar
from urllib.parse import parse_qs

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from dledger.errors import AccessDeniedError, DLedgerError, InvalidRequestError
from dledger.types import NodeId
from dledger_cli.console.browse import PAGE_MAX, WantedMessages, safe_text
from dledger_cli.console.catalog import GROUP_SORTS, TOPIC_SORTS
from dledger_cli.console.changes import FIELDS, BrokerChange, UnconfirmedError
from dledger_cli.console.control import Action, ActionRefusedError
from dledger_cli.console.group_page import (
    GROUP_PAGES_MAX,
    QUEUE_MAX,
    GroupPage,
    TooManyGroupPagesError,
    TooManyStreamsError,
)
from dledger_cli.console.guard import ConsoleGuard, ConsoleRules, RateBound, same
from dledger_cli.console.history import TEXT_MAX
from dledger_cli.console.listing import BadInputError, Fields, Wanted
from dledger_cli.console.overview import SORTS as FLEET_TOPIC_SORTS
from dledger_cli.console.overview import ForeignGroupError, Overview
from dledger_cli.console.sampler import wall_ms
from rocketstore.client import ForbiddenError, MessageRefusedError, NotFoundError

BODY_BYTES_MAX: Final = 4096
LOOKUPS_MAX: Final = 8
"""Concurrent lookups in one group that wait for a node; further ones are refused, because they would only queue."""
CHANGES_MAX: Final = 30
CHANGES_S: Final = 10.0
"""So many changes of topics, groups and messages within so many seconds."""
TEXT_CHARACTERS_MAX: Final = 1024
_OFFSET_MAX: Final = (1 << 63) - 1
_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_T = TypeVar("_T")


_NO_GROUP_PAGE: Final = (BadInputError, NotFoundError, ForeignGroupError, TooManyGroupPagesError)
"""Why a request is about nothing that is there."""


class Console:
    """The application (``asgi``): the page of one group, or with an ``Overview`` the page of all, and one for each.

    ``on_failure`` is called if what keeps the pages up to date fails unexpectedly.
    """

    def __init__(
        self,
        shown: GroupPage | Overview,
        rules: ConsoleRules,
        version: str = "",
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._shown = shown
        self._rules = rules
        self._version = version
        self._on_failure = on_failure
        self._files = load_files(Path(__file__).parent / "static")
        self._lookups: Counter[GroupPage | Overview] = Counter()  # apart, for a group that hangs is only in its own way
        self._acting = 0
        self._changes = RateBound(CHANGES_MAX, CHANGES_S)
        self._limiter: CapacityLimiter | None = None
        get = partial(Route, methods=["GET"])
        post = partial(Route, methods=["POST"])
        app = Starlette(
            routes=[
                get("/", partial(self._file, "index.html" if isinstance(shown, GroupPage) else "cluster.html")),
                get("/group", partial(self._file, "index.html")),
                get("/login", partial(self._file, "login.html")),
                post("/login", self._sign_in),
                get("/static/{name}", self._static),
                get("/healthz", self._health),
                get("/api/session", self._session),
                get("/api/state", self._state),
                get("/api/events", self._events),
                get("/api/topics", self._topics),
                get("/api/groups", self._groups),
                get("/api/topic", self._topic_anywhere),
                get("/api/group", self._lookup(self._group)),
                get("/api/messages", self._lookup(self._messages)),
                get("/api/message", self._lookup(self._message)),
                get("/api/entries", self._lookup(self._entries)),
                get("/api/entry", self._lookup(self._entry)),
                get("/api/clients", self._lookup(self._clients)),
                get("/api/members", self._lookup(self._members)),
                get("/api/dead-letters", self._lookup(self._dead_letters)),
                get("/api/delayed", self._lookup(self._delayed)),
                get("/api/timed", self._lookup(self._timed)),
                get("/api/trace", self._lookup(self._trace)),
                get("/api/reset-plan", self._lookup(self._reset_plan)),
                post("/api/act", self._act),
                post("/api/do/{change}", self._do),
            ],
            lifespan=self._lifespan,
        )
        self.asgi = ConsoleGuard(app, rules)

    # --- the page ----------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        self._limiter = CapacityLimiter(GROUP_PAGES_MAX * LOOKUPS_MAX + 4)
        publishing = asyncio.create_task(
            self._shown.run() if isinstance(self._shown, Overview) else self._shown.streams.run()
        )
        publishing.add_done_callback(self._ended)
        yield
        self._shown.streams.close()
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)

    def _ended(self, publishing: asyncio.Task[None]) -> None:
        if not publishing.cancelled() and (failure := publishing.exception()) is not None:
            self._on_failure(failure)

    async def _file(self, name: str, request: Request) -> Response:
        body, kind, tag = self._files[name]
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=kind)

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._files or name.endswith(".html"):
            return _error(404, "no such file")
        return await self._file(name, request)

    async def _health(self, _request: Request) -> Response:
        pages = self._shown.pages if isinstance(self._shown, Overview) else self._shown.streams.count
        return JSONResponse({"status": "ok", "pages": pages})

    async def _sign_in(self, request: Request) -> Response:
        given = parse_qs((await _body(request) or b"").decode("latin-1")).get("token", [""])[0].strip()
        if self._rules.token and same(given, self._rules.token):
            return self._rules.signed_in(RedirectResponse("/", 303))
        request.state.wrong_token()
        return RedirectResponse("/login?wrong=1", 303)

    async def _session(self, request: Request) -> Response:
        try:
            shown = self._what(request)
        except _NO_GROUP_PAGE as error:
            return _refused(error)
        actions = sorted(shown.control.actions | shown.control.changes) if isinstance(shown, GroupPage) else []
        return JSONResponse({"csrf": request.state.csrf, "actions": actions, "version": self._version})

    # --- what is ----------------------------------------------------------------------------------------------------

    def _what(self, request: Request) -> GroupPage | Overview:
        """The pages that a request is about: the group named by ``broker``, if there are several, otherwise everything.

        Raises what ``Overview.group_page`` does.
        """
        if isinstance(self._shown, GroupPage) or "broker" not in request.query_params:
            return self._shown
        return self._shown.group_page(_text(request, "broker"))

    def _group_page(self, request: Request) -> GroupPage:
        """The same for what only one group has. Raises ``BadInputError``, too."""
        found = self._what(request)
        if isinstance(found, GroupPage):
            return found
        raise BadInputError("name the group: broker=NAME")

    async def _state(self, request: Request) -> Response:
        try:
            return JSONResponse(self._what(request).state())
        except _NO_GROUP_PAGE as error:
            return _refused(error)

    async def _events(self, request: Request) -> Response:
        if request.method != "GET":
            return _error(405, "not allowed")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_MAX)
        try:
            streams = self._what(request).streams
            streams.admit(queue)
        except TooManyStreamsError as error:
            return JSONResponse({"ok": False, "error": str(error)}, 503, headers={"retry-after": "5"})
        except _NO_GROUP_PAGE as error:
            return _refused(error)
        return StreamingResponse(streams.messages(queue), media_type="text/event-stream")

    # --- lists, of what is known already ------------------------------------------------------------------------------

    async def _topics(self, request: Request) -> Response:
        try:
            found = self._what(request)
            if isinstance(found, Overview):
                return JSONResponse(found.topics.topics(Wanted.of(request.query_params, FLEET_TOPIC_SORTS)))
            return JSONResponse(found.catalog.topics(Wanted.of(request.query_params, TOPIC_SORTS)))
        except _NO_GROUP_PAGE as error:
            return _refused(error)

    async def _groups(self, request: Request) -> Response:
        try:
            return JSONResponse(self._group_page(request).catalog.groups(Wanted.of(request.query_params, GROUP_SORTS)))
        except _NO_GROUP_PAGE as error:
            return _refused(error)

    # --- looking things up -------------------------------------------------------------------------------------------

    def _lookup(self, look: Callable[[GroupPage, Request], object]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            return await self._looking(
                request, lambda: self._in_thread(partial(look, self._group_page(request), request))
            )

        return handle

    async def _looking(self, request: Request, look: Callable[[], Awaitable[object]]) -> Response:
        """The answer of ``look``, unless too many about the same wait for theirs."""
        try:
            what = self._what(request)
        except _NO_GROUP_PAGE as error:
            return _refused(error)
        if self._lookups[what] >= LOOKUPS_MAX:
            return _error(503, "too many requests are already waiting for the nodes")
        self._lookups[what] += 1
        try:
            found = await look()
        except _NO_GROUP_PAGE as error:
            return _refused(error)
        except DLedgerError as error:
            return _failed(error)
        finally:
            self._lookups -= Counter({what: 1})  # nobody else is remembered
        return _error(404, "not found, or no longer there") if found is None else JSONResponse(found)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True)

    async def _topic_anywhere(self, request: Request) -> Response:
        """A topic's queues: of one group with its consumers, or of all groups."""

        async def look() -> object:
            found, name = self._what(request), _text(request, "name")
            if isinstance(found, Overview):
                return await found.topics.topic(name)
            return await self._in_thread(partial(found.messages.topic, name))

        return await self._looking(request, look)

    def _group(self, group_page: GroupPage, request: Request) -> object:
        return group_page.messages.group(_text(request, "name"))

    def _messages(self, group_page: GroupPage, request: Request) -> object:
        browser = group_page.messages
        match request.query_params.get("by"):
            case "time":
                return browser.by_time(_wanted(request), _count(request))
            case "offset":
                queue, offset = _number(request, "queue", 0, 65535), _number(request, "offset", -1, _OFFSET_MAX)
                return browser.by_offset(_text(request, "topic"), queue, offset, _count(request))
            case "key":
                return browser.by_key(_text(request, "topic"), _text(request, "key"), unique=False)
            case "unique":
                return browser.by_key(_text(request, "topic"), _text(request, "key"), unique=True)
            case "id":
                return browser.by_id(_text(request, "id"))
            case _:
                raise BadInputError("by must be time, offset, key, unique or id")

    def _message(self, group_page: GroupPage, request: Request) -> object:
        queue, offset = _number(request, "queue", 0, 65535), _number(request, "offset", 0, _OFFSET_MAX)
        return group_page.messages.one(_text(request, "topic"), queue, offset)

    def _entries(self, group_page: GroupPage, request: Request) -> object:
        index = _number(request, "index", -1, _OFFSET_MAX)
        return group_page.entries.by_index(group_page.history.group, index, _count(request))

    def _entry(self, group_page: GroupPage, request: Request) -> object:
        return group_page.entries.one(group_page.history.group, _number(request, "index", 0, _OFFSET_MAX))

    def _clients(self, group_page: GroupPage, request: Request) -> object:
        wanted = _text(request, "wanted") if request.query_params.get("wanted") else ""
        return group_page.clients.everybody(wanted, _number(request, "first", 0, _OFFSET_MAX))

    def _members(self, group_page: GroupPage, request: Request) -> object:
        return group_page.clients.members(_text(request, "group"))

    def _dead_letters(self, group_page: GroupPage, request: Request) -> object:
        return group_page.letters.dead(_text(request, "group"), _number(request, "before", -1, _OFFSET_MAX))

    def _delayed(self, group_page: GroupPage, request: Request) -> object:
        return group_page.letters.delayed(
            _number(request, "level", 0, 999), _number(request, "offset", -1, _OFFSET_MAX)
        )

    def _timed(self, group_page: GroupPage, request: Request) -> object:
        topic, key = (_text(request, name) if request.query_params.get(name) else "" for name in ("topic", "key"))
        begin = [_number(request, name, 0, _OFFSET_MAX) for name in ("from_ms", "from_offset")]
        return group_page.letters.timed(topic, key, *begin)

    def _trace(self, group_page: GroupPage, request: Request) -> object:
        return group_page.messages.trace(_text(request, "id"))

    def _reset_plan(self, group_page: GroupPage, request: Request) -> object:
        to = _text(request, "to")
        start: Literal["first", "last"] | int
        match to:
            case "first" | "last":
                start = to
            case _:
                start = _number(request, "to", 0, _OFFSET_MAX)
        return group_page.changes.plan_reset(_text(request, "group"), _text(request, "topic"), start)

    # --- doing things ------------------------------------------------------------------------------------------------

    async def _act(self, request: Request) -> Response:
        try:
            group_page = self._group_page(request)
            asked = _action_of(await _body(request) or b"")
        except _NO_GROUP_PAGE as error:
            return _refused(error)
        if asked.action not in group_page.control.actions:
            return _error(403, f"this console cannot {asked.action}")
        if self._acting >= LOOKUPS_MAX // 2:
            return _error(503, "other actions are in progress")
        self._acting += 1
        try:
            told = await self._in_thread(partial(_act_on_node, group_page, asked))
        except ActionRefusedError as error:
            return _error(409, str(error))
        except DLedgerError as error:
            return _failed(error)
        finally:
            self._acting -= 1
        return JSONResponse({"ok": True, "message": told})

    async def _do(self, request: Request) -> Response:
        name = request.path_params["change"]
        if name not in BrokerChange.__members__.values():
            return _error(404, "there is no such action")
        change = BrokerChange(name)
        try:
            group_page = self._group_page(request)
            if change not in group_page.control.changes:
                return _error(403, "this console is read-only: it was started with --read-only")
            body = await _body(request, change.bytes_max)
            if body is None:
                return _error(413, f"the request is longer than {change.bytes_max:,} bytes")
            asked = Fields(body, FIELDS[change])
        except _NO_GROUP_PAGE as error:
            return _refused(error)
        if self._acting >= LOOKUPS_MAX // 2:
            return _error(503, "other actions are in progress")
        if not self._changes.admit():
            return _error(429, f"more than {CHANGES_MAX} changes within {CHANGES_S:g} s: wait a moment")
        self._acting += 1
        try:
            return await self._in_thread(partial(_change, group_page, change, asked))
        finally:
            self._acting -= 1


def _change(group_page: GroupPage, change: BrokerChange, asked: Fields) -> Response:
    """Carry it out and note what became of it, unless it was not tried."""
    try:
        done = group_page.changes.carry_out(change, asked)
    except BadInputError as error:
        return _refused(error)
    except UnconfirmedError as question:
        asking = {"title": question.title, "text": str(question), "yes": question.yes}
        return JSONResponse({"ok": False, "confirm": asking})
    except DLedgerError as error:
        group_page.history.tell("refused", "", _event(f"{change.replace('-', ' ')}: {error}"), wall_ms())
        return _failed(error)
    group_page.history.tell("action", "", _event(done.told), wall_ms())
    group_page.catalog.nudge()
    return JSONResponse({"ok": True, "message": done.told, **done.facts})


def _event(text: str) -> str:
    return safe_text(text)[:TEXT_MAX]


class _Asked(NamedTuple):
    """A change that a page asks for; ``new`` and ``address``: of the member that replaces ``node``."""

    action: Action
    node: NodeId | None
    new: str = ""
    address: str = ""


def _act_on_node(group_page: GroupPage, asked: _Asked) -> str:
    history, control, (action, node, new, address) = group_page.history, group_page.control, asked
    try:
        match action:
            case Action.TRANSFER:
                told = control.transfer(node)
            case Action.REPLACE:
                told = control.replace(node or NodeId(""), new, address)
            case _:
                told = control.act(action, node or NodeId(""))
    except (ActionRefusedError, DLedgerError) as error:
        history.tell("refused", node or "", f"{action} {node or ''}: {error}", wall_ms())
        raise
    history.tell("action", node or "", told, wall_ms())
    group_page.sampler.nudge()
    return told


def load_files(directory: Path) -> dict[str, tuple[bytes, str, str]]:
    """Every file of the page with its type and entity tag; nothing else can be requested."""
    found: dict[str, tuple[bytes, str, str]] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in _TYPES:
            body = path.read_bytes()
            found[path.name] = body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return found


async def _body(request: Request, bytes_max: int = BODY_BYTES_MAX) -> bytes | None:
    """The whole body; None if it is too large."""
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > bytes_max:
                return None
    except ClientDisconnect:
        return b""
    return body


def _action_of(body: bytes) -> _Asked:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        raise BadInputError("the body must be a JSON object") from None
    if not isinstance(asked, dict) or asked.keys() - {"action", "node", "new", "address"}:
        raise BadInputError('the body must be {"action": …, "node": …}')
    action, node = asked.get("action"), asked.get("node")
    if not isinstance(action, str) or action not in Action.__members__.values():
        raise BadInputError(f"action must be one of {', '.join(Action)}")
    if node is not None and not (isinstance(node, str) and 0 < len(node) <= 128 and node.isprintable()):
        raise BadInputError("node must be the id of a node")
    if node is None and action != Action.TRANSFER:
        raise BadInputError(f"{action} needs a node")
    found = _Asked(Action(action), NodeId(node) if node is not None else None)
    if found.action is not Action.REPLACE:
        return found
    texts = Fields(body, ("action", "node", "new", "address"))
    return found._replace(new=texts.text("new", longest=128), address=texts.text("address", longest=256))


def _text(request: Request, name: str) -> str:
    text = request.query_params.get(name, "")
    if not text or len(text) > TEXT_CHARACTERS_MAX:
        raise BadInputError(f"{name} must have 1 to {TEXT_CHARACTERS_MAX} characters")
    return text


def _number(request: Request, name: str, low: int, high: int) -> int:
    text = request.query_params.get(name, "")
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 19 and low <= int(text) <= high):
        raise BadInputError(f"{name} must be a whole number from {low} to {high}")
    return int(text)


def _wanted(request: Request) -> WantedMessages:
    query = request.query_params

    def optional(name: str, high: int) -> int | None:
        return _number(request, name, 0, high) if query.get(name) else None

    since_ms, before_ms = optional("since_ms", _OFFSET_MAX) or 0, optional("before_ms", _OFFSET_MAX) or 0
    if 0 < before_ms <= since_ms:
        raise BadInputError("the end of the time must be after its begin")
    return WantedMessages(
        topic=_text(request, "topic"),
        queue_id=optional("queue", 65535),
        since_ms=since_ms,
        before_ms=before_ms,
        oldest_first=query.get("order") == "oldest",
        after=query.get("after", ""),
    )


def _count(request: Request) -> int:
    return _number(request, "count", 1, PAGE_MAX) if "count" in request.query_params else 20


def _refused(error: Exception) -> Response:
    """The answer to one of ``_NO_GROUP_PAGE``."""
    status = {BadInputError: 400, NotFoundError: 404, TooManyGroupPagesError: 503}.get(type(error), 409)
    if isinstance(error, BadInputError) and error.field:
        return JSONResponse({"ok": False, "error": str(error), "field": error.field}, status)
    return _error(status, str(error))


def _failed(error: DLedgerError) -> Response:
    """The answer to what brokers or nodes refused, or did not answer."""
    unknown = " (it may still have taken effect: check)" if error.outcome == "unknown" else ""
    match error:
        case AccessDeniedError() | ForbiddenError():
            status = 403
        case NotFoundError():
            status = 404
        case InvalidRequestError() | MessageRefusedError():
            status = 400
        case _:
            status = 502
    return _error(status, f"{error}{unknown}")


def _error(status: int, why: str) -> Response:
    return JSONResponse({"ok": False, "error": why}, status)
