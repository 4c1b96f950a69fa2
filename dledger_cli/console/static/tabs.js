// Tabs, as the ARIA practices have them: arrows move, Home and End jump, one stop in the tab order.

import { $ } from "./dom.js";

let onShow = () => {};

export function start(onShown) {
  onShow = onShown;
  const list = $("tabs");
  list.addEventListener("click", (event) => {
    const tab = event.target.closest('[role="tab"]');
    if (tab !== null) show(tab.id);
  });
  list.addEventListener("keydown", (event) => {
    const tabs = [...list.querySelectorAll('[role="tab"]:not([hidden])')];
    const place = tabs.indexOf(document.activeElement);
    const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const tab = tabs[(to + tabs.length) % tabs.length];
    show(tab.id);
    tab.focus();
  });
}

export function show(id) {
  for (const tab of $("tabs").querySelectorAll('[role="tab"]')) {
    const chosen = tab.id === id;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  onShow(id);
}

/** Offer only these. */
export function offer(ids) {
  let current = null;
  for (const tab of $("tabs").querySelectorAll('[role="tab"]')) {
    tab.hidden = !ids.includes(tab.id);
    if (tab.getAttribute("aria-selected") === "true") current = tab.id;
  }
  if (!ids.includes(current)) show(ids[0]);
}
