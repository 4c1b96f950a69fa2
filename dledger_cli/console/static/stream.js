// The connection to the console: its session, its events; comes back by itself, and says how it is.

import { state } from "./store.js";

const RETRY_MS = 1500;
const BUSY_RETRY_MS = 5000;
const SILENT_MS = 4000;
const HIDDEN_MS = 60_000;

// With name servers, the console shows many groups: this is what a page of one of them adds to every request.
export const chosen = new URLSearchParams(location.pathname === "/group" ? location.search : "").get("broker");
const scope = chosen === null ? {} : { broker: chosen };

let source = null;
let retry = 0;
let hiddenTimer = 0;
let heard = 0;
let opened = 0;

/** A request's address. */
function address(path, parameters = {}) {
  const query = new URLSearchParams({ ...parameters, ...scope }).toString();
  return query ? `${path}?${query}` : path;
}

/**
 * `on.snapshot(message)` and `on.update(message)`, which gives new events, take what the console sends;
 * `on.data(freshEvents, isSnapshot)` is called then. `on.catalog(message)`; `on.state(connection, words, why)` when that
 * changes; `why` is a refusal's sentence.
 */
export function connect(on) {
  const say = (connection, words, why = "") => {
    state.connection = connection;
    on.state(connection, words, why);
  };

  async function open() {
    clearTimeout(retry);
    source?.close();
    const mine = (opened += 1);
    try {
      const session = await ask("/api/session");
      if (mine !== opened) return; // the page was left, or opened once more, in the meantime
      state.session = session;
    } catch (error) {
      if (mine !== opened) return;
      if (error.isAnswer) again("lost", "not available", BUSY_RETRY_MS, error.message);
      else again("lost", error.message, RETRY_MS);
      return;
    }
    source = new EventSource(address("/api/events"));
    source.addEventListener("snapshot", (event) => {
      heard = Date.now();
      on.snapshot(JSON.parse(event.data));
      say("live", "live");
      on.data([], true);
    });
    source.addEventListener("update", (event) => {
      heard = Date.now();
      const fresh = on.update(JSON.parse(event.data));
      if (state.connection !== "live") say("live", "live");
      on.data(fresh, false);
    });
    source.addEventListener("catalog", (event) => {
      on.catalog(JSON.parse(event.data));
    });
    source.addEventListener("error", () => {
      const refused = source.readyState === EventSource.CLOSED;
      source.close();
      if (refused && state.connection === "connecting") again("lost", "too many open pages", BUSY_RETRY_MS);
      else again("lost", "connection to the console lost", RETRY_MS);
    });
  }

  function again(connection, words, afterMs, why = "") {
    say(connection, words, why);
    clearTimeout(retry);
    retry = setTimeout(open, afterMs);
  }

  // A server that vanished without a word (a machine that was switched off) ends no connection.
  setInterval(() => {
    if (state.connection === "live" && source !== null && !document.hidden && Date.now() - heard > SILENT_MS) {
      again("lost", "no data from the console", 0);
    }
  }, 1000);

  // A page that nobody sees costs nothing after a minute.
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenTimer);
    if (document.hidden) {
      hiddenTimer = setTimeout(() => {
        source?.close();
        source = null;
        clearTimeout(retry);
        say("paused", "paused while hidden");
      }, HIDDEN_MS);
    } else if (source === null) {
      open();
    }
  });

  // A page that is left, which browsers keep for the way back, must not hold one of the few connections to a server.
  window.addEventListener("pagehide", () => {
    opened += 1;
    source?.close();
    source = null;
    clearTimeout(retry);
    clearTimeout(hiddenTimer);
  });
  window.addEventListener("pageshow", (event) => {
    if (event.persisted) open();
  });

  open();
}

/** A request to the console. Gives the answer's JSON, or throws an Error whose message is for people. */
export async function ask(path, parameters = {}) {
  return answerOf(() => fetch(address(path, parameters), { cache: "no-store" }));
}

export const act = (action, node, more = {}) => post("/api/act", node === null ? { action } : { action, node, ...more });

/** Ask for a change at the brokers; fields that are null are left out. The error's `answer` is what the console said. */
export const change = (name, fields) => post(`/api/do/${name}`, fields);

async function post(path, body) {
  return answerOf(() =>
    fetch(address(path), {
      method: "POST",
      headers: { "content-type": "application/json", "x-csrf-token": state.session.csrf },
      body: JSON.stringify(body),
    }),
  );
}

async function answerOf(request) {
  let answer;
  try {
    answer = await request();
  } catch {
    throw new Error("the console is not responding");
  }
  if (answer.status === 401) location.assign("/login");
  let found = null;
  try {
    found = await answer.json();
  } catch {
    // told below
  }
  if (!answer.ok || found === null) {
    throw Object.assign(new Error(found?.error ?? `the console returned status ${answer.status}`), { isAnswer: true, answer: found ?? {} });
  }
  return found;
}
