// One VM: where its memory was, its faults, what the pilot does with it, and its controls.

import { ask, ofVm } from "./api.js";
import { Chart } from "./chart.js";
import { define, make, say } from "./dom.js";
import { count, nanoseconds, seconds, size } from "./format.js";
import { Heat } from "./heat.js";
import { Past } from "./history.js";
import { Bar, Legend, PARTS, bytesOfPart } from "./parts.js";
import { trouble } from "./table.js";

/** A chart of where memory is. */
export function chartOfParts(title, lines = []) {
  const series = PARTS.map(({ key, name }) => ({
    css: key,
    name,
    of: ({ parts }) => bytesOfPart(parts, key),
  }));
  return new Chart({ title, series, lines, text: size, base: 1024, isStacked: true });
}

/** Charts of faults, of how long they take (`whose` says in which VM), and of what comes back. */
export function chartsOfFaults(whose = "") {
  const faults = { css: "faults", name: "faults", of: (moment) => moment.faults };
  const median = { css: "median", name: "half within", of: (moment) => moment.median };
  const slowest = { css: "slowest", name: "99 of 100 within", of: (moment) => moment.slowest };
  const back = { css: "back", name: "came back within 30 s", of: (moment) => moment.back };
  return [
    new Chart({ title: "Faults in a second", series: [faults], text: count }),
    new Chart({ title: `Time from a fault to its answer${whose}`, series: [median, slowest],
      text: nanoseconds }),
    new Chart({ title: "Evicted memory that came back, in a second", series: [back], text: size,
      base: 1024 }),
  ];
}

/** The view of one VM. */
export class VmView {
  /** `actions` has `hold(vm)`, `limit(vm)` and `act(done, change)`. */
  constructor(name, actions) {
    Object.assign(this, { name, vm: null, status: null, trouble: null });
    this.isAsking = false;
    this.past = new Past(name);
    const limit = { css: "limit", name: "limit", of: (moment) => moment.limit };
    this.charts = [chartOfParts(`Where the memory of ${name} was`, [limit]), ...chartsOfFaults()];
    this.bar = new Bar(`memory of ${name}`);
    this.legend = new Legend();
    this.heat = new Heat(name, actions.act);
    this.build(actions);
  }

  build({ hold, limit }) {
    const { name } = this;
    this.title = make("h2", { id: "vm-title", tabindex: -1 }, name);
    this.about = make("p", { role: "status" });
    this.figures = make("dl", { class: "figures" });
    const onHold = () => this.vm && hold(this.vm);
    const onLimit = () => this.vm && limit(this.vm);
    this.holdButton = make("button", { type: "button", id: "hold", click: onHold }, "Hold");
    this.limitButton = make("button", { type: "button", id: "set-limit", click: onLimit }, "Limit");
    this.controls = make("div", { class: "controls", hidden: true });
    this.warnings = make("ul", { class: "warnings" });
    this.decisions = make("ol", { class: "events" });
    const nothing = "The pilot has decided nothing about it lately.";
    this.noDecision = make("p", { class: "quiet" }, nothing);
    const charts = this.charts.map(({ element }) => element);
    this.element = make(
      "div",
      {},
      make("p", {}, make("a", { href: "#/" }, "All VMs")),
      this.title,
      this.about,
      this.bar.element,
      this.legend.element,
      this.controls,
      this.warnings,
      this.figures,
      make("div", { class: "charts" }, ...charts),
      make("h3", {}, "Decisions of the pilot"),
      this.decisions,
      this.noDecision,
      this.heat.element,
    );
  }

  /** Offers controls, or takes them away. */
  allow(isAllowed) {
    this.controls.hidden = !isAllowed;
    this.controls.replaceChildren(...(isAllowed ? [this.holdButton, this.limitButton] : []));
    this.heat.allow(isAllowed);
  }

  /** Asks for what the table of all VMs does not have. Returns whether there is something new. */
  async refresh(nowMs) {
    if (this.isAsking) {
      return false;
    }
    this.isAsking = true;
    try {
      this.status = await ask(ofVm(this.name));
      this.trouble = null;
      await this.heat.refresh(nowMs);
    } catch (error) {
      // The VM may be gone, or slow. Whoever asks for all VMs finds out about a silent daemon.
      this.trouble = error.message;
    } finally {
      this.isAsking = false;
    }
    return true;
  }

  show(top, pilot) {
    this.vm = top.vms.find(({ name }) => name === this.name) ?? null;
    const { vm, past } = this;
    if (vm === null) {
      say(this.about, `${this.name} is not managed now. ${this.trouble ?? ""}`.trim());
    } else {
      const note = trouble(vm)[1];
      const words = note ? `Note: ${note}.` : "Nothing is wrong with it.";
      say(this.about, words + (vm.hold ? " The pilot leaves it as it is." : ""));
      this.bar.showParts(vm.parts, vm.memory_bytes);
      this.legend.show(vm.parts);
      say(this.holdButton, vm.hold ? "Unhold" : "Hold");
    }
    past.show(this.charts, top.at_unix_ms);
    this.showWarnings();
    this.showFigures(pilot);
    this.showDecisions(pilot, top.at_unix_ms);
  }

  showWarnings() {
    const warnings = this.status?.warnings ?? [];
    const troubles = [this.trouble, this.past.trouble].filter((trouble) => trouble !== null);
    const lines = [...troubles, ...warnings];
    const shown = [...this.warnings.children].map((item) => item.textContent);
    if (lines.join("\n") !== shown.join("\n")) {
      this.warnings.replaceChildren(...lines.map((line) => make("li", {}, line)));
    }
  }

  showFigures(pilot) {
    const { vm, status } = this;
    const piloted = pilot?.vms.find(({ name }) => name === this.name);
    const pairs = [];
    if (vm !== null) {
      const by = vm.limit_by_pilot ? " by the pilot" : "";
      pairs.push(["size", size(vm.memory_bytes)]);
      pairs.push(["limit", vm.limit_bytes === null ? "none" : size(vm.limit_bytes) + by]);
      pairs.push(["works with", size(vm.working_bytes)]);
      pairs.push(["class", vm.class + (piloted ? `, weight ${piloted.weight}` : "")]);
    }
    if (piloted?.left_alone) {
      pairs.push(["the pilot leaves its limit alone", piloted.left_alone]);
    }
    if (status !== null) {
      const { p50, p99 } = status.fault_ns;
      const times = `half within ${nanoseconds(p50)}, 99 of 100 within ${nanoseconds(p99)}`;
      pairs.push(["all faults so far", times]);
      pairs.push(["guest", status.guest.kernel ?? "not known"]);
      pairs.push(["reclaimed in all", size(status.reclaimed_total_bytes)]);
      pairs.push(["compressed pages take", size(status.limit.compressed_bytes)]);
      pairs.push(["swap file", size(status.limit.swap_file_bytes)]);
    }
    define(this.figures, pairs);
  }

  showDecisions(pilot, nowMs) {
    const about = (pilot?.decisions ?? []).filter(({ vm }) => vm === this.name);
    this.noDecision.hidden = about.length > 0;
    const items = about.map(({ age_ms: age, action, why, outcome }) =>
      make("li", {}, `${seconds(age)} ago: ${action} (${why}): ${outcome ?? "not done yet"}`),
    );
    // An age that grows is worth no new list: somebody may have selected text.
    const key = JSON.stringify(about.map(({ number, outcome }) => [number, outcome]));
    const isOld = nowMs - (this.decidedMs ?? -Infinity) > 15_000;
    if (key !== this.decidedKey || isOld) {
      Object.assign(this, { decidedKey: key, decidedMs: nowMs });
      this.decisions.replaceChildren(...items);
    }
  }
}
