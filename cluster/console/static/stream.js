// The connection to the console: its session, its events; comes back by itself, and says how it is.

import { state, takeSnapshot, takeUpdate } from "./store.js";

const RETRY_MS = 1500;
const BUSY_RETRY_MS = 5000;
const SILENT_MS = 4000;
const HIDDEN_MS = 60_000;

let source = null;
let retry = 0;
let hiddenTimer = 0;
let heard = 0;

/** `on.state(words)` when the connection changes, `on.data(freshEvents, isSnapshot)`, `on.catalog()`. */
export function connect(on) {
  const say = (connection, words) => {
    state.connection = connection;
    on.state(connection, words);
  };

  async function open() {
    clearTimeout(retry);
    source?.close();
    try {
      const answer = await fetch("/api/session", { cache: "no-store" });
      if (answer.status === 401) {
        location.assign("/login");
        return;
      }
      if (!answer.ok) throw new Error(String(answer.status));
      state.session = await answer.json();
    } catch {
      again("lost", "the console is not responding", RETRY_MS);
      return;
    }
    source = new EventSource("/api/events");
    source.addEventListener("snapshot", (event) => {
      heard = Date.now();
      takeSnapshot(JSON.parse(event.data));
      say("live", "live");
      on.data([], true);
    });
    source.addEventListener("update", (event) => {
      heard = Date.now();
      const fresh = takeUpdate(JSON.parse(event.data));
      if (state.connection !== "live") say("live", "live");
      on.data(fresh, false);
    });
    source.addEventListener("catalog", (event) => {
      state.catalog = JSON.parse(event.data);
      on.catalog();
    });
    source.addEventListener("error", () => {
      const refused = source.readyState === EventSource.CLOSED;
      source.close();
      if (refused && state.connection === "connecting") again("lost", "too many open pages", BUSY_RETRY_MS);
      else again("lost", "connection to the console lost", RETRY_MS);
    });
  }

  function again(connection, words, afterMs) {
    say(connection, words);
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

  open();
}

/** A request to the console. Gives the answer's JSON, or throws an Error whose message is for people. */
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return answerOf(() => fetch(query ? `${path}?${query}` : path, { cache: "no-store" }));
}

export async function act(action, node) {
  return answerOf(() =>
    fetch("/api/act", {
      method: "POST",
      headers: { "content-type": "application/json", "x-csrf-token": state.session.csrf },
      body: JSON.stringify(node === null ? { action } : { action, node }),
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
  if (!answer.ok || found === null) throw new Error(found?.error ?? `the console returned status ${answer.status}`);
  return found;
}
