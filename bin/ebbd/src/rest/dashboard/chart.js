// Charts of figures over time. Each has its latest figures in words, a cursor that keys and
// pointers move, and its figures as a table.

import { draw, make, mark, say } from "./dom.js";
import { time, timeOnAxis } from "./format.js";
import { swatch } from "./parts.js";

const HEIGHT = 170;
const WIDTH_LEAST = 240;
const EDGE = { left: 54, right: 8, top: 8, bottom: 22 };
/** Rows of a chart's table. */
const ROWS = 20;
const TOPS = {
  1000: [1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 800, 1000],
  1024: [1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024],
};

/**
 * A chart. `series` are stacked areas or lines: `{ css, name, of }`, where `of` gives the figure
 * of a moment, or null. `lines` are drawn over areas. `base` is 1024 for bytes.
 */
export class Chart {
  constructor({ title, series, lines = [], text, base = 1000, isStacked = false }) {
    Object.assign(this, { title, series, lines, text, base, isStacked, moments: [], at: null });
    this.svg = draw("svg", {
      class: "chart",
      role: "img",
      tabindex: 0,
      keydown: (event) => this.onKey(event),
      pointermove: (event) => this.onPointer(event),
      // A pointer that rests leaves, too, when the page moves below it: what keys chose stays.
      pointerleave: () => document.activeElement === this.svg || this.point(null),
      blur: () => this.point(null),
    });
    this.latest = make("p", { class: "quiet" });
    this.readout = make("output", { class: "quiet" });
    this.body = make("tbody");
    const names = this.all().map(({ name }) => make("th", { scope: "col" }, name));
    const head = make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "time"), ...names));
    const table = make("table", {}, make("caption", {}, title), head, this.body);
    this.details = make(
      "details",
      { toggle: () => this.fillTable() },
      make("summary", {}, "Figures as a table"),
      make("div", { class: "wide" }, table),
    );
    const key = this.all().map(({ css, name }) => make("li", {}, swatch(css), name));
    this.element = make(
      "figure",
      {},
      make("figcaption", {}, title),
      make("ul", { class: "legend" }, ...key),
      this.svg,
      this.latest,
      this.readout,
      this.details,
    );
  }

  all() {
    return [...this.series, ...this.lines];
  }

  /** Shows moments between two times. Nothing is drawn across a gap that is longer than this. */
  show(moments, from, to, gapMs) {
    this.moments = moments.filter(({ at }) => at >= from && at <= to);
    Object.assign(this, { from, to, gapMs });
    const last = this.moments.at(-1);
    const words = last ? `${time(last.at)}: ${this.inWords(last)}` : "nothing is on record";
    say(this.latest, words);
    mark(this.svg, "aria-label", `${this.title}. ${words}`);
    this.redraw();
  }

  inWords(moment) {
    const told = this.all().filter(({ of }) => of(moment) !== null);
    const words = told.map(({ name, of }) => `${name} ${this.text(of(moment))}`);
    return words.join(", ") || "no figure";
  }

  redraw() {
    this.width = Math.max(this.svg.getBoundingClientRect().width, WIDTH_LEAST);
    mark(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.top = topOf(this.most(), this.base);
    const shapes = this.isStacked
      ? this.series.map((one, at) => this.area(one, at))
      : this.series.map((one) => this.line(one));
    const lines = this.lines.map((one) => this.line(one));
    this.svg.replaceChildren(...this.axes(), ...shapes, ...lines, ...this.cursor());
  }

  /** The largest figure that has to have room. */
  most() {
    const heights = this.moments.flatMap((moment) => {
      const figures = this.series.map(({ of }) => of(moment) ?? 0);
      const sum = figures.reduce((all, figure) => all + figure, 0);
      const over = this.lines.map(({ of }) => of(moment) ?? 0);
      return [...(this.isStacked ? [sum] : figures), ...over];
    });
    return heights.reduce((most, height) => Math.max(most, height), 0);
  }

  x(at) {
    const span = Math.max(this.to - this.from, 1);
    const wide = this.width - EDGE.left - EDGE.right;
    return EDGE.left + ((at - this.from) / span) * wide;
  }

  y(figure) {
    return EDGE.top + (1 - figure / this.top) * (HEIGHT - EDGE.top - EDGE.bottom);
  }

  place(at, figure) {
    return `${this.x(at).toFixed(1)},${this.y(figure).toFixed(1)}`;
  }

  axes() {
    const right = this.width - EDGE.right;
    const rows = [0, 0.5, 1].flatMap((part) => {
      const figure = part * this.top;
      const y = this.y(figure).toFixed(1);
      const label = { x: EDGE.left - 6, y, class: "tick", "text-anchor": "end", dy: "0.32em" };
      return [
        draw("line", { x1: EDGE.left, x2: right, y1: y, y2: y, class: "grid" }),
        draw("text", label, this.text(figure)),
      ];
    });
    const anchors = ["start", "middle", "end"];
    const columns = anchors.map((anchor, at) => {
      const moment = this.from + ((this.to - this.from) * at) / 2;
      const label = { x: this.x(moment), y: HEIGHT - 6, class: "tick", "text-anchor": anchor };
      return draw("text", label, timeOnAxis(moment, this.to - this.from));
    });
    return [...rows, ...columns];
  }

  /** Moments that follow each other without a gap, and of which this is known. */
  runs(isKnown) {
    const runs = [];
    let before = null;
    for (const moment of this.moments) {
      if (!isKnown(moment)) {
        before = null;
        continue;
      }
      if (before === null || moment.at - before > this.gapMs) {
        runs.push([]);
      }
      runs.at(-1).push(moment);
      before = moment.at;
    }
    return runs;
  }

  area({ css }, number) {
    const below = (moment, count) =>
      this.series.slice(0, count).reduce((sum, { of }) => sum + (of(moment) ?? 0), 0);
    const isKnown = (moment) => this.series.some(({ of }) => of(moment) !== null);
    const paths = this.runs(isKnown).map((run) => {
      const upper = run.map((moment) => this.place(moment.at, below(moment, number + 1)));
      const lower = run.map((moment) => this.place(moment.at, below(moment, number)));
      return `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
    });
    return draw("path", { class: `area ${css}`, d: paths.join("") });
  }

  line({ css, of }) {
    const runs = this.runs((moment) => of(moment) !== null);
    // A run of one moment is a dot.
    const path = (run) => `M${run.map((moment) => this.place(moment.at, of(moment))).join("L")}h0`;
    return draw("path", { class: `line ${css}`, d: runs.map(path).join("") });
  }

  cursor() {
    const moment = this.moments[this.at ?? -1];
    if (!moment) {
      return [];
    }
    const x = this.x(moment.at).toFixed(1);
    const ends = { x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom };
    return [draw("line", { ...ends, class: "cursor" })];
  }

  /** Points at a moment, or at none. */
  point(at) {
    this.at = at;
    const moment = this.moments[at ?? -1];
    say(this.readout, moment ? `At ${time(moment.at)}: ${this.inWords(moment)}` : "");
    if (this.from !== undefined) {
      this.redraw();
    }
  }

  onKey(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1 };
    const last = this.moments.length - 1;
    if (!(event.key in steps) || last < 0) {
      return;
    }
    event.preventDefault();
    const at = (this.at ?? last + 1) + steps[event.key];
    this.point(Math.min(Math.max(at, 0), last));
  }

  onPointer(event) {
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / Math.max(box.width, 1)) * this.width;
    const distances = this.moments.map(({ at }) => Math.abs(this.x(at) - x));
    const nearest = distances.indexOf(Math.min(...distances));
    this.point(nearest < 0 ? null : nearest);
  }

  fillTable() {
    if (!this.details.open) {
      return;
    }
    const every = Math.max(1, Math.ceil(this.moments.length / ROWS));
    const shown = this.moments.filter((_, at) => (this.moments.length - 1 - at) % every === 0);
    const rows = shown.map((moment) => {
      const cells = this.all().map(({ of }) => make("td", {}, this.text(of(moment))));
      return make("tr", {}, make("th", { scope: "row" }, time(moment.at)), ...cells);
    });
    this.body.replaceChildren(...rows);
  }
}

/** The round number at the top of an axis. */
function topOf(most, base) {
  let unit = base === 1024 ? 2 ** 20 : 1;
  while (most / unit >= base) {
    unit *= base;
  }
  // Half of it has a label, too.
  return Math.max(2, unit * TOPS[base].find((step) => step * unit >= most));
}
