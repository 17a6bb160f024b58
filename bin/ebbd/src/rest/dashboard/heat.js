// Which of a VM's memory is hot: the map of the last monitoring.

import { ask, change, ofVm } from "./api.js";
import { draw, make, mark, say } from "./dom.js";
import { seconds, size } from "./format.js";

/** Shades of the map, the coldest first: classes heat-0 to heat-7. */
const SHADES = 8;
const COLUMNS = 64;
/** Cells of a map. Where a VM has more blocks, several are one cell. */
const CELLS_MOST = 2048;
const AGAIN_MS = { monitoring: 3000, else: 60_000 };

/** The map of one VM. */
export class Heat {
  /** `act` carries out a change, and says what came of it. */
  constructor(name, act) {
    Object.assign(this, { name, askedMs: -Infinity, isMonitoring: false, drawn: null });
    const monitor = () => act(`${name} is monitored`, () => this.monitor());
    this.button = make("button", { type: "button", hidden: true, click: monitor }, "Monitor");
    this.words = make("p", { class: "quiet" });
    this.map = draw("svg", { class: "heat", role: "img", hidden: true });
    this.element = make("div", {}, make("h3", {}, "Heat"), this.words, this.map, this.button);
  }

  allow(isAllowed) {
    this.button.hidden = !isAllowed;
  }

  async monitor() {
    const report = await change(ofVm(this.name, "heat"), { fresh: true }, "POST");
    this.askedMs = -Infinity;
    this.show(report);
  }

  /** Asks for the map, if that was long ago. */
  async refresh(nowMs) {
    const again = this.isMonitoring ? AGAIN_MS.monitoring : AGAIN_MS.else;
    if (nowMs - this.askedMs < again) {
      return;
    }
    this.askedMs = nowMs;
    this.show(await ask(ofVm(this.name, "heat")));
  }

  show({ monitoring, windows_done: done, windows, failed, figures }) {
    this.isMonitoring = monitoring;
    const words = [];
    if (monitoring) {
      words.push(`Ebb monitors the VM: ${done} of ${windows} windows have ended.`);
    }
    if (failed !== null) {
      words.push(`The last monitoring failed: ${failed}.`);
    }
    if (figures === null) {
      words.push(monitoring ? "" : "Nothing is known yet: a monitoring finds out what is hot.");
    } else {
      const { hot_bytes: hot, used_bytes: used, memory_bytes: all, age_s: age } = figures;
      words.push(`Of ${size(all)}, ${size(used)} were used, and ${size(hot)} are the hot set, ` +
        `${seconds(age * 1000)} ago.`);
      this.drawMap(figures);
    }
    say(this.words, words.join(" ").trim());
    this.map.toggleAttribute("hidden", figures === null);
  }

  drawMap({ regions, degree_max: most, degrees, block_bytes: block, used_bytes: used }) {
    // The same figures come again until the next monitoring.
    const drawn = JSON.stringify([degrees, used]);
    if (drawn === this.drawn) {
      return;
    }
    this.drawn = drawn;
    const blocks = regions.flatMap((region) => region.blocks.map(({ degree }) => degree));
    const each = Math.max(1, Math.ceil(blocks.length / CELLS_MOST));
    const cells = [];
    for (let at = 0; at < blocks.length; at += each) {
      cells.push(Math.max(...blocks.slice(at, at + each)));
    }
    const rects = cells.map((degree, at) => draw("rect", {
      x: at % COLUMNS,
      y: Math.floor(at / COLUMNS),
      width: 0.92,
      height: 0.92,
      class: `heat-${shadeOf(degree, most)}`,
    }));
    this.map.replaceChildren(...rects);
    mark(this.map, "viewBox", `0 0 ${COLUMNS} ${Math.max(1, Math.ceil(cells.length / COLUMNS))}`);
    const words = degrees.map(({ degree, bytes }) => `degree ${degree}: ${size(bytes)}`);
    mark(this.map, "aria-label", `Heat map, ${size(block * each)} a cell. ${words.join(", ")}`);
  }
}

function shadeOf(degree, most) {
  if (degree <= 0) {
    return 0;
  }
  const part = Math.sqrt(Math.min(degree / Math.max(most, 1), 1));
  return 1 + Math.min(Math.floor(part * (SHADES - 1)), SHADES - 2);
}
