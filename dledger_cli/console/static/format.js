// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const units = ["B", "KiB", "MiB", "GiB", "TiB"];

export const count = (value) => (value === null || value === undefined || value < -1 ? "–" : whole.format(value));

/** A log index: -1 is "none". */
export const index = (value) => (value === null || value === undefined || value < 0 ? "none" : whole.format(value));

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 || value === 0 ? whole.format(value) : value.toFixed(1);
}

export function bytes(value) {
  if (value === null || value === undefined || value < 0) return "–";
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? whole.format(value) : value.toFixed(1)} ${units[unit]}`;
}

export function milliseconds(value) {
  if (value === null || value === undefined || value < 0) return "–";
  return value >= 100 ? `${whole.format(value)} ms` : `${value.toFixed(1)} ms`;
}

const two = (value) => String(value).padStart(2, "0");

/** 14:03:09, in the browser's time zone. */
export function clock(atMs) {
  const at = new Date(atMs);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** With the date, and the milliseconds. */
export function moment(atMs) {
  if (!(atMs > 0)) return "–";
  const at = new Date(atMs);
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return `${day} ${clock(atMs)}.${String(at.getMilliseconds()).padStart(3, "0")}`;
}

/** 12 s, 3 min, 5 h: how long. */
export function span(ms) {
  if (!(ms >= 0)) return "–";
  const seconds = ms / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

/** The next round number that is not smaller, of which the half is round as well. */
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999999);
}

export const names = (list) =>
  list.length <= 1 ? list.join("") : `${list.slice(0, -1).join(", ")} and ${list[list.length - 1]}`;
