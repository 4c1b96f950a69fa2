// Before the first paint: the theme that was chosen on this machine, and what the sign-in page has to say.
"use strict";
try {
  const chosen = localStorage.getItem("dledger-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // no storage: the system's choice it is
}
if (new URLSearchParams(location.search).has("wrong")) {
  document.addEventListener("DOMContentLoaded", () => document.getElementById("wrong")?.removeAttribute("hidden"));
}
