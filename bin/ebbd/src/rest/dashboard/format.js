// Numbers and times as people read them, as `ebb top` writes them.

const UNITS = [["T", 2 ** 40], ["G", 2 ** 30], ["M", 2 ** 20], ["K", 2 ** 10]];
const UNKNOWN = "?";

/** A size with three digits and the first letter of its unit, a power of 1024: 1.50G. */
export function size(bytes) {
  if (bytes === null || bytes === undefined) {
    return UNKNOWN;
  }
  const unit = UNITS.find(([, one]) => bytes >= one);
  if (!unit) {
    return bytes === 0 ? "0" : `${bytes}B`;
  }
  return digits(bytes / unit[1]) + unit[0];
}

/** A count with three digits, and k or M for thousands and millions. */
export function count(number) {
  if (number === null || number === undefined) {
    return UNKNOWN;
  }
  if (number < 10_000) {
    return String(Math.round(number));
  }
  return number < 999_500 ? `${digits(number / 1e3)}k` : `${digits(number / 1e6)}M`;
}

function digits(number) {
  if (number < 9.995) {
    return number.toFixed(2);
  }
  return number.toFixed(number < 99.95 ? 1 : 0);
}

/** Thousandths as a percentage. */
export function percent(permille) {
  return `${(permille / 10).toFixed(1)} %`;
}

/** A short time. */
export function nanoseconds(ns) {
  if (ns === null || ns === undefined) {
    return UNKNOWN;
  }
  const units = [["s", 1e9], ["ms", 1e6], ["us", 1e3]];
  const unit = units.find(([, one]) => ns >= one);
  return unit ? `${digits(ns / unit[1])} ${unit[0]}` : `${Math.round(ns)} ns`;
}

/** A longer time, in its largest unit. */
export function seconds(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 120) {
    return `${s} s`;
  }
  return s < 7200 ? `${Math.round(s / 60)} min` : `${Math.round(s / 3600)} h`;
}

const TIME = { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" };
const DAY = { month: "short", day: "numeric" };
const clock = new Intl.DateTimeFormat(undefined, TIME);
const minutes = new Intl.DateTimeFormat(undefined, { ...TIME, second: undefined });
const days = new Intl.DateTimeFormat(undefined, { ...TIME, ...DAY, second: undefined });

/** A moment of today. */
export function time(ms) {
  return clock.format(ms);
}

/** A moment as an axis that is so many milliseconds long shows it. */
export function timeOnAxis(ms, spanMs) {
  return (spanMs > 86_400_000 ? days : minutes).format(ms);
}

/** A size as somebody would type it, to the byte. */
export function exactSize(bytes) {
  const unit = UNITS.find(([, one]) => bytes >= one && bytes % one === 0);
  return unit ? `${bytes / unit[1]}${unit[0]}` : `${bytes / 1024}K`;
}

/** The bytes of a size that somebody typed; null: it is none. */
export function bytesOf(text) {
  const found = /^\s*(\d{1,12}(?:\.\d{1,3})?)\s*([KMGT])(?:i?B)?\s*$/i.exec(text);
  const unit = found && UNITS.find(([letter]) => letter === found[2].toUpperCase());
  return unit ? Math.round(Number(found[1]) * unit[1]) : null;
}
