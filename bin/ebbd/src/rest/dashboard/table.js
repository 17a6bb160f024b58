// The table of all VMs. Its columns are those of `ebb top`: the six parts add up to the size.

import { byId, make, mark, say } from "./dom.js";
import { count, size } from "./format.js";
import { Bar, PARTS, bytesOfPart } from "./parts.js";

/** How urgently a VM needs somebody. */
const WAITS = 2;
const SLOW = 1;
const FINE = 0;

/** What is wrong with a VM, or worth knowing. */
export function trouble(vm) {
  const reason = vm.state_reason ?? "";
  if (vm.state === "not_taken_up") {
    return [WAITS, `not recovered: ${reason}`];
  }
  if (vm.waits) {
    return [WAITS, reason ? `waits for room: ${reason}` : "waits for room"];
  }
  if (vm.state === "taking_up") {
    return [SLOW, `being recovered: ${reason}`];
  }
  if (reason) {
    return [SLOW, reason];
  }
  if (vm.misses_memory) {
    return [SLOW, "misses memory: its limit is too low"];
  }
  const untrusted = vm.parts !== null && vm.parts.free_bytes === null ? ["guest not trusted"] : [];
  const warned = vm.warnings === 1 ? "1 warning" : `${vm.warnings} warnings`;
  return [FINE, [...untrusted, ...(vm.warnings > 0 ? [warned] : [])].join("; ")];
}

function limitOf(vm) {
  return vm.limit_bytes === null ? "-" : size(vm.limit_bytes) + (vm.limit_by_pilot ? "*" : "");
}

/** A column: `of` gives what is sorted by, `text` what is shown, and `sum` says it has a sum. */
const COLUMNS = [
  { key: "name", head: "Name", meaning: "the VM", of: (vm) => vm.name, text: (vm) => vm.name },
  {
    key: "limit",
    head: "Limit",
    meaning: "most that in use, free, and the compressed pages take; * by the pilot",
    of: (vm) => vm.limit_bytes,
    text: limitOf,
  },
  ...PARTS.map(({ key, name, meaning }) => ({
    key,
    head: name[0].toUpperCase() + name.slice(1),
    meaning,
    of: (vm) => bytesOfPart(vm.parts, key),
    sum: size,
  })),
  {
    key: "size",
    head: "Size",
    meaning: "all of its memory: the sum of the six columns before",
    of: (vm) => vm.memory_bytes,
    sum: size,
  },
  {
    key: "back",
    head: "Back/s",
    meaning: "evicted memory that came back within 30 s, in a second",
    of: (vm) => vm.refaulted_bytes_per_s,
    sum: size,
  },
  {
    key: "faults",
    head: "Faults/s",
    meaning: "faults that Ebb served, in a second",
    of: (vm) => vm.faults_per_s,
    sum: count,
  },
  {
    key: "class",
    head: "Class",
    meaning: "how much its speed matters to the pilot",
    of: (vm) => vm.class,
    text: (vm) => vm.class + (vm.hold ? ", held" : ""),
  },
  {
    key: "note",
    head: "Note",
    meaning: "what is wrong, or worth knowing",
    of: (vm) => -trouble(vm)[0],
    text: (vm) => trouble(vm)[1],
  },
];
const TEXTS = ["name", "class", "note"];
/** What the headings mean. */
export const WORDS = COLUMNS.map(({ head, meaning }) => [head, meaning]);
/** Columns of figures. They are sorted with the largest first. */
const isNumber = ({ key }) => !TEXTS.includes(key);

/** One VM. */
class Row {
  constructor(name) {
    this.bar = new Bar(`memory of ${name}`);
    this.link = make("a", { href: `#/vm/${encodeURIComponent(name)}` }, name);
    this.cells = COLUMNS.map(({ key, head }) => {
      const attributes = { class: TEXTS.includes(key) ? key : "number", "data-head": head };
      return key === "name"
        ? make("th", { ...attributes, scope: "row", role: "rowheader" }, this.link)
        : make("td", { ...attributes, "data-key": key, role: "cell" });
    });
    const bar = make("td", { class: "where", role: "cell" }, this.bar.element);
    this.element = make("tr", { role: "row", "data-vm": name }, ...this.cells, bar);
  }

  show(vm) {
    mark(this.element, "class", ["fine", "slow", "waits"][trouble(vm)[0]]);
    COLUMNS.forEach(({ key, of, text, sum }, at) => {
      if (key === "name") {
        return;
      }
      const figure = of(vm);
      say(this.cells[at], text ? text(vm) : sum(figure));
      mark(this.cells[at], "data-value", isNumber({ key }) ? figure : null);
    });
    this.bar.showParts(vm.parts, vm.memory_bytes);
  }
}

/** All VMs, as far as their names have what is searched for. */
export class Table {
  constructor() {
    Object.assign(this, { rows: new Map(), filter: "", by: null, isReversed: false, top: null });
    this.heads = COLUMNS.map((column) => {
      const click = () => this.sort(column);
      const button = make("button", { type: "button", title: column.meaning, click }, column.head);
      const css = isNumber(column) ? "number" : column.key;
      return make("th", { scope: "col", role: "columnheader", class: css }, button);
    });
    const where = make("th", { scope: "col", role: "columnheader" }, "Where its memory is");
    byId("vms-head").append(...this.heads, where);
    this.sums = COLUMNS.map(({ key, head }) => {
      const css = isNumber({ key }) ? "number" : key;
      return key === "name"
        ? make("th", { scope: "row", role: "rowheader", class: css }, "all")
        : make("td", { role: "cell", class: css, "data-head": head });
    });
    byId("vms-sum").append(...this.sums, make("td", { role: "cell" }));
  }

  /** Sorts by a column; the second time the other way round, the third time by trouble again. */
  sort(column) {
    if (this.by !== column) {
      Object.assign(this, { by: column, isReversed: isNumber(column) });
    } else if (this.isReversed === isNumber(column)) {
      this.isReversed = !this.isReversed;
    } else {
      this.by = null;
    }
    this.heads.forEach((head, at) => {
      const order = this.isReversed ? "descending" : "ascending";
      mark(head, "aria-sort", COLUMNS[at] === this.by ? order : null);
    });
    this.redraw();
  }

  search(filter) {
    this.filter = filter;
    this.redraw();
  }

  show(top) {
    this.top = top;
    this.redraw();
  }

  redraw() {
    if (this.top === null) {
      return;
    }
    const vms = this.shown();
    for (const vm of vms) {
      if (!this.rows.has(vm.name)) {
        this.rows.set(vm.name, new Row(vm.name));
      }
      this.rows.get(vm.name).show(vm);
    }
    const known = new Set(this.top.vms.map(({ name }) => name));
    for (const name of this.rows.keys()) {
      if (!known.has(name)) {
        this.rows.delete(name);
      }
    }
    this.place(vms.map(({ name }) => this.rows.get(name).element));
    this.sumUp(vms);
    say(byId("vms-say"), this.inWords(vms));
  }

  shown() {
    const vms = this.top.vms.filter(({ name }) => name.includes(this.filter));
    const sign = this.isReversed ? -1 : 1;
    const byName = (one, other) => (one.name < other.name ? -1 : 1);
    const compare = (one, other) => {
      if (this.by === null) {
        return trouble(other)[0] - trouble(one)[0] || byName(one, other);
      }
      const [first, second] = [this.by.of(one), this.by.of(other)];
      // What is not known stands last, whichever way round.
      if (first === null || second === null) {
        return (first === null) - (second === null) || byName(one, other);
      }
      return first === second ? byName(one, other) : first < second ? -sign : sign;
    };
    return vms.sort(compare);
  }

  /** Puts rows into the table. None moves that need not: one that moves loses the focus. */
  place(elements) {
    const body = byId("vms-body");
    const isSame = body.children.length === elements.length &&
      elements.every((element, at) => element === body.children[at]);
    if (isSame) {
      return;
    }
    const focused = document.activeElement;
    body.replaceChildren(...elements);
    if (focused instanceof HTMLElement && body.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  }

  sumUp(vms) {
    byId("vms-sum").hidden = vms.length < 2;
    COLUMNS.forEach(({ of, sum }, at) => {
      if (sum) {
        const known = vms.map(of).filter((figure) => figure !== null);
        const all = known.reduce((sumOf, figure) => sumOf + figure, 0);
        say(this.sums[at], known.length ? sum(all) : "?");
      }
    });
  }

  inWords(vms) {
    const all = this.top.vms.length;
    if (all === 0) {
      return "No VM is managed: ebb run starts one, ebb attach takes one.";
    }
    const waiting = vms.filter((vm) => trouble(vm)[0] === WAITS).length;
    const slow = vms.filter((vm) => trouble(vm)[0] === SLOW).length;
    const shown = vms.length === all ? `${all}` : `${vms.length} of ${all}`;
    const words = [`${shown} ${all === 1 ? "VM" : "VMs"}`];
    if (waiting) {
      words.push(`${waiting} waiting`);
    }
    if (slow) {
      words.push(`${slow} slow`);
    }
    return `${words.join(", ")}.`;
  }
}
