// What the page knows: the server's snapshots and updates, kept within bounds.

const CHANGES_MAX = 400;
const EVENTS_MAX = 200;
const POINTS_MAX = 1800;

export const state = {
  session: { csrf: "", actions: [], version: "" },
  loaded: false,
  connection: "connecting",
  group: null,
  nodes: [],
  processes: {},
  changes: new Map(), // node → [[at, state, term], …], oldest first
  events: [],
  points: [],
  catalog: { loaded: false, error: "", seen_ms: 0, version: -1, totals: { topics: 0, groups: 0 } },
  number: 0,
  skewMs: 0, // what to add to this machine's clock to get the console's
  heardMs: 0,
};

/** The console's clock; stands still while nothing is heard, so that nothing looks newer than it is. */
export function now() {
  if (state.connection !== "live") return state.heardMs;
  return Date.now() + state.skewMs;
}

export function takeSnapshot(message) {
  state.changes = new Map();
  state.events = [];
  state.points = [];
  state.number = 0;
  takeUpdate(message);
}

/** Gives the events that are new. */
export function takeUpdate(message) {
  state.loaded = true;
  state.group = message.group;
  state.nodes = message.nodes;
  state.processes = message.processes;
  state.skewMs = message.now_ms - Date.now();
  state.heardMs = message.now_ms;
  const known = state.number;
  for (const [number, node, at, role, term] of message.changes) {
    if (number <= known) continue;
    let list = state.changes.get(node);
    if (list === undefined) state.changes.set(node, (list = []));
    list.push([at, role, term]);
    if (list.length > CHANGES_MAX) list.shift();
  }
  const fresh = message.events.filter((event) => event.number > known);
  state.events.push(...fresh);
  state.points.push(...message.points.filter((point) => point.number > known));
  if (state.events.length > EVENTS_MAX) state.events.splice(0, state.events.length - EVENTS_MAX);
  if (state.points.length > POINTS_MAX) state.points.splice(0, state.points.length - POINTS_MAX);
  state.number = Math.max(state.number, message.number);
  return fresh;
}

export const ALIVE = new Set(["leader", "follower", "candidate", "plain"]);
export const isAlive = (node) => ALIVE.has(node.state);
export const can = (action) => state.session.actions.includes(action);
