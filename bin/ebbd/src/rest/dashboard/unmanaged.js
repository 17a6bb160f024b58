// VMs of the host that Ebb does not manage: what their guests use, and how Ebb could manage them.

import { ask } from "./api.js";
import { byId, make, mark, say } from "./dom.js";
import { size } from "./format.js";

/** Time between two questions, and after one that has failed. */
const AGAIN_MS = { known: 15_000, else: 3000 };

/** A column of figures: `of` gives bytes; null: not known. */
const COLUMNS = [
  {
    key: "size",
    head: "Size",
    meaning: "its memory, without what is plugged",
    of: (vm) => vm.memory_bytes,
  },
  {
    key: "used",
    head: "Used",
    meaning: "in use in the guest, without its page cache",
    of: ({ usage }) => usage?.used_bytes ?? null,
  },
  {
    key: "free",
    head: "Free",
    meaning: "free in the guest, whether it takes memory of the host or not",
    of: ({ usage }) => usage?.free_bytes ?? null,
  },
  {
    key: "reclaimable",
    head: "Reclaimable",
    meaning: "free memory that Ebb would give back to the host now",
    of: ({ usage }) => usage?.reclaimable_bytes ?? null,
  },
];
/** What the headings mean. */
export const WORDS_OF_UNMANAGED = COLUMNS.map(({ head, meaning }) => [
  `${head}, of a VM that is not managed`,
  meaning,
]);

/** One VM, known by its process. */
class Row {
  constructor(pid) {
    this.name = make("th", { class: "name", scope: "row", role: "rowheader" });
    const number = { class: "number", role: "cell" };
    this.cells = COLUMNS.map(({ key, head }) =>
      make("td", { ...number, "data-key": key, "data-head": head }),
    );
    this.what = make("span");
    this.command = make("code");
    this.why = make("p", { class: "quiet" });
    // On a phone, a cell puts what is in it side by side.
    const note = make("div", {}, this.what, this.command, this.why);
    this.element = make(
      "tr",
      { role: "row", "data-pid": pid },
      this.name,
      make("td", { ...number, "data-head": "PID" }, String(pid)),
      ...this.cells,
      make("td", { class: "note", role: "cell" }, note),
    );
  }

  show(vm) {
    say(this.name, vm.name ?? "-");
    COLUMNS.forEach(({ of }, at) => {
      say(this.cells[at], size(of(vm)));
      mark(this.cells[at], "data-value", of(vm));
    });
    const { obstacle, reason } = vm;
    const isFree = obstacle === null;
    say(this.what, isFree ? "Manage it, on the host: " : `Ebb cannot manage it: ${obstacle}`);
    say(this.command, isFree ? `ebb attach --name ${vm.attach_as ?? "NAME"} --pid ${vm.pid}` : "");
    say(this.why, reason === null ? "" : `Not known what it uses: ${reason}`);
    this.why.hidden = reason === null;
  }
}

/** The table of these VMs. */
export class Unmanaged {
  constructor() {
    Object.assign(this, { rows: new Map(), isAsking: false, dueMs: -Infinity });
    const head = { scope: "col", role: "columnheader" };
    byId("others-head").append(
      make("th", head, "Name"),
      make("th", { ...head, class: "number" }, "PID"),
      ...COLUMNS.map(({ head: text, meaning }) =>
        make("th", { ...head, class: "number", title: meaning }, text),
      ),
      make("th", head, "What to do"),
    );
  }

  /** Asks, if that was some time ago. It shows by itself what is new, so it returns false. */
  async refresh() {
    if (this.isAsking || performance.now() < this.dueMs) {
      return false;
    }
    this.isAsking = true;
    let again = AGAIN_MS.else;
    try {
      this.show(await ask("observe"));
      again = AGAIN_MS.known;
    } catch (error) {
      say(byId("others-say"), `Not known now: ${error.message}.`);
    } finally {
      this.isAsking = false;
      this.dueMs = performance.now() + again;
    }
    return false;
  }

  show({ vms, left_out: more }) {
    const others = vms.filter((vm) => vm.managed_as === null);
    const before = this.rows;
    this.rows = new Map(others.map(({ pid }) => [pid, before.get(pid) ?? new Row(pid)]));
    others.forEach((vm) => this.rows.get(vm.pid).show(vm));
    const elements = [...this.rows.values()].map(({ element }) => element);
    const shown = byId("others-body").children;
    // Text that somebody has selected stays selected.
    if (shown.length !== elements.length || elements.some((one, at) => one !== shown[at])) {
      byId("others-body").replaceChildren(...elements);
    }
    byId("others-table").hidden = others.length === 0;
    say(byId("others-say"), inWords(others.length, more));
  }
}

function inWords(count, more) {
  const none = "No other VM of root's or of libvirt's runs on this host.";
  const some = `${count} ${count === 1 ? "VM" : "VMs"} of this host.`;
  return (count === 0 ? none : some) + (more > 0 ? ` ${more} more are not shown.` : "");
}
