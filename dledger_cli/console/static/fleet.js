// What the page of all groups knows: the server's snapshots and updates, kept within bounds.

import { state } from "./store.js";

const EVENTS_MAX = 200;

export const fleet = {
  overall: { level: "none", title: "", more: "" },
  servers: [],
  registeredMs: 0,
  leftOut: 0,
  groups: new Map(), // by name, in the server's order
  changed: new Set(), // names of groups to draw anew
  topics: { loaded: false, error: "", seen_ms: 0, version: -1, totals: { topics: 0 }, unseen: 0, counts: {} },
};

export function takeSnapshot(message) {
  fleet.groups = new Map();
  state.events = [];
  state.number = 0;
  takeUpdate(message);
}

/** Gives the events that are new. */
export function takeUpdate(message) {
  state.loaded = true;
  state.skewMs = message.now_ms - Date.now();
  state.heardMs = message.now_ms;
  fleet.overall = message.overall;
  fleet.servers = message.name_servers;
  fleet.registeredMs = message.registered_ms;
  fleet.leftOut = message.left_out;
  for (const group of message.groups) {
    fleet.groups.set(group.name, group);
    fleet.changed.add(group.name);
  }
  if (message.names !== null) {
    fleet.groups = new Map(message.names.filter((name) => fleet.groups.has(name)).map((name) => [name, fleet.groups.get(name)]));
  }
  const known = state.number;
  const fresh = message.events.filter((event) => event.number > known);
  state.events.push(...fresh);
  if (state.events.length > EVENTS_MAX) state.events.splice(0, state.events.length - EVENTS_MAX);
  state.number = Math.max(known, message.number);
  return fresh;
}

export function takeCatalog(message) {
  fleet.topics = message;
}

/** Whether name servers know any of the group's brokers. */
export const isRegistered = (group) => group.members.some((member) => member.state !== "missing");
/** The names of all clusters. */
export const clusters = () => [...new Set([...fleet.groups.values()].map((group) => group.cluster))];
export const groupUrl = (name) => `/group?${new URLSearchParams({ broker: name })}`;
