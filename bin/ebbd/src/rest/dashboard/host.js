// The host: its memory, and what the pilot does with it.

import { byId, define, make, mark, say } from "./dom.js";
import { percent, size } from "./format.js";
import { Bar, resident, swatch } from "./parts.js";

const MODES = [
  ["off", "off", "The pilot decides nothing, and takes back what it has set."],
  ["dry_run", "dry run", "The pilot only shows what it would do, and takes back what it has set."],
  ["on", "on", "The pilot takes memory from VMs by itself, and gives it back."],
];

/** The pieces of the host's memory, from left to right, and the mark in them. */
const PIECES = [
  ["in-use", "VMs take it"],
  ["other", "all else takes it"],
  ["empty", "available"],
  ["mark", "the reserve begins"],
];

/** Shows the host. */
export class HostView {
  /** `setMode` is called with a mode, its name, and what it means. */
  constructor(setMode) {
    this.bar = new Bar("the host's memory");
    const key = PIECES.map(([css, name]) => make("li", {}, swatch(css), name));
    byId("host-bar").append(this.bar.element, make("ul", { class: "legend" }, ...key));
    this.buttons = MODES.map(([mode, name, meaning]) => {
      const click = () => setMode(mode, name, meaning);
      return { mode, element: make("button", { type: "button", title: meaning, click }, name) };
    });
  }

  /** Offers controls, or takes them away. */
  allow(isAllowed) {
    const group = byId("pilot-modes");
    group.hidden = !isAllowed;
    group.replaceChildren(...(isAllowed ? this.buttons.map(({ element }) => element) : []));
  }

  show({ host, vms }) {
    const sum = (of) => vms.reduce((all, vm) => all + of(vm), 0);
    const known = vms.filter((vm) => vm.parts !== null);
    const have = known.reduce((all, vm) => all + vm.memory_bytes, 0);
    const take = sum((vm) => resident(vm.parts));
    const compressed = sum((vm) => vm.compressed_in_bytes);
    const taken = Math.max(host.total_bytes - host.available_bytes, 0);
    const byVms = Math.min(take + compressed, taken);
    const pieces = [
      { css: "in-use", bytes: byVms },
      { css: "other", bytes: taken - byVms },
      { css: "empty", bytes: host.available_bytes },
    ];
    const words = `VMs take ${size(byVms)}, all else ${size(taken - byVms)}, available ` +
      `${size(host.available_bytes)}, reserve ${size(host.reserve_bytes)}`;
    this.bar.show(pieces, host.total_bytes, words, host.total_bytes - host.reserve_bytes);
    const stall = host.stall_permille;
    define(byId("host-figures"), [
      ["memory", size(host.total_bytes)],
      ["available", `${size(host.available_bytes)}, reserve ${size(host.reserve_bytes)}`],
      ["VMs have", size(have)],
      ["VMs take", size(take + compressed)],
      ["not resident", `${size(have - take)}, compressed pages take ${size(compressed)}`],
      ["tasks wait", stall === null ? "the kernel does not tell" : `${percent(stall)} of the time`],
      ...tightest(host),
    ]);
    this.showPilot(host);
  }

  showPilot({ pilot, stage }) {
    const name = MODES.find(([mode]) => mode === pilot)?.[1] ?? pilot;
    const sees = stage === null ? "it has not looked yet" : `the host is ${stage}`;
    say(byId("pilot-says"), pilot === "off" ? "The pilot is off." : `The pilot: ${name}; ${sees}.`);
    for (const { mode, element } of this.buttons) {
      mark(element, "aria-pressed", mode === pilot);
    }
  }
}

/** The control group with the least available memory, if that is less than the host's. */
function tightest({ bounds, available_bytes: available }) {
  const least = bounds.reduce(
    (before, bound) => (bound.available_bytes < before.available_bytes ? bound : before),
    { available_bytes: available },
  );
  if (least.name === undefined) {
    return [];
  }
  return [[least.name, `${size(least.available_bytes)} of ${size(least.total_bytes)} available`]];
}
