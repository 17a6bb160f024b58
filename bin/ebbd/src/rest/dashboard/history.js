// What was: the moments that the daemon has on record, and those that this page has seen since.

import { Refused, ask } from "./api.js";
import { sumOfParts } from "./parts.js";

/** Times that charts can show, in seconds. */
export const SPANS = [
  [2 * 60, "2 minutes"],
  [15 * 60, "15 minutes"],
  [3600, "1 hour"],
  [6 * 3600, "6 hours"],
  [24 * 3600, "1 day"],
  [7 * 24 * 3600, "7 days"],
  [90 * 24 * 3600, "90 days"],
];
/** Moments that the page itself remembers: ten minutes. */
const SEEN_MOST = 300;
/** Time between two moments on record, in seconds. */
const STEP_S = 15;
/** Moments to ask for, of all VMs and of one. The daemon gives 100 and 1000 at most. */
const POINTS_OF_ALL = 99;
const POINTS_OF_ONE = 240;
const AGAIN_MS = { least: 30_000, most: 300_000 };

const seen = [];

/** Remembers what the host and its VMs are like. */
export function remember(top) {
  if (seen.at(-1)?.at_unix_ms !== top.at_unix_ms) {
    seen.push(top);
  }
  seen.splice(0, Math.max(0, seen.length - SEEN_MOST));
}

/** The figures of charts: of all VMs, or of one. */
function momentOf(top, name) {
  const vms = name === null ? top.vms : top.vms.filter((vm) => vm.name === name);
  return {
    at: top.at_unix_ms,
    parts: sumOfParts(vms),
    limit: name === null ? null : vms[0]?.limit_bytes ?? null,
    faults: sum(vms.map((vm) => vm.faults_per_s)),
    // Quantiles cannot be added: those of the VM whose faults took longest.
    median: largest(vms.map((vm) => vm.fault_ns?.p50)),
    slowest: largest(vms.map((vm) => vm.fault_ns?.p99)),
    back: sum(vms.map((vm) => vm.refaulted_bytes_per_s)),
    available: top.host.available_bytes,
    reserve: top.host.reserve_bytes,
    stall: top.host.stall_permille,
  };
}

function known(figures) {
  return figures.filter((figure) => figure !== null && figure !== undefined);
}

/** The sum of what is known; null: nothing is. */
function sum(figures) {
  return known(figures).reduce((all, figure) => (all ?? 0) + figure, null);
}

/** The largest of what is known; null: nothing is. */
function largest(figures) {
  return known(figures).reduce((most, figure) => Math.max(most ?? 0, figure), null);
}

/** The past of all VMs (null), or of one. */
export class Past {
  constructor(name) {
    Object.assign(this, { name, spanS: SPANS[0][0], recorded: [], stepS: STEP_S });
    Object.assign(this, { askedMs: -Infinity, isAsking: false, trouble: null });
  }

  /** Shows another time from now on. */
  choose(spanS) {
    Object.assign(this, { spanS, recorded: [], askedMs: -Infinity });
  }

  /** Asks for what is on record, if that was long ago. Returns whether there is something new. */
  async refresh(nowMs) {
    const again = Math.min(Math.max(this.stepS * 1000, AGAIN_MS.least), AGAIN_MS.most);
    if (this.isAsking || nowMs - this.askedMs < again) {
      return false;
    }
    const { spanS, name } = this;
    const most = name === null ? POINTS_OF_ALL : POINTS_OF_ONE;
    const stepS = Math.max(STEP_S, Math.ceil(spanS / most));
    const to = Math.floor(nowMs / 1000);
    const vm = name === null ? "" : `&vm=${encodeURIComponent(name)}`;
    Object.assign(this, { askedMs: nowMs, isAsking: true });
    try {
      const history = await ask(`history?from=${to - spanS}&to=${to}&step=${stepS}${vm}`);
      if (spanS === this.spanS) {
        const recorded = history.points.map((top) => momentOf(top, name));
        Object.assign(this, { recorded, stepS, trouble: null });
      }
    } catch (error) {
      // Whoever asks for what is now finds out about a daemon that is silent.
      this.trouble = error instanceof Refused ? `No history: ${error.message}` : null;
    } finally {
      this.isAsking = false;
    }
    return true;
  }

  /** All that is known, the latest last. */
  moments() {
    const last = this.recorded.at(-1)?.at ?? -Infinity;
    const since = seen.filter(({ at_unix_ms: at }) => at > last);
    return [...this.recorded, ...since.map((top) => momentOf(top, this.name))];
  }

  /** Shows it on charts, up to this time. */
  show(charts, nowMs) {
    const gapMs = Math.max(45_000, this.stepS * 3000);
    const moments = this.moments();
    for (const chart of charts) {
      chart.show(moments, nowMs - this.spanS * 1000, nowMs, gapMs);
    }
  }
}
